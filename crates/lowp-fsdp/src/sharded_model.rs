//! [`ShardedModel`]: one rank's parameters, optimizer and communication. Linear layers live in a
//! recipe, sharded as [`Sharding`] says; everything else lives in f32, sharded by rows.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use lowp_comm::{GatherItem, MeshComm, or_abort, ordered};
use lowp_format::{Recipe, ReshardAfterForward};
use lowp_kernels::{Backend, Source};
use lowp_optim::{Group, Optimizer, ParamId, PendingStep, StateDtypes, StepOptions, StepReport};
use lowp_shard::{FlatGather, GradBucketOptions, Reduction, ScaleBook};

use crate::error::ModelError;
use crate::gradients::Gradients;
use crate::memory::LayerMemory;
use crate::operand::{PassState, RecipeOperands};
use crate::plain_vars::{PlainVars, VarPlace, VarWeight};
use crate::saving::Saving;
use crate::sharded_weight::ShardedWeight;

mod audit;

pub use audit::ModelDivergence;

/// What a rank has of the linear layers between steps. Both train the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Sharding {
    /// Rows of everything; weights are gathered for each use (FSDP).
    #[default]
    Fsdp,
    /// The full low-precision weights, gathered once in every step, and flat slices of masters, moments and gradients
    /// (ZeRO-1).
    Zero1,
}

impl Sharding {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Fsdp, Self::Zero1];

    /// `fsdp` or `zero1`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fsdp => "fsdp",
            Self::Zero1 => "zero1",
        }
    }
}

/// How a [`ShardedModel`] is trained.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ModelOptions {
    /// What a rank has of the linear layers.
    pub sharding: Sharding,
    /// What becomes of gathered weights between forward and backward ([`Sharding::Fsdp`]).
    pub reshard_after_forward: ReshardAfterForward,
    /// How gradients gather and travel. Those of the layers are on the host: f32.
    pub grads: GradBucketOptions,
    /// Seed of initial values and stochastic rounding.
    pub seed: u64,
    /// The rule and its hyperparameters; weight decay applies to matrices only.
    pub group: Group,
    /// The rule and hyperparameters of variables; `None`: those of layers. A rule of matrices updates no variables, so beside it they have a group of another rule.
    pub var_group: Option<Group>,
    /// The dtypes of masters, and of the states that the rule has.
    pub state: StateDtypes,
    /// Whether masters and states are page-locked memory of the host, not of the backend's device
    /// ([`OptimizerBuilder::offload`](lowp_optim::OptimizerBuilder::offload)).
    pub offload: bool,
    /// Where the full values of variables are.
    pub vars: VarPlace,
}

/// How often the layers run in one step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Passes {
    /// Micro-batches, each with a forward and a backward pass.
    pub micro_batches: usize,
    /// Whether backward runs the layers forward again.
    pub recompute: bool,
}

impl Default for Passes {
    /// One forward and one backward pass.
    fn default() -> Self {
        Self {
            micro_batches: 1,
            recompute: false,
        }
    }
}

/// Bytes of the linear weights of one replica.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WeightBytes {
    /// This rank's gathered bytes, counted by the communicator since the model was made; the first gather of full
    /// weights is a part of making it.
    pub sent: u64,
    /// This rank's gathered bytes in one step, by the gather plans.
    pub sent_per_step: u64,
    /// Bytes of this rank's shards, or of the full weights.
    pub resident: u64,
    /// Bytes of the optimizer's masters of this rank's elements. Moments and gradients are not
    /// weights and not counted.
    pub masters: u64,
    /// The most bytes that held weights and full gradients at once so far: the shards, the masters, and the memory in
    /// which weights are gathered and decoded and gradients travel.
    pub peak: u64,
}

