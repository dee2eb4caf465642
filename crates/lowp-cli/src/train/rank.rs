//! The training loop of one rank, with its share of every batch.

use super::checkpoints::{LOSSES, Resumed};
use super::config::Config;
use super::corpus::{Corpus, share};
use super::model::Gpt;
use super::progress::Progress;
use super::recipes::Run;
use super::variant::Variant;
use crate::output;
use anyhow::{Result, bail};
use lowp_candle::{LinearSpec, ModelOptions, ShardedModel, VarSpec};
use lowp_checkpoint::{Block, Dtype, Piece, Saver};
use lowp_kernels::Cpu;
use lowp_optim::StepOptions;
use lowp_shard::{Communicator, Control, GradBucketOptions, MeshComm};
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of small gradients that travel together: on a CPU nothing overlaps, so memory counts.
pub(crate) const GRAD_BUCKET: usize = 1 << 16;

type Comm = Arc<dyn Communicator<Cpu>>;

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
    /// Bytes of parameters that it held.
    pub(super) memory: u64,
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
    fn add(&mut self, trained: &Trained, config: &Config) -> Result<()> {
        let Trained {
            sharded,
            tail,
            steps,
            ..
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
        self.memory = self.memory.max(sharded.parameter_bytes()?);
        Ok(())
    }
}

/// One rank of a run.
pub(super) struct Rank<'a> {
    pub(super) rank: usize,
    pub(super) config: &'a Config,
    pub(super) corpus: &'a Corpus,
    pub(super) progress: Option<&'a Progress>,
    /// Threads that its products may use.
    pub(super) threads: usize,
}

/// The model in the recipe of its steps.
struct Trained {
    sharded: ShardedModel<Cpu, Variant>,
    model: Gpt,
    tail: bool,
    /// Steps since it was made.
    steps: usize,
}

