//! [`PlainVars`]: the parameters that stay in f32, sharded like the others. Those that layers read throughout are gathered once per
//! step into buffers of the backend, or read to the host by whoever runs the model; others are gathered for each use.

use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use lowp_comm::{MeshComm, or_abort};
use lowp_format::{Orientation, Phase, PlainF32, Recipe, Shape};
use lowp_kernels::{Backend, DecodeJob, Source, StepScalars, Work};
use lowp_shard::{
    GatherGroup, GatherPool, GradBucketOptions, Reshard, ShardError, ShardedTensor, dequantize,
};
use serde_json::{Value, json};

use crate::error::{ModelError, VarShapeError};
use crate::gradients::Gradients;
use crate::memory::LayerMemory;
use crate::sharded_weight::ShardedWeight;
use crate::spec::VarSpec;

/// The recipe of variables, whatever that of the weights is.
pub(crate) type VarRecipe = PlainF32;

/// A variable that is gathered for each use ([`VarUse`](crate::VarUse)).
pub type VarWeight<B> = ShardedWeight<B, VarRecipe>;

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

    /// The block of the network whose gradients may share a larger bucket.
    pub(crate) fn grad_block(self, block: usize) -> Option<usize> {
        match self {
            Self::Host => None,
            Self::Backend => Some(block),
        }
    }
}

/// The full values of variables that stay between uses.
#[derive(Debug)]
enum FullValues<B: Backend> {
    Host,
    Backend {
        buffers: Vec<B::Buffer<f32>>,
        /// What fills them, by the number of the memory that they are gathered in.
        decodes: Vec<(Option<u64>, B::Plan)>,
    },
}

/// A parameter that stays in f32.
#[derive(Debug)]
struct PlainVar<B: Backend> {
    name: String,
    shape: Vec<usize>,
    full: Shape,
    /// Elements of the flattened variable that this rank has.
    elements: Range<usize>,
    /// The number of the variable among the gradients.
    grad: usize,
    storage: VarStorage<B>,
}

/// What a rank has of a variable between uses.
#[derive(Debug)]
enum VarStorage<B: Backend> {
    /// The full values.
    Stays {
        /// The variable's number among those that stay.
        number: usize,
        /// Whether a micro-batch that is not finished left a gradient.
        open: AtomicBool,
    },
    /// Rows that are gathered for each use.
    Transient(Arc<VarWeight<B>>),
}

/// The elements of a variable that a rank has.
#[derive(Debug)]
pub(crate) struct VarElements<'a> {
    pub(crate) name: &'a str,
    /// The elements of this rank.
    pub(crate) own: Range<usize>,
    /// How many there are on all ranks.
    pub(crate) len: usize,
}

/// One rank's f32 parameters.
#[derive(Debug)]
pub(crate) struct PlainVars<B: Backend> {
    backend: B,
    vars: Vec<PlainVar<B>>,
    values: FullValues<B>,
    /// Gathers the variables that stay.
    group: GatherGroup<B, VarRecipe>,
    /// The pool of `group` alone.
    pool: Arc<GatherPool<B>>,
    /// Where transient variables are gathered.
    memory: Arc<LayerMemory<B>>,
}

