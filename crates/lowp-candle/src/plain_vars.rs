//! [`PlainVars`]: the parameters that stay in f32, sharded like the others and gathered once per
//! step into candle variables.

use std::ops::Range;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use lowp_format::{Orientation, Phase, PlainF32, Recipe, Shape};
use lowp_kernels::Backend;
use lowp_shard::{GatherGroup, GatherPool, MeshComm, ShardedTensor, dequantize, or_abort};
use serde_json::{Value, json};

use crate::error::ModelError;
use crate::gradients::Gradients;
use crate::spec::VarSpec;

/// One rank's f32 parameters.
#[derive(Debug)]
pub(crate) struct PlainVars<B: Backend> {
    backend: B,
    names: Vec<String>,
    vars: Vec<Var>,
    group: GatherGroup<B, PlainF32>,
    /// The parameter that the first variable is among the gradients.
    first_grad: usize,
}

impl<B: Backend> PlainVars<B> {
    /// Variables over `shards`, whose gradients are parameters `first_grad` and following. Collective; values are
    /// there after [`PlainVars::refresh`].
    pub(crate) fn new(
        backend: &B,
        mesh: &MeshComm<B>,
        pool: &Arc<GatherPool<B>>,
        specs: &[VarSpec],
        shards: Vec<ShardedTensor<B, PlainF32>>,
        first_grad: usize,
    ) -> Result<Self, ModelError> {
        let vars = specs.iter().map(variable).collect::<Result<_, _>>();
        let vars = or_abort(&*mesh.world, vars)?;
        let group = GatherGroup::new(backend, mesh.shard.clone(), pool, shards, true)?;
        Ok(Self {
            backend: backend.clone(),
            names: specs.iter().map(|spec| spec.name.clone()).collect(),
            vars,
            group,
            first_grad,
        })
    }

    /// Their names.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Name, recipe and shape of each.
    pub(crate) fn about(&self) -> impl Iterator<Item = (String, Value)> + '_ {
        let vars = self.names.iter().zip(&self.vars).zip(self.group.params());
        vars.map(|((name, var), shard)| {
            let about = json!({ "recipe": shard.recipe().name(), "shape": var.dims() });
            (name.clone(), about)
        })
    }

    /// The elements that this rank has of each, and how many there are.
    pub(crate) fn elements(&self) -> impl Iterator<Item = (Range<usize>, usize)> + '_ {
        let shards = self.group.params().iter();
        shards.map(|shard| (shard.spec().elements(), shard.spec().full().elements()))
    }

    /// The variables.
    pub(crate) fn vars(&self) -> &[Var] {
        &self.vars
    }

    /// Adds the gradients that a backward pass left in `store`.
    ///
    /// # Errors
    /// A variable without one, or a rank that failed.
    pub(crate) fn add_gradients(
        &self,
        gradients: &Gradients<B>,
        store: &GradStore,
    ) -> Result<(), ModelError> {
        for (index, (var, name)) in self.vars.iter().zip(&self.names).enumerate() {
            let Some(grad) = store.get(var) else {
                return Err(ModelError::NoGradient { name: name.clone() });
            };
            let values = grad.flatten_all()?.to_vec1::<f32>()?;
            gradients.add(self.first_grad + index, &values)?;
        }
        Ok(())
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

/// A variable of zeros.
fn variable(spec: &VarSpec) -> Result<Var, ModelError> {
    let zeros = vec![0f32; shape_of(spec)?.elements()];
    Ok(Var::from_vec(zeros, spec.shape.as_slice(), &Device::Cpu)?)
}

/// A vector is one row, so that any length can be sharded beside matrices.
pub(crate) fn shape_of(spec: &VarSpec) -> Result<Shape, ModelError> {
    match spec.shape.as_slice() {
        [cols] => Ok(Shape::new(1, *cols)),
        dims => Ok(Shape::from_dims(dims)?),
    }
}
