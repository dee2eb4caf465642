//! [`ShardedModel`]: one rank's parameters, optimizer and communication. Linear layers live in a
//! recipe, sharded as [`Sharding`] says; everything else lives in f32, sharded by rows.

use std::ops::Range;
use std::sync::Arc;

use candle_core::Var;
use candle_core::backprop::GradStore;
use lowp_format::{
    Phase, PlainF32, QuantizedTensor, Recipe, ReshardAfterForward, Role, Shape, Usage,
};
use lowp_kernels::{Backend, Source};
use lowp_optim::StepReport;
use lowp_optim::{AdamW, AdamWBuilder, Group, OptimError, ParamId, ParamSpec, StepOptions};
use lowp_shard::{
    Divergence, FlatShard, GatherItem, GatherPool, GradBucketOptions, GradParam, MeshComm, Reshard,
    ScaleBook, ShardSpec, ShardedTensor, check_flat, or_abort, ordered,
};

use crate::error::ModelError;
use crate::formats::check_formats;
use crate::gradients::Gradients;
use crate::linear::{Linear, QuantLinear};
use crate::memory::LayerMemory;
use crate::operand::{OperandPlan, PassState, RecipeOperands};
use crate::plain_vars::{PlainVars, shape_of};
use crate::sharded_weight::ShardedWeight;
use crate::spec::{LinearSpec, VarSpec};

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

/// How a [`ShardedModel`] is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelOptions {
    /// What a rank has of the linear layers.
    pub sharding: Sharding,
    /// What becomes of gathered weights between forward and backward ([`Sharding::Fsdp`]).
    pub reshard_after_forward: ReshardAfterForward,
    /// How gradients gather and travel. Those of the layers are on the host: f32.
    pub grads: GradBucketOptions,
    /// Seed of initial values and stochastic rounding.
    pub seed: u64,
    /// Hyperparameters; weight decay applies to matrices only.
    pub group: Group,
    /// Threads of each product.
    pub threads: usize,
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
    /// Bytes of the optimizer's f32 masters of this rank's elements. Moments and gradients are not
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
/// [`ShardedModel::begin`], a forward and a backward pass, and [`ShardedModel::add_gradients`],
/// which finishes it. It counts whole or not at all: linear layers reduce their gradients during
/// the backward pass, so if it fails before it is finished, the gradients of the step are neither
/// with nor without it. Then `begin` and `finish_step` are
/// [`ModelError::UnfinishedMicroBatch`], until [`ShardedModel::discard_gradients`] on every rank
/// forgets all micro-batches of the step, so that they can run again.
#[derive(Debug)]
pub struct ShardedModel<B: Backend, R: Recipe> {
    backend: B,
    mesh: MeshComm<B>,
    options: ModelOptions,
    pass: Arc<PassState>,
    memory: Arc<LayerMemory<B>>,
    adamw: AdamW<B>,
    weights: Vec<(ParamId, Arc<ShardedWeight<B, R>>)>,
    operands: Vec<Arc<RecipeOperands<B>>>,
    /// Of all parameters.
    gradients: Arc<Gradients<B>>,
    /// The optimizer's parameters, in the order of their gradients.
    grad_ids: Vec<ParamId>,
    /// Micro-batches that this step finished.
    micro_batches: usize,
    vars: PlainVars<B>,
    /// Bytes of full weights that were sent before the first step.
    sent_before: u64,
}

impl<B: Backend, R: Recipe> ShardedModel<B, R> {
    /// Builds this rank's part: only its own elements are initialised and stored in f32, and they are those
    /// of an unsharded model. `recipe` says which recipe each weight lives in. Collective.
    ///
    /// # Errors
    /// A shape that the recipe cannot take or a product whose operands differ in format (with the layer's name), ranks
    /// that disagree, or no room.
    pub fn new(
        backend: &B,
        mesh: &MeshComm<B>,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
        vars: &[VarSpec],
        options: ModelOptions,
    ) -> Result<Self, ModelError> {
        let builder = Builder {
            backend,
            mesh,
            options,
        };
        or_abort(&*mesh.world, builder.build(recipe, linears, vars))
    }

    /// The linear layers over this rank's weights.
    pub fn layers(&self) -> Vec<Box<dyn Linear>> {
        let layer = |((_, weight), operands): (&(ParamId, Arc<_>), &Arc<RecipeOperands<B>>)| {
            let weight: Arc<ShardedWeight<B, R>> = Arc::clone(weight);
            let threads = self.options.threads;
            Box::new(QuantLinear::with_cast(weight, operands.clone(), threads)) as Box<dyn Linear>
        };
        self.weights.iter().zip(&self.operands).map(layer).collect()
    }

