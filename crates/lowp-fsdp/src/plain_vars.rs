//! [`PlainVars`]: the parameters that stay in f32, sharded like the others and gathered once per
//! step into candle variables, or into buffers of the backend.

use std::ops::Range;
use std::sync::Arc;

use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor, Var};
use lowp_format::{Orientation, Phase, PlainF32, Recipe, Shape};
use lowp_kernels::{Backend, DecodeJob, Source, StepScalars, Work};
use lowp_shard::{
    GatherGroup, GatherPool, MeshComm, ShardError, ShardedTensor, dequantize, or_abort,
};
use serde_json::{Value, json};

use crate::error::ModelError;
use crate::gradients::Gradients;
use crate::spec::VarSpec;

/// Where the full values of variables are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VarPlace {
    /// In candle variables, on the host.
    #[default]
    Candle,
    /// In buffers of the backend.
    Backend,
}

/// The full values.
#[derive(Debug)]
enum Values<B: Backend> {
    Candle(Vec<Var>),
    Backend {
        buffers: Vec<B::Buffer<f32>>,
        /// What fills them, by the number of the memory that they are gathered in.
        decodes: Vec<(Option<u64>, B::Plan)>,
    },
}

/// One rank's f32 parameters.
#[derive(Debug)]
pub(crate) struct PlainVars<B: Backend> {
    backend: B,
    names: Vec<String>,
    shapes: Vec<Vec<usize>>,
    values: Values<B>,
    group: GatherGroup<B, PlainF32>,
    /// Of the group alone.
    pool: Arc<GatherPool<B>>,
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
        (shards, first_grad): (Vec<ShardedTensor<B, PlainF32>>, usize),
        place: VarPlace,
    ) -> Result<Self, ModelError> {
        let values = match place {
            VarPlace::Candle => {
                let vars = specs.iter().map(variable).collect::<Result<_, _>>();
                vars.map(Values::Candle)
            }
            VarPlace::Backend => {
                let buffer = |spec: &VarSpec| Ok(backend.alloc(shape_of(spec)?.elements())?);
                let buffers: Result<_, ModelError> = specs.iter().map(buffer).collect();
                let decodes = Vec::new();
                buffers.map(|buffers| Values::Backend { buffers, decodes })
            }
        };
        let values = or_abort(&*mesh.world, values)?;
        let group = GatherGroup::new(backend, mesh.shard.clone(), pool, shards, true)?;
        Ok(Self {
            backend: backend.clone(),
            names: specs.iter().map(|spec| spec.name.clone()).collect(),
            shapes: specs.iter().map(|spec| spec.shape.clone()).collect(),
            values,
            group,
            pool: Arc::clone(pool),
            first_grad,
        })
    }

    /// Their names.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Name, recipe and shape of each.
    pub(crate) fn about(&self) -> impl Iterator<Item = (String, Value)> + '_ {
        let vars = self.names.iter().zip(&self.shapes);
        vars.zip(self.group.params()).map(|((name, shape), shard)| {
            let about = json!({ "recipe": shard.recipe().name(), "shape": shape });
            (name.clone(), about)
        })
    }

    /// The elements that this rank has of each, and how many there are.
    pub(crate) fn elements(&self) -> impl Iterator<Item = (Range<usize>, usize)> + '_ {
        let shards = self.group.params().iter();
        shards.map(|shard| (shard.spec().elements(), shard.spec().full().elements()))
    }

    /// The variables, where candle has them.
    pub(crate) fn vars(&self) -> &[Var] {
        match &self.values {
            Values::Candle(vars) => vars,
            Values::Backend { .. } => &[],
        }
    }

    /// The buffers, where the backend has them.
    pub(crate) fn buffers(&self) -> &[B::Buffer<f32>] {
        match &self.values {
            Values::Candle(_) => &[],
            Values::Backend { buffers, .. } => buffers,
        }
    }

    /// Bytes of the full values.
    pub(crate) fn bytes(&self) -> usize {
        let elements = |shape: &Vec<usize>| shape.iter().product::<usize>();
        size_of::<f32>() * self.shapes.iter().map(elements).sum::<usize>()
    }

    /// Bytes of the f32 shards, and of what they are gathered in.
    pub(crate) fn gather_bytes(&self) -> usize {
        let shards = self.group.params().iter();
        shards.map(ShardedTensor::resident_bytes).sum::<usize>() + self.pool.resident_bytes()
    }

    /// The parameter that variable `index` is among the gradients.
    pub(crate) fn grad(&self, index: usize) -> usize {
        self.first_grad + index
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
        for (index, (var, name)) in self.vars().iter().zip(&self.names).enumerate() {
            let Some(grad) = store.get(var) else {
                return Err(ModelError::NoGradient { name: name.clone() });
            };
            let values = grad.flatten_all()?.to_vec1::<f32>()?;
            gradients.add(self.grad(index), &values)?;
        }
        Ok(())
    }

    /// Gathers the f32 shards and sets the full values. Collective.
    pub(crate) fn refresh(&mut self) -> Result<(), ModelError> {
        let set = self.try_refresh();
        or_abort(&**self.group.comm(), set)
    }

    fn try_refresh(&mut self) -> Result<(), ModelError> {
        self.group.unshard(Phase::Forward)?;
        match &mut self.values {
            Values::Candle(vars) => {
                for (index, var) in vars.iter().enumerate() {
                    let tensor = self.group.tensor(index)?;
                    let values = dequantize(&self.backend, tensor, Orientation::Rowwise)?;
                    var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
                }
            }
            Values::Backend { buffers, decodes } => {
                fill(&self.backend, &self.group, buffers, decodes)?;
            }
        }
        self.group.release();
        Ok(())
    }
}

/// Copies the gathered values of `group` into `buffers`.
fn fill<B: Backend>(
    backend: &B,
    group: &GatherGroup<B, PlainF32>,
    buffers: &[B::Buffer<f32>],
    decodes: &mut Vec<(Option<u64>, B::Plan)>,
) -> Result<(), ShardError> {
    let set = group.set();
    let known = decodes.iter().position(|(known, _)| *known == set);
    let index = match known {
        Some(index) => index,
        None => {
            let jobs = buffers.iter().enumerate().map(|(index, buffer)| {
                let tensor = group.tensor(index)?;
                Ok(DecodeJob::new(
                    tensor,
                    Orientation::Rowwise,
                    Source::F32(buffer.clone()),
                )?)
            });
            let jobs = jobs.collect::<Result<Vec<_>, ShardError>>()?;
            decodes.push((set, backend.plan(Work::Decode(jobs))?));
            decodes.len() - 1
        }
    };
    Ok(backend.run(&decodes[index].1, &StepScalars::default())?)
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
