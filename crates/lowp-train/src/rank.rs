//! The training loop of one rank, with its share of every batch.

mod evaluation;

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lowp_checkpoint::{Block, Dtype, Late, Piece, Saver};
use lowp_comm::{Communicator, Control, MeshComm, or_abort};
use lowp_format::spelling::Variant;
use lowp_fsdp::{LinearSpec, ModelError, ModelOptions, ShardedModel, VarSpec};
use lowp_kernels::Backend;
use lowp_optim::{StepOptions, StepReport};
use lowp_shard::GradBucketOptions;
use serde_json::Value;

use crate::checkpoints::{EVALUATIONS, LOSSES, Resumed, about_run};
use crate::codes::shares;
use crate::config::blocks;
use crate::data::{Data, share};
use crate::error::TrainError;
use crate::forms::written;
use crate::metrics::{Metrics, host_bytes};
use crate::network::{Model, Network, NetworkResult, RankPlace};
use crate::outcome::{Evaluated, Outcome, Trained};
use crate::result::{Evaluation, RunResult};
use crate::training::{Event, Training};

/// Steps that are not measured where there are more than twice as many others.
const WARM_UP: usize = 4;

type Comm<B> = Arc<dyn Communicator<B>>;
type Specs = (Vec<LinearSpec>, Vec<VarSpec>);

impl<M: Model, D: Data> Training<'_, M, D> {
    /// Trains as one rank of `comm`, a world of as many ranks as the mesh has, and returns what all of them left. `network` makes the
    /// network over this rank's parameters, again where the recipe changes. Collective.
    ///
    /// # Errors
    /// What [`Training::check`] finds, a rank that failed, or a defect that the audit found. A loss that is not finite is no error here:
    /// [`RunResult::check_finite`].
    pub fn rank<B: Backend, N: Network<B, Batch = D::Batch>>(
        &self,
        backend: &B,
        comm: Arc<dyn Communicator<B>>,
        network: impl Fn(&mut ShardedModel<B, Variant>, RankPlace) -> NetworkResult<N>,
    ) -> Result<RunResult, TrainError> {
        let rank = Rank {
            training: self,
            backend,
            rank: comm.rank(),
            network: &network,
        };
        let trained = self.compare(comm.control()).and_then(|()| {
            let outcome = rank.train(&comm)?;
            let data = (self.config, self.data.tokens());
            outcome.result(self.run, data, comm.control())
        });
        or_abort(&*comm, trained)
    }

    /// Checks the run, and that all ranks make it with the same data.
    fn compare(&self, control: &dyn Control) -> Result<(), TrainError> {
        self.check_config()?;
        let none = [Value::Null, Value::Null];
        let mut about = about_run(self.config, self.run, &self.data.digest(), none)?;
        // Not saved, but counts are collectives.
        about["codes_every"] = self.codes_every.into();
        Ok(control.all_equal("the run", &about.to_string())?)
    }
}

/// What a step did on one rank.
struct Done {
    /// Its share of the loss.
    loss: f64,
    report: StepReport,
    /// How long it waited for data.
    data: Duration,
}

/// One rank of a run.
struct Rank<'a, M, D, B, F> {
    training: &'a Training<'a, M, D>,
    backend: &'a B,
    rank: usize,
    /// Makes the network.
    network: &'a F,
}

