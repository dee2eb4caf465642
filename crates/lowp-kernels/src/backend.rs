//! The [`Backend`] trait: buffers, planned work, and the scalars of a step.

use std::fmt::Debug;
use std::ops::Range;

use half::bf16;

use crate::{KernelError, Work};

mod sealed {
    pub trait Sealed {}
    impl Sealed for u8 {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
}

/// A plain value that buffers are made of: `u8`, `f32` or `bf16`.
pub trait Element:
    Copy + Debug + Default + PartialEq + Send + Sync + sealed::Sealed + 'static
{
}
impl Element for u8 {}
impl Element for f32 {}
impl Element for bf16 {}

/// A device that holds buffers and runs jobs.
///
/// Buffers are shared handles: cloning one clones the handle, not the content. A plan keeps the
/// handles of its jobs, so their addresses are fixed for its life.
pub trait Backend: Clone + Debug + Send + Sync + 'static {
    /// A buffer of `T`.
    type Buffer<T: Element>: Clone + Debug + Send + Sync + 'static;
    /// Work that was checked and laid out once.
    type Plan: Debug + Send + Sync + 'static;

    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// The device has no room.
    fn alloc<T: Element>(&self, len: usize) -> Result<Self::Buffer<T>, KernelError>;

    /// Number of entries of `buffer`.
    fn len<T: Element>(&self, buffer: &Self::Buffer<T>) -> usize;

    /// The addresses of `buffer`'s memory, on the device that holds it. Handles whose spans overlap
    /// share memory; an empty buffer has an empty span.
    fn span<T: Element>(&self, buffer: &Self::Buffer<T>) -> Range<usize>;

    /// Copies host values into `buffer` from entry `start` on.
    ///
    /// # Errors
    /// The range lies outside the buffer.
    fn write<T: Element>(
        &self,
        buffer: &Self::Buffer<T>,
        start: usize,
        values: &[T],
    ) -> Result<(), KernelError>;

    /// Copies entries of `buffer` from `start` on to the host.
    ///
    /// # Errors
    /// The range lies outside the buffer.
    fn read<T: Element>(
        &self,
        buffer: &Self::Buffer<T>,
        start: usize,
        values: &mut [T],
    ) -> Result<(), KernelError>;

    /// Copies `range` of `from` into `to` at entry `start`. The buffers must differ.
    ///
    /// # Errors
    /// A range lies outside its buffer.
    fn copy<T: Element>(
        &self,
        from: &Self::Buffer<T>,
        range: Range<usize>,
        to: &Self::Buffer<T>,
        start: usize,
    ) -> Result<(), KernelError>;

    /// Sets every entry of `buffer` to zero.
    ///
    /// # Errors
    /// The device failed.
    fn clear<T: Element>(&self, buffer: &Self::Buffer<T>) -> Result<(), KernelError>;

    /// Checks `work` and lays it out. Everything that can be wrong is found here.
    ///
    /// # Errors
    /// Buffers of the wrong length, outputs that alias, or ingredients without a kernel.
    fn plan(&self, work: Work<Self>) -> Result<Self::Plan, KernelError>;

    /// Runs planned work.
    ///
    /// # Errors
    /// Scalars that do not fit the plan, or a device failure.
    fn run(&self, plan: &Self::Plan, scalars: &StepScalars) -> Result<(), KernelError>;

    /// Makes later work of this handle follow what `other`, a handle of the same device, was given so
    /// far. Handles whose work is done when a call returns have nothing to wait for.
    ///
    /// # Errors
    /// The handles are of different devices, or the device failed.
    fn wait_for(&self, other: &Self) -> Result<(), KernelError>;

    /// A buffer with the content of `values`.
    ///
    /// # Errors
    /// The device has no room.
    fn upload<T: Element>(&self, values: &[T]) -> Result<Self::Buffer<T>, KernelError> {
        let buffer = self.alloc(values.len())?;
        self.write(&buffer, 0, values)?;
        Ok(buffer)
    }

    /// The content of `buffer`.
    ///
    /// # Errors
    /// The device failed.
    fn download<T: Element>(&self, buffer: &Self::Buffer<T>) -> Result<Vec<T>, KernelError> {
        let mut values = vec![T::default(); self.len(buffer)];
        self.read(buffer, 0, &mut values)?;
        Ok(values)
    }

    /// Plans and runs `work` once.
    ///
    /// # Errors
    /// As [`Backend::plan`] and [`Backend::run`].
    fn once(&self, work: Work<Self>) -> Result<(), KernelError> {
        let plan = self.plan(work)?;
        self.run(&plan, &StepScalars::default())
    }
}

/// The scalars of AdamW for one parameter group (docs/numerics.md 12).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamScalars {
    /// Learning rate.
    pub lr: f32,
    /// Decay of the first moment.
    pub beta1: f32,
    /// Decay of the second moment.
    pub beta2: f32,
    /// Added to the root of the second moment.
    pub eps: f32,
    /// Weight decay.
    pub weight_decay: f32,
    /// `f32(1 - beta1^step)`, the power in binary64; 1 without bias correction.
    pub correction1: f32,
    /// `f32(1 - beta2^step)`, the power in binary64; 1 without bias correction.
    pub correction2: f32,
}

/// What language models are mostly trained with: lr 1e-3, betas 0.9 and 0.95, eps 1e-8, weight decay
/// 0.1; no bias correction.
impl Default for AdamScalars {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            correction1: 1.0,
            correction2: 1.0,
        }
    }
}

impl AdamScalars {
    /// Sets both bias corrections for `step`, which starts at 1.
    #[must_use]
    pub fn at_step(self, step: u64) -> Self {
        let correction = |beta: f32| (1.0 - f64::from(beta).powf(step as f64)) as f32;
        Self {
            correction1: correction(self.beta1),
            correction2: correction(self.beta2),
            ..self
        }
    }
}

/// What changes from run to run of one plan.
#[derive(Clone, Debug, PartialEq)]
pub struct StepScalars {
    /// One set per parameter group.
    pub adam: Vec<AdamScalars>,
    /// Gradients are multiplied by this before use (clipping, loss scale); 1 leaves their bits.
    pub grad_scale: f32,
    /// Separates the random numbers of this run from those of others with the same key.
    pub random_step: u64,
    /// The run changes nothing: the step of a gradient that is not finite.
    pub skip: bool,
}

impl Default for StepScalars {
    fn default() -> Self {
        Self {
            adam: Vec::new(),
            grad_scale: 1.0,
            random_step: 0,
            skip: false,
        }
    }
}