impl<B: Backend> PlainVars<B> {
    /// Variables over `shards`, and what ranks must have in common of their gathers, each with its name, for the caller to compare. Collective;
    /// values are there after [`PlainVars::refresh`].
    pub(crate) fn new(
        backend: &B,
        mesh: &MeshComm<B>,
        memory: &LayerMemory<B>,
        specs: &[VarSpec],
        shards: Vec<ShardedTensor<B, VarRecipe>>,
        place: VarPlace,
    ) -> Result<(Self, Vec<[String; 2]>), ModelError> {
        let stays = specs.iter().filter(|spec| !spec.used.is_transient());
        let values = match place {
            VarPlace::Host => Ok(FullValues::Host),
            VarPlace::Backend => {
                let buffer = |spec: &VarSpec| Ok(backend.alloc(shape_of(spec)?.elements())?);
                let buffers: Result<_, ModelError> = stays.map(buffer).collect();
                let decodes = Vec::new();
                buffers.map(|buffers| FullValues::Backend { buffers, decodes })
            }
        };
        let values = or_abort(&*mesh.world, values)?;
        let (pool, memory) = (memory.pool().beside(), memory.beside());
        let (mut vars, mut staying) = (Vec::with_capacity(specs.len()), Vec::new());
        let mut plans = Vec::new();
        for (spec, shard) in specs.iter().zip(shards) {
            let (full, elements) = (shard.spec().full(), shard.spec().elements());
            let storage = if spec.used.is_transient() {
                let (tensors, reshard) = (vec![shard], &Reshard::Yes);
                let block = ShardedWeight::uncompared(backend, mesh, &memory, tensors, reshard)?;
                let (weights, plan) = block;
                plans.push([spec.name.clone(), plan]);
                let weight = weights.into_iter().next().map(Arc::new);
                VarStorage::Transient(weight.ok_or(ModelError::NotConnected)?)
            } else {
                staying.push(shard);
                VarStorage::Stays {
                    number: staying.len() - 1,
                    open: AtomicBool::new(false),
                }
            };
            vars.push(PlainVar {
                name: spec.name.clone(),
                shape: spec.shape.clone(),
                full,
                elements,
                grad: 0,
                storage,
            });
        }
        let comm = mesh.shard.clone();
        let (group, plan) = GatherGroup::uncompared(backend, comm, &pool, staying, true)?;
        plans.push(["the variables that stay".to_owned(), plan]);
        let vars = Self {
            backend: backend.clone(),
            vars,
            values,
            group,
            pool,
            memory,
        };
        Ok((vars, plans))
    }

    /// Says which parameter each is among `gradients`.
    pub(crate) fn connect(
        &mut self,
        gradients: &Arc<Gradients<B>>,
        params: &[usize],
    ) -> Result<(), ModelError> {
        for (var, &param) in self.vars.iter_mut().zip(params) {
            var.grad = param;
            if let VarStorage::Transient(weight) = &var.storage {
                weight.connect(gradients, param)?;
            }
        }
        Ok(())
    }

    /// Their names, and the shapes that their specs have.
    pub(crate) fn shapes(&self) -> impl ExactSizeIterator<Item = (&str, &[usize])> {
        self.vars
            .iter()
            .map(|var| (var.name.as_str(), var.shape.as_slice()))
    }

