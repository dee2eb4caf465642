//! [`Transformer`]: the model over this rank's parameters.

use lowp_kernels::Cpu;
use lowp_optim::{PendingStep, StepOptions};
use lowp_train::Batch;
use lowp_train::Network;
use lowp_train::network::{NetworkResult, Sharded};
use lowp_transformer::GptConfig;

use super::Gpt;
use crate::{CandleError, CandleVars, layers, transients};

/// A transformer on a CPU, over the parameters of a [`Sharded`] model.
#[derive(Debug)]
pub struct Transformer {
    model: Gpt,
    vars: CandleVars,
}

impl Transformer {
    /// The transformer of `config` over `sharded`, which has its parameters. Products use at most `threads` threads. To `recompute`, only
    /// the inputs of blocks are saved, and backward runs the blocks again. Collective.
    ///
    /// # Errors
    /// Parameters of another transformer, or a rank that failed.
    pub fn new(
        config: GptConfig,
        sharded: &mut Sharded<Cpu>,
        threads: usize,
        recompute: bool,
    ) -> Result<Self, CandleError> {
        let vars = CandleVars::new(sharded)?;
        let model = Gpt::new(
            config,
            layers(sharded, threads),
            vars.vars().to_vec(),
            transients(sharded),
            threads,
            recompute,
        )?;
        Ok(Self { model, vars })
    }

    /// The same with a z-loss of this coefficient in training ([`lowp_train::Config::z_loss`]).
    #[must_use]
    pub fn with_z_loss(mut self, coefficient: f32) -> Self {
        self.model.z_loss = coefficient;
        self
    }

    /// Logits of the token after each of `inputs`, which are whole sequences: row by row, as many as the vocabulary has. Collective.
    ///
    /// # Errors
    /// Tokens that are no whole sequences or not of the vocabulary, or a rank that failed.
    pub fn logits(&self, inputs: &[u32]) -> Result<Vec<f32>, CandleError> {
        let logits = self.model.logits(&inputs.into())?;
        Ok(logits.flatten_all()?.to_vec1()?)
    }
}

impl Network<Cpu> for Transformer {
    type Batch = Batch;

    fn z_loss(&self) -> f32 {
        self.model.z_loss
    }

    fn train(
        &mut self,
        sharded: &mut Sharded<Cpu>,
        batch: &Batch,
        divisor: usize,
    ) -> NetworkResult<f64> {
        let loss = self.model.loss(batch, divisor)?;
        self.vars.add_gradients(sharded, &loss.backward()?)?;
        Ok(loss.value()?.into())
    }

    fn evaluate(
        &mut self,
        _: &mut Sharded<Cpu>,
        batch: &Batch,
        divisor: usize,
    ) -> NetworkResult<f64> {
        Ok(self.model.evaluate(batch, divisor)?.into())
    }

    fn start_step(
        &mut self,
        sharded: &mut Sharded<Cpu>,
        options: &StepOptions,
    ) -> NetworkResult<PendingStep<Cpu>> {
        Ok(self.vars.start_step(sharded, options)?)
    }
}
