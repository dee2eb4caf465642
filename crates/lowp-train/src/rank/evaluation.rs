//! The loss on the validation split, during a run and at its end.

use std::time::{Duration, Instant};

use lowp_fsdp::Multiplies;

use super::TrainLoop;
use crate::data::Data;
use crate::error::TrainError;
use crate::network::{Model, Network};
use crate::outcome::{Evaluated, Trained};
use crate::training::Training;

impl<M, D, B, N> TrainLoop<'_, M, D, B, N>
where
    M: Model,
    D: Data + ?Sized,
    B: Multiplies,
    N: Network<B, Batch = D::Batch>,
{
    /// The loss after `done` steps, and how long it took. Weights are gathered again after it. Collective.
    pub(super) fn evaluate(&mut self, done: usize) -> Result<(f64, Duration), TrainError> {
        let begun = Instant::now();
        let passes = self.rank.training.config.passes();
        let before = Evaluated::until(&self.trained.sharded, passes)?;
        let first = self.rank.first_token(&self.rank.share());
        self.trained.sharded.begin(done as u64, first, false)?;
        let loss = self.validate()?;
        self.trained.sharded.release()?;
        let after = Evaluated::until(&self.trained.sharded, passes)?;
        self.trained.evaluated.sent += after.sent - before.sent;
        self.trained.evaluated.gathering += after.gathering - before.gathering;
        Ok((loss, begun.elapsed()))
    }

    /// The loss on the validation split.
    fn validate(&mut self) -> Result<f64, TrainError> {
        let Training { config, data, .. } = self.rank.training;
        let Trained {
            sharded, network, ..
        } = &mut self.trained;
        let mine = self.rank.share();
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
        Ok(counted * self.rank.sum(loss)? / config.eval_batches as f64)
    }
}