    /// The candle variables of the parameters that stay in f32.
    pub fn vars(&self) -> &[Var] {
        self.vars.vars()
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

    /// Finishes a micro-batch: reduces the gradients of the variables that its backward pass left
    /// in `store`, adding to what arrived before in this step; those of the linear layers went
    /// their way during the pass. Collective.
    ///
    /// # Errors
    /// A variable without a gradient, or a rank that failed. The micro-batch stays unfinished.
    pub fn add_gradients(&mut self, store: &GradStore) -> Result<(), ModelError> {
        let sent = self.vars.add_gradients(&self.gradients, store);
        or_abort(&*self.mesh.world, sent)?;
        self.gradients.flush()?;
        for (_, weight) in &self.weights {
            weight.finish_micro_batch()?;
        }
        self.micro_batches += 1;
        Ok(())
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
            self.gradients.arrived()
        );
        self.mesh
            .world
            .control()
            .agree("discarded gradients", &finished)?;
        let done = self.forget();
        or_abort(&*self.mesh.world, done)
    }

    fn forget(&mut self) -> Result<(), ModelError> {
        for (_, weight) in &self.weights {
            weight.finish_micro_batch()?;
        }
        self.gradients.discard()?;
        self.micro_batches = 0;
        self.adamw.clear_grads();
        Ok(self.adamw.scales().forget_observations()?)
    }

    fn check_finished(&self) -> Result<(), ModelError> {
        let mut layers = 0;
        for (_, weight) in &self.weights {
            layers += usize::from(weight.is_open()?);
        }
        let total = self.weights.len();
        match layers {
            0 => Ok(()),
            _ => Err(ModelError::UnfinishedMicroBatch { layers, total }),
        }
    }

    /// Ends a step: updates and casts all parameters, and gives the variables their new values.
    /// Collective.
    ///
    /// # Errors
    /// A parameter without a gradient, a micro-batch that was not finished, or a rank that failed.
    pub fn finish_step(&mut self, options: &StepOptions) -> Result<StepReport, ModelError> {
        // Before the first collective call: every rank can still discard.
        self.check_finished()?;
        let done = self.try_finish_step(options);
        or_abort(&*self.mesh.world, done)
    }

    fn try_finish_step(&mut self, options: &StepOptions) -> Result<StepReport, ModelError> {
        for (&id, arrived) in self.grad_ids.iter().zip(self.gradients.finish()?) {
            if arrived > 0 {
                self.adamw.mark_ready(id);
            }
        }
        self.micro_batches = 0;
        for (_, weight) in &self.weights {
            weight.release()?;
        }
        let report = self.adamw.step(options)?.wait()?;
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
        Ok(())
    }

    /// What this rank sends and stores of the linear weights.
    ///
    /// # Errors
    /// A thread failed while it used a weight.
    pub fn weight_bytes(&self) -> Result<WeightBytes, ModelError> {
        let mut bytes = WeightBytes::default();
        for (_, weight) in &self.weights {
            let account = weight.account()?;
            let own = &weight.element_ranges()[self.mesh.shard.rank()];
            bytes.masters += (size_of::<f32>() * own.len()) as u64;
            bytes.sent += account.counted_sent_bytes;
            bytes.sent_per_step += account.sent_bytes() as u64;
            bytes.resident += account.shard_bytes() as u64;
        }
        let transient = self.memory.weight_bytes() + self.gradients.bytes();
        bytes.peak = bytes.resident + bytes.masters + transient as u64;
        if let Some(gather) = self.adamw.flat_gather() {
            bytes.sent += self.adamw.flat_sent_bytes() - self.sent_before;
            bytes.sent_per_step += gather.sent_bytes() as u64;
            bytes.peak += gather.staged_bytes() as u64;
        }
        Ok(bytes)
    }

    /// Compares every linear weight, as each phase gathers it, with a full cast of its fp32
    /// masters. Returns the differences with the number of their layer. Collective.
    ///
    /// # Errors
    /// A rank failed.
    pub fn audit(&self) -> Result<Vec<(usize, Phase, Divergence)>, ModelError> {
        or_abort(&*self.mesh.world, self.try_audit())
    }

    fn try_audit(&self) -> Result<Vec<(usize, Phase, Divergence)>, ModelError> {
        let mut found = Vec::new();
        for (layer, (id, weight)) in self.weights.iter().enumerate() {
            let master = self.adamw.master(*id)?;
            let full = self.gather_master(weight, master)?;
            let divergences = weight.audit(&full)?;
            found.extend(divergences.into_iter().map(|(phase, d)| (layer, phase, d)));
        }
        Ok(found)
    }

