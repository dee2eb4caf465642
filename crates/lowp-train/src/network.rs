//! [`Model`]: the parameters of a network. [`Network`]: its passes on one rank.

use std::error::Error;

use lowp_format::spelling::Variant;
use lowp_fsdp::{LinearSpec, ShardedModel, VarPlace, VarSpec};
use lowp_kernels::Backend;
use lowp_optim::{PendingStep, StepOptions};
use serde::Serialize;
use serde_json::Value;

/// What a network returns: its own error, whatever that is.
pub type NetworkResult<T = ()> = Result<T, Box<dyn Error + Send + Sync>>;

/// The parameters of one rank, in the recipe of a run.
pub type Sharded<B> = ShardedModel<B, Variant>;

/// The sizes of a network, and the parameters that follow from them. Checkpoints keep what it serializes to, a struct: a run resumes
/// only with the same.
pub trait Model: Clone + Serialize + Sync {
    /// The linear layers in the order in which they run: sharded, and in the recipe of the run.
    fn linears(&self) -> Vec<LinearSpec>;

    /// The parameters that stay in f32.
    fn vars(&self) -> Vec<VarSpec> {
        Vec::new()
    }

    /// Floating-point operations of one token in forward and backward: six per weight of a linear layer, unless the network has others.
    fn flops_per_token(&self) -> f64 {
        let weights = self
            .linears()
            .iter()
            .map(|l| l.rows * l.cols)
            .sum::<usize>();
        6.0 * weights as f64
    }

    /// The `config.json` that the transformers package has for this network, for exports of checkpoints.
    fn transformers(&self) -> Option<Value> {
        None
    }

    /// The number of parameters, in linear layers and variables.
    fn parameters(&self) -> usize {
        let vars = self.vars();
        let vars = vars.iter().map(|var| var.shape.iter().product::<usize>());
        let linears = self.linears();
        linears.iter().map(|l| l.rows * l.cols).chain(vars).sum()
    }
}

/// The passes of one rank over the parameters of a [`ShardedModel`].
///
/// A step is one micro-batch or several ([`Network::train`]), then [`Network::start_step`], and [`Network::start_loss`]. All calls are
/// collective.
pub trait Network<B: Backend>: Sized {
    /// What the network trains on.
    type Batch;

    /// Where it reads the parameters that stay in f32. Where that is the backend, and ranks do not wait for each other on the host, the report and
    /// the loss of a step are read when the next one is on its way.
    const VARS: VarPlace = VarPlace::Host;

    /// Trains on a micro-batch: adds all gradients of its loss, which is the sum over its tokens divided by `divisor`, the tokens of the
    /// whole batch; ends with [`ShardedModel::finish_micro_batch`]. Returns the loss, or 0 where [`Network::take_loss`] does.
    ///
    /// # Errors
    /// The network's own, or those of the model.
    fn train(
        &mut self,
        model: &mut Sharded<B>,
        batch: &Self::Batch,
        divisor: usize,
    ) -> NetworkResult<f64>;

    /// The loss of a batch, without gradients, or 0 where [`Network::take_loss`] returns it.
    ///
    /// # Errors
    /// The network's own, or those of the model.
    fn evaluate(
        &mut self,
        model: &mut Sharded<B>,
        batch: &Self::Batch,
        divisor: usize,
    ) -> NetworkResult<f64>;

    /// The losses since the last call, added up, of a network that keeps them on its device until the end of a step.
    ///
    /// # Errors
    /// The network's own.
    fn take_loss(&mut self) -> NetworkResult<f64> {
        Ok(0.0)
    }

    /// The same as [`Network::take_loss`], read when it is called: a step later where steps are read later ([`Network::VARS`]).
    ///
    /// # Errors
    /// The network's own.
    fn start_loss(&mut self) -> NetworkResult<LateLoss> {
        let loss = self.take_loss()?;
        Ok(Box::new(move || Ok(loss)))
    }

    /// Ends a step.
    ///
    /// # Errors
    /// Those of [`ShardedModel::start_step`].
    fn start_step(
        &mut self,
        model: &mut Sharded<B>,
        options: &StepOptions,
    ) -> NetworkResult<PendingStep<B>> {
        Ok(model.start_step(options)?)
    }

    /// The stream of random numbers for micro-batch `micro` of a step: the step, where each micro-batch has token numbers of its own.
    fn random_step(step: usize, _micro: usize, _accumulate: usize) -> u64 {
        step as u64
    }

    /// The coefficient of the z-loss that it trains with; a run is an error if [`Config::z_loss`](crate::Config::z_loss) is another one.
    fn z_loss(&self) -> f32 {
        0.0
    }

    /// How it runs what may run in several ways; ranks must say the same.
    fn ways(&self) -> String {
        String::new()
    }

    /// Has `backend` measure its memory from now on.
    ///
    /// # Errors
    /// The device failed.
    fn measure_memory(_backend: &B) -> NetworkResult {
        Ok(())
    }

    /// What it has of the memory of `backend`; `None` where nothing measures that.
    ///
    /// # Errors
    /// The device failed.
    fn memory(&self, _backend: &B) -> NetworkResult<Option<DeviceMemory>> {
        Ok(None)
    }

    /// Begins to measure a step.
    ///
    /// # Errors
    /// The device failed.
    fn start_profile(&self) -> NetworkResult {
        Ok(())
    }

    /// Ends it: what took how long; `None` where nothing measures that.
    ///
    /// # Errors
    /// The device failed.
    fn take_profile(&self) -> NetworkResult<Option<Profile>> {
        Ok(None)
    }
}

/// A loss that a device may still compute.
pub type LateLoss = Box<dyn FnOnce() -> NetworkResult<f64>>;

/// The rank that a network is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPlace {
    /// Its number in the world, from 0.
    pub rank: usize,
    /// Threads that its products may use, so that all ranks together use the machine once.
    pub threads: usize,
}

/// Bytes on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    /// Of the network, without parameters, as its layers count them.
    pub network: u64,
    /// The most that was allocated at once.
    pub peak: u64,
}

/// What a device spent a step on.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// Time of each kind of work, the most first.
    pub spent: Vec<ProfileEntry>,
    /// Seconds in which it waited for gathered weights.
    pub waited: f64,
    /// Seconds of gathers from begin to end, and those of them in which it computed, where they were timed.
    pub gathered: Option<[f64; 2]>,
}

/// What a device spent on one kind of work.
#[derive(Clone, Debug, PartialEq)]
pub struct ProfileEntry {
    /// The kind of work.
    pub what: String,
    /// How often such work ran.
    pub count: usize,
    /// Milliseconds of all of it in the step.
    pub milliseconds: f64,
}
