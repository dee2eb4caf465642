//! The training loop of one rank, with its share of every batch.

mod evaluation;
mod steps;
mod train_loop;

use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use lowp_checkpoint::{Checkpoint, CheckpointError, Saver};
use lowp_comm::{Communicator, Control, MeshComm, or_abort};
use lowp_format::spelling::Variant;
use lowp_fsdp::{LinearSpec, ModelOptions, Multiplies, ShardedModel, VarSpec};
use lowp_kernels::Backend;
use lowp_shard::GradBucketOptions;
use serde_json::Value;

use crate::checkpoints::{Resumed, about_run, unreadable};
use crate::config::blocks;
use crate::data::{Data, share};
use crate::error::TrainError;
use crate::network::{Model, Network, NetworkResult, RankPlace};
use crate::outcome::{Evaluated, Outcome, Trained};
use crate::result::RunResult;
use crate::training::{Event, Training};

use steps::{InFlight, Rate};

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
        let trained = self.compare(comm.control()).and_then(|()| {
            let rank = Rank {
                training: self,
                backend,
                comm: comm.clone(),
                network: &network,
            };
            let outcome = rank.begin()?.train()?;
            outcome.result(self.run, self.config, self.data.tokens(), comm.control())
        });
        tell(&*comm, trained)
    }

    /// Checks the run, and that all ranks make it with the same data.
    fn compare(&self, control: &dyn Control) -> Result<(), TrainError> {
        self.check_config()?;
        let (digest, none) = (self.data.digest(), Value::Null);
        let mut about = about_run(self.config, self.run, &digest, none.clone(), none)?;
        // Not saved, but counts are collectives.
        about["codes_every"] = self.codes_every.into();
        Ok(control.all_equal("the run", &about.to_string())?)
    }
}

/// Ends the world where this rank has failed. Where another rank has the error, that rank ends the world, and this one waits for it.
fn tell<B: Backend, T>(
    comm: &dyn Communicator<B>,
    done: Result<T, TrainError>,
) -> Result<T, TrainError> {
    if done.as_ref().is_err_and(TrainError::is_of_other_rank) {
        drop(comm.control().barrier());
    }
    or_abort(comm, done)
}

/// Makes a network over a rank's parameters.
type MakeNetwork<'a, B, N> =
    &'a dyn Fn(&mut ShardedModel<B, Variant>, RankPlace) -> NetworkResult<N>;

/// One rank of a run.
struct Rank<'a, M, D: ?Sized, B: Backend, N> {
    training: &'a Training<'a, M, D>,
    backend: &'a B,
    comm: Comm<B>,
    network: MakeNetwork<'a, B, N>,
}

/// What steps took.
struct StepTimes {
    elapsed: Duration,
    /// Seconds of that in which they waited for data.
    data_seconds: f64,
}

/// The model of a rank, and what training it left so far.
struct TrainLoop<'a, M, D: ?Sized, B: Backend, N> {
    rank: Rank<'a, M, D, B, N>,
    specs: Specs,
    steps: Range<usize>,
    /// The last step that was started, until it is read.
    unread: Option<InFlight<B>>,
    saver: Option<Saver>,
    trained: Trained<B, N>,
    outcome: Outcome,
    rate: Rate,
    /// Of the steps before the profiled one.
    before_profile: Option<StepTimes>,
}

