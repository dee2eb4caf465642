//! [`ShardedModel`]: one rank's parameters, optimizer and communication. Linear layers live in a
//! recipe; everything else lives in f32, sharded the same way.

use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Error, Result, Tensor, Var, bail};
use lowp_format::{Orientation, Phase, PlainF32, Recipe, Shape};
use lowp_kernels::{Backend, Source};
use lowp_optim::StepReport;
use lowp_optim::{AdamW, AdamWBuilder, Group, OptimError, ParamId, ParamSpec, StepOptions};
use lowp_shard::{
    GatherGroup, GatherPool, GradWire, MeshComm, ReduceItem, ScaleBook, ScaleBookBuilder,
    ShardSpec, ShardedTensor, dequantize,
};

use crate::gpt::{LinearSpec, VarSpec};
use crate::linear::{Linear, QuantLinear};
use crate::operand::{OperandPlan, PassState, RecipeOperands};
use crate::sharded_weight::ShardedWeight;

/// How a [`ShardedModel`] is trained.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ModelOptions {
    /// Free gathered weights after forward and gather again for backward.
    pub reshard_after_forward: bool,
    /// How gradients travel.
    pub grad_wire: GradWire,
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
    /// This rank's gathered bytes, counted by the communicator since the model was made.
    pub sent: u64,
    /// This rank's gathered bytes in one step, by the gather plans.
    pub sent_per_step: u64,
    /// Bytes of this rank's shards.
    pub resident: u64,
}

/// One rank of a model.
#[derive(Debug)]
pub struct ShardedModel<B: Backend, R: Recipe> {
    backend: B,
    mesh: MeshComm<B>,
    options: ModelOptions,
    book: Arc<ScaleBook<B>>,
    pass: Arc<PassState>,
    adamw: AdamW<B>,
    weights: Vec<(ParamId, Arc<ShardedWeight<B, R>>)>,
    operands: Vec<Arc<RecipeOperands<B>>>,
    vars: Vars<B>,
}

/// The parameters that stay in f32: gathered once per step into candle variables.
#[derive(Debug)]
struct Vars<B: Backend> {
    ids: Vec<ParamId>,
    vars: Vec<Var>,
    group: GatherGroup<B, PlainF32>,
    full_grads: Vec<B::Buffer<f32>>,
}

impl<B: Backend, R: Recipe> ShardedModel<B, R> {
    /// Builds this rank's part: only its own rows are initialised and stored, and they are those
    /// of an unsharded model. Collective.
    ///
    /// # Errors
    /// A shape that the recipe cannot take (with the layer's name), ranks that disagree, or no
    /// room.
    pub fn new(
        backend: &B,
        mesh: &MeshComm<B>,
        recipe: R,
        linears: &[LinearSpec],
        vars: &[VarSpec],
        options: ModelOptions,
    ) -> Result<Self> {
        Builder {
            backend,
            mesh,
            options,
        }
        .build(recipe, linears, vars)
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
        &self.vars.vars
    }

    /// Begins a pass: its step and the index of this rank's first token in the global batch;
    /// `training` observes amaxes for delayed scales.
    pub fn begin(&self, step: u64, first_token: u64, training: bool) {
        self.pass.begin(step, first_token, training);
    }

    /// Ends a step: reduces the gradients of the variables, updates and casts all parameters, and
    /// gives the variables their new values. Collective.
    ///
    /// # Errors
    /// A parameter without a gradient, or a rank that failed.
    pub fn finish_step(&mut self, grads: &GradStore, options: &StepOptions) -> Result<StepReport> {
        for (id, weight) in &self.weights {
            if weight.finish_gradient()? > 0 {
                self.adamw.mark_ready(*id);
            }
            weight.release()?;
        }
        self.reduce_vars(grads)?;
        let (shard, world) = (&*self.mesh.shard, &*self.mesh.world);
        let report = self
            .adamw
            .step(options, &self.book, shard, world)
            .map_err(Error::wrap)?;
        self.vars.refresh(&self.backend)?;
        Ok(report)
    }

    /// Frees gathered weights after an evaluation.
    ///
    /// # Errors
    /// A thread failed while it used a weight.
    pub fn release(&self) -> Result<()> {
        self.weights
            .iter()
            .try_for_each(|(_, weight)| weight.release())
    }

