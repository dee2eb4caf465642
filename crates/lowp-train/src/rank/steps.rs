//! The steps of one rank: each is given to the device, and read when it is done.

use std::time::{Duration, Instant};

use lowp_fsdp::{ModelError, Multiplies};
use lowp_kernels::Backend;
use lowp_optim::{PendingStep, StepOptions, StepReport};

use super::TrainLoop;
use crate::data::{Data, share};
use crate::error::TrainError;
use crate::metrics::{Metrics, host_bytes};
use crate::network::{LateLoss, Model, Network};
use crate::outcome::Trained;
use crate::training::{Event, Training};

/// A step that the device may still work on.
pub(super) struct InFlight<B: Backend> {
    step: usize,
    begun: Instant,
    /// What the host knows of this rank's share of the loss.
    loss: f64,
    /// The rest of the loss.
    late: LateLoss,
    report: PendingStep<B>,
    /// How long the step waited for data.
    pub(super) data: Duration,
}

/// A step that the device has done.
struct Done {
    step: usize,
    begun: Instant,
    /// This rank's share of the loss.
    loss: f64,
    report: StepReport,
    data: Duration,
}

impl<B: Backend> InFlight<B> {
    /// Waits until the device has done the step.
    fn done(self) -> Result<Done, TrainError> {
        let report = self.report.wait().map_err(ModelError::from)?;
        Ok(Done {
            step: self.step,
            begun: self.begun,
            loss: self.loss + (self.late)()?,
            report,
            data: self.data,
        })
    }
}

/// Since when steps are measured.
pub(super) struct Rate {
    pub(super) start: Instant,
    /// The first step that is measured.
    pub(super) begun_at: usize,
    /// When the last one was read.
    read: Instant,
}

impl Rate {
    /// From step `begun_at` on, which begins now.
    pub(super) fn new(begun_at: usize) -> Self {
        let start = Instant::now();
        Self {
            start,
            begun_at,
            read: start,
        }
    }
}

impl<M, D, B, N> TrainLoop<'_, M, D, B, N>
where
    M: Model,
    D: Data + ?Sized,
    B: Multiplies,
    N: Network<B, Batch = D::Batch>,
{
    /// Gives the device one step, which is read later.
    pub(super) fn start(&mut self, step: usize) -> Result<InFlight<B>, TrainError> {
        let Training { config, data, .. } = self.rank.training;
        let Trained {
            sharded, network, ..
        } = &mut self.trained;
        let mine = self.rank.share();
        let begun = Instant::now();
        let targets = data.targets(config.seed, step, config.batch)?.max(1);
        let mut waited = begun.elapsed();
        let mut loss = 0.0;
        for micro in 0..config.accumulate {
            let part = share(mine.len(), config.accumulate, micro);
            let part = mine.start + part.start..mine.start + part.end;
            let random_step = N::random_step(step, micro, config.accumulate);
            sharded.reduce(config.reduction(micro))?;
            sharded.begin(random_step, self.rank.first_token(&part), true)?;
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
        let report = network.start_step(sharded, &options)?;
        self.trained.steps += 1;
        Ok(InFlight {
            step,
            begun,
            loss,
            late: self.trained.network.start_loss()?,
            report,
            data: waited,
        })
    }

    /// Waits for the step that was not read yet, if there is one, records it and tells of it. Collective.
    pub(super) fn read(&mut self) -> Result<(), TrainError> {
        match self.unread.take() {
            Some(started) => self.record(started.done()?),
            None => Ok(()),
        }
    }

    /// Why a run ends that cannot give the device its next step: what went wrong in the one before comes first, unless the world had failed
    /// already.
    pub(super) fn first_error(&mut self, error: TrainError) -> TrainError {
        let comm = &self.rank.comm;
        let (has_failed, ranks) = (comm.control().failure().is_some(), comm.world_size());
        match self.unread.take().map(InFlight::done) {
            Some(Err(earlier)) if !has_failed => earlier,
            // Of several ranks others may be elsewhere, and would not add their losses.
            Some(Ok(done)) if ranks == 1 => self.record(done).err().unwrap_or(error),
            _ => error,
        }
    }

    /// Records a step that is done, and tells of it. Collective.
    fn record(&mut self, done: Done) -> Result<(), TrainError> {
        let Training { config, data, .. } = self.rank.training;
        let loss = self.rank.sum(done.loss)?;
        // Recorded with the precision it was computed in.
        self.outcome.train_loss.push(loss as f32);
        // A step that was on its way before the last one was read took the time since then.
        let (begun, now) = (done.begun.max(self.rate.read), Instant::now());
        self.rate.read = now;
        if self.rank.comm.rank() == 0 {
            let metrics = self.metrics(&done, loss, now - begun)?;
            let steps = done.step + 1 - self.rate.begun_at;
            let all = (steps * config.batch * data.tokens()) as f64;
            let tokens_per_second = all / self.rate.start.elapsed().as_secs_f64();
            self.rank.tell(Event::Step {
                metrics: &metrics,
                tokens_per_second,
                flops_per_second: tokens_per_second * config.model.flops_per_token(),
            });
        }
        Ok(())
    }

    /// What is known of a step that took `took`, whose loss over all ranks is `loss`.
    fn metrics(&self, done: &Done, loss: f64, took: Duration) -> Result<Metrics, TrainError> {
        let Training {
            config,
            data,
            peak_flops,
            ..
        } = self.rank.training;
        let (steps, batch) = ((done.step + 1) as u64, config.batch as u64);
        let seconds = took.as_secs_f64();
        let tokens_per_second = (batch * data.tokens() as u64) as f64 / seconds;
        let flops_per_second = tokens_per_second * config.model.flops_per_token();
        let memory = self.trained.network.memory(self.rank.backend)?;
        let lr = config.lr * config.schedule().factor(steps);
        Ok(Metrics {
            step: done.step + 1,
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
}
