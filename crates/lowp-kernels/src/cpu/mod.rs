//! The CPU backend: host memory, threads, and loops compiled for the machine's vector width.

use std::ops::Range;

use crate::check::range;
use crate::{Backend, Element, KernelError, StepScalars, Work};

mod access;
mod bands;
mod buffer;
mod generic;
mod isa;
mod lanes;
mod layout;
mod memory;
mod plan;
mod threads;

pub(crate) use generic::flat::touched;
pub(crate) use generic::turn::Turnable;
#[cfg(test)]
pub(crate) use isa::{Isa, Kernel};
pub(crate) use lanes::{LANES, Lanes, Line};
pub(crate) use memory::zeroed;

pub use buffer::{CpuBuffer, CpuRead, CpuWrite};
pub use plan::CpuPlan;

/// The CPU. Work runs on as many threads as the current rayon pool has (`RAYON_NUM_THREADS`,
/// `ThreadPool::install`), which are threads of this crate; the bits do not depend on their number.
///
/// Runs may share buffers wherever they are called from, rayon tasks included: one waits for the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu;

impl Backend for Cpu {
    type Buffer<T: Element> = CpuBuffer<T>;
    type Plan = CpuPlan;

    fn alloc<T: Element>(&self, len: usize) -> Result<CpuBuffer<T>, KernelError> {
        Ok(CpuBuffer::new(memory::zeros(len)?))
    }

    fn len<T: Element>(&self, buffer: &CpuBuffer<T>) -> usize {
        buffer.len()
    }

    fn span<T: Element>(&self, buffer: &CpuBuffer<T>) -> Range<usize> {
        buffer.span()
    }

    fn write<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        start: usize,
        values: &[T],
    ) -> Result<(), KernelError> {
        let range = range("write", start, values.len(), buffer.len())?;
        buffer.write()?[range].copy_from_slice(values);
        Ok(())
    }

    fn read<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        start: usize,
        values: &mut [T],
    ) -> Result<(), KernelError> {
        let range = range("read", start, values.len(), buffer.len())?;
        values.copy_from_slice(&buffer.read()?[range]);
        Ok(())
    }

    fn copy<T: Element>(
        &self,
        from: &CpuBuffer<T>,
        from_range: Range<usize>,
        to: &CpuBuffer<T>,
        start: usize,
    ) -> Result<(), KernelError> {
        let count = from_range.len();
        let from_range = range("copy from", from_range.start, count, from.len())?;
        let to_range = range("copy to", start, count, to.len())?;
        if from.ptr_eq(to) {
            let what = "the destination of a copy".to_owned();
            return Err(KernelError::Aliased { what, other: 0 });
        }
        // Locks are taken in the order in which plans take theirs, so nobody waits in a circle.
        let (source, mut target);
        if from.address() < to.address() {
            source = from.read()?;
            target = to.write()?;
        } else {
            target = to.write()?;
            source = from.read()?;
        }
        target[to_range].copy_from_slice(&source[from_range]);
        Ok(())
    }

    fn clear<T: Element>(&self, buffer: &CpuBuffer<T>) -> Result<(), KernelError> {
        buffer.write()?.fill(T::default());
        Ok(())
    }

    fn plan(&self, work: Work<Self>) -> Result<CpuPlan, KernelError> {
        CpuPlan::new(work)
    }

    fn run(&self, plan: &CpuPlan, scalars: &StepScalars) -> Result<(), KernelError> {
        plan.run(scalars)
    }

    fn run_with(&self, plan: &CpuPlan, scalars: &CpuBuffer<u8>) -> Result<(), KernelError> {
        // Copied, so that no two buffers are locked at a time outside of the plan's order.
        let scalars = StepScalars::from_bytes(&scalars.read()?)?;
        plan.run(&scalars)
    }

    fn wait_for(&self, _other: &Self) -> Result<(), KernelError> {
        Ok(())
    }
}