impl<'a, M, D, B, N> Rank<'a, M, D, B, N>
where
    M: Model,
    D: Data + ?Sized,
    B: Multiplies,
    N: Network<B, Batch = D::Batch>,
{
    /// Makes the model of the first step, and all else that steps need. Collective.
    fn begin(self) -> Result<TrainLoop<'a, M, D, B, N>, TrainError> {
        let Training {
            run,
            config,
            checkpoints,
            ..
        } = self.training;
        N::measure_memory(self.backend)?;
        let mesh = MeshComm::new(config.mesh, self.comm.clone())?;
        let specs = (config.linears(), config.vars());
        // First, since no other run saves there then: what it saved is there to be found.
        let saver = self.saver()?;
        let resumed = self.resumed()?;
        let first_step = resumed.as_ref().map_or(0, Resumed::step);
        let mut outcome = Outcome::new(first_step);
        self.tell(Event::Begun(resumed.as_ref().map(|found| found.at(run))));
        if let Some(resumed) = &resumed {
            outcome.train_loss = resumed.losses()?;
            outcome.evaluations = resumed.evaluations(config, run)?;
        }
        let in_tail = config.tail_steps > 0 && first_step > config.steps - config.tail_steps;
        let trained = self.make(in_tail, &mesh, &specs, resumed.as_ref())?;
        drop(resumed);
        outcome.ways = trained.network.ways();
        let control = self.comm.control();
        control.all_equal("how attention runs", &outcome.ways)?;
        let layers = trained.sharded.recast();
        if layers > 0 {
            let all = specs.0.len();
            self.tell(Event::Recast { layers, all });
        }
        let states = trained.sharded.rounded();
        if states > 0 {
            self.tell(Event::Rounded { states });
        }
        Ok(TrainLoop {
            saver,
            steps: first_step..checkpoints.last_step(config.steps),
            specs,
            unread: None,
            trained,
            outcome,
            rate: Rate::new(first_step),
            before_profile: None,
            rank: self,
        })
    }

    /// Tells of what happened, on rank 0.
    fn tell(&self, event: Event<'_>) {
        if self.comm.rank() == 0 {
            (self.training.watch)(event);
        }
    }

    /// This rank's sequences of a batch.
    fn share(&self) -> Range<usize> {
        let config = self.training.config;
        share(config.batch, config.mesh.world(), self.comm.rank())
    }

    /// The number of the first token of `sequences` in the batch.
    fn first_token(&self, sequences: &Range<usize>) -> u64 {
        (sequences.start * self.training.data.tokens()) as u64
    }

    /// Sum of one number over the ranks, the same on each.
    fn sum(&self, value: f64) -> Result<f64, TrainError> {
        let mut values = [value];
        if self.comm.world_size() > 1 {
            self.comm.control().sum(&mut values)?;
        }
        Ok(values[0])
    }

    /// The checkpoint to resume from. With `newest_whole` the ranks verify all files, each a part, and try the previous checkpoint if a file
    /// is damaged. Otherwise every restart would fail on it while loading. Collective.
    fn resumed(&self) -> Result<Option<Resumed>, TrainError> {
        let control = self.comm.control();
        let mut before = u64::MAX;
        loop {
            let Some(found) = self.found(before)? else {
                return Ok(None);
            };
            if !self.training.checkpoints.newest_whole {
                return Ok(Some(found));
            }
            let is_earlier = before < u64::MAX || !found.damaged().is_empty();
            let checkpoint = found.checkpoint();
            let damage = match self.verify_part(checkpoint)? {
                Ok(()) => String::new(),
                Err(damage) if damage.is_damage() => damage.to_string(),
                Err(error) => return Err(error.into()),
            };
            let mut damaged = [f64::from(!damage.is_empty())];
            control.sum(&mut damaged)?;
            if damaged == [0.0] {
                if is_earlier {
                    self.tell(Event::Earlier(found.step()));
                }
                return Ok(Some(found));
            }
            let told = control.gather("damage of the checkpoint", damage.into_bytes())?;
            for damage in told.iter().flatten().filter(|damage| !damage.is_empty()) {
                self.tell(Event::Damaged(&String::from_utf8_lossy(damage)));
            }
            before = checkpoint.step();
        }
    }

    /// Verifies this rank's part of the files of `checkpoint`. Ranks meet while they read: parts differ, and one that takes long is not taken
    /// for a rank that is gone. Collective.
    fn verify_part(
        &self,
        checkpoint: &Checkpoint,
    ) -> Result<Result<(), CheckpointError>, TrainError> {
        const LONGEST_PAUSE: Duration = Duration::from_secs(1);
        let [rank, world] = [self.comm.rank(), self.comm.world_size()];
        thread::scope(|scope| {
            let reads = scope.spawn(move || checkpoint.verify_part(rank, world));
            let mut pause = Duration::from_millis(1);
            while self.sum(f64::from(!reads.is_finished()))? > 0.0 {
                thread::sleep(pause);
                pause = (2 * pause).min(LONGEST_PAUSE);
            }
            Ok(reads.join().unwrap_or_else(|panic| resume_unwind(panic)))
        })
    }

    /// Rank 0 looks for the newest checkpoint before step `before`; all ranks open it. Collective.
    fn found(&self, before: u64) -> Result<Option<Resumed>, TrainError> {
        let (training, control) = (self.training, self.comm.control());
        let found = match self.comm.rank() {
            0 => training.find(before),
            _ => Ok(None),
        };
        let found = self.all_or(found)?;
        for damaged in found.iter().flat_map(Resumed::damaged) {
            self.tell(Event::Damaged(&damaged.to_string()));
        }
        let step = found.as_ref().map(|found| found.checkpoint().step());
        let step = step.map_or_else(Vec::new, |step| step.to_le_bytes().to_vec());
        let step = control.broadcast("the checkpoint to resume", step)?;
        // Where ranks are processes, each opens it for itself.
        let opened = match (found, step.first_chunk()) {
            (None, Some(&step)) => {
                let seed = training.config.seed;
                let step = u64::from_le_bytes(step);
                Resumed::of_step(&training.checkpoints, training.run, seed, step).map(Some)
            }
            (found, _) => Ok(found),
        };
        let found = self.all_or(opened)?;
        let id = found
            .as_ref()
            .map_or("none", |found| found.checkpoint().id());
        control.all_equal("the checkpoint to resume", id)?;
        Ok(found)
    }

    /// What this rank found to resume from, where no rank has an error; else that of the first, which is one of the input. Collective.
    fn all_or<T>(&self, own: Result<T, TrainError>) -> Result<T, TrainError> {
        let why = own.as_ref().err().map(TrainError::chain);
        let control = self.comm.control();
        let first = control.first_error(
            "why there is nothing to resume",
            why.as_ref().map(|why| why as _),
        )?;
        let own = own?;
        first.map_or(Ok(own), |(rank, why)| {
            Err(unreadable(CheckpointError::OtherRank { rank, why }))
        })
    }

    /// The model of the first step.
    fn make(
        &self,
        tail: bool,
        mesh: &MeshComm<B>,
        (linears, vars): &Specs,
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
                Some(first) => ShardedModel::with_values(
                    self.backend,
                    mesh,
                    of,
                    linears,
                    vars,
                    options,
                    first,
                )?,
            },
            Some(resumed) => {
                let saved = resumed.saved();
                ShardedModel::load(self.backend, mesh, of, linears, vars, options, saved)?
            }
        };
        self.over(sharded, tail)
    }

    /// The model in the recipe of the tail.
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
        move |linear: &LinearSpec| config.recipe_of(run, linear, blocks, tail)
    }

    fn over(
        &self,
        mut sharded: ShardedModel<B, Variant>,
        tail: bool,
    ) -> Result<Trained<B, N>, TrainError> {
        let place = RankPlace {
            rank: self.comm.rank(),
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
    fn saver(&self) -> Result<Option<Saver>, TrainError> {
        let Training {
            run,
            config,
            checkpoints,
            ..
        } = self.training;
        let Some(folder) = checkpoints.folder_of(run, config.seed) else {
            return Ok(None);
        };
        let control = self.comm.control().split(0, self.comm.rank())?;
        let saver = Saver::new(control, &folder, checkpoints.keep);
        saver.map(Some).map_err(|why| match why {
            CheckpointError::Comm(cause) => cause.into(),
            why => checkpoints.cannot_save(why),
        })
    }
}