    fn gather_master(
        &self,
        weight: &ShardedWeight<B, R>,
        master: Vec<f32>,
    ) -> Result<B::Buffer<f32>, ModelError> {
        let ranges = weight.element_ranges();
        let to_bytes = |range: &Range<usize>| 4 * range.start..4 * range.end;
        let ranges: Vec<Range<usize>> = ranges.iter().map(to_bytes).collect();
        let bytes: Vec<u8> = master.iter().flat_map(|v| v.to_le_bytes()).collect();
        let source = self.backend.upload(&bytes)?;
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
        let word = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        let values: Vec<f32> = self
            .backend
            .download(&dest)?
            .chunks_exact(4)
            .map(word)
            .collect();
        Ok(self.backend.upload(&values)?)
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &AdamW<B> {
        &self.adamw
    }

    /// The scales of the weights and of the operands.
    pub fn scale_book(&self) -> &ScaleBook<B> {
        self.adamw.scales()
    }

    /// The weight of layer `index`.
    pub fn weight(&self, index: usize) -> Option<&Arc<ShardedWeight<B, R>>> {
        self.weights.get(index).map(|(_, weight)| weight)
    }
}

/// A full weight, and the slices that the ranks have of its masters.
type Whole<B, R> = (
    QuantizedTensor<<B as Backend>::Buffer<u8>, R>,
    Vec<Range<usize>>,
);

/// What building needs throughout.
struct Builder<'a, B: Backend> {
    backend: &'a B,
    mesh: &'a MeshComm<B>,
    options: ModelOptions,
}