/// One rank of a model.
///
/// # Steps
///
/// A step is one micro-batch or several, then [`ShardedModel::finish_step`]. A micro-batch is
/// [`ShardedModel::begin`], a forward and a backward pass, and [`ShardedModel::finish_micro_batch`],
/// which finishes it. It counts whole or not at all: linear layers reduce their gradients during
/// the backward pass, so if it fails before it is finished, the gradients of the step are neither
/// with nor without it. Then `begin` and `finish_step` are
/// [`ModelError::UnfinishedMicroBatch`], until [`ShardedModel::discard_gradients`] on every rank
/// forgets all micro-batches of the step, so that they can run again.
#[derive(Debug)]
pub struct ShardedModel<B: Backend, R: Recipe> {
    pub(crate) backend: B,
    pub(crate) mesh: MeshComm<B>,
    pub(crate) options: ModelOptions,
    pub(crate) pass: Arc<PassState>,
    pub(crate) memory: Arc<LayerMemory<B>>,
    pub(crate) optimizer: Optimizer<B>,
    pub(crate) weights: Vec<(ParamId, Arc<ShardedWeight<B, R>>)>,
    /// Names of the linear layers.
    pub(crate) names: Vec<String>,
    pub(crate) operands: Vec<Arc<RecipeOperands<B>>>,
    pub(crate) gradients: Arc<Gradients<B>>,
    /// The optimizer's parameters, in the order of their gradients.
    pub(crate) grad_ids: Vec<ParamId>,
    /// Micro-batches that this step finished.
    pub(crate) micro_batches: usize,
    pub(crate) vars: PlainVars<B>,
    /// The optimizer's parameters of the variables.
    pub(crate) var_ids: Vec<ParamId>,
    /// Bytes of full weights that were sent before the first step.
    pub(crate) sent_before: u64,
    /// Linear weights that a checkpoint had in other formats.
    pub(crate) recast: usize,
    pub(crate) rounded: usize,
    /// Once something was saved.
    pub(crate) saving: Option<Saving<B>>,
}

impl<B: Backend, R: Recipe> ShardedModel<B, R> {
    /// This rank's weights, in the order of their layers.
    pub fn weights(&self) -> impl ExactSizeIterator<Item = &Arc<ShardedWeight<B, R>>> {
        self.weights.iter().map(|(_, weight)| weight)
    }

    /// Names of the parameters that stay in f32, in the order of their specs, and their shapes.
    pub fn var_shapes(&self) -> impl ExactSizeIterator<Item = (&str, &[usize])> {
        self.vars.shapes()
    }

    /// Gathers the parameters that stay in f32 and are used throughout a pass, and gives `set` the full values of each, by the number of
    /// its spec ([`VarPlace::Host`]): after the model was made, and after each step. Collective.
    ///
    /// # Errors
    /// What `set` reports, variables on the backend, or a rank that failed.
    pub fn read_vars<E: From<ModelError> + Display>(
        &mut self,
        set: impl FnMut(usize, Vec<f32>) -> Result<(), E>,
    ) -> Result<(), E> {
        or_abort(&*self.mesh.world, self.vars.read(set))
    }

    /// Adds the full gradient of variable `index`, which a backward pass left on the host, to what arrived before in this step.
    /// Collective.
    ///
    /// # Errors
    /// No such variable, values of another length, variables on the backend, or a rank that failed.
    pub fn add_var_gradient(&self, index: usize, values: &[f32]) -> Result<(), ModelError> {
        let added = self.vars.add_gradient(&self.gradients, index, values);
        or_abort(&*self.mesh.world, added)
    }

    /// The ranks that share the model.
    pub fn mesh(&self) -> &MeshComm<B> {
        &self.mesh
    }

    /// The full values of variable `index`, row-major, where the backend has them between uses ([`VarPlace::Backend`],
    /// [`VarUse::Throughout`](crate::VarUse::Throughout)). Their content changes with each step, their memory does not.
    pub fn var_buffer(&self, index: usize) -> Option<&B::Buffer<f32>> {
        self.vars.buffer(index)
    }

    /// Variable `index`, where it is gathered for each use ([`VarUse`](crate::VarUse)): in the forward phase, whatever reads it.
    pub fn transient_var(&self, index: usize) -> Option<&Arc<VarWeight<B>>> {
        self.vars.transient(index)
    }

