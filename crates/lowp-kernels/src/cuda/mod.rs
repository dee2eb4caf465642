//! The CUDA backend: device memory, and one launch per planned operation.
//!
//! Work is planned into a table that stays on the device. A run writes the scalars of the step if
//! they changed and launches one kernel over the table, whatever the number of jobs in it, on the
//! stream of the [`Cuda`] handle. [`CudaGraph`] captures runs of several plans and replays them.
//!
//! Nothing waits for the device but [`Backend::read`], [`Backend::write`], [`Backend::plan`] (each
//! moves host memory that its caller may change next), [`Cuda::synchronize`], and the drop of the last
//! handle of a stream. Work of one handle runs in order. Between handles the caller makes the order:
//! [`Cuda::wait_for`].
//!
//! A process has one device per ordinal, which all handles share. Memory is freed behind the work of all of
//! them, in the order of the stream that it was allocated on. Memory of others goes back to them when all
//! streams have passed its last use; no drop of a buffer or a plan waits for that.

use std::ops::Range;

use cudarc::driver::result;

use crate::check::range;
use crate::{Backend, Element, KernelError, StepScalars, Work};

mod buffer;
mod cleanup;
mod deferred;
mod device;
mod geometry;
mod graph;
mod launch;
mod lower;
mod module;
mod plan;
mod queue;
mod registry;
mod step;
mod table;

pub use buffer::CudaBuffer;
pub use device::{Cuda, CudaMark};
pub use graph::{CudaGraph, CudaRecorder};
pub use plan::CudaPlan;

impl Backend for Cuda {
    type Buffer<T: Element> = CudaBuffer<T>;
    type Plan = CudaPlan;

    fn alloc<T: Element>(&self, len: usize) -> Result<CudaBuffer<T>, KernelError> {
        CudaBuffer::zeros(self, len)
    }

    fn len<T: Element>(&self, buffer: &CudaBuffer<T>) -> usize {
        buffer.len()
    }

    fn span<T: Element>(&self, buffer: &CudaBuffer<T>) -> Range<usize> {
        buffer.span()
    }

    fn write<T: Element>(
        &self,
        buffer: &CudaBuffer<T>,
        start: usize,
        values: &[T],
    ) -> Result<(), KernelError> {
        range("write", start, values.len(), buffer.len())?;
        self.own(buffer)?;
        buffer.upload(self, start, values)
    }

    fn read<T: Element>(
        &self,
        buffer: &CudaBuffer<T>,
        start: usize,
        values: &mut [T],
    ) -> Result<(), KernelError> {
        range("read", start, values.len(), buffer.len())?;
        self.own(buffer)?;
        buffer.download(self, start, values)
    }

    fn copy<T: Element>(
        &self,
        from: &CudaBuffer<T>,
        from_range: Range<usize>,
        to: &CudaBuffer<T>,
        start: usize,
    ) -> Result<(), KernelError> {
        let count = from_range.len();
        range("copy from", from_range.start, count, from.len())?;
        range("copy to", start, count, to.len())?;
        self.own(from)?;
        self.own(to)?;
        let (a, b) = (from.span(), to.span());
        if a.start < b.end && b.start < a.end {
            let what = "the destination of a copy".to_owned();
            return Err(KernelError::Aliased { what, other: 0 });
        }
        to.copy_from(self, start, from, from_range.start, count)
    }

    fn clear<T: Element>(&self, buffer: &CudaBuffer<T>) -> Result<(), KernelError> {
        self.own(buffer)?;
        buffer.fill_zero(self)
    }

    fn plan(&self, work: Work<Self>) -> Result<CudaPlan, KernelError> {
        CudaPlan::new(self, work)
    }

    fn run(&self, plan: &CudaPlan, scalars: &StepScalars) -> Result<(), KernelError> {
        plan.run(self, scalars)
    }

    fn run_with(&self, plan: &CudaPlan, scalars: &CudaBuffer<u8>) -> Result<(), KernelError> {
        plan.run_with(self, scalars)
    }

    fn wait_for(&self, other: &Self) -> Result<(), KernelError> {
        Cuda::wait_for(self, other)
    }
}

/// Names the driver call that failed.
fn failed(call: &'static str) -> impl Fn(result::DriverError) -> KernelError {
    move |error| {
        let text = |text: Result<&std::ffi::CStr, _>| {
            text.map_or("unknown error".to_owned(), |text: &std::ffi::CStr| {
                text.to_string_lossy().into_owned()
            })
        };
        let why = format!(
            "{} ({})",
            text(error.error_string()),
            text(error.error_name())
        );
        KernelError::Device { call, why }
    }
}
