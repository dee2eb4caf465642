//! [`AdamWBuilder`]: what an [`AdamW`] is made from.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;
use lowp_kernels::{Backend, KernelError, Moments, Source, Work};
use lowp_shard::{
    CastInto, CastItem, Communicator, Mesh, Requantize, ScaleBook, ScaleBookBuilder, ShardError,
    or_abort,
};

use crate::adamw::AdamW;
use crate::param::{FloatDtype, Param, ParamId, ParamSpec};
use crate::work::{Passes, StepWork};
use crate::{Group, OptimError};

/// Collects groups and parameters; recipes and plain parameters mix in any order.
#[derive(Debug)]
pub struct AdamWBuilder<B: Backend> {
    id: u64,
    backend: B,
    /// Streams that wrote masters of earlier parameters.
    earlier: Vec<B>,
    world: Arc<dyn Communicator<B>>,
    mesh: Mesh,
    scales: ScaleBookBuilder,
    groups: Vec<Group>,
    params: Vec<Param<B>>,
}

impl<B: Backend> AdamWBuilder<B> {
    /// An optimizer with no groups and no parameters yet, whose rows the ranks of `world` share out. It
    /// works on the communicator's stream.
    pub fn new(world: impl Into<Arc<dyn Communicator<B>>>) -> Self {
        static OPTIMIZERS: AtomicU64 = AtomicU64::new(0);
        let world = world.into();
        Self {
            id: OPTIMIZERS.fetch_add(1, Ordering::Relaxed),
            backend: world.backend().clone(),
            earlier: Vec::new(),
            mesh: Mesh::sharded(world.world_size()),
            world,
            scales: ScaleBookBuilder::default(),
            groups: Vec::new(),
            params: Vec::new(),
        }
    }

    /// Works on the stream of `backend`, a handle of the communicator's device, beside the communicator's.
    #[must_use]
    pub fn on(self, backend: &B) -> Self {
        let backend = backend.clone();
        let earlier = [self.earlier, vec![self.backend]].concat();
        Self {
            backend,
            earlier,
            ..self
        }
    }

    /// Has the ranks of the world hold `mesh.replicate` replicas of `mesh.shard` shards; the default is one
    /// replica.
    #[must_use]
    pub fn mesh(self, mesh: Mesh) -> Self {
        Self { mesh, ..self }
    }

    /// Where scales of other tensors, such as activations, are registered: they are agreed on together with
    /// those of the parameters.
    pub fn scales(&mut self) -> &mut ScaleBookBuilder {
        &mut self.scales
    }

    /// Adds a group and returns its index.
    pub fn group(&mut self, group: Group) -> usize {
        self.groups.push(group);
        self.groups.len() - 1
    }

    /// Adds a parameter whose low-precision form is `tensor`, this rank's shard (any recipe; the
    /// plain recipes keep it in high precision).
    ///
    /// # Errors
    /// A name twice, an unknown group, or master values that do not fit the shard.
    pub fn param(
        &mut self,
        tensor: &impl CastInto<B>,
        spec: ParamSpec,
    ) -> Result<ParamId, OptimError> {
        let (into, tensor) = (tensor, tensor.tensor());
        let ParamSpec {
            name,
            group,
            master,
            grad,
            moments,
        } = spec;
        let (len, groups) = (tensor.shape().elements(), self.groups.len());
        if self.params.iter().any(|p| p.name == name) {
            return Err(OptimError::DuplicateParam { name });
        }
        if group >= groups {
            return Err(OptimError::NoGroup {
                name,
                group,
                groups,
            });
        }
        if master.len() != len {
            let (what, found) = ("the master", master.len());
            return Err(OptimError::Length {
                name,
                what,
                found,
                needed: len,
            });
        }
        let backend = &self.backend;
        let master = backend.upload(&master)?;
        let moments = match moments {
            FloatDtype::F32 => Moments::F32 {
                exp_avg: backend.alloc::<f32>(len)?,
                exp_avg_sq: backend.alloc::<f32>(len)?,
            },
            FloatDtype::Bf16 => Moments::Bf16 {
                exp_avg: backend.alloc::<bf16>(len)?,
                exp_avg_sq: backend.alloc::<bf16>(len)?,
            },
        };
        let grad = match grad {
            FloatDtype::F32 => Source::F32(backend.alloc::<f32>(len)?),
            FloatDtype::Bf16 => Source::Bf16(backend.alloc::<bf16>(len)?),
        };
        let item = CastItem::rows(into, Source::F32(master.clone()), &mut self.scales);
        let param = Param {
            name,
            group,
            len,
            master,
            moments,
            grad,
            item,
            ready: false,
            incoming: None,
        };
        self.params.push(param);
        Ok(ParamId {
            optimizer: self.id,
            index: self.params.len() - 1,
        })
    }