impl Rank<'_> {
    /// Trains, and saves what is to be saved. Collective.
    pub(super) fn train(&self, run: &Run, comm: Comm) -> Result<Outcome> {
        let config = self.config;
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
        let mut trained = self.make(run.recipe, in_tail, (&mesh, &specs), resumed.as_ref())?;
        drop(resumed);
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
            memory: 0,
        };
        let start = Instant::now();
        for step in first_step..last_step {
            if config.tail_steps > 0 && step == tail_step {
                outcome.add(&trained, config)?;
                trained = self.switch(run.recipe, trained, &specs)?;
            }
            let loss = sum(&comm, self.step(step, &mut trained)?)?;
            // Recorded with the precision it was computed in.
            train_loss.push(loss as f32);
            if let Some(progress) = self.progress {
                let tokens = (step + 1 - first_step) * config.batch * config.model.seq;
                let rate = tokens as f64 / start.elapsed().as_secs_f64();
                progress.step(step, loss, rate, config.model.flops_per_token());
            }
            if let Some(saver) = &mut saver {
                let done = step + 1;
                saver.poll()?;
                if config.checkpoints.saves_at(done, last_step) {
                    self.save(saver, run, (done, &trained.sharded, &train_loss))?;
                }
            }
        }
        if let (Some(saver), true) = (&mut saver, first_step == last_step) {
            // Of a run that is done: where it is to be saved it may not be yet.
            self.save(saver, run, (last_step, &trained.sharded, &train_loss))?;
        }
        outcome.seconds = start.elapsed().as_secs_f64();
        outcome.add(&trained, config)?;
        let Trained { sharded, model, .. } = &trained;
        if let Some((layer, phase, divergence)) = sharded.audit()?.first() {
            let (name, phase) = (&specs.0[*layer].name, phase.name());
            bail!(
                "{name}, as {phase} gathers it: {divergence}; this is a defect in lowp: please report it"
            );
        }
        let mine = share(config.batch, config.mesh.world(), self.rank);
        sharded.begin(last_step as u64, self.first_token(&mine), false)?;
        outcome.val_loss = self.validate(model, &comm)?;
        sharded.release()?;
        outcome.skipped = sharded.optimizer().counts()?.skipped;
        outcome.train_loss = train_loss;
        if let Some(saver) = &mut saver {
            saver.finish()?;
        }
        Ok(outcome)
    }

    /// The model of the first step.
    fn make(
        &self,
        recipe: Variant,
        tail: bool,
        (mesh, (linears, vars)): (&MeshComm<Cpu>, &(Vec<LinearSpec>, Vec<VarSpec>)),
        resumed: Option<&Resumed>,
    ) -> Result<Trained> {
        let config = self.config;
        let options = ModelOptions {
            sharding: config.sharding,
            reshard_after_forward: config.reshard_after_forward,
            grads: GradBucketOptions {
                wire: config.grad_wire,
                bytes: GRAD_BUCKET,
                ..GradBucketOptions::default()
            },
            seed: config.seed,
            group: config.group,
            threads: self.threads,
        };
        let of = |linear: &LinearSpec| match tail {
            true => self.recipe_of(recipe, linear).with_bf16_forward(),
            false => self.recipe_of(recipe, linear),
        };
        let sharded = match resumed {
            None => ShardedModel::new(&Cpu, mesh, of, linears, vars, options)?,
            Some(resumed) => {
                let saved = (resumed.checkpoint(), resumed.formats());
                ShardedModel::load((&Cpu, mesh), of, linears, vars, options, saved)?
            }
        };
        self.over(sharded, tail)
    }

    /// The same model with the recipe of the tail.
    fn switch(
        &self,
        recipe: Variant,
        trained: Trained,
        (linears, vars): &(Vec<LinearSpec>, Vec<VarSpec>),
    ) -> Result<Trained> {
        let Trained { sharded, model, .. } = trained;
        // Its layers hold weights.
        drop(model);
        let of = |linear: &LinearSpec| self.recipe_of(recipe, linear).with_bf16_forward();
        self.over(sharded.in_recipes(of, linears, vars)?, true)
    }

    fn over(&self, sharded: ShardedModel<Cpu, Variant>, tail: bool) -> Result<Trained> {
        let config = self.config;
        let (layers, vars) = (sharded.layers(), sharded.vars().to_vec());
        let passes = (self.threads, config.recompute);
        let model = Gpt::new(config.model, layers, vars, passes)?;
        Ok(Trained {
            sharded,
            model,
            tail,
            steps: 0,
        })
    }

    fn recipe_of(&self, recipe: Variant, linear: &LinearSpec) -> Variant {
        match self.config.kept_in_bf16.contains(&linear.name) {
            true => recipe.in_bf16(),
            false => recipe.of_block(linear.block, self.config.model.layers),
        }
    }

    /// One step; returns this rank's share of the loss.
    fn step(&self, step: usize, trained: &mut Trained) -> Result<f64> {
        let config = self.config;
        let Trained { sharded, model, .. } = trained;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let tokens = config.batch * config.model.seq;
        let mut loss = 0.0;
        for micro in 0..config.accumulate {
            let part = share(mine.len(), config.accumulate, micro);
            let part = mine.start + part.start..mine.start + part.end;
            sharded.begin(step as u64, self.first_token(&part), true)?;
            let batch = self.corpus.train(config.seed, step, part);
            let own = model.loss(&batch, tokens)?;
            sharded.add_gradients(&own.backward()?)?;
            loss += f64::from(own.value()?);
        }
        sharded.finish_step(&StepOptions {
            lr_factor: config.schedule.factor(step as u64 + 1),
            max_norm: Some(config.clip),
            ..StepOptions::default()
        })?;
        trained.steps += 1;
        Ok(loss)
    }

    /// The number of the first token of `sequences` in the batch.
    fn first_token(&self, sequences: &Range<usize>) -> u64 {
        (sequences.start * self.config.model.seq) as u64
    }

    /// Where checkpoints of this run go. Collective.
    fn saver(&self, run: &Run, comm: &Comm) -> Result<Option<Saver>> {
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
        (step, sharded, train_loss): (usize, &ShardedModel<Cpu, Variant>, &[f32]),
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
        sharded: &ShardedModel<Cpu, Variant>,
        train_loss: &[f32],
    ) -> Result<Vec<Piece>> {
        let mut pieces = sharded.pieces()?;
        if self.rank == 0 {
            let full = [1, train_loss.len()];
            pieces.push(Piece {
                name: LOSSES.to_owned(),
                dtype: Dtype::F32,
                full,
                block: Block::whole(full),
                bytes: train_loss.iter().flat_map(|x| x.to_le_bytes()).collect(),
            });
        }
        Ok(pieces)
    }

    fn validate(&self, model: &Gpt, comm: &Comm) -> Result<f64> {
        let config = self.config;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let tokens = config.batch * config.model.seq;
        let total = config.eval_batches * config.batch;
        let mut loss_sum = 0.0;
        for index in 0..config.eval_batches {
            let first = index * config.batch;
            let range = first + mine.start..first + mine.end;
            let loss = model.loss(&self.corpus.validation(total, range), tokens)?;
            loss_sum += f64::from(loss.value()?);
        }
        Ok(sum(comm, loss_sum)? / config.eval_batches as f64)
    }
}

/// Sum of one number over the ranks, the same on each.
fn sum(comm: &Comm, value: f64) -> Result<f64> {
    let mut values = [value];
    comm.control().sum(&mut values)?;
    Ok(values[0])
}
