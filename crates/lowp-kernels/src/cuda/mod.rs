//! The CUDA backend: device memory, and one launch per planned operation.
//!
//! Work is planned into a table that stays on the device. A run writes the scalars of the step if those that the plan reads
//! changed, and launches one kernel over the table, whatever the number of jobs in it, on the
//! stream of the [`Cuda`] handle. A [`CudaGraph`] replays many of them with one call.
//!
//! Nothing waits for the device but [`Backend::read`], [`Backend::plan`], [`Backend::synchronize`],
//! [`crate::Pending::wait`], a [`Backend::write`] with 64 MiB of earlier ones on their way, and the drop of
//! the last handle of a stream. Work of one handle runs in order. Between handles the caller makes the
//! order: [`Backend::wait`], [`Backend::wait_for`].
//!
//! A process has one device per ordinal, which all handles share. Memory is freed after the work of all of
//! them, in the order of the stream that it was allocated on. Memory of others goes back to them when all
//! streams have passed its last use; no drop of a buffer or a plan waits for that. Page-locked memory of the host
//! ([`Backend::with_host_buffers`]) is freed as that of others is given back, in a later call; as the driver frees it, that call waits for all work of
//! the device.

use std::ops::Range;

use self::host_pool::Lender;
use crate::check::range;
use crate::{Backend, Element, KernelError, Pending, StepScalars, Work};

mod buffer;
mod capture;
mod cleanup;
mod current;
mod deferred;
mod device;
mod driver;
mod event;
mod events;
mod graph;
mod handle;
mod host;
mod host_block;
mod host_pool;
mod library;
mod memory;
mod module;
mod open;
mod ops;
mod peers;
mod plan;
mod queue;
mod registry;
mod step;
mod table;

pub use buffer::CudaBuffer;
pub use current::CurrentContext;
pub use event::CudaEvent;
pub use graph::CudaGraph;
pub use handle::{Cuda, CudaMark};
pub use library::CudaLibrary;
pub use module::CudaFunction;
pub use ops::encode_ring::WIDE_TILES;
pub use plan::CudaPlan;

impl crate::sealed::Backend for Cuda {}

impl Backend for Cuda {
    type Buffer<T: Element> = CudaBuffer<T>;
    type Plan = CudaPlan;
    type Event = CudaEvent;
    type Graph = CudaGraph;

    const HAS_HOST_BUFFERS: bool = true;

    fn alloc<T: Element>(&self, len: usize) -> Result<CudaBuffer<T>, KernelError> {
        capture::not_in("an allocation")?;
        CudaBuffer::zeros(self, len)
    }

    fn len<T: Element>(&self, buffer: &CudaBuffer<T>) -> usize {
        buffer.len()
    }

    fn span<T: Element>(&self, buffer: &CudaBuffer<T>) -> Range<usize> {
        buffer.span()
    }

    fn view<T: Element>(
        &self,
        buffer: &CudaBuffer<T>,
        view: Range<usize>,
    ) -> Result<CudaBuffer<T>, KernelError> {
        range("a view", view.start, view.len(), buffer.len())?;
        Ok(buffer.view(view))
    }

    fn owns<T: Element>(&self, buffer: &CudaBuffer<T>) -> Result<(), KernelError> {
        self.own(buffer)
    }

    fn write<T: Element>(
        &self,
        buffer: &CudaBuffer<T>,
        start: usize,
        values: &[T],
    ) -> Result<(), KernelError> {
        capture::not_in("a write from the host")?;
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
        capture::not_in("a read to the host")?;
        range("read", start, values.len(), buffer.len())?;
        self.own(buffer)?;
        buffer.download(self, start, values)
    }

    fn start_read<T: Element>(
        &self,
        buffer: &CudaBuffer<T>,
        entries: Range<usize>,
    ) -> Result<Pending<T>, KernelError> {
        capture::not_in("a read to the host")?;
        range("read", entries.start, entries.len(), buffer.len())?;
        self.own(buffer)?;
        buffer.start_read(self, entries, Lender::Pool)
    }

    fn start_read_bytes<T: Element>(
        &self,
        buffer: &CudaBuffer<T>,
        entries: Range<usize>,
    ) -> Result<Pending<u8>, KernelError> {
        capture::not_in("a read to the host")?;
        range("read", entries.start, entries.len(), buffer.len())?;
        self.own(buffer)?;
        buffer.start_read(self, entries, Lender::Staging)
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
        let (from, to) = (from.view(from_range), to.view(start..start + count));
        let (a, b) = (from.span(), to.span());
        if a.start < b.end && b.start < a.end {
            let what = "the destination of a copy".to_owned();
            return Err(KernelError::Aliased { what, other: 0 });
        }
        to.copy_from(self, &from)
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

    fn with_host_buffers(&self) -> Self {
        Self {
            host_buffers: true,
            ..self.clone()
        }
    }

    fn fork(&self) -> Result<Self, KernelError> {
        self.fork_stream()
    }

    fn record(&self) -> Result<CudaEvent, KernelError> {
        self.queue.record()
    }

    fn wait(&self, event: &CudaEvent) -> Result<(), KernelError> {
        let remedy = "wait for its work with `synchronize`";
        self.device().same(event.device(), "the event", remedy)?;
        self.queue.wait(event)
    }

    fn wait_for(&self, other: &Self) -> Result<(), KernelError> {
        let (what, remedy) = ("the other handle", "wait for its work with `synchronize`");
        self.device().same(other.device(), what, remedy)?;
        // A stream runs in order by itself.
        if self.queue.number == other.queue.number {
            return Ok(());
        }
        self.wait(&other.record()?)
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.finish()
    }

    fn capture<E: From<KernelError>>(
        &self,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<CudaGraph, E> {
        CudaGraph::capture(self, work)
    }

    fn launch(&self, graph: &CudaGraph) -> Result<(), KernelError> {
        graph.launch(self)
    }
}