    /// Memory for the full gradient of variable `index`, which work of the backend writes whole before
    /// [`ShardedModel::push_var_gradient`].
    ///
    /// # Errors
    /// No such variable, no room, or a rank that failed.
    pub fn var_gradient(&self, index: usize) -> Result<Source<B>, ModelError> {
        let memory = self.vars.gradient(&self.gradients, index);
        or_abort(&*self.mesh.world, memory)
    }

    /// Says that the backend was given the work that writes the gradient of variable `index`. Collective.
    ///
    /// # Errors
    /// No such variable, no memory was taken for it, or a rank that failed.
    pub fn push_var_gradient(&self, index: usize) -> Result<(), ModelError> {
        let pushed = self.vars.push_gradient(&self.gradients, index);
        or_abort(&*self.mesh.world, pushed)
    }

    /// How the operands of each layer's products are quantized.
    pub fn operands(&self) -> &[Arc<RecipeOperands<B>>] {
        &self.operands
    }

    /// Begins a pass: its step and the index of this rank's first token in the global batch;
    /// `training` observes amaxes for delayed scales.
    ///
    /// # Errors
    /// A training pass after a micro-batch that was not finished.
    pub fn begin(&self, step: u64, first_token: u64, training: bool) -> Result<(), ModelError> {
        if training {
            self.check_finished()?;
        }
        self.pass.begin(step, first_token, training);
        Ok(())
    }

    /// Says what becomes of the gradients of the micro-batch that begins, and of those after it until the step ends
    /// ([`GradBuckets::begin`]). Collective.
    ///
    /// # Errors
    /// A rank that failed.
    ///
    /// [`GradBuckets::begin`]: lowp_shard::GradBuckets::begin
    pub fn reduce(&mut self, reduction: Reduction) -> Result<(), ModelError> {
        let begun = self.gradients.lock().begin(reduction);
        Ok(or_abort(&*self.mesh.world, begun)?)
    }

    /// Finishes a micro-batch whose gradients are all on their way: those of weights ([`ShardedWeight::add_gradient`] or
    /// [`ShardedWeight::push_gradient`]) and of variables ([`ShardedModel::add_var_gradient`] or
    /// [`ShardedModel::push_var_gradient`]). Collective.
    ///
    /// # Errors
    /// A rank that failed. The micro-batch stays unfinished.
    pub fn finish_micro_batch(&mut self) -> Result<(), ModelError> {
        self.gradients.lock().flush()?;
        for (_, weight) in &self.weights {
            weight.finish_micro_batch()?;
        }
        self.vars.finish_micro_batch()?;
        self.micro_batches += 1;
        Ok(())
    }

    /// Micro-batches that this step finished so far.
    pub fn micro_batches(&self) -> usize {
        self.micro_batches
    }

    /// Forgets the gradients of all micro-batches of this step, so that they can run again after
    /// one of them failed. Collective.
    ///
    /// # Errors
    /// A rank that failed, called something else, or finished other micro-batches.
    pub fn discard_gradients(&mut self) -> Result<(), ModelError> {
        // Also what an unfinished one sent: buckets that only some ranks sent would meet later ones of the others.
        let finished = format!(
            "{} finished micro-batches, gradients by parameter: {:?}",
            self.micro_batches,
            self.gradients.lock().contributions()
        );
        self.mesh
            .world
            .control()
            .all_equal("discarded gradients", &finished)?;
        let done = self.forget();
        or_abort(&*self.mesh.world, done)
    }

    fn forget(&mut self) -> Result<(), ModelError> {
        for (_, weight) in &self.weights {
            weight.finish_micro_batch()?;
        }
        self.vars.finish_micro_batch()?;
        // What one rank alone holds or began to gather, it would not gather with the others.
        self.release()?;
        self.gradients.lock().discard()?;
        self.micro_batches = 0;
        self.optimizer.clear_grads();
        Ok(self.optimizer.scales().forget_observations()?)
    }

    /// Rejects what would lose the gradients of micro-batches that were added since the last step.
    pub(crate) fn check_between_steps(&self) -> Result<(), ModelError> {
        self.check_finished()?;
        match self.micro_batches {
            0 => Ok(()),
            added => Err(ModelError::AddedMicroBatches { added }),
        }
    }

