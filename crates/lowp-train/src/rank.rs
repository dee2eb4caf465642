//! The training loop of one rank, with its share of every batch.

use super::checkpoints::{LOSSES, Resumed};
use super::config::Config;
use super::corpus::{Corpus, share};
use super::network::{DeviceMemory, Network, Place, Profile};
use super::progress::Progress;
use super::recipes::Run;
use crate::output;
use anyhow::{Result, bail};
use lowp_checkpoint::{Block, Dtype, Late, Piece, Saver};
use lowp_format::spelling::Variant;
use lowp_fsdp::cost::HOST_GRAD_BUCKET;
use lowp_fsdp::{LinearSpec, ModelOptions, ShardedModel, VarPlace, VarSpec};
use lowp_kernels::Backend;
use lowp_optim::StepOptions;
use lowp_shard::{Communicator, Control, GradBucketOptions, MeshComm};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Steps that are not measured where there are more than twice as many others.
const WARM_UP: usize = 4;

type Comm<B> = Arc<dyn Communicator<B>>;

/// What training left on one rank.
#[derive(Serialize, Deserialize)]
pub(super) struct Outcome {
    /// Of all steps, also those before a checkpoint.
    pub(super) train_loss: Vec<f32>,
    pub(super) val_loss: f64,
    /// The step behind which this process went on.
    pub(super) resumed_at: u64,
    /// The steps of the recipe, and those of the tail.
    pub(super) parts: Vec<Part>,
    pub(super) skipped: u64,
    pub(super) seconds: f64,
    /// Seconds in which it waited for gathered weights.
    pub(super) gathering: f64,
    /// Those of the last step, as a device measured them.
    pub(super) waited: Option<f64>,
    /// Seconds of gathers in the last step from begin to end, and those of them in which it computed, as a device measured them.
    pub(super) gathered: Option<[f64; 2]>,
    /// Bytes of parameters that it held.
    pub(super) memory: u64,
    /// The most bytes that it held on a device, as counted and as measured.
    pub(super) device: Option<[u64; 2]>,
}

/// Steps in one recipe, and the bytes of this rank's weights behind them.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) tail: bool,
    pub(super) steps: usize,
    pub(super) sent: u64,
    pub(super) sent_per_step: u64,
    pub(super) resident: u64,
    pub(super) masters: u64,
    pub(super) peak: u64,
}

impl Outcome {
    /// Those of all ranks, of which this one has its own.
    pub(super) fn of_all(own: &Self, control: &dyn Control) -> Result<Vec<Self>> {
        let all = control.exchange("what training left", postcard::to_stdvec(own)?)?;
        all.iter()
            .map(|bytes| Ok(postcard::from_bytes(bytes)?))
            .collect()
    }
}

impl Outcome {
    /// Adds what `trained` did.
    fn add<B: Backend, N: Network<B>>(
        &mut self,
        trained: &Trained<B, N>,
        (backend, config): (&B, &Config),
    ) -> Result<()> {
        let Trained {
            sharded,
            network,
            tail,
            steps,
        } = trained;
        let bytes = sharded.weight_bytes(config.passes())?;
        self.parts.push(Part {
            tail: *tail,
            steps: *steps,
            sent: bytes.sent,
            sent_per_step: bytes.sent_per_step,
            resident: bytes.resident,
            masters: bytes.masters,
            peak: bytes.peak,
        });
        self.gathering += sharded.gathering()?.as_secs_f64();
        let parameters = sharded.parameter_bytes()?;
        self.memory = self.memory.max(parameters);
        if let Some(DeviceMemory { network, peak }) = network.memory(backend)? {
            let counted = self.device.map_or(0, |[counted, _]| counted);
            let all = parameters + sharded.var_gather_bytes() + network;
            self.device = Some([counted.max(all), peak]);
        }
        Ok(())
    }
}

/// One rank of a run.
pub(super) struct Rank<'a, B: Backend> {
    pub(super) backend: &'a B,
    pub(super) rank: usize,
    pub(super) config: &'a Config,
    pub(super) corpus: &'a Corpus,
    pub(super) progress: Option<&'a Progress>,
    /// Threads that its products may use.
    pub(super) threads: usize,
}

/// The model in the recipe of its steps.
struct Trained<B: Backend, N> {
    sharded: ShardedModel<B, Variant>,
    network: N,
    tail: bool,
    /// Steps since it was made.
    steps: usize,
}

