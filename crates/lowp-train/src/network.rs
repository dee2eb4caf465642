//! [`Network`]: what runs a model's passes: candle on the CPU ([`Candle`]), kernels on a GPU ([`super::gpu::Gpu`]).

use super::config::Config;
use super::model::{Batch, Gpt};
use anyhow::Result;
use lowp_candle::{CandleVars, layers};
use lowp_format::spelling::Variant;
use lowp_fsdp::{ShardedModel, VarPlace};
use lowp_kernels::{Backend, Cpu};
use lowp_optim::{StepOptions, StepReport};

/// What a network is made for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) config: &'a Config,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "GPUs read it"))]
    pub(super) rank: usize,
    /// Threads that its products may use.
    pub(super) threads: usize,
}

/// What the device spent a step on.
#[derive(Clone, Debug)]
pub(super) struct Profile {
    /// By work.
    pub(super) table: String,
    /// Seconds in which it waited for gathered weights.
    pub(super) waited: f64,
    /// Seconds of gathers from begin to end, and those of them in which it computed, where they were timed.
    pub(super) gathered: Option<[f64; 2]>,
}

/// Bytes on a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceMemory {
    /// Of the network, beside parameters, as its layers count them.
    pub(super) network: u64,
    /// The most that was allocated at once.
    pub(super) peak: u64,
}

/// The passes of a model whose parameters are those of a [`ShardedModel`].
pub(super) trait Network<B: Backend>: Sized {
    /// Where it reads variables.
    const VARS: VarPlace;

    /// The network over `sharded`.
    fn new(backend: &B, sharded: &mut ShardedModel<B, Variant>, place: Place<'_>) -> Result<Self>;

    /// The number that tells apart the random numbers of micro-batch `micro` of a step.
    fn random_step(step: usize, micro: usize, accumulate: usize) -> u64;

    /// Trains on a micro-batch whose loss is the sum over its tokens divided by `divisor`, and finishes it.
    fn train(
        &mut self,
        sharded: &mut ShardedModel<B, Variant>,
        batch: &Batch,
        divisor: usize,
    ) -> Result<()>;

    /// Ends a step.
    fn finish_step(
        &mut self,
        sharded: &mut ShardedModel<B, Variant>,
        options: &StepOptions,
    ) -> Result<StepReport>;

    /// Adds the loss of a batch.
    fn evaluate(&mut self, batch: &Batch, divisor: usize) -> Result<()>;

    /// The sum of losses since the last call.
    fn take_loss(&mut self) -> Result<f64>;

    /// Has `backend` measure its memory from now on.
    fn measure_memory(backend: &B) -> Result<()>;

    /// What it has of the memory of `backend`; `None` where nothing measures that.
    fn memory(&self, backend: &B) -> Result<Option<DeviceMemory>>;

    /// How it runs what may run in several ways, the same on all ranks.
    fn ways(&self) -> String;

    /// Begins to measure a step.
    fn start_profile(&self) -> Result<()>;

    /// Ends it: what took how long; `None` where nothing measures that.
    fn take_profile(&self) -> Result<Option<Profile>>;
}

/// The model as candle runs it.
#[derive(Debug)]
pub(super) struct Candle {
    model: Gpt,
    vars: CandleVars,
    loss: f64,
}

impl Network<Cpu> for Candle {
    const VARS: VarPlace = VarPlace::Host;

    fn new(_: &Cpu, sharded: &mut ShardedModel<Cpu, Variant>, place: Place<'_>) -> Result<Self> {
        let Place {
            config, threads, ..
        } = place;
        let vars = CandleVars::new(sharded)?;
        let (layers, own) = (layers(sharded, threads), vars.vars().to_vec());
        let model = Gpt::new(config.model, layers, own, (threads, config.recompute))?;
        Ok(Self {
            model,
            vars,
            loss: 0.0,
        })
    }

    fn measure_memory(_: &Cpu) -> Result<()> {
        Ok(())
    }

    fn memory(&self, _: &Cpu) -> Result<Option<DeviceMemory>> {
        Ok(None)
    }

    /// Micro-batches have tokens of their own.
    fn random_step(step: usize, _: usize, _: usize) -> u64 {
        step as u64
    }

    fn train(
        &mut self,
        sharded: &mut ShardedModel<Cpu, Variant>,
        batch: &Batch,
        divisor: usize,
    ) -> Result<()> {
        let own = self.model.loss(batch, divisor)?;
        self.vars.add_gradients(sharded, &own.backward()?)?;
        self.loss += f64::from(own.value()?);
        Ok(())
    }

    fn finish_step(
        &mut self,
        sharded: &mut ShardedModel<Cpu, Variant>,
        options: &StepOptions,
    ) -> Result<StepReport> {
        Ok(self.vars.finish_step(sharded, options)?)
    }

    fn evaluate(&mut self, batch: &Batch, divisor: usize) -> Result<()> {
        self.loss += f64::from(self.model.loss(batch, divisor)?.value()?);
        Ok(())
    }

    fn take_loss(&mut self) -> Result<f64> {
        Ok(std::mem::take(&mut self.loss))
    }

    fn ways(&self) -> String {
        String::new()
    }

    fn start_profile(&self) -> Result<()> {
        Ok(())
    }

    fn take_profile(&self) -> Result<Option<Profile>> {
        Ok(None)
    }
}
