//! A backend for tests: the CPU, with handles that queue their work, as the streams of a device
//! do, and that fail at the call that a test chooses.

use std::cell::Cell;
use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lowp_gemm::{GemmError, Multiplies, Products};
use lowp_kernels::{
    Backend, Cpu, CpuBuffer, CpuGraph, CpuPlan, Element, KernelError, Pending, StepScalars, Work,
};

mod every_call;
mod work;

pub use every_call::{Comm, at_every_call};

/// Work that a handle was given and that has not run yet.
type Task = Box<dyn FnOnce() -> Result<(), KernelError> + Send>;

/// A handle. Clones share the queue. Copies, clears and planned work run as late as they may: when
/// this handle reads or writes, or when another one waits for it. So work of two handles that
/// nobody ordered runs in the wrong order.
#[derive(Clone)]
pub struct Queued(Arc<Handle>);

struct Handle {
    queue: Mutex<Queue>,
    /// Calls until one fails; 0 is never.
    fuse: AtomicU64,
}

#[derive(Default)]
struct Queue {
    tasks: VecDeque<Task>,
    /// Tasks that have run.
    done: u64,
}

/// A point in the work of a handle.
#[derive(Clone, Debug)]
pub struct Point {
    handle: Queued,
    /// Tasks before it.
    tasks: u64,
    /// The capture that it is a point of.
    capture: Option<u64>,
}

thread_local! {
    /// The capture of this thread: the CPU takes its calls.
    static CAPTURE: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Captures so far.
static CAPTURES: AtomicU64 = AtomicU64::new(0);

impl Default for Queued {
    fn default() -> Self {
        let (queue, fuse) = Default::default();
        Self(Arc::new(Handle { queue, fuse }))
    }
}

impl fmt::Debug for Queued {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Queued")
    }
}

impl Queued {
    /// Makes the call number `call` from now on fail, counted from 1.
    pub fn fail_at(&self, call: u64) {
        self.0.fuse.store(call, Ordering::SeqCst);
    }

    /// Whether the failure that was asked for is yet to come.
    pub fn will_fail(&self) -> bool {
        self.0.fuse.load(Ordering::SeqCst) > 0
    }

    /// Counts a call.
    fn call(&self) -> Result<(), KernelError> {
        let count = |left: u64| left.checked_sub(1);
        let before = self
            .0
            .fuse
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, count);
        if before == Ok(1) {
            let (call, why) = ("the test", "planted".to_owned());
            return Err(KernelError::Device { call, why });
        }
        Ok(())
    }

    fn push(
        &self,
        task: impl FnOnce() -> Result<(), KernelError> + Send + 'static,
    ) -> Result<(), KernelError> {
        if CAPTURE.get().is_some() {
            return task();
        }
        self.queue().tasks.push_back(Box::new(task));
        Ok(())
    }

    fn queue(&self) -> std::sync::MutexGuard<'_, Queue> {
        self.0.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs what is queued. Others that come meanwhile wait.
    fn flush(&self) -> Result<(), KernelError> {
        self.flush_to(u64::MAX)
    }

    /// Runs what is queued before task number `end`.
    fn flush_to(&self, end: u64) -> Result<(), KernelError> {
        let mut queue = self.queue();
        while queue.done < end
            && let Some(task) = queue.tasks.pop_front()
        {
            queue.done += 1;
            task()?;
        }
        Ok(())
    }
}

impl lowp_kernels::sealed::Backend for Queued {}

impl Backend for Queued {
    type Buffer<T: Element> = CpuBuffer<T>;
    type Plan = CpuPlan;
    type Event = Point;
    type Graph = CpuGraph;

    fn alloc<T: Element>(&self, len: usize) -> Result<CpuBuffer<T>, KernelError> {
        self.call()?;
        let buffer = Cpu.alloc(len)?;
        // As on a device, zeros arrive in the order of the stream.
        let zeros = buffer.clone();
        self.push(move || Cpu.clear(&zeros))?;
        Ok(buffer)
    }

    fn len<T: Element>(&self, buffer: &CpuBuffer<T>) -> usize {
        buffer.len()
    }

    fn span<T: Element>(&self, buffer: &CpuBuffer<T>) -> Range<usize> {
        Cpu.span(buffer)
    }

