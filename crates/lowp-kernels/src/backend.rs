//! The [`Backend`] trait: buffers and planned work.

use std::fmt::Debug;
use std::ops::Range;

use half::bf16;

use crate::cpu::zeroed;
use crate::{KernelError, StepScalars, Work};

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

    /// Runs planned work with scalars that lie in a buffer of the device by then, as
    /// [`StepScalars::to_bytes`] lays them out: those that [`crate::StepScalarsJob`] made. The plan must
    /// not write the buffer.
    ///
    /// # Errors
    /// A buffer of a length that no scalars have, of fewer groups than the plan uses, or that does not
    /// begin at a multiple of 8 bytes on a device; or a device failure.
    fn run_with(&self, plan: &Self::Plan, scalars: &Self::Buffer<u8>) -> Result<(), KernelError>;

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
    /// The device failed, or the host has no room.
    fn download<T: Element>(&self, buffer: &Self::Buffer<T>) -> Result<Vec<T>, KernelError> {
        let mut values = zeroed(self.len(buffer))?;
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
