//! [`Stop`]: a word of the host that ends kernels which wait.

#![expect(unsafe_code, reason = "a word in page-locked memory")]

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use cudarc::driver::{result, sys};
use lowp_kernels::{Cuda, KernelError};

/// A word that kernels of all GPUs of the process look at while they wait.
#[derive(Debug)]
pub(crate) struct Stop {
    cuda: Cuda,
    word: NonNull<AtomicU32>,
}

// SAFETY: the word is atomic, and stays where it is until the last handle is dropped.
unsafe impl Send for Stop {}
// SAFETY: as above.
unsafe impl Sync for Stop {}

impl Stop {
    /// One that is not set.
    pub(crate) fn new(cuda: &Cuda) -> Result<Self, KernelError> {
        const BYTES: usize = size_of::<AtomicU32>();
        let allocate = |_| {
            let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
            // SAFETY: the memory is written before anything reads it, and freed by `drop`.
            let word = unsafe { result::malloc_host(BYTES, flags) };
            let word = word.map_err(|error| KernelError::Device {
                call: "cuMemHostAlloc",
                why: error.to_string(),
            })?;
            let word = NonNull::new(word.cast::<AtomicU32>());
            let word = word.ok_or(KernelError::NoHostMemory { bytes: BYTES })?;
            // SAFETY: page-locked memory begins at a page.
            unsafe { word.write(AtomicU32::new(0)) };
            Ok::<_, KernelError>(word)
        };
        Ok(Self {
            word: cuda.foreign_work(|| (), allocate)?,
            cuda: cuda.clone(),
        })
    }

    /// Where kernels find it: addresses of hosts and devices are unified.
    pub(crate) fn pointer(&self) -> u64 {
        self.word.as_ptr() as u64
    }

    /// Ends kernels that wait, and those that begin.
    fn set(&self) {
        // SAFETY: written by `new`, freed by `drop`.
        let word = unsafe { self.word.as_ref() };
        word.store(1, Ordering::SeqCst);
    }
}

impl Drop for Stop {
    fn drop(&mut self) {
        let word = self.word.as_ptr().cast();
        self.cuda.free_foreign(|| {
            // SAFETY: allocated by `new` and freed once; whoever launched kernels has waited for them. Nobody is left to hear of an error.
            let _freed = unsafe { result::free_host(word) };
        });
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
