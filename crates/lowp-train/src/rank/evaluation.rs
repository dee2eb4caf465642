//! The loss on the validation split, during a run and at its end.

use std::time::{Duration, Instant};

use lowp_format::spelling::Variant;
use lowp_fsdp::ShardedModel;
use lowp_kernels::Backend;

use super::{Comm, Rank, sum};
use crate::data::{Data, share};
use crate::error::TrainError;
use crate::network::{Model, Network, NetworkResult, RankPlace};
use crate::outcome::{Evaluated, Trained};

impl<M, D, B, F, N> Rank<'_, M, D, B, F>
where
    M: Model,
    D: Data + ?Sized,
    B: Backend,
    F: Fn(&mut ShardedModel<B, Variant>, RankPlace) -> NetworkResult<N>,
    N: Network<B, Batch = D::Batch>,
{
    /// The loss after `done` steps, and how long it took. Weights are gathered again after it. Collective.
    pub(super) fn evaluate(
        &self,
        done: usize,
        trained: &mut Trained<B, N>,
        comm: &Comm<B>,
    ) -> Result<(f64, Duration), TrainError> {
        let config = self.training.config;
        let begun = Instant::now();
        let passes = config.passes();
        let before = Evaluated::until(&trained.sharded, passes)?;
        let mine = share(config.batch, config.mesh.world(), self.rank);
        let first = self.first_token(&mine);
        trained.sharded.begin(done as u64, first, false)?;
        let loss = self.validate(trained, comm)?;
        trained.sharded.release()?;
        let after = Evaluated::until(&trained.sharded, passes)?;
        trained.evaluated.sent += after.sent - before.sent;
        trained.evaluated.gathering += after.gathering - before.gathering;
        Ok((loss, begun.elapsed()))
    }

    /// The loss on the validation split.
    fn validate(&self, trained: &mut Trained<B, N>, comm: &Comm<B>) -> Result<f64, TrainError> {
        let (config, data) = (self.training.config, self.training.data);
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