    pub(crate) fn check_finished(&self) -> Result<(), ModelError> {
        let mut open = self.vars.open()?;
        for (_, weight) in &self.weights {
            open += usize::from(weight.is_open()?);
        }
        let total = self.weights.len() + self.var_ids.len();
        match open {
            0 => Ok(()),
            _ => Err(ModelError::UnfinishedMicroBatch { open, total }),
        }
    }

    /// Ends a step: updates and casts all parameters, and gives the variables on the backend their new values. Waits for it.
    /// Collective.
    ///
    /// # Errors
    /// A parameter without a gradient, a micro-batch that was not finished, or a rank that failed.
    pub fn finish_step(&mut self, options: &StepOptions) -> Result<StepReport, ModelError> {
        let report = self.start_step(options)?.wait();
        Ok(or_abort(&*self.mesh.world, report)?)
    }

    /// Ends a step as [`ShardedModel::finish_step`] does, and waits for nothing where a device can go on by itself: the report may be
    /// read a step later. Collective.
    ///
    /// # Errors
    /// As there; what the report says is in the wait for it.
    pub fn start_step(&mut self, options: &StepOptions) -> Result<PendingStep<B>, ModelError> {
        // Before the first collective call: every rank can still discard.
        self.check_finished()?;
        let done = self.try_start_step(options);
        or_abort(&*self.mesh.world, done)
    }

    fn try_start_step(&mut self, options: &StepOptions) -> Result<PendingStep<B>, ModelError> {
        let reduced = self.gradients.lock().finish()?;
        for (&id, arrived) in self.grad_ids.iter().zip(reduced.contributions) {
            if arrived > 0 {
                self.optimizer.mark_ready(id);
            }
        }
        let gathered = self.memory.pool().gathered(&*self.mesh.shard);
        self.optimizer.compare(reduced.done);
        self.optimizer.compare(gathered);
        self.micro_batches = 0;
        self.release()?;
        if let Some(saving) = &mut self.saving {
            saving.follow(&self.backend)?;
        }
        let report = self.optimizer.step(options)?;
        self.vars.refresh()?;
        Ok(report)
    }

    /// Frees gathered weights after an evaluation.
    ///
    /// # Errors
    /// A thread failed while it used a weight.
    pub fn release(&self) -> Result<(), ModelError> {
        for (_, weight) in &self.weights {
            weight.release()?;
        }
        self.vars.release()
    }

    /// What this rank sends, in steps of `passes`, and stores of the linear weights.
    ///
    /// # Errors
    /// A thread failed while it used a weight.
    pub fn weight_bytes(&self, passes: Passes) -> Result<WeightBytes, ModelError> {
        let mut bytes = WeightBytes::default();
        for (_, weight) in &self.weights {
            let account = weight.account()?;
            let own = &weight.element_ranges()[self.mesh.shard.rank()];
            let master = self.options.state.of_recipe(&weight.recipe()).master;
            bytes.masters += (master.bytes() * own.len()) as u64;
            bytes.sent += account.counted_sent_bytes;
            let sent = match passes.recompute {
                true => account.recompute_sent_bytes(),
                false => account.sent_bytes(),
            };
            bytes.sent_per_step += (passes.micro_batches * sent) as u64;
            bytes.resident += account.shard_bytes() as u64;
        }
        let transient = self.memory.weight_bytes() + self.gradients.lock().resident_bytes();
        bytes.peak = bytes.resident + bytes.masters + transient as u64;
        if let Some(gather) = self.optimizer.flat_gather() {
            bytes.sent += self.optimizer.flat_sent_bytes() - self.sent_before;
            bytes.sent_per_step += gather.sent_bytes() as u64;
            bytes.peak += gather.staged_bytes() as u64;
        }
        Ok(bytes)
    }

