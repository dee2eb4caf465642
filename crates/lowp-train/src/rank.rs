//! The training loop of one rank, with its share of every batch.

mod evaluation;
mod steps;

use std::sync::Arc;
use std::time::Instant;

use lowp_checkpoint::{Block, Dtype, Late, Piece, Saver};
use lowp_comm::{Communicator, Control, MeshComm, or_abort};
use lowp_format::spelling::Variant;
use lowp_fsdp::{
    LinearSpec, ModelError, ModelOptions, Multiplies, ShardedModel, VarPlace, VarSpec,
};
use lowp_kernels::Backend;
use lowp_shard::GradBucketOptions;
use serde_json::Value;

use crate::checkpoints::{EVALUATIONS, LOSSES, Resumed, about_run};
use crate::codes::shares;
use crate::config::blocks;
use crate::data::Data;
use crate::error::TrainError;
use crate::forms::written;
use crate::network::{Model, Network, NetworkResult, RankPlace};
use crate::outcome::{Evaluated, Outcome, Trained};
use crate::result::{Evaluation, RunResult};
use crate::training::{Event, Training};

use steps::{InFlight, Rate};

/// Steps that are not measured where there are more than twice as many others.
const WARM_UP: usize = 4;

type Comm<B> = Arc<dyn Communicator<B>>;
type Specs = (Vec<LinearSpec>, Vec<VarSpec>);

impl<M: Model, D: Data + ?Sized> Training<'_, M, D> {
    /// Trains as one rank of `comm`, a world of as many ranks as the mesh has, and returns what all of them left. `network` makes the
    /// network over this rank's parameters, again where the recipe changes. Collective.
    ///
    /// # Errors
    /// What [`Training::check`] finds, a rank that failed, or a defect that the audit found. A loss that is not finite is no error here:
    /// [`RunResult::check_finite`].
    pub fn rank<B: Multiplies, N: Network<B, Batch = D::Batch>>(
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

/// One rank of a run.
struct Rank<'a, M, D: ?Sized, B, F> {
    training: &'a Training<'a, M, D>,
    backend: &'a B,
    rank: usize,
    /// Makes the network.
    network: &'a F,
}

impl<M, D, B, F, N> Rank<'_, M, D, B, F>
where
    M: Model,
    D: Data + ?Sized,
    B: Multiplies,
    F: Fn(&mut ShardedModel<B, Variant>, RankPlace) -> NetworkResult<N>,
    N: Network<B, Batch = D::Batch>,
{
    /// Trains, and saves what is to be saved. Collective.
    fn train(&self, comm: &Comm<B>) -> Result<Outcome, TrainError> {
        let Training {
            config,
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
        outcome.ways = ways;
        let recast = trained.sharded.recast();
        if recast > 0 && self.rank == 0 {
            watch(Event::Recast {
                layers: recast,
                all: specs.0.len(),
            });
        }
        let rounded = trained.sharded.rounded();
        if rounded > 0 && self.rank == 0 {
            watch(Event::Rounded { states: rounded });
        }
        let mut saver = self.saver(comm)?;
        let mut rate = Rate::new(first_step);
        let mut unmeasured = None;
        // Steps that a device goes on from by itself are read when the next one is on its way.
        let reads_late = comm.is_enqueued() && N::VARS == VarPlace::Backend;
        let mut unread: Option<InFlight<B>> = None;
        for step in first_step..last_step {
            let warmed_up = step == first_step + WARM_UP && last_step - first_step >= 3 * WARM_UP;
            let switches = config.tail_steps > 0 && step == tail_step;
            let is_last = step + 1 == last_step;
            if warmed_up || switches || is_last {
                self.read(&mut unread, comm, (&trained, &mut outcome, &mut rate))?;
            }
            if warmed_up {
                // Plans are made and memory is found in the first steps.
                rate = Rate::new(step);
                outcome.data = 0.0;
            }
            if switches {
                outcome.add(&trained, (self.backend, *config))?;
                trained = self.switch(trained, &specs)?;
            }
            let measured = self.rank == 0 && is_last;
            if measured {
                // What measures the step is no part of its rate, where there are others.
                unmeasured = Some((rate.start.elapsed(), outcome.data));
                trained.network.start_profile()?;
            }
            let started = match self.start(step, &mut trained) {
                Ok(started) => started,
                Err(error) => {
                    let into = (&trained, &mut outcome, &mut rate);
                    return Err(self.first_error(unread, comm, into, error));
                }
            };
            outcome.data += started.data.as_secs_f64();
            if measured && let Some(profile) = trained.network.take_profile()? {
                (outcome.waited, outcome.gathered) = (Some(profile.waited), profile.gathered);
                watch(Event::Profile(&profile));
            }
            self.read(&mut unread, comm, (&trained, &mut outcome, &mut rate))?;
            unread = Some(started);
            let is_at =
                |every: Option<usize>| every.is_some_and(|every| (step + 1).is_multiple_of(every));
            let counts = is_at(self.training.codes_every);
            let evaluates = is_at(config.eval_every);
            let saves = saver.is_some() && checkpoints.saves_at(step + 1, last_step);
            if !reads_late || is_last || counts || evaluates || saves {
                self.read(&mut unread, comm, (&trained, &mut outcome, &mut rate))?;
            }
            if counts {
                let begun = Instant::now();
                let layers = shares(&trained.sharded, &specs.0, comm.control())?;
                rate.start += begun.elapsed();
                if self.rank == 0 {
                    let step = step + 1;
                    watch(Event::Codes {
                        step,
                        layers: &layers,
                    });
                }
            }
            if evaluates {
                let (loss, took) = self.evaluate(step + 1, &mut trained, comm)?;
                rate.start += took;
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
                if saves {
                    self.save(saver, (step + 1, &mut trained.sharded, &outcome))?;
                }
            }
        }
        // A run that is done may not be yet where it is to be saved.
        let done = first_step == last_step
            && !checkpoints.resumes_where_it_saves(self.training.run, config.seed);
        if let (Some(saver), true) = (&mut saver, done) {
            self.save(saver, (last_step, &mut trained.sharded, &outcome))?;
        }
        // As if all steps had taken as long as those after the first ones.
        let ((elapsed, data), measured) = match unmeasured {
            Some(before) if last_step > rate.begun_at + 1 && outcome.waited.is_some() => {
                (before, last_step - 1 - rate.begun_at)
            }
            _ => (
                (rate.start.elapsed(), outcome.data),
                (last_step - rate.begun_at).max(1),
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
            let all = control.gather("damage of the checkpoint", damage.into_bytes())?;
            for damage in all.iter().flatten().filter(|damage| !damage.is_empty()) {
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
            var_group: config.var_group(),
            state: config.optimizer_state,
            offload: config.offload_optimizer,
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
    if comm.world_size() == 1 {
        return Ok(value);
    }
    let mut values = [value];
    comm.control().sum(&mut values)?;
    Ok(values[0])
}