impl<M, D, B, F, N> Rank<'_, M, D, B, F>
where
    M: Model,
    D: Data,
    B: Backend,
    F: Fn(&mut ShardedModel<B, Variant>, RankPlace) -> NetworkResult<N>,
    N: Network<B, Batch = D::Batch>,
{
    /// Trains, and saves what is to be saved. Collective.
    fn train(&self, comm: &Comm<B>) -> Result<Outcome, TrainError> {
        let Training {
            config,
            data,
            checkpoints,
            watch,
            ..
        } = self.training;
        N::measure_memory(self.backend)?;
        let mesh = MeshComm::new(config.mesh, comm.clone())?;
        let specs = (config.linears(), config.vars());
        let resumed = self.resumed(comm)?;
        let first_step = resumed.as_ref().map_or(0, Resumed::step);
        let last_step = checkpoints.last_step(config.steps);
        let tail_step = config.steps - config.tail_steps;
        let mut outcome = Outcome::new(first_step);
        if self.rank == 0 {
            let run = self.training.run;
            watch(Event::Begun(resumed.as_ref().map(|found| found.at(run))));
        }
        if let Some(resumed) = &resumed {
            outcome.train_loss = resumed.losses()?;
            outcome.evaluations = resumed.evaluations(config, self.training.run)?;
        }
        let in_tail = config.tail_steps > 0 && first_step > tail_step;
        let mut trained = self.make(in_tail, (&mesh, &specs), resumed.as_ref())?;
        drop(resumed);
        let ways = trained.network.ways();
        comm.control().all_equal("how attention runs", &ways)?;
        let recast = trained.sharded.recast();
        if recast > 0 && self.rank == 0 {
            watch(Event::Recast {
                layers: recast,
                all: specs.0.len(),
            });
        }
        let mut saver = self.saver(comm)?;
        let mut start = Instant::now();
        let mut begun_at = first_step;
        let mut unmeasured = None;
        let tokens = config.batch * data.tokens();
        for step in first_step..last_step {
            if step == first_step + WARM_UP && last_step - first_step >= 3 * WARM_UP {
                // Plans are made and memory is found in the first steps.
                (start, begun_at, outcome.data) = (Instant::now(), step, 0.0);
            }
            if config.tail_steps > 0 && step == tail_step {
                outcome.add(&trained, (self.backend, *config))?;
                trained = self.switch(trained, &specs)?;
            }
            let measured = self.rank == 0 && step + 1 == last_step;
            if measured {
                // What measures the step is no part of its rate, where there are others.
                unmeasured = Some((start.elapsed(), outcome.data));
                trained.network.start_profile()?;
            }
            let begun = Instant::now();
            let done = self.step(step, &mut trained)?;
            outcome.data += done.data.as_secs_f64();
            if measured && let Some(profile) = trained.network.take_profile()? {
                (outcome.waited, outcome.gathered) = (Some(profile.waited), profile.gathered);
                watch(Event::Profile(&profile));
            }
            let loss = sum(comm, done.loss)?;
            // Recorded with the precision it was computed in.
            outcome.train_loss.push(loss as f32);
            if self.rank == 0 {
                let metrics = self.metrics((step, loss, &done), begun.elapsed(), &trained)?;
                let all = ((step + 1 - begun_at) * tokens) as f64;
                let tokens_per_second = all / start.elapsed().as_secs_f64();
                watch(Event::Step {
                    metrics: &metrics,
                    tokens_per_second,
                    flops_per_second: tokens_per_second * config.model.flops_per_token(),
                });
            }
            if self
                .training
                .codes_every
                .is_some_and(|every| (step + 1).is_multiple_of(every))
            {
                let begun = Instant::now();
                let layers = shares(&trained.sharded, &specs.0, comm.control())?;
                start += begun.elapsed();
                if self.rank == 0 {
                    let step = step + 1;
                    watch(Event::Codes {
                        step,
                        layers: &layers,
                    });
                }
            }
            if config
                .eval_every
                .is_some_and(|every| (step + 1).is_multiple_of(every))
            {
                let (loss, took) = self.evaluate(step + 1, &mut trained, comm)?;
                start += took;
                let evaluation = Evaluation {
                    step: step + 1,
                    loss,
                };
                outcome.evaluations.push(evaluation);
                if self.rank == 0 {
                    watch(Event::Evaluation(evaluation));
                }
            }
            if let Some(saver) = &mut saver {
                saver.poll()?;
                if checkpoints.saves_at(step + 1, last_step) {
                    self.save(saver, (step + 1, &mut trained.sharded, &outcome))?;
                }
            }
        }
        if let (Some(saver), true) = (&mut saver, first_step == last_step) {
            // Of a run that is done: where it is to be saved it may not be yet.
            self.save(saver, (last_step, &mut trained.sharded, &outcome))?;
        }
        // As if all steps had taken as long as those after the first ones.
        let ((elapsed, data), measured) = match unmeasured {
            Some(before) if last_step > begun_at + 1 && outcome.waited.is_some() => {
                (before, last_step - 1 - begun_at)
            }
            _ => (
                (start.elapsed(), outcome.data),
                (last_step - begun_at).max(1),
            ),
        };
        let all = (last_step - first_step) as f64 / measured as f64;
        (outcome.seconds, outcome.data) = (elapsed.as_secs_f64() * all, data * all);
        outcome.add(&trained, (self.backend, *config))?;
        self.audit(&trained.sharded, &specs)?;
        // What a checkpoint says may be of other data or of another recipe.
        let evaluated = first_step < last_step;
        let last = outcome.evaluations.last().filter(|_| evaluated);
        outcome.val_loss = match last.filter(|last| last.step == last_step) {
            Some(last) => last.loss,
            None => {
                let (loss, _) = self.evaluate(last_step, &mut trained, comm)?;
                // Of a run that is stopped here, the log is that of one that goes on.
                if self.rank == 0 && last_step == config.steps {
                    let step = last_step;
                    watch(Event::Evaluation(Evaluation { step, loss }));
                }
                loss
            }
        };
        outcome.skipped = trained
            .sharded
            .optimizer()
            .counts()
            .map_err(ModelError::from)?
            .skipped;
        if let Some(saver) = &mut saver {
            saver.finish()?;
        }
        Ok(outcome)
    }

    /// The checkpoint to resume from. With `newest_whole` the ranks verify all files, each a part, and try the previous checkpoint if a file
    /// is damaged. Otherwise every restart would fail on it while loading. Collective.
    fn resumed(&self, comm: &Comm<B>) -> Result<Option<Resumed>, TrainError> {
        let control = comm.control();
        let mut before = u64::MAX;
        loop {
            let Some(found) = self.found(comm, before)? else {
                return Ok(None);
            };
            if !self.training.checkpoints.newest_whole {
                return Ok(Some(found));
            }
            let checkpoint = found.checkpoint();
            let damage = match checkpoint.verify_part(self.rank, comm.world_size()) {
                Ok(()) => String::new(),
                Err(damage) if damage.is_damage() => damage.to_string(),
                Err(error) => return Err(error.into()),
            };
            let mut damaged = [f64::from(!damage.is_empty())];
            control.sum(&mut damaged)?;
            if damaged == [0.0] {
                return Ok(Some(found));
            }
            let told = control.gather("damage of the checkpoint", damage.into_bytes())?;
            for damage in told.iter().flatten().filter(|damage| !damage.is_empty()) {
                (self.training.watch)(Event::Damaged(&String::from_utf8_lossy(damage)));
            }
            before = checkpoint.step();
        }
    }

    /// Rank 0 looks for the newest checkpoint before step `before`; all ranks open it. Collective.
    fn found(&self, comm: &Comm<B>, before: u64) -> Result<Option<Resumed>, TrainError> {
        let (training, control) = (self.training, comm.control());
        let found = match self.rank {
            0 => training.find(before)?,
            _ => None,
        };
        for damaged in found.iter().flat_map(Resumed::damaged) {
            (training.watch)(Event::Damaged(&damaged.to_string()));
        }
        let step = found.as_ref().map(|found| found.checkpoint().step());
        let step = step.map_or_else(Vec::new, |step| step.to_le_bytes().to_vec());
        let step = control.broadcast("the checkpoint to resume", step)?;
        let found = match (found, step.first_chunk()) {
            (None, Some(&step)) => {
                let run = (training.run, training.config.seed);
                let step = u64::from_le_bytes(step);
                Some(Resumed::of_step(&training.checkpoints, run, step)?)
            }
            (found, _) => found,
        };
        // Where ranks are processes, each opens it for itself.
        let id = found
            .as_ref()
            .map_or("none", |found| found.checkpoint().id());
        control.all_equal("the checkpoint to resume", id)?;
        Ok(found)
    }

    /// The model of the first step.
    fn make(
        &self,
        tail: bool,
        (mesh, (linears, vars)): (&MeshComm<B>, &Specs),
        resumed: Option<&Resumed>,
    ) -> Result<Trained<B, N>, TrainError> {
        let config = self.training.config;
        let options = ModelOptions {
            sharding: config.sharding,
            reshard_after_forward: config.reshard_after_forward,
            grads: GradBucketOptions {
                wire: config.grad_wire,
                bytes: N::VARS.grad_bucket(),
                ..GradBucketOptions::default()
            },
            seed: config.seed,
            group: config.group(),
            vars: N::VARS,
        };
        let of = self.recipes(linears, tail);
        let sharded = match resumed {
            None => match self.training.pretrained.values {
                None => ShardedModel::new(self.backend, mesh, of, linears, vars, options)?,
                Some(first) => {
                    let on = (self.backend, mesh);
                    ShardedModel::with_values(on, of, linears, vars, options, first)?
                }
            },
            Some(resumed) => {
                let saved = (resumed.checkpoint(), resumed.formats());
                ShardedModel::load((self.backend, mesh), of, linears, vars, options, saved)?
            }
        };
        self.over(sharded, tail)
    }

    /// The same model with the recipe of the tail.
    fn switch(
        &self,
        trained: Trained<B, N>,
        (linears, vars): &Specs,
    ) -> Result<Trained<B, N>, TrainError> {
        let Trained {
            sharded, network, ..
        } = trained;
        // Its layers hold weights.
        drop(network);
        let of = self.recipes(linears, true);
        self.over(sharded.in_recipes(of, linears, vars)?, true)
    }

    /// The recipe of each linear layer.
    fn recipes(&self, linears: &[LinearSpec], tail: bool) -> impl Fn(&LinearSpec) -> Variant {
        let Training { run, config, .. } = *self.training;
        let blocks = blocks(linears);
        move |linear: &LinearSpec| config.recipe_of(run, linear, (blocks, tail))
    }

    fn over(
        &self,
        mut sharded: ShardedModel<B, Variant>,
        tail: bool,
    ) -> Result<Trained<B, N>, TrainError> {
        let place = RankPlace {
            rank: self.rank,
            threads: self.training.threads,
        };
        let network = (self.network)(&mut sharded, place)?;
        let (config, applied) = (self.training.config.z_loss, network.z_loss());
        if config != applied {
            return Err(TrainError::ZLoss { config, applied });
        }
        Ok(Trained {
            sharded,
            network,
            tail,
            steps: 0,
            evaluated: Evaluated::default(),
        })
    }

    /// One step.
    fn step(&self, step: usize, trained: &mut Trained<B, N>) -> Result<Done, TrainError> {
        let Training { config, data, .. } = self.training;
        let Trained {
            sharded, network, ..
        } = trained;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let begun = Instant::now();
        let targets = data.targets(config.seed, step, config.batch)?.max(1);
        let mut waited = begun.elapsed();
        let mut loss = 0.0;
        for micro in 0..config.accumulate {
            let part = share(mine.len(), config.accumulate, micro);
            let part = mine.start + part.start..mine.start + part.end;
            let random_step = N::random_step(step, micro, config.accumulate);
            sharded.reduce(config.reduction(micro))?;
            sharded.begin(random_step, self.first_token(&part), true)?;
            let begun = Instant::now();
            let batch = data.train(config.seed, step, part)?;
            waited += begun.elapsed();
            loss += network.train(sharded, &batch, targets)?;
        }
        let options = StepOptions {
            lr_factor: config.schedule().factor(step as u64 + 1),
            max_norm: Some(config.clip),
            ..StepOptions::default()
        };
        let report = network.finish_step(sharded, &options)?;
        trained.steps += 1;
        Ok(Done {
            loss: loss + trained.network.take_loss()?,
            report,
            data: waited,
        })
    }

    /// What is known of step `step`, whose loss over all ranks is `loss`.
    fn metrics(
        &self,
        (step, loss, done): (usize, f64, &Done),
        took: Duration,
        trained: &Trained<B, N>,
    ) -> Result<Metrics, TrainError> {
        let Training {
            config,
            data,
            peak_flops,
            ..
        } = self.training;
        let (steps, batch) = ((step + 1) as u64, config.batch as u64);
        let seconds = took.as_secs_f64();
        let tokens_per_second = (batch * data.tokens() as u64) as f64 / seconds;
        let flops_per_second = tokens_per_second * config.model.flops_per_token();
        let memory = trained.network.memory(self.backend)?;
        let lr = config.lr * config.schedule().factor(steps);
        Ok(Metrics {
            step: step + 1,
            loss,
            lr: lr.into(),
            grad_norm: done.report.grad.norm,
            skipped: !done.report.applied,
            tokens: steps * batch * data.tokens() as u64,
            epoch: data
                .sequences()
                .map(|all| (steps * batch) as f64 / all as f64),
            seconds,
            tokens_per_second,
            flops_per_second,
            mfu: peak_flops.map(|peak| flops_per_second / (peak * config.mesh.world() as f64)),
            data_wait: done.data.as_secs_f64() / seconds,
            device_bytes: memory.map(|memory| memory.peak),
            host_bytes: host_bytes(),
        })
    }

    /// The number of the first token of `sequences` in the batch.
    fn first_token(&self, sequences: &Range<usize>) -> u64 {
        (sequences.start * self.training.data.tokens()) as u64
    }

    /// Where checkpoints of this run go. Collective.
    fn saver(&self, comm: &Comm<B>) -> Result<Option<Saver>, TrainError> {
        let Training {
            run,
            config,
            checkpoints,
            ..
        } = self.training;
        let Some(folder) = checkpoints.folder_of(run, config.seed) else {
            return Ok(None);
        };
        let control = comm.control().split(0, self.rank)?;
        Ok(Some(Saver::new(control, &folder, checkpoints.keep)?))
    }

    /// Begins to save the checkpoint of `step`, once the one before is written.
    fn save(
        &self,
        saver: &mut Saver,
        (step, sharded, outcome): (usize, &mut ShardedModel<B, Variant>, &Outcome),
    ) -> Result<(), TrainError> {
        saver.finish()?;
        let pieces = self.pieces(sharded, &outcome.train_loss)?;
        let formats = [sharded.about(), sharded.about_scales()?];
        let Training {
            run, config, data, ..
        } = self.training;
        let mut about = about_run(config, run, &data.digest(), formats)?;
        if let Some(own) = self.training.pretrained.config {
            about["transformers"] = own.clone();
        }
        if !outcome.evaluations.is_empty() {
            about[EVALUATIONS] = written(&outcome.evaluations)?;
        }
        Ok(saver.start(step as u64, pieces, about)?)
    }

    /// This rank's pieces of a checkpoint.
    fn pieces(
        &self,
        sharded: &mut ShardedModel<B, Variant>,
        train_loss: &[f32],
    ) -> Result<Vec<Piece<Late>>, TrainError> {
        let mut pieces = sharded.pieces()?;
        if self.rank == 0 {
            let full = [1, train_loss.len()];
            let bytes: Vec<u8> = train_loss.iter().flat_map(|x| x.to_le_bytes()).collect();
            let losses = Piece {
                name: LOSSES.to_owned(),
                dtype: Dtype::F32,
                full,
                block: Block::whole(full),
                bytes,
            };
            pieces.push(losses.into());
        }
        Ok(pieces)
    }

    /// Compares what is gathered for each use with a cast of its masters, where that is asked for. Collective.
    fn audit(
        &self,
        sharded: &ShardedModel<B, Variant>,
        (linears, vars): &Specs,
    ) -> Result<(), TrainError> {
        let found = match self.training.audit {
            true => sharded.audit()?,
            false => Vec::new(),
        };
        let layers = linears.iter().map(|spec| &spec.name);
        let mut names = layers.chain(vars.iter().map(|spec| &spec.name));
        match found.first() {
            Some((number, phase, divergence)) => Err(TrainError::Audit {
                layer: names.nth(*number).cloned().unwrap_or_default(),
                phase: phase.name(),
                why: divergence.to_string(),
            }),
            None => Ok(()),
        }
    }
}

/// Sum of one number over the ranks, the same on each.
fn sum<B: Backend>(comm: &Comm<B>, value: f64) -> Result<f64, TrainError> {
    let mut values = [value];
    comm.control().sum(&mut values)?;
    Ok(values[0])
}