    /// What this rank sends and stores of the linear weights.
    ///
    /// # Errors
    /// A thread failed while it used a weight.
    pub fn weight_bytes(&self) -> Result<WeightBytes> {
        let mut bytes = WeightBytes::default();
        for (_, weight) in &self.weights {
            let account = weight.account()?;
            bytes.sent += account.counted_sent_bytes;
            bytes.sent_per_step += account.sent_bytes() as u64;
            bytes.resident += account.shard_bytes() as u64;
        }
        Ok(bytes)
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &AdamW<B> {
        &self.adamw
    }

    /// The weight of layer `index`.
    pub fn weight(&self, index: usize) -> Option<&Arc<ShardedWeight<B, R>>> {
        self.weights.get(index).map(|(_, weight)| weight)
    }

    fn reduce_vars(&mut self, grads: &GradStore) -> Result<()> {
        let mut outs = Vec::with_capacity(self.vars.vars.len());
        for ((var, full), id) in self
            .vars
            .vars
            .iter()
            .zip(&self.vars.full_grads)
            .zip(&self.vars.ids)
        {
            let Some(grad) = grads.get(var) else {
                bail!("a variable of shape {:?} has no gradient", var.shape())
            };
            let values = grad.flatten_all()?.to_vec1::<f32>()?;
            self.backend.write(full, 0, &values).map_err(Error::wrap)?;
            let Source::F32(out) = self.adamw.grad(*id) else {
                bail!("gradients are f32")
            };
            outs.push(out.clone());
        }
        let ranges: Vec<_> = self
            .vars
            .group
            .params()
            .iter()
            .map(|p| p.spec().all_elements())
            .collect();
        let items: Vec<_> = self
            .vars
            .full_grads
            .iter()
            .zip(&ranges)
            .zip(&outs)
            .map(|((grad, ranges), out)| ReduceItem {
                grad,
                ranges,
                out,
                accumulate: false,
            })
            .collect();
        let wire = self.options.grad_wire;
        self.mesh
            .shard
            .reduce_scatter(&items, wire)
            .map_err(Error::wrap)?;
        for (out, id) in outs.iter().zip(&self.vars.ids) {
            if self.mesh.mesh.replicate > 1 {
                self.mesh
                    .replicate
                    .all_reduce_sum(out)
                    .map_err(Error::wrap)?;
            }
            self.adamw.mark_ready(*id);
        }
        Ok(())
    }
}

impl<B: Backend> Vars<B> {
    /// Gathers the f32 shards and sets the candle variables.
    fn refresh(&mut self, backend: &B) -> Result<()> {
        self.group.unshard(Phase::Forward).map_err(Error::wrap)?;
        for (index, var) in self.vars.iter().enumerate() {
            let tensor = self.group.tensor(index).map_err(Error::wrap)?;
            let values = dequantize(backend, tensor, Orientation::Rowwise).map_err(Error::wrap)?;
            var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
        }
        self.group.release();
        Ok(())
    }
}

/// What building needs throughout.
struct Builder<'a, B: Backend> {
    backend: &'a B,
    mesh: &'a MeshComm<B>,
    options: ModelOptions,
}