    /// Name, recipe and shape of each.
    pub(crate) fn about(&self) -> impl Iterator<Item = (String, Value)> + '_ {
        let recipe = VarRecipe::default().name();
        self.vars.iter().map(move |var| {
            let about = json!({ "recipe": recipe, "shape": var.shape });
            (var.name.clone(), about)
        })
    }

    /// What this rank has of each.
    pub(crate) fn elements(&self) -> impl Iterator<Item = VarElements<'_>> {
        self.vars.iter().map(|var| VarElements {
            name: &var.name,
            own: var.elements.clone(),
            len: var.full.elements(),
        })
    }

    /// The buffer of variable `index`, where the backend has its full values.
    pub(crate) fn buffer(&self, index: usize) -> Option<&B::Buffer<f32>> {
        match (&self.values, &self.vars.get(index)?.storage) {
            (FullValues::Backend { buffers, .. }, VarStorage::Stays { number, .. }) => {
                buffers.get(*number)
            }
            _ => None,
        }
    }

    /// Variable `index`, where it is gathered for each use.
    pub(crate) fn transient(&self, index: usize) -> Option<&Arc<VarWeight<B>>> {
        match &self.vars.get(index)?.storage {
            VarStorage::Transient(weight) => Some(weight),
            VarStorage::Stays { .. } => None,
        }
    }

    fn transients(&self) -> impl Iterator<Item = &Arc<VarWeight<B>>> {
        (0..self.vars.len()).filter_map(|index| self.transient(index))
    }

    /// How many have a gradient of a micro-batch that is not finished.
    pub(crate) fn open(&self) -> Result<usize, ModelError> {
        let mut all = 0;
        for var in &self.vars {
            all += usize::from(match &var.storage {
                VarStorage::Stays { open, .. } => open.load(Ordering::Relaxed),
                VarStorage::Transient(weight) => weight.is_open()?,
            });
        }
        Ok(all)
    }

    /// Says that the micro-batch is finished or forgotten.
    pub(crate) fn finish_micro_batch(&self) -> Result<(), ModelError> {
        self.vars.iter().try_for_each(|var| match &var.storage {
            VarStorage::Stays { open, .. } => {
                open.store(false, Ordering::Relaxed);
                Ok(())
            }
            VarStorage::Transient(weight) => weight.finish_micro_batch(),
        })
    }

    /// Frees what is gathered for a use.
    pub(crate) fn release(&self) -> Result<(), ModelError> {
        self.transients().try_for_each(|weight| weight.release())
    }

    /// Bytes of the full values that stay, and the most in which others were gathered at once.
    pub(crate) fn bytes(&self) -> usize {
        let stay = |var: &&PlainVar<B>| matches!(var.storage, VarStorage::Stays { .. });
        let elements = self.vars.iter().filter(stay).map(|var| var.full.elements());
        size_of::<f32>() * elements.sum::<usize>() + self.memory.weight_bytes()
    }

    /// Bytes of the f32 shards, and of what those that stay are gathered in.
    pub(crate) fn gather_bytes(&self) -> Result<usize, ModelError> {
        let shards = self.group.params().iter();
        let mut bytes = shards.map(ShardedTensor::resident_bytes).sum::<usize>();
        for weight in self.transients() {
            bytes += weight.account()?.shard_bytes();
        }
        Ok(bytes + self.pool.resident_bytes())
    }

    /// Memory for the full gradient of variable `index`.
    pub(crate) fn gradient(
        &self,
        gradients: &Gradients<B>,
        index: usize,
    ) -> Result<Source<B>, ModelError> {
        let var = self.var(index)?;
        match &var.storage {
            VarStorage::Stays { open, .. } => {
                open.store(true, Ordering::Relaxed);
                Ok(gradients.lock().grad(var.grad)?)
            }
            VarStorage::Transient(weight) => weight.gradient(),
        }
    }

    /// Says that the backend was given the work that writes the gradient of variable `index`.
    pub(crate) fn push_gradient(
        &self,
        gradients: &Gradients<B>,
        index: usize,
    ) -> Result<(), ModelError> {
        let var = self.var(index)?;
        match &var.storage {
            VarStorage::Stays { .. } => Ok(gradients.lock().push(var.grad)?),
            VarStorage::Transient(weight) => weight.push_gradient(),
        }
    }

    fn var(&self, index: usize) -> Result<&PlainVar<B>, ModelError> {
        let len = self.vars.len();
        let found = self.vars.get(index);
        found.ok_or(ModelError::NoSuchVar { index, len })
    }

    /// Adds the full gradient of variable `index`, which is on the host.
    pub(crate) fn add_gradient(
        &self,
        gradients: &Gradients<B>,
        index: usize,
        values: &[f32],
    ) -> Result<(), ModelError> {
        if let FullValues::Backend { .. } = self.values {
            return Err(ModelError::VarsOnBackend);
        }
        let var = self.var(index)?;
        let shape = var.full;
        if values.len() != shape.elements() {
            let found = values.len();
            return Err(ModelError::GradientLength { found, shape });
        }
        match &var.storage {
            VarStorage::Stays { open, .. } => {
                // Also one that fails may have added something.
                open.store(true, Ordering::Relaxed);
                Ok(gradients.add(var.grad, values)?)
            }
            VarStorage::Transient(weight) => weight.add_gradient(values),
        }
    }

    /// Gathers the f32 shards of those that stay into the buffers of the backend, if they are there. Collective.
    pub(crate) fn refresh(&mut self) -> Result<(), ModelError> {
        let FullValues::Backend { buffers, decodes } = &mut self.values else {
            return Ok(());
        };
        let filled = self.group.unshard(Phase::Forward);
        let filled = filled.and_then(|()| fill(&self.backend, &self.group, buffers, decodes));
        // Also after an error: what this rank alone holds, it would not gather with the others.
        self.group.release();
        Ok(or_abort(&**self.group.comm(), filled)?)
    }

    /// Gathers the f32 shards of those that stay and gives `set` the full values of each variable. Collective.
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
        if let FullValues::Backend { .. } = self.values {
            return Err(ModelError::VarsOnBackend.into());
        }
        let failed = |error| E::from(ModelError::Shard(error));
        self.group.unshard(Phase::Forward).map_err(failed)?;
        for (index, var) in self.vars.iter().enumerate() {
            let VarStorage::Stays { number, .. } = var.storage else {
                continue;
            };
            let tensor = self.group.tensor(number).map_err(failed)?;
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
