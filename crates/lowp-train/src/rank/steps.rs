//! The steps of one rank: each is given to the device, and read when it is done.

use std::ops::Range;
use std::time::{Duration, Instant};

use lowp_format::spelling::Variant;
use lowp_fsdp::{ModelError, ShardedModel};
use lowp_kernels::Backend;
use lowp_optim::{PendingStep, StepOptions, StepReport};

use super::{Comm, Rank, sum};
use crate::data::{Data, share};
use crate::error::TrainError;
use crate::metrics::{Metrics, host_bytes};
use crate::network::{LateLoss, Model, Network, NetworkResult, RankPlace};
use crate::outcome::{Outcome, Trained};
use crate::training::{Event, Training};

/// A step that the device may still work on.
pub(super) struct InFlight<B: Backend> {
    step: usize,
    begun: Instant,
    /// What the host knows of this rank's share of the loss.
    loss: f64,
    /// The rest of it.
    late: LateLoss,
    report: PendingStep<B>,
    /// How long it waited for data.
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
    /// Waits for it.
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
    /// The first of these steps.
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

impl<M, D, B, F, N> Rank<'_, M, D, B, F>
where
    M: Model,
    D: Data + ?Sized,
    B: Backend,
    F: Fn(&mut ShardedModel<B, Variant>, RankPlace) -> NetworkResult<N>,
    N: Network<B, Batch = D::Batch>,
{
    /// One step, which is read later.
    pub(super) fn start(
        &self,
        step: usize,
        trained: &mut Trained<B, N>,
    ) -> Result<InFlight<B>, TrainError> {
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
        let report = network.start_step(sharded, &options)?;
        trained.steps += 1;
        Ok(InFlight {
            step,
            begun,
            loss,
            late: trained.network.start_loss()?,
            report,
            data: waited,
        })
    }

    /// Waits for the step that was not read yet, if there is one, records it and tells of it. Collective.
    pub(super) fn read(
        &self,
        unread: &mut Option<InFlight<B>>,
        comm: &Comm<B>,
        into: (&Trained<B, N>, &mut Outcome, &mut Rate),
    ) -> Result<(), TrainError> {
        match unread.take() {
            Some(started) => self.record(started.done()?, comm, into),
            None => Ok(()),
        }
    }

    /// Why a run ends that cannot give the device its next step: what went wrong in the one before comes first, unless the world had failed
    /// already.
    pub(super) fn first_error(
        &self,
        unread: Option<InFlight<B>>,
        comm: &Comm<B>,
        into: (&Trained<B, N>, &mut Outcome, &mut Rate),
        error: TrainError,
    ) -> TrainError {
        let has_failed = comm.control().failure().is_some();
        match unread.map(InFlight::done) {
            Some(Err(earlier)) if !has_failed => earlier,
            // Of several ranks others may be elsewhere, and would not add their losses.
            Some(Ok(done)) if comm.world_size() == 1 => {
                self.record(done, comm, into).err().unwrap_or(error)
            }
            _ => error,
        }
    }

    /// Records a step that is done, and tells of it. Collective.
    fn record(
        &self,
        done: Done,
        comm: &Comm<B>,
        (trained, outcome, rate): (&Trained<B, N>, &mut Outcome, &mut Rate),
    ) -> Result<(), TrainError> {
        let (step, report, config) = (done.step, done.report, self.training.config);
        let loss = sum(comm, done.loss)?;
        // Recorded with the precision it was computed in.
        outcome.train_loss.push(loss as f32);
        // A step that was on its way before the last one was read took the time since then.
        let (begun, now) = (done.begun.max(rate.read), Instant::now());
        rate.read = now;
        if self.rank == 0 {
            let took = (now - begun, done.data);
            let metrics = self.metrics((step, loss, &report), took, trained)?;
            let all =
                ((step + 1 - rate.begun_at) * config.batch * self.training.data.tokens()) as f64;
            let tokens_per_second = all / rate.start.elapsed().as_secs_f64();
            (self.training.watch)(Event::Step {
                metrics: &metrics,
                tokens_per_second,
                flops_per_second: tokens_per_second * config.model.flops_per_token(),
            });
        }
        Ok(())
    }

    /// What is known of step `step`, whose loss over all ranks is `loss`.
    fn metrics(
        &self,
        (step, loss, report): (usize, f64, &StepReport),
        (took, waited): (Duration, Duration),
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
            grad_norm: report.grad.norm,
            skipped: !report.applied,
            tokens: steps * batch * data.tokens() as u64,
            epoch: data
                .sequences()
                .map(|all| (steps * batch) as f64 / all as f64),
            seconds,
            tokens_per_second,
            flops_per_second,
            mfu: peak_flops.map(|peak| flops_per_second / (peak * config.mesh.world() as f64)),
            data_wait: waited.as_secs_f64() / seconds,
            device_bytes: memory.map(|memory| memory.peak),
            host_bytes: host_bytes(),
        })
    }

    /// The number of the first token of `sequences` in the batch.
    pub(super) fn first_token(&self, sequences: &Range<usize>) -> u64 {
        (sequences.start * self.training.data.tokens()) as u64
    }
}
