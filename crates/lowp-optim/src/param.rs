//! Parameters and groups: what an [`AdamW`] is built from.

use half::bf16;
use lowp_format::{QuantizedTensor, Recipe};
use lowp_kernels::{AdamMode, AdamScalars, AdamwJob, Backend, Moments, Source, Work};
use lowp_shard::{CastItem, Requantize, ScaleBook, ScaleBookBuilder};

use crate::OptimError;
use crate::adamw::AdamW;
use crate::clip::NormPlan;

/// Hyperparameters of a parameter group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// Base learning rate.
    pub lr: f32,
    /// Decay of the first and second moment.
    pub betas: (f32, f32),
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// Decoupled (AdamW) or added to the gradient (L2).
    pub mode: AdamMode,
    /// Divide moments by `1 - beta^step`.
    pub bias_correction: bool,
}

impl Default for Group {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.95),
            eps: 1e-8,
            weight_decay: 0.1,
            mode: AdamMode::AdamW,
            bias_correction: true,
        }
    }
}

impl Group {
    /// The scalars of `step`, which starts at 1, with the rate multiplied by `lr_factor`.
    pub fn scalars(&self, step: u64, lr_factor: f32) -> AdamScalars {
        let scalars = AdamScalars {
            lr: self.lr * lr_factor,
            beta1: self.betas.0,
            beta2: self.betas.1,
            eps: self.eps,
            weight_decay: self.weight_decay,
            correction1: 1.0,
            correction2: 1.0,
        };
        if self.bias_correction {
            scalars.at_step(step)
        } else {
            scalars
        }
    }
}

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

/// The index of a parameter in its optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ParamId(pub(crate) usize);

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

/// Collects groups and parameters; recipes and plain parameters mix in any order.
#[derive(Debug)]
pub struct AdamWBuilder<B: Backend> {
    backend: B,
    groups: Vec<Group>,
    params: Vec<Param<B>>,
}

impl<B: Backend> AdamWBuilder<B> {
    /// An optimizer on `backend` with no groups and no parameters yet.
    pub fn new(backend: &B) -> Self {
        Self {
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
    /// A name twice, an unknown group, or master values that do not fit the shard.
    pub fn param<R: Recipe>(
        &mut self,
        book: &mut ScaleBookBuilder,
        tensor: &QuantizedTensor<B::Buffer<u8>, R>,
        spec: ParamSpec,
    ) -> Result<ParamId, OptimError> {
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
        let item = CastItem::rows(tensor, Source::F32(master.clone()), book);
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
        Ok(ParamId(self.params.len() - 1))
    }

    /// Plans the step: one job per parameter over buffers that no other job writes, so every
    /// parameter is updated exactly once. `book` is the built book that the parameters were
    /// registered in.
    ///
    /// # Errors
    /// Buffers that two parameters share, or ingredients without a kernel.
    pub fn finish(self, book: &ScaleBook<B>) -> Result<AdamW<B>, OptimError> {
        let Self {
            backend,
            groups,
            params,
        } = self;
        let update = params
            .iter()
            .map(|p| AdamwJob {
                master: p.master.clone(),
                moments: p.moments.clone(),
                grad: p.grad.clone(),
                group: p.group,
                mode: groups[p.group].mode,
                source_rounding: p.item.source_rounding,
                amax: p.item.slot.map(|index| book.observed_slot(index)),
                encode: (!p.item.needs_agreement()).then(|| Box::new(p.item.encode_job(book))),
            })
            .collect();
        let second = params
            .iter()
            .filter(|p| p.item.needs_agreement())
            .map(|p| p.item.encode_job(book))
            .collect();
        let grads: Vec<Source<B>> = params.iter().map(|p| p.grad.clone()).collect();
        let items: Vec<CastItem<B>> = params.iter().map(|p| p.item.clone()).collect();
        Ok(AdamW {
            update: backend.plan(Work::Adamw(update))?,
            second: backend.plan(Work::Encode(second))?,
            norm: NormPlan::new(&backend, &grads)?,
            requantize: Requantize::new(&backend, book, &items)?,
            backend,
            groups,
            params,
            steps: 0,
            skipped: 0,
        })
    }
}
