//! [`Transformer`]: the model over this rank's parameters.

use lowp_format::spelling::Variant;
use lowp_fsdp::ShardedModel;
use lowp_kernels::Cpu;
use lowp_optim::{StepOptions, StepReport};
use lowp_train::text::Batch;
use lowp_train::{Network, NetworkResult};
use lowp_transformer::GptConfig;

use super::Gpt;
use crate::{CandleError, CandleVars, layers};

/// A transformer on a CPU, over the parameters of a [`ShardedModel`].
#[derive(Debug)]
pub struct Transformer {
    model: Gpt,
    vars: CandleVars,
    loss: f64,
}

impl Transformer {
    /// The transformer of `config` over `sharded`, which has its parameters. Products use at most `threads` threads. To `recompute`, only
    /// the inputs of blocks are saved, and backward runs the blocks again. Collective.
    ///
    /// # Errors
    /// Parameters of another transformer, or a rank that failed.
    pub fn new(
        config: GptConfig,
        sharded: &mut ShardedModel<Cpu, Variant>,
        threads: usize,
        recompute: bool,
    ) -> Result<Self, CandleError> {
        let vars = CandleVars::new(sharded)?;
        let (layers, own) = (layers(sharded, threads), vars.vars().to_vec());
        let model = Gpt::new(config, layers, own, (threads, recompute))?;
        Ok(Self {
            model,
            vars,
            loss: 0.0,
        })
    }
}

impl Network<Cpu> for Transformer {
    type Batch = Batch;

    fn train(
        &mut self,
        sharded: &mut ShardedModel<Cpu, Variant>,
        batch: &Batch,
        divisor: usize,
    ) -> NetworkResult {
        let own = self.model.loss(batch, divisor)?;
        self.vars.add_gradients(sharded, &own.backward()?)?;
        self.loss += f64::from(own.value()?);
        Ok(())
    }

    fn evaluate(
        &mut self,
        _: &mut ShardedModel<Cpu, Variant>,
        batch: &Batch,
        divisor: usize,
    ) -> NetworkResult {
        self.loss += f64::from(self.model.loss(batch, divisor)?.value()?);
        Ok(())
    }

    fn take_loss(&mut self) -> NetworkResult<f64> {
        Ok(std::mem::take(&mut self.loss))
    }

    fn finish_step(
        &mut self,
        sharded: &mut ShardedModel<Cpu, Variant>,
        options: &StepOptions,
    ) -> NetworkResult<StepReport> {
        Ok(self.vars.finish_step(sharded, options)?)
    }
}