impl<B: Backend> Builder<'_, B> {
    fn build<R: Recipe>(
        &self,
        recipe: impl Fn(&LinearSpec) -> R,
        linears: &[LinearSpec],
        vars: &[VarSpec],
    ) -> Result<ShardedModel<B, R>, ModelError> {
        let Self {
            backend,
            mesh,
            options,
        } = *self;
        let mut adamw = AdamWBuilder::new(mesh.world.clone())
            .on(backend)
            .mesh(mesh.mesh);
        let decay = adamw.group(options.group);
        let no_decay = adamw.group(Group {
            weight_decay: 0.0,
            ..options.group
        });
        let memory = LayerMemory::new(backend);
        let reshard = match options.sharding {
            Sharding::Fsdp => Reshard::new(options.reshard_after_forward, &mesh.shard)?,
            Sharding::Zero1 => Reshard::No,
        };
        let mut weights = Vec::new();
        let mut plans = Vec::new();
        for (number, spec) in linears.iter().enumerate() {
            let (recipe, shape) = (recipe(spec), Shape::new(spec.rows, spec.cols));
            check_formats(&recipe).map_err(|source| ModelError::Formats {
                name: spec.name.clone(),
                source: Box::new(source),
            })?;
            let init = |rows: Range<usize>| {
                let init = spec.init.rows(options.seed, number as u64, rows, spec.cols);
                ParamSpec::new(&spec.name, decay, init)
            };
            let failed = |source| ModelError::Param {
                name: spec.name.clone(),
                source: Box::new(source),
            };
            let (id, weight) = match options.sharding {
                Sharding::Fsdp => {
                    let made = self.param(recipe, shape, &mut adamw, |s| init(s.rows()));
                    let (tensor, id) = made.map_err(failed)?;
                    let reshard = &reshard;
                    let weight = ShardedWeight::new(backend, mesh, &memory, tensor, reshard)?;
                    (id, weight)
                }
                Sharding::Zero1 => {
                    let made = self.flat_param(recipe, shape, &mut adamw, init);
                    let ((tensor, ranges), id) = made.map_err(failed)?;
                    let weight = ShardedWeight::whole(backend, mesh, &memory, tensor, ranges);
                    (id, weight)
                }
            };
            weights.push((id, Arc::new(weight)));
            plans.push(OperandPlan::new(
                &recipe,
                adamw.scales(),
                options.seed,
                number as u64,
            ));
        }
        let mut var_ids = Vec::new();
        let mut shards = Vec::new();
        for (number, spec) in (linears.len()..).zip(vars) {
            let shape = shape_of(spec)?;
            let group = if spec.decay { decay } else { no_decay };
            let (tensor, id) = self
                .param(PlainF32::default(), shape, &mut adamw, |s| {
                    let init = spec
                        .init
                        .rows(options.seed, number as u64, s.rows(), shape.cols);
                    ParamSpec::new(&spec.name, group, init)
                })
                .map_err(|source| ModelError::Param {
                    name: spec.name.clone(),
                    source: Box::new(source),
                })?;
            var_ids.push(id);
            shards.push(tensor);
        }
        let adamw = adamw.build()?;
        let param = |name: &str, ranges: &[Range<usize>], id| -> Result<_, ModelError> {
            Ok(GradParam {
                name: name.to_owned(),
                ranges: ranges.to_vec(),
                out: f32_buffer(adamw.grad(id))?,
            })
        };
        // The last layer has its gradient first, and variables have theirs at the end.
        let mut grads = Vec::new();
        let mut grad_ids = Vec::new();
        for ((id, weight), spec) in weights.iter().zip(linears).rev() {
            grads.push(param(&spec.name, weight.element_ranges(), *id)?);
            grad_ids.push(*id);
        }
        for ((id, shard), spec) in var_ids.iter().zip(&shards).zip(vars) {
            grads.push(param(&spec.name, &shard.spec().all_elements(), *id)?);
            grad_ids.push(*id);
        }
        let gradients = Arc::new(Gradients::new(backend, mesh, grads, options.grads)?);
        for ((_, weight), at) in weights.iter().rev().zip(0..) {
            weight.connect(&gradients, at)?;
        }
        let pass = Arc::new(PassState::default());
        let operands = plans
            .into_iter()
            .map(|plan| {
                Arc::new(RecipeOperands::new(
                    backend,
                    plan,
                    Arc::clone(adamw.scales()),
                    pass.clone(),
                    mesh.world.clone(),
                    memory.clone(),
                ))
            })
            .collect();
        // Variables are gathered once per step, all together: nothing could be shared with layers.
        let pool = GatherPool::new(backend);
        let mut vars = PlainVars::new(backend, mesh, &pool, vars, shards, weights.len())?;
        vars.refresh()?;
        let sent_before = adamw.flat_sent_bytes();
        Ok(ShardedModel {
            backend: backend.clone(),
            mesh: mesh.clone(),
            options,
            pass,
            memory,
            adamw,
            weights,
            operands,
            gradients,
            grad_ids,
            micro_batches: 0,
            vars,
            sent_before,
        })
    }

    /// One parameter: the full weight, with this rank's slice registered with the optimizer, and the slices of all
    /// ranks. `init` makes the values of rows.
    fn flat_param<R: Recipe>(
        &self,
        recipe: R,
        shape: Shape,
        adamw: &mut AdamWBuilder<B>,
        init: impl FnOnce(Range<usize>) -> ParamSpec,
    ) -> Result<(Whole<B, R>, ParamId), OptimError> {
        check_flat(&recipe, Usage::BOTH)?;
        let comm = &self.mesh.shard;
        let tensor = QuantizedTensor::new(recipe, shape, Usage::BOTH, |_, bytes| {
            Ok::<_, OptimError>(self.backend.alloc::<u8>(bytes)?)
        })?;
        // Cut where the narrowest codes may be.
        let codes = recipe
            .quantizers(Role::Weight)
            .kernels()
            .map(|key| key.element);
        let [row, col] = codes;
        let code = if col.bits() < row.bits() { col } else { row };
        let shards = FlatShard::split(shape, code, comm.world_size())?;
        let ranges: Vec<Range<usize>> = shards.iter().map(FlatShard::elements).collect();
        let own = ranges[comm.rank()].clone();
        let cols = shape.cols.max(1);
        let rows = own.start / cols..own.end.div_ceil(cols);
        let from = own.start - rows.start * cols;
        let mut spec = init(rows);
        spec.master = spec.master[from..from + own.len()].to_vec();
        let id = adamw.flat_param(&tensor, own.start, spec)?;
        Ok(((tensor, ranges), id))
    }

    /// One parameter: this rank's shard, registered with the optimizer.
    fn param<R: Recipe>(
        &self,
        recipe: R,
        shape: Shape,
        adamw: &mut AdamWBuilder<B>,
        spec: impl FnOnce(&ShardSpec) -> ParamSpec,
    ) -> Result<(ShardedTensor<B, R>, ParamId), OptimError> {
        let comm = &self.mesh.shard;
        let shard = ShardSpec::new(&recipe, shape, comm.world_size(), comm.rank())?;
        let spec = spec(&shard);
        let tensor = ShardedTensor::new(self.backend, recipe, shard)?;
        let id = adamw.param(tensor.local(), spec)?;
        Ok((tensor, id))
    }
}

/// The reduce-scatter accumulates in fp32, so the optimizer's gradients are f32.
fn f32_buffer<B: Backend>(grad: &Source<B>) -> Result<B::Buffer<f32>, OptimError> {
    match grad {
        Source::F32(buffer) => Ok(buffer.clone()),
        Source::Bf16(_) => Err(OptimError::GradDtype {
            name: "a reduced gradient".to_owned(),
            expected: "f32",
        }),
    }
}
