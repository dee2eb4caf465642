//! The CPU backend: host memory, threads, and loops compiled for the machine's vector width.

use std::ops::Range;

use crate::check::range;
use crate::host::zeroed;
use crate::{Backend, Element, KernelError, Pending, StepScalars, Work};

mod access;
mod bands;
mod buffer;
mod element;
mod generic;
mod graph;
mod ingredients;
mod layout;
mod memory;
mod plan;
mod round;
mod scaling;
mod threads;

pub use buffer::{CpuBuffer, CpuRead, CpuWrite};
pub use graph::CpuGraph;
#[cfg(feature = "cuda")]
pub(crate) use graph::nothing as nothing_captured;
pub use plan::CpuPlan;

/// The CPU. Work runs on as many threads as the current rayon pool has (`RAYON_NUM_THREADS`,
/// `ThreadPool::install`), which are threads of this crate; the bits do not depend on their number.
///
/// Runs may share buffers wherever they are called from, rayon tasks included: one waits for the other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cpu;

impl Cpu {
    /// Has another library do `work` now or, where this thread captures ([`Backend::capture`]), at every launch of the graph.
    ///
    /// # Errors
    /// Those of `work`.
    pub fn foreign_work(
        &self,
        work: impl Fn() -> Result<(), KernelError> + Send + Sync + 'static,
    ) -> Result<(), KernelError> {
        graph::call(work)
    }
}

impl crate::sealed::Backend for Cpu {}

impl Backend for Cpu {
    type Buffer<T: Element> = CpuBuffer<T>;
    type Plan = CpuPlan;
    /// Work is done when a call returns: every point has been passed.
    type Event = ();
    type Graph = CpuGraph;

    fn alloc<T: Element>(&self, len: usize) -> Result<CpuBuffer<T>, KernelError> {
        graph::not_in_capture("an allocation")?;
        Ok(CpuBuffer::new(memory::zeros(len)?))
    }

    fn len<T: Element>(&self, buffer: &CpuBuffer<T>) -> usize {
        buffer.len()
    }

    fn span<T: Element>(&self, buffer: &CpuBuffer<T>) -> Range<usize> {
        buffer.span()
    }

    fn view<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        view: Range<usize>,
    ) -> Result<CpuBuffer<T>, KernelError> {
        range("a view", view.start, view.len(), buffer.len())?;
        Ok(buffer.view(view))
    }

    fn owns<T: Element>(&self, _buffer: &CpuBuffer<T>) -> Result<(), KernelError> {
        Ok(())
    }

    fn adopt<T: Element>(&self, values: Vec<T>) -> Result<CpuBuffer<T>, KernelError> {
        Ok(CpuBuffer::from_vec(values))
    }

    fn write<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        start: usize,
        values: &[T],
    ) -> Result<(), KernelError> {
        graph::not_in_capture("a write from the host")?;
        let range = range("write", start, values.len(), buffer.len())?;
        threads::copy_values(values, &mut buffer.write()?[range])
    }

    fn read<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        start: usize,
        values: &mut [T],
    ) -> Result<(), KernelError> {
        graph::not_in_capture("a read to the host")?;
        let range = range("read", start, values.len(), buffer.len())?;
        values.copy_from_slice(&buffer.read()?[range]);
        Ok(())
    }

    fn start_read<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        entries: Range<usize>,
    ) -> Result<Pending<T>, KernelError> {
        graph::not_in_capture("a read to the host")?;
        let entries = range("read", entries.start, entries.len(), buffer.len())?;
        let mut values = zeroed(entries.len())?;
        values.copy_from_slice(&buffer.read()?[entries]);
        Ok(Pending::new(values))
    }

    fn start_read_bytes<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        entries: Range<usize>,
    ) -> Result<Pending<u8>, KernelError> {
        graph::not_in_capture("a read to the host")?;
        let entries = range("read", entries.start, entries.len(), buffer.len())?;
        Ok(Pending::new(T::to_bytes(&buffer.read()?[entries])))
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
        let (from, to) = (from.view(from_range), to.view(to_range));
        let (source, target) = (from.span(), to.span());
        if source.start < target.end && target.start < source.end {
            let what = "the destination of a copy".to_owned();
            return Err(KernelError::Aliased { what, other: 0 });
        }
        graph::call(move || buffer::copy(&from, &to))
    }

    fn clear<T: Element>(&self, buffer: &CpuBuffer<T>) -> Result<(), KernelError> {
        let buffer = buffer.clone();
        graph::call(move || {
            buffer.write()?.fill(T::default());
            Ok(())
        })
    }

    fn plan(&self, work: Work<Self>) -> Result<CpuPlan, KernelError> {
        graph::not_in_capture("planning")?;
        CpuPlan::new(work)
    }

    fn run(&self, plan: &CpuPlan, scalars: &StepScalars) -> Result<(), KernelError> {
        plan.fits(scalars.groups.len())?;
        if !graph::is_capturing() {
            return plan.run(scalars);
        }
        let (plan, scalars) = (plan.clone(), scalars.clone());
        graph::call(move || plan.run(&scalars))
    }

    fn run_with(&self, plan: &CpuPlan, scalars: &CpuBuffer<u8>) -> Result<(), KernelError> {
        let (plan, scalars) = (plan.clone(), scalars.clone());
        plan.fits(StepScalars::groups_in(scalars.len())?)?;
        graph::call(move || {
            // Copied, so that no two buffers are locked at a time outside of the plan's order.
            let scalars = StepScalars::from_bytes(&scalars.read()?)?;
            plan.run(&scalars)
        })
    }

    fn fork(&self) -> Result<Self, KernelError> {
        graph::not_in_capture("a new stream")?;
        Ok(Self)
    }

    fn record(&self) -> Result<(), KernelError> {
        Ok(())
    }

    fn wait(&self, _event: &()) -> Result<(), KernelError> {
        Ok(())
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        graph::not_in_capture("waiting for work")
    }

    fn capture<E: From<KernelError>>(
        &self,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<CpuGraph, E> {
        CpuGraph::capture(work)
    }

    fn launch(&self, graph: &CpuGraph) -> Result<(), KernelError> {
        graph.launch()
    }
}
