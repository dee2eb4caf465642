//! Parameters and their builder: what an [`AdamW`] is made from.

use std::sync::atomic::{AtomicU64, Ordering};

use half::bf16;
use lowp_format::Recipe;
use lowp_kernels::{AdamwJob, Backend, KernelError, Moments, Source, Work};
use lowp_shard::{CastInto, CastItem, Requantize, ScaleBook, ScaleBookBuilder, ShardError};

use crate::adamw::AdamW;
use crate::clip::NormPlan;
use crate::{Group, OptimError};

/// Storage of gradients and moments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FloatDtype {
    /// binary32.
    #[default]
    F32,
    /// bfloat16.
    Bf16,
}

/// One parameter as this rank sees it.
#[derive(Clone, Debug, PartialEq)]
pub struct ParamSpec {
    /// Unique name.
    pub name: String,
    /// Index returned by [`AdamWBuilder::group`].
    pub group: usize,
    /// Initial fp32 master values of this rank's rows, row-major.
    pub master: Vec<f32>,
    /// Gradient storage.
    pub grad: FloatDtype,
    /// Moment storage.
    pub moments: FloatDtype,
}

impl ParamSpec {
    /// A parameter with f32 gradients and moments.
    pub fn new(name: impl Into<String>, group: usize, master: Vec<f32>) -> Self {
        Self {
            name: name.into(),
            group,
            master,
            grad: FloatDtype::F32,
            moments: FloatDtype::F32,
        }
    }
}

/// The name of a parameter in its optimizer. Other optimizers refuse it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId {
    pub(crate) optimizer: u64,
    pub(crate) index: usize,
}

/// A registered parameter: its buffers on the device.
#[derive(Debug)]
pub(crate) struct Param<B: Backend> {
    pub(crate) name: String,
    pub(crate) group: usize,
    pub(crate) len: usize,
    pub(crate) master: B::Buffer<f32>,
    pub(crate) moments: Moments<B>,
    pub(crate) grad: Source<B>,
    pub(crate) item: CastItem<B>,
    pub(crate) ready: bool,
}

impl<B: Backend> Param<B> {
    /// The first pass of a step.
    fn update(&self, groups: &[Group], book: &ScaleBook<B>) -> Result<AdamwJob<B>, ShardError> {
        let observed = |slot| book.observed_slot(slot);
        let encode = (!self.item.needs_agreement()).then(|| self.item.encode_job(book));
        Ok(AdamwJob {
            master: self.master.clone(),
            moments: self.moments.clone(),
            grad: self.grad.clone(),
            group: self.group,
            mode: groups[self.group].mode,
            source_rounding: self.item.source_rounding,
            amax: self.item.slot.map(observed).transpose()?,
            encode: encode.transpose()?.map(Box::new),
        })
    }
}

/// Collects groups and parameters; recipes and plain parameters mix in any order.
#[derive(Debug)]
pub struct AdamWBuilder<B: Backend> {
    id: u64,
    /// The builder of the scales, from the first parameter that has one.
    book: Option<u64>,
    backend: B,
    groups: Vec<Group>,
    params: Vec<Param<B>>,
}

impl<B: Backend> AdamWBuilder<B> {
    /// An optimizer on `backend` with no groups and no parameters yet.
    pub fn new(backend: &B) -> Self {
        static OPTIMIZERS: AtomicU64 = AtomicU64::new(0);
        Self {
            id: OPTIMIZERS.fetch_add(1, Ordering::Relaxed),
            book: None,
            backend: backend.clone(),
            groups: Vec::new(),
            params: Vec::new(),
        }
    }

    /// Adds a group and returns its index.
    pub fn group(&mut self, group: Group) -> usize {
        self.groups.push(group);
        self.groups.len() - 1
    }

    /// Adds a parameter whose low-precision form is `tensor`, this rank's shard (any recipe; the
    /// plain recipes keep it in high precision). Its scale is registered in `book`.
    ///
    /// # Errors
    /// A name twice, an unknown group, master values that do not fit the shard, or another `book`
    /// than that of earlier parameters.
    pub fn param(
        &mut self,
        book: &mut ScaleBookBuilder,
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
        if tensor.recipe().scale_source().observes_tensor_amax()
            && *self.book.get_or_insert(book.id()) != book.id()
        {
            let what = format!("parameter '{name}'");
            return Err(OptimError::OtherBook { what });
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
        let item = CastItem::rows(into, Source::F32(master.clone()), book);
        let param = Param {
            name,
            group,
            len,
            master,
            moments,
            grad,
            item,
            ready: false,
        };
        self.params.push(param);
        Ok(ParamId {
            optimizer: self.id,
            index: self.params.len() - 1,
        })
    }

    /// Plans the step: one job per parameter over buffers that no other job writes, so every
    /// parameter is updated exactly once. `book` is the built book that the parameters were
    /// registered in.
    ///
    /// # Errors
    /// Hyperparameters out of range, another book, buffers that two parameters share, or
    /// ingredients without a kernel.
    pub fn finish(self, book: &ScaleBook<B>) -> Result<AdamW<B>, OptimError> {
        let Self {
            id,
            book: registered,
            backend,
            groups,
            params,
        } = self;
        for (index, group) in groups.iter().enumerate() {
            group.check(index)?;
        }
        if registered.is_some_and(|id| id != book.id()) {
            let what = "the scales of the parameters".to_owned();
            return Err(OptimError::OtherBook { what });
        }
        let items: Vec<CastItem<B>> = params.iter().map(|p| p.item.clone()).collect();
        let requantize = Requantize::new(&backend, book, &items).map_err(|error| match error {
            ShardError::Kernel(KernelError::Aliased { .. }) => {
                shared_buffer(&backend, book, &params).unwrap_or(error.into())
            }
            error => error.into(),
        })?;
        let update = params.iter().map(|p| p.update(&groups, book));
        let update = update.collect::<Result<_, ShardError>>()?;
        let late = params.iter().filter(|p| p.item.needs_agreement());
        let second = late.map(|p| p.item.encode_job(book));
        let second = second.collect::<Result<_, _>>()?;
        let grads: Vec<Source<B>> = params.iter().map(|p| p.grad.clone()).collect();
        Ok(AdamW {
            id,
            book: book.id(),
            update: backend.plan(Work::Adamw(update))?,
            second: backend.plan(Work::Encode(second))?,
            norm: NormPlan::new(&backend, &grads)?,
            requantize,
            backend,
            groups,
            params,
            steps: 0,
            skipped: 0,
            compared: false,
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
