//! The allocator of the unit tests: it counts, and fails what no test needs, so that memory taken in proportion to a
//! number that a file merely states is seen before it is touched.

#![expect(unsafe_code, reason = "implements an allocator")]

use std::alloc::{GlobalAlloc, Layout};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// A single allocation above this fails.
const MOST: usize = 1 << 30;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

/// Counts the bytes that are allocated.
struct Counted(mimalloc::MiMalloc);

#[global_allocator]
static ALLOCATOR: Counted = Counted(mimalloc::MiMalloc);

/// Begins to look for the most bytes in use, and returns those in use now.
pub(super) fn start() -> usize {
    let live = LIVE.load(Relaxed);
    PEAK.store(live, Relaxed);
    live
}

/// The most bytes in use since [`start`].
pub(super) fn peak() -> usize {
    PEAK.load(Relaxed)
}

fn grow(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed) + bytes;
    PEAK.fetch_max(live, Relaxed);
}

// SAFETY: every call goes to an allocator that keeps the contract; a null pointer is its way to say that there is no
// memory.
unsafe impl GlobalAlloc for Counted {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MOST {
            return ptr::null_mut();
        }
        grow(layout.size());
        // SAFETY: the caller keeps the contract.
        unsafe { self.0.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() > MOST {
            return ptr::null_mut();
        }
        grow(layout.size());
        // SAFETY: the caller keeps the contract.
        unsafe { self.0.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { self.0.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if size > MOST {
            return ptr::null_mut();
        }
        grow(size);
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: the caller keeps the contract.
        unsafe { self.0.realloc(at, layout, size) }
    }
}
