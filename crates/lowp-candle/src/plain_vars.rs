//! [`PlainVars`]: the parameters that stay in f32, sharded like the others and gathered once per
//! step into candle variables.

use std::ops::Range;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use lowp_format::{Orientation, Phase, PlainF32, Shape};
use lowp_kernels::Backend;
use lowp_shard::{
    GatherGroup, GatherPool, GradWire, MeshComm, ReduceItem, ShardedTensor, dequantize, or_abort,
    ordered,
};

use crate::error::ModelError;
use crate::spec::VarSpec;

/// One rank's f32 parameters.
#[derive(Debug)]
pub(crate) struct PlainVars<B: Backend> {
    backend: B,
    names: Vec<String>,
    vars: Vec<Var>,
    group: GatherGroup<B, PlainF32>,
    /// This rank's contribution to the full gradients.
    full_grads: Vec<B::Buffer<f32>>,
    /// The optimizer's gradients of this rank's rows.
    grads: Vec<B::Buffer<f32>>,
    ranges: Vec<Vec<Range<usize>>>,
    arrived: usize,
}

impl<B: Backend> PlainVars<B> {
    /// Variables over `shards`, whose optimizer gradients are `grads`. Collective; values are
    /// there after [`PlainVars::refresh`].
    pub(crate) fn new(
        backend: &B,
        mesh: &MeshComm<B>,
        pool: &Arc<GatherPool<B>>,
        specs: &[VarSpec],
        shards: Vec<ShardedTensor<B, PlainF32>>,
        grads: Vec<B::Buffer<f32>>,
    ) -> Result<Self, ModelError> {
        let made = specs.iter().map(|spec| Self::variable(backend, spec));
        let made: Vec<_> = or_abort(&*mesh.world, made.collect::<Result<_, ModelError>>())?;
        let (vars, full_grads) = made.into_iter().unzip();
        let ranges = shards.iter().map(|s| s.spec().all_elements()).collect();
        let group = GatherGroup::new(backend, mesh.shard.clone(), pool, shards, true)?;
        Ok(Self {
            backend: backend.clone(),
            names: specs.iter().map(|spec| spec.name.clone()).collect(),
            vars,
            group,
            full_grads,
            grads,
            ranges,
            arrived: 0,
        })
    }

    /// A variable of zeros, and a buffer for its full gradient.
    fn variable(backend: &B, spec: &VarSpec) -> Result<(Var, B::Buffer<f32>), ModelError> {
        let len = shape_of(spec)?.elements();
        let full_grad = backend.alloc::<f32>(len)?;
        let zeros = vec![0f32; len];
        let var = Var::from_vec(zeros, spec.shape.as_slice(), &Device::Cpu)?;
        Ok((var, full_grad))
    }

    /// The variables.
    pub(crate) fn vars(&self) -> &[Var] {
        &self.vars
    }

    /// Reduces this rank's gradients into the owners' rows, adding to what arrived before in this
    /// step. Collective.
    pub(crate) fn add_gradients(
        &mut self,
        mesh: &MeshComm<B>,
        wire: GradWire,
        store: &GradStore,
    ) -> Result<(), ModelError> {
        let added = self.try_add(mesh, wire, store);
        or_abort(&*mesh.world, added)
    }

    fn try_add(
        &mut self,
        mesh: &MeshComm<B>,
        wire: GradWire,
        store: &GradStore,
    ) -> Result<(), ModelError> {
        for ((var, full), name) in self.vars.iter().zip(&self.full_grads).zip(&self.names) {
            let Some(grad) = store.get(var) else {
                return Err(ModelError::NoGradient { name: name.clone() });
            };
            let values = grad.flatten_all()?.to_vec1::<f32>()?;
            self.backend.write(full, 0, &values)?;
        }
        let items: Vec<_> = self
            .full_grads
            .iter()
            .zip(&self.ranges)
            .zip(&self.grads)
            .map(|((grad, ranges), out)| ReduceItem {
                grad,
                ranges,
                out,
                accumulate: self.arrived > 0,
            })
            .collect();
        let shard = &*mesh.shard;
        ordered(&self.backend, shard, || shard.reduce_scatter(&items, wire))?;
        self.arrived += 1;
        Ok(())
    }

    /// Forgets what arrived in this step: the next contribution replaces it.
    pub(crate) fn discard_gradients(&mut self) {
        self.arrived = 0;
    }

    /// Micro-batches that arrived in this step.
    pub(crate) fn arrived(&self) -> usize {
        self.arrived
    }

    /// Ends the accumulation of a step: sums gradients over the replicas. Returns how many
    /// contributions arrived. Collective.
    pub(crate) fn finish_gradients(&mut self, mesh: &MeshComm<B>) -> Result<usize, ModelError> {
        if mesh.mesh.replicate > 1 {
            for grad in &self.grads {
                let replicas = &*mesh.replicate;
                ordered(&self.backend, replicas, || replicas.all_reduce_sum(grad))?;
            }
        }
        Ok(std::mem::take(&mut self.arrived))
    }

    /// Gathers the f32 shards and sets the candle variables. Collective.
    pub(crate) fn refresh(&mut self) -> Result<(), ModelError> {
        let set = self.try_refresh();
        or_abort(&**self.group.comm(), set)
    }

    fn try_refresh(&mut self) -> Result<(), ModelError> {
        self.group.unshard(Phase::Forward)?;
        for (index, var) in self.vars.iter().enumerate() {
            let tensor = self.group.tensor(index)?;
            let values = dequantize(&self.backend, tensor, Orientation::Rowwise)?;
            var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
        }
        self.group.release();
        Ok(())
    }
}

/// A vector is one row, so that any length can be sharded beside matrices.
pub(crate) fn shape_of(spec: &VarSpec) -> Result<Shape, ModelError> {
    match spec.shape.as_slice() {
        [cols] => Ok(Shape::new(1, *cols)),
        dims => Ok(Shape::from_dims(dims)?),
    }
}
