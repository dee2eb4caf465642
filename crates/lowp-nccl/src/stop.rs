//! [`Stop`]: a word of the host that ends kernels which wait.

#![expect(unsafe_code, reason = "writes a word of page-locked memory")]

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use lowp_kernels::{Backend, Cuda, CudaBuffer, KernelError};

/// A word of the host that kernels of all GPUs of the process look at while they wait. Nothing waits where it is dropped.
#[derive(Debug)]
pub(crate) struct Stop(CudaBuffer<u8>);

impl Stop {
    /// One that is not set, once the stream has passed this point.
    pub(crate) fn new(cuda: &Cuda) -> Result<Self, KernelError> {
        let word = cuda.with_host_buffers().alloc(size_of::<AtomicU32>())?;
        Ok(Self(word))
    }

    /// Where kernels and the host find it: their addresses are unified.
    pub(crate) fn pointer(&self) -> u64 {
        self.0.pointer()
    }

    /// Ends kernels that wait, and those that begin.
    fn set(&self) {
        let word = self.pointer() as *const AtomicU32;
        // SAFETY: page-locked memory of as many bytes, at the beginning of a page, for as long as the buffer; whatever reads or writes it takes it
        // for an atomic word.
        let word = unsafe { &*word };
        word.store(1, Ordering::SeqCst);
    }
}

/// Those that are set when a group is aborted.
#[derive(Debug, Default)]
pub(crate) struct Stops(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    alive: Vec<Weak<Stop>>,
    /// Whether they were set.
    set: bool,
}

impl Stops {
    /// Sets `stop`, too; at once, if the others were.
    pub(crate) fn add(&self, stop: &Arc<Stop>) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if list.set {
            stop.set();
        }
        list.alive.retain(|stop| stop.strong_count() > 0);
        list.alive.push(Arc::downgrade(stop));
    }

    pub(crate) fn set(&self) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        list.set = true;
        let alive: Vec<Arc<Stop>> = list.alive.iter().filter_map(Weak::upgrade).collect();
        drop(list);
        alive.iter().for_each(|stop| stop.set());
    }
}