impl<B: Backend> Rank<'_, B> {
    /// Trains, and saves what is to be saved. Collective.
    pub(super) fn train<N: Network<B>>(&self, run: &Run, comm: Comm<B>) -> Result<Outcome> {
        let config = self.config;
        N::measure_memory(self.backend)?;
        let mesh = MeshComm::new(config.mesh, comm.clone())?;
        let specs = (config.linears(), config.model.vars());
        let resumed = Resumed::find(config, run, self.corpus)?;
        // Where ranks are processes, each looks for itself.
        let behind = resumed
            .as_ref()
            .map_or("none", |resumed| resumed.checkpoint().id());
        comm.control()
            .agree("the checkpoint to go on behind", behind)?;
        let first_step = resumed.as_ref().map_or(0, Resumed::step);
        let last_step = config.last_step();
        let tail_step = config.steps - config.tail_steps;
        let mut train_loss = match &resumed {
            Some(resumed) => resumed.losses()?,
            None => Vec::new(),
        };
        let in_tail = config.tail_steps > 0 && first_step > tail_step;
        let mut trained: Trained<B, N> =
            self.make(run.recipe, in_tail, (&mesh, &specs), resumed.as_ref())?;
        drop(resumed);
        let ways = trained.network.ways();
        comm.control().agree("how attention runs", &ways)?;
        let recast = trained.sharded.recast();
        if recast > 0 && self.progress.is_some() {
            let all = specs.0.len();
            output::note(&format!(
                "{}: {recast} of {all} linear weights are cast from their masters: the checkpoint has them in other formats",
                run.name
            ));
        }
        let mut saver = self.saver(run, &comm)?;
        let mut outcome = Outcome {
            train_loss: Vec::new(),
            val_loss: f64::NAN,
            resumed_at: first_step as u64,
            parts: Vec::new(),
            skipped: 0,
            seconds: 0.0,
            gathering: 0.0,
            waited: None,
            gathered: None,
            memory: 0,
            device: None,
        };
        let mut start = Instant::now();
        let mut begun_at = first_step;
        let mut unmeasured = None;
        for step in first_step..last_step {
            if step == first_step + WARM_UP && last_step - first_step >= 3 * WARM_UP {
                // Plans are made and memory is found in the first steps.
                (start, begun_at) = (Instant::now(), step);
            }
            if config.tail_steps > 0 && step == tail_step {
                outcome.add(&trained, (self.backend, config))?;
                trained = self.switch(run.recipe, trained, &specs)?;
            }
            let measured = self.progress.is_some() && step + 1 == last_step;
            if measured {
                // What measures the step is no part of its rate, where there are others.
                unmeasured = Some(start.elapsed());
                trained.network.start_profile()?;
            }
            let loss = self.step(step, &mut trained)?;
            if measured {
                self.report(trained.network.take_profile()?, &mut outcome)?;
            }
            let loss = sum(&comm, loss)?;
            // Recorded with the precision it was computed in.
            train_loss.push(loss as f32);
            if let Some(progress) = self.progress {
                let tokens = (step + 1 - begun_at) * config.batch * config.model.seq;
                let rate = tokens as f64 / start.elapsed().as_secs_f64();
                progress.step(step, loss, rate, config.model.flops_per_token());
            }
            if let Some(saver) = &mut saver {
                let done = step + 1;
                saver.poll()?;
                if config.checkpoints.saves_at(done, last_step) {
                    self.save(saver, run, (done, &mut trained.sharded, &train_loss))?;
                }
            }
        }
        if let (Some(saver), true) = (&mut saver, first_step == last_step) {
            // Of a run that is done: where it is to be saved it may not be yet.
            self.save(saver, run, (last_step, &mut trained.sharded, &train_loss))?;
        }
        // As if all steps had taken what those behind the first ones took.
        let (elapsed, measured) = match unmeasured {
            Some(before) if last_step > begun_at + 1 && outcome.waited.is_some() => {
                (before, last_step - 1 - begun_at)
            }
            _ => (start.elapsed(), (last_step - begun_at).max(1)),
        };
        let steps = (last_step - first_step) as f64;
        outcome.seconds = elapsed.as_secs_f64() * steps / measured as f64;
        outcome.add(&trained, (self.backend, config))?;
        let Trained {
            sharded, network, ..
        } = &mut trained;
        let found = match config.audit {
            true => sharded.audit()?,
            false => Vec::new(),
        };
        if let Some((layer, phase, divergence)) = found.first() {
            let (name, phase) = (&specs.0[*layer].name, phase.name());
            bail!(
                "{name}, as {phase} gathers it: {divergence}; this is a defect in lowp: please report it"
            );
        }
        let mine = share(config.batch, config.mesh.world(), self.rank);
        sharded.begin(last_step as u64, self.first_token(&mine), false)?;
        outcome.val_loss = self.validate(network, &comm)?;
        sharded.release()?;
        outcome.skipped = sharded.optimizer().counts()?.skipped;
        outcome.train_loss = train_loss;
        if let Some(saver) = &mut saver {
            saver.finish()?;
        }
        Ok(outcome)
    }

    /// Keeps what the last step was spent on, and prints it where that was asked for.
    fn report(&self, profile: Option<Profile>, outcome: &mut Outcome) -> Result<()> {
        let Some(Profile {
            table,
            waited,
            gathered,
        }) = profile
        else {
            return Ok(());
        };
        (outcome.waited, outcome.gathered) = (Some(waited), gathered);
        match self.config.profile {
            true => output::print(&table),
            false => Ok(()),
        }
    }

    /// The model of the first step.
    fn make<N: Network<B>>(
        &self,
        recipe: Variant,
        tail: bool,
        (mesh, (linears, vars)): (&MeshComm<B>, &(Vec<LinearSpec>, Vec<VarSpec>)),
        resumed: Option<&Resumed>,
    ) -> Result<Trained<B, N>> {
        let config = self.config;
        let options = ModelOptions {
            sharding: config.sharding,
            reshard_after_forward: config.reshard_after_forward,
            grads: GradBucketOptions {
                wire: config.grad_wire,
                bytes: match N::VARS {
                    VarPlace::Host => HOST_GRAD_BUCKET,
                    VarPlace::Backend => GradBucketOptions::default().bytes,
                },
                ..GradBucketOptions::default()
            },
            seed: config.seed,
            group: config.group,
            vars: N::VARS,
        };
        let of = |linear: &LinearSpec| config.recipe_of(recipe, linear, tail);
        let sharded = match resumed {
            None => ShardedModel::new(self.backend, mesh, of, linears, vars, options)?,
            Some(resumed) => {
                let saved = (resumed.checkpoint(), resumed.formats());
                ShardedModel::load((self.backend, mesh), of, linears, vars, options, saved)?
            }
        };
        self.over(sharded, tail)
    }

    /// The same model with the recipe of the tail.
    fn switch<N: Network<B>>(
        &self,
        recipe: Variant,
        trained: Trained<B, N>,
        (linears, vars): &(Vec<LinearSpec>, Vec<VarSpec>),
    ) -> Result<Trained<B, N>> {
        let Trained {
            sharded, network, ..
        } = trained;
        // Its layers hold weights.
        drop(network);
        let of = |linear: &LinearSpec| self.config.recipe_of(recipe, linear, true);
        self.over(sharded.in_recipes(of, linears, vars)?, true)
    }

    fn over<N: Network<B>>(
        &self,
        mut sharded: ShardedModel<B, Variant>,
        tail: bool,
    ) -> Result<Trained<B, N>> {
        let place = Place {
            config: self.config,
            rank: self.rank,
            threads: self.threads,
        };
        let network = N::new(self.backend, &mut sharded, place)?;
        Ok(Trained {
            sharded,
            network,
            tail,
            steps: 0,
        })
    }

    /// One step; returns this rank's share of the loss.
    fn step<N: Network<B>>(&self, step: usize, trained: &mut Trained<B, N>) -> Result<f64> {
        let config = self.config;
        let Trained {
            sharded, network, ..
        } = trained;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let tokens = config.batch * config.model.seq;
        for micro in 0..config.accumulate {
            let part = share(mine.len(), config.accumulate, micro);
            let part = mine.start + part.start..mine.start + part.end;
            let random_step = N::random_step(step, micro, config.accumulate);
            sharded.begin(random_step, self.first_token(&part), true)?;
            let batch = self.corpus.train(config.seed, step, part);
            network.train(sharded, &batch, tokens)?;
        }
        let options = StepOptions {
            lr_factor: config.schedule.factor(step as u64 + 1),
            max_norm: Some(config.clip),
            ..StepOptions::default()
        };
        network.finish_step(sharded, &options)?;
        trained.steps += 1;
        trained.network.take_loss()
    }

    /// The number of the first token of `sequences` in the batch.
    fn first_token(&self, sequences: &Range<usize>) -> u64 {
        (sequences.start * self.config.model.seq) as u64
    }

    /// Where checkpoints of this run go. Collective.
    fn saver(&self, run: &Run, comm: &Comm<B>) -> Result<Option<Saver>> {
        let checkpoints = &self.config.checkpoints;
        let Some(folder) = checkpoints.folder_of(run, self.config.seed) else {
            return Ok(None);
        };
        let control = comm.control().split(0, self.rank)?;
        Ok(Some(Saver::new(control, &folder, checkpoints.keep)?))
    }

    /// Begins to save the checkpoint behind `step`, once that before it is done.
    fn save(
        &self,
        saver: &mut Saver,
        run: &Run,
        (step, sharded, train_loss): (usize, &mut ShardedModel<B, Variant>, &[f32]),
    ) -> Result<()> {
        saver.finish()?;
        let pieces = self.pieces(sharded, train_loss)?;
        let formats = [sharded.about(), sharded.about_scales()?];
        let about = self.config.about(run, self.corpus, formats)?;
        Ok(saver.start(step as u64, pieces, about)?)
    }

    /// This rank's pieces of a checkpoint.
    fn pieces(
        &self,
        sharded: &mut ShardedModel<B, Variant>,
        train_loss: &[f32],
    ) -> Result<Vec<Piece<Late>>> {
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

    fn validate<N: Network<B>>(&self, network: &mut N, comm: &Comm<B>) -> Result<f64> {
        let config = self.config;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let tokens = config.batch * config.model.seq;
        let total = config.eval_batches * config.batch;
        for index in 0..config.eval_batches {
            let first = index * config.batch;
            let range = first + mine.start..first + mine.end;
            network.evaluate(&self.corpus.validation(total, range), tokens)?;
        }
        Ok(sum(comm, network.take_loss()?)? / config.eval_batches as f64)
    }
}

/// Sum of one number over the ranks, the same on each.
fn sum<B: Backend>(comm: &Comm<B>, value: f64) -> Result<f64> {
    let mut values = [value];
    comm.control().sum(&mut values)?;
    Ok(values[0])
}
