//! [`PlainVars`]: the parameters that stay in f32, sharded like the others and gathered once per
//! step into buffers of the backend, or read to the host by whoever runs the model.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use lowp_comm::{MeshComm, or_abort};
use lowp_format::{Orientation, Phase, PlainF32, Recipe, Shape};
use lowp_kernels::{Backend, DecodeJob, Source, StepScalars, Work};
use lowp_shard::{
    GatherGroup, GatherPool, GradBucketOptions, ShardError, ShardedTensor, dequantize,
};
use serde_json::{Value, json};

use crate::error::{ModelError, VarShapeError};
use crate::gradients::Gradients;
use crate::spec::VarSpec;

/// The recipe of variables, whatever that of the weights is.
pub(crate) type VarRecipe = PlainF32;

/// Where the full values of variables are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VarPlace {
    /// On the host, with whoever runs the model, who reads them after each step ([`ShardedModel::read_vars`]).
    ///
    /// [`ShardedModel::read_vars`]: crate::ShardedModel::read_vars
    #[default]
    Host,
    /// In buffers of the backend.
    Backend,
}

/// Bytes of small gradients that travel together on a CPU: nothing overlaps there, so memory counts.
const HOST_GRAD_BUCKET: usize = 1 << 16;

impl VarPlace {
    /// Bytes of gradients that travel together where layers run there.
    pub fn grad_bucket(self) -> usize {
        match self {
            Self::Host => HOST_GRAD_BUCKET,
            Self::Backend => GradBucketOptions::default().bytes,
        }
    }
}

/// The full values.
#[derive(Debug)]
enum Values<B: Backend> {
    Host,
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
            VarPlace::Host => Ok(Values::Host),
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

    /// The shapes that their specs have.
    pub(crate) fn shapes(&self) -> &[Vec<usize>] {
        &self.shapes
    }

    /// The buffers, where the backend has them.
    pub(crate) fn buffers(&self) -> &[B::Buffer<f32>] {
        match &self.values {
            Values::Host => &[],
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
    pub(crate) fn grad(&self, index: usize) -> Result<usize, ModelError> {
        let len = self.names.len();
        match index < len {
            true => Ok(self.first_grad + index),
            false => Err(ModelError::NoSuchVar { index, len }),
        }
    }

    /// Adds the full gradient of variable `index`, which is on the host.
    pub(crate) fn add_gradient(
        &self,
        gradients: &Gradients<B>,
        index: usize,
        values: &[f32],
    ) -> Result<(), ModelError> {
        if let Values::Backend { .. } = self.values {
            return Err(ModelError::VarsOnBackend);
        }
        let grad = self.grad(index)?;
        let shape = self.group.params()[index].spec().full();
        if values.len() != shape.elements() {
            let found = values.len();
            return Err(ModelError::GradientLength { found, shape });
        }
        Ok(gradients.add(grad, values)?)
    }

    /// Gathers the f32 shards into the buffers of the backend, if they are there. Collective.
    pub(crate) fn refresh(&mut self) -> Result<(), ModelError> {
        let Values::Backend { buffers, decodes } = &mut self.values else {
            return Ok(());
        };
        let filled = self.group.unshard(Phase::Forward);
        let filled = filled.and_then(|()| fill(&self.backend, &self.group, buffers, decodes));
        // Also after an error: what this rank alone holds, it would not gather with the others.
        self.group.release();
        Ok(or_abort(&**self.group.comm(), filled)?)
    }

    /// Gathers the f32 shards and gives `set` the full values of each variable. Collective.
    pub(crate) fn read<E: From<ModelError> + Display>(
        &mut self,
        set: impl FnMut(usize, Vec<f32>) -> Result<(), E>,
    ) -> Result<(), E> {
        let read = self.try_read(set);
        self.group.release();
        or_abort(&**self.group.comm(), read)
    }

    fn try_read<E: From<ModelError>>(
        &mut self,
        mut set: impl FnMut(usize, Vec<f32>) -> Result<(), E>,
    ) -> Result<(), E> {
        if let Values::Backend { .. } = self.values {
            return Err(ModelError::VarsOnBackend.into());
        }
        let failed = |error| E::from(ModelError::Shard(error));
        self.group.unshard(Phase::Forward).map_err(failed)?;
        for index in 0..self.names.len() {
            let tensor = self.group.tensor(index).map_err(failed)?;
            let values = dequantize(&self.backend, tensor, Orientation::Rowwise).map_err(failed)?;
            set(index, values)?;
        }
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

/// The matrix of a variable. A vector is one row, so that any length can be sharded beside matrices.
pub(crate) fn shape_of(spec: &VarSpec) -> Result<Shape, VarShapeError> {
    let shape = match spec.shape[..] {
        [cols] => Shape::new(1, cols),
        [rows, cols] => Shape::new(rows, cols),
        _ => {
            return Err(VarShapeError::Axes {
                name: spec.name.clone(),
                shape: spec.shape.clone(),
            });
        }
    };
    let checked = shape.check().map_err(|source| VarShapeError::TooLarge {
        name: spec.name.clone(),
        source,
    });
    checked.map(|()| shape)
}