    /// How long the host waited for gathers of linear weights so far.
    ///
    /// # Errors
    /// A thread failed while it used a weight.
    pub fn gathering(&self) -> Result<Duration, ModelError> {
        let mut sum = self
            .optimizer
            .flat_gather()
            .map_or(Duration::ZERO, FlatGather::host_time);
        for (_, weight) in &self.weights {
            sum += weight.gathering()?;
        }
        Ok(sum)
    }

    /// The most bytes that this rank held for parameters so far: shards of linear weights and the memory in which they are gathered
    /// and decoded and gradients travel, masters, moments and reduced gradients of all parameters, the memory in which a rule of matrices makes
    /// them orthogonal, and the full variables, those that are gathered for each use as many as there were at once. Activations and what casts
    /// of operands work in are not counted.
    ///
    /// # Errors
    /// A thread failed while it used a weight.
    pub fn parameter_bytes(&self) -> Result<u64, ModelError> {
        let weights = self.weight_bytes(Passes::default())?;
        let vars = self.vars.bytes();
        let state = self.optimizer.state_bytes() + self.optimizer.matrix_bytes();
        Ok(weights.peak - weights.masters + (state + vars) as u64)
    }

    /// Those bytes of [`ShardedModel::parameter_bytes`] that are page-locked memory of the host ([`ModelOptions::offload`]).
    pub fn host_bytes(&self) -> u64 {
        self.optimizer.host_bytes() as u64
    }

    /// Bytes of the f32 shards of variables, and of what those that stay are gathered in after a step: beside
    /// [`ShardedModel::parameter_bytes`].
    ///
    /// # Errors
    /// A thread failed while it used a variable.
    pub fn var_gather_bytes(&self) -> Result<u64, ModelError> {
        Ok(self.vars.gather_bytes()? as u64)
    }

    /// The values of a weight, row-major, of which this rank has `own`. Collective over the shard group.
    pub(crate) fn gather_values(
        &self,
        weight: &ShardedWeight<B, R>,
        own: &[f32],
    ) -> Result<Vec<f32>, ModelError> {
        let tall = self.gather_f32(weight.element_ranges(), own)?;
        Ok(match weight.tiles().are_in_order() {
            true => tall,
            false => weight.tiles().scatter(&tall),
        })
    }

    /// The values of all ranks, of which this one has those of its range of `ranges`. Collective over the shard group.
    pub(crate) fn gather_f32(
        &self,
        ranges: &[Range<usize>],
        own: &[f32],
    ) -> Result<Vec<f32>, ModelError> {
        let in_bytes = |range: &Range<usize>| 4 * range.start..4 * range.end;
        let ranges: Vec<Range<usize>> = ranges.iter().map(in_bytes).collect();
        let source = self.backend.upload(&to_bytes(own))?;
        let dest = self
            .backend
            .alloc::<u8>(ranges.last().map_or(0, |r| r.end))?;
        let item = GatherItem {
            source: &source,
            dest: &dest,
            ranges: &ranges,
        };
        let shard = &*self.mesh.shard;
        ordered(&self.backend, shard, || shard.all_gather(&[item]))?;
        Ok(from_bytes(&self.backend.download(&dest)?))
    }

    /// The optimizer of all parameters, with the masters and states of this rank.
    pub fn optimizer(&self) -> &Optimizer<B> {
        &self.optimizer
    }

    /// The scales of the weights and of the operands.
    pub fn scale_book(&self) -> &ScaleBook<B> {
        self.optimizer.scales()
    }

    /// The weight of layer `index`.
    pub fn weight(&self, index: usize) -> Option<&Arc<ShardedWeight<B, R>>> {
        self.weights.get(index).map(|(_, weight)| weight)
    }
}

/// Little-endian. Like [`from_bytes`] without type parameters, so that it is compiled here, optimized.
pub(crate) fn to_bytes(values: &[f32]) -> Vec<u8> {
    let mut bytes = vec![0; 4 * values.len()];
    for (word, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(values) {
        *word = value.to_le_bytes();
    }
    bytes
}

fn from_bytes(bytes: &[u8]) -> Vec<f32> {
    let (words, _) = bytes.as_chunks::<4>();
    words.iter().map(|&word| f32::from_le_bytes(word)).collect()
}
