//! A backend for tests: the CPU behind handles that queue their work, as the streams of a device
//! do, and that fail at the call that a test chooses.

use std::fmt;
use std::mem::take;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use lowp_kernels::{Backend, Cpu, CpuBuffer, CpuPlan, Element, KernelError, StepScalars, Work};

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
    queue: Mutex<Vec<Task>>,
    /// Calls until one fails; 0 is never.
    fuse: AtomicU64,
}

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

    fn push(&self, task: impl FnOnce() -> Result<(), KernelError> + Send + 'static) {
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        queue.push(Box::new(task));
    }

    /// Runs what is queued. Others that come meanwhile wait.
    fn flush(&self) -> Result<(), KernelError> {
        let mut queue = self.0.queue.lock().unwrap_or_else(PoisonError::into_inner);
        take(&mut *queue).into_iter().try_for_each(|task| task())
    }
}

impl Backend for Queued {
    type Buffer<T: Element> = CpuBuffer<T>;
    type Plan = Arc<CpuPlan>;

    fn alloc<T: Element>(&self, len: usize) -> Result<CpuBuffer<T>, KernelError> {
        self.call()?;
        Cpu.alloc(len)
    }

    fn len<T: Element>(&self, buffer: &CpuBuffer<T>) -> usize {
        buffer.len()
    }

    fn span<T: Element>(&self, buffer: &CpuBuffer<T>) -> Range<usize> {
        Cpu.span(buffer)
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

    fn copy<T: Element>(
        &self,
        from: &CpuBuffer<T>,
        range: Range<usize>,
        to: &CpuBuffer<T>,
        start: usize,
    ) -> Result<(), KernelError> {
        self.call()?;
        let (from, to) = (from.clone(), to.clone());
        self.push(move || Cpu.copy(&from, range, &to, start));
        Ok(())
    }

    fn clear<T: Element>(&self, buffer: &CpuBuffer<T>) -> Result<(), KernelError> {
        self.call()?;
        let buffer = buffer.clone();
        self.push(move || Cpu.clear(&buffer));
        Ok(())
    }

    fn plan(&self, work: Work<Self>) -> Result<Arc<CpuPlan>, KernelError> {
        self.call()?;
        Ok(Arc::new(Cpu.plan(work::on_cpu(work))?))
    }

    fn run(&self, plan: &Arc<CpuPlan>, scalars: &StepScalars) -> Result<(), KernelError> {
        self.call()?;
        let (plan, scalars) = (plan.clone(), scalars.clone());
        self.push(move || Cpu.run(&plan, &scalars));
        Ok(())
    }

    fn run_with(&self, plan: &Arc<CpuPlan>, scalars: &CpuBuffer<u8>) -> Result<(), KernelError> {
        self.call()?;
        let (plan, scalars) = (plan.clone(), scalars.clone());
        self.push(move || Cpu.run_with(&plan, &scalars));
        Ok(())
    }

    fn wait_for(&self, other: &Self) -> Result<(), KernelError> {
        self.call()?;
        other.flush()
    }
}