    fn view<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        range: Range<usize>,
    ) -> Result<CpuBuffer<T>, KernelError> {
        Cpu.view(buffer, range)
    }

    fn owns<T: Element>(&self, buffer: &CpuBuffer<T>) -> Result<(), KernelError> {
        Cpu.owns(buffer)
    }

    fn write<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        start: usize,
        values: &[T],
    ) -> Result<(), KernelError> {
        self.call()?;
        self.flush()?;
        Cpu.write(buffer, start, values)
    }

    fn read<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        start: usize,
        values: &mut [T],
    ) -> Result<(), KernelError> {
        self.call()?;
        self.flush()?;
        Cpu.read(buffer, start, values)
    }

    fn start_read<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        range: Range<usize>,
    ) -> Result<Pending<T>, KernelError> {
        self.call()?;
        self.flush()?;
        Cpu.start_read(buffer, range)
    }

    fn start_read_bytes<T: Element>(
        &self,
        buffer: &CpuBuffer<T>,
        range: Range<usize>,
    ) -> Result<Pending<u8>, KernelError> {
        self.call()?;
        self.flush()?;
        Cpu.start_read_bytes(buffer, range)
    }

    fn copy<T: Element>(
        &self,
        from: &CpuBuffer<T>,
        range: Range<usize>,
        to: &CpuBuffer<T>,
        start: usize,
    ) -> Result<(), KernelError> {
        self.call()?;
        let (from, to) = (from.clone(), to.clone());
        self.push(move || Cpu.copy(&from, range, &to, start))
    }

    fn clear<T: Element>(&self, buffer: &CpuBuffer<T>) -> Result<(), KernelError> {
        self.call()?;
        let buffer = buffer.clone();
        self.push(move || Cpu.clear(&buffer))
    }

    fn plan(&self, work: Work<Self>) -> Result<CpuPlan, KernelError> {
        self.call()?;
        Cpu.plan(work::on_cpu(work))
    }

    fn run(&self, plan: &CpuPlan, scalars: &StepScalars) -> Result<(), KernelError> {
        self.call()?;
        let (plan, scalars) = (plan.clone(), scalars.clone());
        self.push(move || Cpu.run(&plan, &scalars))
    }

    fn fork(&self) -> Result<Self, KernelError> {
        self.call()?;
        let fork = Self::default();
        fork.wait_for(self)?;
        Ok(fork)
    }

    fn record(&self) -> Result<Point, KernelError> {
        self.call()?;
        let queue = self.queue();
        Ok(Point {
            handle: self.clone(),
            tasks: queue.done + queue.tasks.len() as u64,
            capture: CAPTURE.get(),
        })
    }

    /// As on a device, a point of a capture is there for that capture alone.
    fn wait(&self, point: &Point) -> Result<(), KernelError> {
        self.call()?;
        if point.capture.is_some() && point.capture != CAPTURE.get() {
            let what = "waiting for a point of another capture";
            return Err(KernelError::InCapture { what });
        }
        if Arc::ptr_eq(&self.0, &point.handle.0) {
            return Ok(());
        }
        point.handle.flush_to(point.tasks)
    }

    fn run_with(&self, plan: &CpuPlan, scalars: &CpuBuffer<u8>) -> Result<(), KernelError> {
        self.call()?;
        let (plan, scalars) = (plan.clone(), scalars.clone());
        self.push(move || Cpu.run_with(&plan, &scalars))
    }

    fn wait_for(&self, other: &Self) -> Result<(), KernelError> {
        // A queue runs in order by itself.
        if Arc::ptr_eq(&self.0, &other.0) {
            return Ok(());
        }
        self.wait(&other.record()?)
    }

    fn synchronize(&self) -> Result<(), KernelError> {
        self.call()?;
        self.flush()
    }

    fn capture<E: From<KernelError>>(
        &self,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<CpuGraph, E> {
        self.call()?;
        /// Ends the capture also where `work` panics.
        struct End;
        impl Drop for End {
            fn drop(&mut self) {
                CAPTURE.set(None);
            }
        }
        Cpu.capture(|| {
            let _end = End;
            CAPTURE.set(Some(CAPTURES.fetch_add(1, Ordering::SeqCst)));
            work()
        })
    }

    fn launch(&self, graph: &CpuGraph) -> Result<(), KernelError> {
        self.call()?;
        let graph = graph.clone();
        self.push(move || Cpu.launch(&graph))
    }
}

impl Multiplies for Queued {
    /// None: no test of failures orthogonalises.
    fn products(&self) -> Result<Arc<dyn Products<Self>>, GemmError> {
        Err(GemmError::Unsupported("no products of queued handles"))
    }
}