impl<B: Backend> Builder<'_, B> {
    fn build<R: Recipe>(
        &self,
        recipe: R,
        linears: &[LinearSpec],
        vars: &[VarSpec],
    ) -> Result<ShardedModel<B, R>> {
        let Self {
            backend,
            mesh,
            options,
        } = *self;
        let mut book = ScaleBookBuilder::default();
        let mut adamw = AdamWBuilder::new(backend);
        let decay = adamw.group(options.group);
        let no_decay = adamw.group(Group {
            weight_decay: 0.0,
            ..options.group
        });
        let pool = Arc::new(GatherPool::new(backend));
        let mut weights = Vec::new();
        let mut plans = Vec::new();
        for (number, spec) in linears.iter().enumerate() {
            let shape = Shape::new(spec.rows, spec.cols);
            let (tensor, id) = self
                .param(recipe, shape, &mut adamw, &mut book, |s| {
                    let init = spec
                        .init
                        .rows(options.seed, number as u64, s.rows(), spec.cols);
                    ParamSpec::new(&spec.name, decay, init)
                })
                .map_err(|e| Error::wrap(e).context(spec.name.clone()))?;
            let (reshard, wire) = (options.reshard_after_forward, options.grad_wire);
            let weight = ShardedWeight::new(backend, mesh, &pool, tensor, reshard, wire)
                .map_err(Error::wrap)?;
            weights.push((id, Arc::new(weight)));
            plans.push(OperandPlan::new(
                &recipe,
                &mut book,
                options.seed,
                number as u64,
            ));
        }
        let mut ids = Vec::new();
        let mut shards = Vec::new();
        for (number, spec) in (linears.len()..).zip(vars) {
            let shape = var_shape(spec)?;
            let group = if spec.decay { decay } else { no_decay };
            let (tensor, id) = self
                .param(PlainF32, shape, &mut adamw, &mut book, |s| {
                    let init = spec
                        .init
                        .rows(options.seed, number as u64, s.rows(), shape.cols);
                    ParamSpec::new(&spec.name, group, init)
                })
                .map_err(|e| Error::wrap(e).context(spec.name.clone()))?;
            ids.push(id);
            shards.push(tensor);
        }
        let book = Arc::new(book.build(backend).map_err(Error::wrap)?);
        let adamw = adamw.finish(&book).map_err(Error::wrap)?;
        adamw.calibrate(&book, &*mesh.world).map_err(Error::wrap)?;
        for (id, weight) in &weights {
            weight.connect(adamw.grad(*id))?;
        }
        let pass = Arc::new(PassState::default());
        let operands = plans
            .into_iter()
            .map(|plan| {
                Arc::new(RecipeOperands::new(
                    backend,
                    plan,
                    book.clone(),
                    pass.clone(),
                ))
            })
            .collect();
        let vars = self.vars(vars, ids, shards, &pool)?;
        let (backend, mesh, options) = (backend.clone(), mesh.clone(), options);
        Ok(ShardedModel {
            backend,
            mesh,
            options,
            book,
            pass,
            adamw,
            weights,
            operands,
            vars,
        })
    }

    /// One parameter: this rank's shard, registered with the optimizer.
    fn param<R: Recipe>(
        &self,
        recipe: R,
        shape: Shape,
        adamw: &mut AdamWBuilder<B>,
        book: &mut ScaleBookBuilder,
        spec: impl FnOnce(&ShardSpec) -> ParamSpec,
    ) -> std::result::Result<(ShardedTensor<B, R>, ParamId), OptimError> {
        let comm = &self.mesh.shard;
        let shard = ShardSpec::new(&recipe, shape, comm.world_size(), comm.rank())?;
        let spec = spec(&shard);
        let tensor = ShardedTensor::new(self.backend, recipe, shard)?;
        let id = adamw.param(book, tensor.local(), spec)?;
        Ok((tensor, id))
    }

    fn vars(
        &self,
        specs: &[VarSpec],
        ids: Vec<ParamId>,
        shards: Vec<ShardedTensor<B, PlainF32>>,
        pool: &Arc<GatherPool<B>>,
    ) -> Result<Vars<B>> {
        let mut full_grads = Vec::new();
        let mut vars = Vec::new();
        for spec in specs {
            let len = var_shape(spec)?.elements();
            full_grads.push(self.backend.alloc::<f32>(len).map_err(Error::wrap)?);
            vars.push(Var::from_vec(
                vec![0f32; len],
                spec.shape.as_slice(),
                &Device::Cpu,
            )?);
        }
        let comm = self.mesh.shard.clone();
        let group =
            GatherGroup::new(self.backend, comm, pool, shards, true).map_err(Error::wrap)?;
        let mut vars = Vars {
            ids,
            vars,
            group,
            full_grads,
        };
        vars.refresh(self.backend)?;
        Ok(vars)
    }
}

/// A vector is one row, so that any length can be sharded beside matrices.
fn var_shape(spec: &VarSpec) -> Result<Shape> {
    match spec.shape.as_slice() {
        [cols] => Ok(Shape::new(1, *cols)),
        dims => Shape::from_dims(dims).map_err(Error::wrap),
    }
}
