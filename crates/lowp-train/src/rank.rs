//! The training loop of one rank, with its share of every batch.

use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use lowp_checkpoint::{Block, Dtype, Late, Piece, Saver};
use lowp_comm::{Communicator, Control, MeshComm, or_abort};
use lowp_format::spelling::Variant;
use lowp_fsdp::{LinearSpec, ModelError, ModelOptions, ShardedModel, VarSpec};
use lowp_kernels::Backend;
use lowp_optim::StepOptions;
use lowp_shard::GradBucketOptions;
use serde_json::Value;

use crate::checkpoints::{LOSSES, Resumed, about_run};
use crate::config::blocks;
use crate::data::{Data, share};
use crate::error::TrainError;
use crate::network::{Model, Network, NetworkResult, RankPlace};
use crate::outcome::{Outcome, Trained};
use crate::result::RunResult;
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
        let about = about_run(self.config, self.run, &self.data.digest(), none)?;
        Ok(control.all_equal("the run", &about.to_string())?)
    }
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
        let mut train_loss = match &resumed {
            Some(resumed) => resumed.losses()?,
            None => Vec::new(),
        };
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
        let mut outcome = Outcome::new(first_step);
        let mut start = Instant::now();
        let mut begun_at = first_step;
        let mut unmeasured = None;
        let tokens = config.batch * data.tokens();
        for step in first_step..last_step {
            if step == first_step + WARM_UP && last_step - first_step >= 3 * WARM_UP {
                // Plans are made and memory is found in the first steps.
                (start, begun_at) = (Instant::now(), step);
            }
            if config.tail_steps > 0 && step == tail_step {
                outcome.add(&trained, (self.backend, *config))?;
                trained = self.switch(trained, &specs)?;
            }
            let measured = self.rank == 0 && step + 1 == last_step;
            if measured {
                // What measures the step is no part of its rate, where there are others.
                unmeasured = Some(start.elapsed());
                trained.network.start_profile()?;
            }
            let loss = self.step(step, &mut trained)?;
            if measured && let Some(profile) = trained.network.take_profile()? {
                (outcome.waited, outcome.gathered) = (Some(profile.waited), profile.gathered);
                watch(Event::Profile(&profile));
            }
            let loss = sum(comm, loss)?;
            // Recorded with the precision it was computed in.
            train_loss.push(loss as f32);
            if self.rank == 0 {
                let done = ((step + 1 - begun_at) * tokens) as f64;
                let tokens_per_second = done / start.elapsed().as_secs_f64();
                watch(Event::Step {
                    step,
                    loss,
                    tokens_per_second,
                    flops_per_second: tokens_per_second * config.model.flops_per_token(),
                });
            }
            if let Some(saver) = &mut saver {
                saver.poll()?;
                if checkpoints.saves_at(step + 1, last_step) {
                    self.save(saver, (step + 1, &mut trained.sharded, &train_loss))?;
                }
            }
        }
        if let (Some(saver), true) = (&mut saver, first_step == last_step) {
            // Of a run that is done: where it is to be saved it may not be yet.
            self.save(saver, (last_step, &mut trained.sharded, &train_loss))?;
        }
        // As if all steps had taken as long as those after the first ones.
        let (elapsed, measured) = match unmeasured {
            Some(before) if last_step > begun_at + 1 && outcome.waited.is_some() => {
                (before, last_step - 1 - begun_at)
            }
            _ => (start.elapsed(), (last_step - begun_at).max(1)),
        };
        let steps = (last_step - first_step) as f64;
        outcome.seconds = elapsed.as_secs_f64() * steps / measured as f64;
        outcome.add(&trained, (self.backend, *config))?;
        self.audit(&trained.sharded, &specs.0)?;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let begin = (last_step as u64, self.first_token(&mine));
        trained.sharded.begin(begin.0, begin.1, false)?;
        outcome.val_loss = self.validate(&mut trained, comm)?;
        trained.sharded.release()?;
        outcome.skipped = trained
            .sharded
            .optimizer()
            .counts()
            .map_err(ModelError::from)?
            .skipped;
        outcome.train_loss = train_loss;
        if let Some(saver) = &mut saver {
            saver.finish()?;
        }
        Ok(outcome)
    }

    /// The checkpoint to resume from, which the first rank finds. Collective.
    fn resumed(&self, comm: &Comm<B>) -> Result<Option<Resumed>, TrainError> {
        let (training, control) = (self.training, comm.control());
        let found = match self.rank {
            0 => training.find()?,
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
        Ok(Trained {
            sharded,
            network,
            tail,
            steps: 0,
        })
    }

    /// One step; returns this rank's share of the loss.
    fn step(&self, step: usize, trained: &mut Trained<B, N>) -> Result<f64, TrainError> {
        let Training { config, data, .. } = self.training;
        let Trained {
            sharded, network, ..
        } = trained;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let targets = data.targets(config.seed, step, config.batch)?.max(1);
        let mut loss = 0.0;
        for micro in 0..config.accumulate {
            let part = share(mine.len(), config.accumulate, micro);
            let part = mine.start + part.start..mine.start + part.end;
            let random_step = N::random_step(step, micro, config.accumulate);
            sharded.begin(random_step, self.first_token(&part), true)?;
            let batch = data.train(config.seed, step, part)?;
            loss += network.train(sharded, &batch, targets)?;
        }
        let options = StepOptions {
            lr_factor: config.schedule().factor(step as u64 + 1),
            max_norm: Some(config.clip),
            ..StepOptions::default()
        };
        network.finish_step(sharded, &options)?;
        trained.steps += 1;
        Ok(loss + trained.network.take_loss()?)
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
        (step, sharded, train_loss): (usize, &mut ShardedModel<B, Variant>, &[f32]),
    ) -> Result<(), TrainError> {
        saver.finish()?;
        let pieces = self.pieces(sharded, train_loss)?;
        let formats = [sharded.about(), sharded.about_scales()?];
        let Training {
            run, config, data, ..
        } = self.training;
        let mut about = about_run(config, run, &data.digest(), formats)?;
        if let Some(own) = self.training.pretrained.config {
            about["transformers"] = own.clone();
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

    /// Compares every weight, as it is gathered, with a cast of its masters, where that is asked for. Collective.
    fn audit(
        &self,
        sharded: &ShardedModel<B, Variant>,
        linears: &[LinearSpec],
    ) -> Result<(), TrainError> {
        let found = match self.training.audit {
            true => sharded.audit()?,
            false => Vec::new(),
        };
        match found.first() {
            Some((layer, phase, divergence)) => Err(TrainError::Audit {
                layer: linears[*layer].name.clone(),
                phase: phase.name(),
                why: divergence.to_string(),
            }),
            None => Ok(()),
        }
    }

    /// The loss on the validation split.
    fn validate(&self, trained: &mut Trained<B, N>, comm: &Comm<B>) -> Result<f64, TrainError> {
        let Training { config, data, .. } = self.training;
        let Trained {
            sharded, network, ..
        } = trained;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let total = config.eval_batches * config.batch;
        let targets = data.validation_targets(total)?.max(1);
        let divisor = targets.div_ceil(config.eval_batches);
        let mut loss = 0.0;
        for index in 0..config.eval_batches {
            let first = index * config.batch;
            let range = first + mine.start..first + mine.end;
            loss += network.evaluate(sharded, &data.validation(total, range)?, divisor)?;
        }
        loss += network.take_loss()?;
        // Where all targets count, `divisor` is those of a batch.
        let counted = (divisor * config.eval_batches) as f64 / targets as f64;
        Ok(counted * sum(comm, loss)? / config.eval_batches as f64)
    }
}

/// Sum of one number over the ranks, the same on each.
fn sum<B: Backend>(comm: &Comm<B>, value: f64) -> Result<f64, TrainError> {
    let mut values = [value];
    comm.control().sum(&mut values)?;
    Ok(values[0])
}