    /// Plans the step, compares the parameters over the ranks, and casts the masters for the first time.
    /// Every rank must call it.
    ///
    /// # Errors
    /// As [`AdamWBuilder::build_uncast`].
    pub fn build(self) -> Result<AdamW<B>, OptimError> {
        let adamw = self.build_uncast()?;
        adamw.calibrate()?;
        Ok(adamw)
    }

    /// Plans the step: one job per parameter over buffers that no other job writes, so every
    /// parameter is updated exactly once. Compares the parameters over the ranks. The rows are not cast:
    /// they hold the bytes of the masters already, or [`AdamW::calibrate`] follows. Every rank must call it.
    ///
    /// # Errors
    /// Hyperparameters out of range, buffers that two parameters share, ingredients without a kernel, a
    /// mesh of another size than the world, or ranks with other parameters or groups.
    pub fn build_uncast(self) -> Result<AdamW<B>, OptimError> {
        let world = Arc::clone(&self.world);
        let adamw = or_abort(&*world, self.plan())?;
        world
            .control()
            .agree("the parameters of the optimizer", &adamw.describe())?;
        Ok(adamw)
    }

    fn plan(self) -> Result<AdamW<B>, OptimError> {
        let Self {
            id,
            backend,
            earlier,
            world,
            mesh,
            scales,
            groups,
            params,
        } = self;
        if mesh.world() != world.world_size() {
            return Err(ShardError::MeshWorld {
                replicate: mesh.replicate,
                shard: mesh.shard,
                world: world.world_size(),
            }
            .into());
        }
        for (index, group) in groups.iter().enumerate() {
            group.check(index)?;
        }
        for stream in &earlier {
            backend.wait_for(stream)?;
        }
        let book = Arc::new(scales.build(&backend)?);
        let items: Vec<CastItem<B>> = params.iter().map(|p| p.item.clone()).collect();
        let requantize = Requantize::new(&backend, &book, &items).map_err(|error| match error {
            ShardError::Kernel(KernelError::Aliased { .. }) => {
                shared_buffer(&backend, &book, &params).unwrap_or(error.into())
            }
            error => error.into(),
        })?;
        let update = params.iter().map(|p| p.update(&groups, &book));
        let late = params.iter().filter(|p| p.item.needs_agreement());
        let passes = Passes {
            update: update.collect::<Result<_, ShardError>>()?,
            second: late
                .map(|p| p.item.encode_job(&book))
                .collect::<Result<_, _>>()?,
        };
        let grads: Vec<Source<B>> = params.iter().map(|p| p.grad.clone()).collect();
        let place = (&backend, &world, mesh);
        let work = StepWork::new(place, &book, &grads, groups.len(), passes)?;
        Ok(AdamW {
            id,
            backend,
            world,
            mesh,
            book,
            groups,
            params,
            requantize,
            work,
            graph: None,
            number: 0,
        })
    }
}

/// The first two parameters that write the same buffer.
fn shared_buffer<B: Backend>(
    backend: &B,
    book: &ScaleBook<B>,
    params: &[Param<B>],
) -> Option<OptimError> {
    let clash = |of: &[&Param<B>]| {
        let casts: Result<Vec<_>, ShardError> =
            of.iter().map(|p| p.item.encode_job(book)).collect();
        let planned = casts.map(|casts| backend.plan(Work::Encode(casts)));
        matches!(planned, Ok(Err(KernelError::Aliased { .. })))
    };
    for (index, second) in params.iter().enumerate() {
        let first = if clash(&[second]) {
            Some(second)
        } else {
            params[..index].iter().find(|first| clash(&[first, second]))
        };
        if let Some(first) = first {
            return Some(OptimError::SharedBuffer {
                first: first.name.clone(),
                second: second.name.clone(),
            });
        }
    }
    None
}
