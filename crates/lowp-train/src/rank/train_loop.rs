//! The steps of one rank from the first to the last, and what comes between them: evaluations, checkpoints, counts of codes
//! and the tail.

use std::sync::Arc;
use std::time::Instant;

use lowp_checkpoint::{Block, Dtype, Piece};
use lowp_fsdp::{ModelError, Multiplies, VarPlace};

use super::steps::Rate;
use super::{StepTimes, TrainLoop, tell};
use crate::checkpoints::{EVALUATIONS, LOSSES, about_run};
use crate::codes::shares;
use crate::data::Data;
use crate::error::TrainError;
use crate::forms::written;
use crate::network::{Model, Network};
use crate::outcome::Outcome;
use crate::result::Evaluation;
use crate::training::{Event, Training};

/// Steps that are not measured where there are more than twice as many others.
const WARM_UP: usize = 4;

impl<M, D, B, N> TrainLoop<'_, M, D, B, N>
where
    M: Model,
    D: Data + ?Sized,
    B: Multiplies,
    N: Network<B, Batch = D::Batch>,
{
    /// Trains, and saves what is to be saved. Collective.
    pub(super) fn train(mut self) -> Result<Outcome, TrainError> {
        // The others hear of a failure before the saver is dropped, which waits for a file.
        let comm = Arc::clone(&self.rank.comm);
        let tell = |done: Result<(), TrainError>| tell(&*comm, done.map_err(TrainError::of_run));
        for step in self.steps.clone() {
            tell(self.prepare(step))?;
            if self.switches_at(step) {
                self = self.switch()?;
            }
            tell(self.step(step))?;
            tell(self.after_step(step + 1))?;
        }
        tell(self.finish())?;
        Ok(self.outcome)
    }

    /// Whether step `step` is the first of the tail.
    fn switches_at(&self, step: usize) -> bool {
        let config = self.rank.training.config;
        config.tail_steps > 0 && step == config.steps - config.tail_steps
    }

    /// Changes to the recipe of the tail.
    fn switch(mut self) -> Result<Self, TrainError> {
        let rank = &self.rank;
        let added = self
            .outcome
            .add(&self.trained, rank.backend, rank.training.config);
        tell(&*rank.comm, added)?;
        let switched = rank.switch(self.trained, &self.specs);
        let trained = tell(&*rank.comm, switched)?;
        Ok(Self { trained, ..self })
    }

    /// Begins to measure after the warm-up.
    fn prepare(&mut self, step: usize) -> Result<(), TrainError> {
        let warmed_up = step == self.steps.start + WARM_UP && self.steps.len() >= 3 * WARM_UP;
        if warmed_up || self.switches_at(step) || self.is_last(step) {
            self.read()?;
        }
        if warmed_up {
            // Plans are made and memory is found in the first steps.
            self.rate = Rate::new(step);
            self.outcome.data = 0.0;
        }
        Ok(())
    }

    fn is_last(&self, step: usize) -> bool {
        step + 1 == self.steps.end
    }

    /// Starts step `step`, and reads the one before.
    fn step(&mut self, step: usize) -> Result<(), TrainError> {
        let profiled = self.rank.comm.rank() == 0 && self.is_last(step);
        if profiled {
            // What measures the step is no part of its rate, where there are others.
            self.before_profile = Some(self.times());
            self.trained.network.start_profile()?;
        }
        let started = self.start(step).map_err(|error| self.first_error(error))?;
        self.outcome.data += started.data.as_secs_f64();
        if profiled && let Some(profile) = self.trained.network.take_profile()? {
            self.outcome.waited = Some(profile.waited);
            self.outcome.gathered = profile.gathered;
            self.rank.tell(Event::Profile(&profile));
        }
        self.read()?;
        self.unread = Some(started);
        Ok(())
    }

    /// Counts codes, evaluates and saves, where that is due after `step` steps.
    fn after_step(&mut self, step: usize) -> Result<(), TrainError> {
        let training = self.rank.training;
        let comm = &self.rank.comm;
        let is_at = |every: Option<usize>| every.is_some_and(|every| step.is_multiple_of(every));
        let counts = is_at(training.codes_every);
        let evaluates = is_at(training.config.eval_every);
        let saves = self.saver.is_some() && training.checkpoints.saves_at(step, self.steps.end);
        // Steps that a device goes on from by itself are read when the next one is on its way.
        let reads_late = comm.is_enqueued() && N::VARS == VarPlace::Backend;
        if !reads_late || step == self.steps.end || counts || evaluates || saves {
            self.read()?;
        }
        if counts {
            let begun = Instant::now();
            let control = self.rank.comm.control();
            let layers = shares(&self.trained.sharded, &self.specs.0, control)?;
            self.rate.start += begun.elapsed();
            self.rank.tell(Event::Codes {
                step,
                layers: &layers,
            });
        }
        // An evaluation takes its time, in which a checkpoint that is written is better one that is there.
        if let Some(saver) = &mut self.saver {
            let saved = saver.poll()?;
            self.saved(saved);
        }
        if evaluates {
            let (loss, took) = self.evaluate(step)?;
            self.rate.start += took;
            let evaluation = Evaluation { step, loss };
            self.outcome.evaluations.push(evaluation);
            self.rank.tell(Event::Evaluation(evaluation));
        }
        if saves {
            self.save(step)?;
        }
        Ok(())
    }

    /// Saves, and then looks at what training left.
    fn finish(&mut self) -> Result<(), TrainError> {
        let Training {
            run,
            config,
            checkpoints,
            ..
        } = self.rank.training;
        let last_step = self.steps.end;
        // A run that is done may not be yet where it is to be saved; where it is, it may have more checkpoints than are kept.
        match &mut self.saver {
            Some(saver)
                if self.steps.is_empty()
                    && checkpoints.resumes_where_it_saves(run, config.seed) =>
            {
                saver.mend_latest(last_step as u64)?;
                saver.remove_old(last_step as u64);
            }
            _ if self.steps.is_empty() => self.save(last_step)?,
            _ => {}
        }
        self.measure();
        // What fails from here on loses nothing.
        self.finish_saving()?;
        self.outcome.add(&self.trained, self.rank.backend, config)?;
        self.audit()?;
        // What a checkpoint says may be of other data or of another recipe.
        let evaluated = !self.steps.is_empty();
        let last = self.outcome.evaluations.last().filter(|_| evaluated);
        self.outcome.val_loss = match last.filter(|last| last.step == last_step) {
            Some(last) => last.loss,
            None => {
                let (loss, _) = self.evaluate(last_step)?;
                // Of a run that is stopped here, the log is that of one that goes on.
                if last_step == config.steps {
                    let step = last_step;
                    self.rank.tell(Event::Evaluation(Evaluation { step, loss }));
                }
                loss
            }
        };
        let counts = self.trained.sharded.optimizer().counts();
        self.outcome.skipped = counts.map_err(ModelError::from)?.skipped;
        if let Some(saver) = &mut self.saver {
            for left in saver.finish_removals()? {
                self.rank.tell(Event::NotRemoved(&left.to_string()));
            }
        }
        Ok(())
    }

    /// Sets the seconds of the run, as if all steps had taken as long as those after the first ones.
    fn measure(&mut self) {
        let (begun, end) = (self.rate.begun_at, self.steps.end);
        let (times, measured) = match self.before_profile.take() {
            Some(before) if end > begun + 1 && self.outcome.waited.is_some() => {
                (before, end - 1 - begun)
            }
            _ => (self.times(), (end - begun).max(1)),
        };
        let all = self.steps.len() as f64 / measured as f64;
        self.outcome.seconds = times.elapsed.as_secs_f64() * all;
        self.outcome.data = times.data_seconds * all;
    }

    /// What the steps after the first ones took so far.
    fn times(&self) -> StepTimes {
        StepTimes {
            elapsed: self.rate.start.elapsed(),
            data_seconds: self.outcome.data,
        }
    }

    /// Waits for the checkpoint that is being written.
    fn finish_saving(&mut self) -> Result<(), TrainError> {
        if let Some(saver) = &mut self.saver {
            let saved = saver.finish()?;
            self.saved(saved);
        }
        Ok(())
    }

    /// Says which checkpoint is there, if one came to be.
    fn saved(&self, step: Option<u64>) {
        // It is one of this run.
        let step = step.and_then(|step| usize::try_from(step).ok());
        step.into_iter()
            .for_each(|step| self.rank.tell(Event::Saved(step)));
    }

    /// Begins to save the checkpoint of `step` where one is to be, once the one before is written.
    fn save(&mut self, step: usize) -> Result<(), TrainError> {
        self.finish_saving()?;
        let Self {
            rank,
            saver: Some(saver),
            trained,
            outcome,
            ..
        } = self
        else {
            return Ok(());
        };
        let Training {
            run,
            config,
            data,
            pretrained,
            ..
        } = rank.training;
        let sharded = &mut trained.sharded;
        let mut pieces = sharded.pieces()?;
        if rank.comm.rank() == 0 {
            pieces.push(losses(&outcome.train_loss).into());
        }
        let (weights, scales) = (sharded.about(), sharded.about_scales()?);
        let mut about = about_run(config, run, &data.digest(), weights, scales)?;
        if let Some(own) = pretrained.config {
            about["transformers"] = own.clone();
        }
        if !outcome.evaluations.is_empty() {
            about[EVALUATIONS] = written(&outcome.evaluations)?;
        }
        Ok(saver.start(step as u64, pieces, about)?)
    }

    /// Compares what is gathered for each use with a cast of its masters, where that is asked for. Collective.
    fn audit(&self) -> Result<(), TrainError> {
        let found = match self.rank.training.audit {
            true => self.trained.sharded.audit()?,
            false => Vec::new(),
        };
        let (linears, vars) = &self.specs;
        let layers = linears.iter().map(|spec| &spec.name);
        let mut names = layers.chain(vars.iter().map(|spec| &spec.name));
        match found.first() {
            Some(found) => Err(TrainError::Audit {
                layer: names.nth(found.layer).cloned().unwrap_or_default(),
                phase: found.phase.name(),
                why: found.divergence.to_string(),
            }),
            None => Ok(()),
        }
    }
}

/// The losses of all steps, for a checkpoint.
fn losses(train_loss: &[f32]) -> Piece {
    let full = [1, train_loss.len()];
    Piece {
        name: LOSSES.to_owned(),
        dtype: Dtype::F32,
        full,
        block: Block::whole(full),
        bytes: train_loss.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}
