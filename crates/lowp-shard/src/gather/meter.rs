//! [`Meter`]: how much memory a pool has, and had.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use lowp_kernels::{Backend, Element, FloatDtype, Source};

use crate::ShardError;

/// What a pool has allocated.
#[derive(Debug, Default)]
pub(super) struct Meter {
    allocations: AtomicU64,
    bytes: AtomicUsize,
    most: AtomicUsize,
}

impl Meter {
    /// Number of buffers that were allocated.
    pub(super) fn allocations(&self) -> u64 {
        self.allocations.load(Ordering::Relaxed)
    }

    /// Bytes of the buffers that are there.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    /// The most that there were at once.
    pub(super) fn most(&self) -> usize {
        self.most.load(Ordering::Relaxed)
    }
}

/// Bytes of buffers of a pool, which their owner keeps beside them: they count until it is dropped.
#[derive(Debug)]
pub(super) struct Metered {
    meter: Arc<Meter>,
    bytes: usize,
}

impl Metered {
    pub(super) fn new(meter: &Arc<Meter>) -> Self {
        let meter = Arc::clone(meter);
        Self { meter, bytes: 0 }
    }

    /// Allocates a buffer of `len` entries, and counts its bytes.
    pub(super) fn alloc<B: Backend, T: Element>(
        &mut self,
        backend: &B,
        len: usize,
    ) -> Result<B::Buffer<T>, ShardError> {
        let buffer = backend.alloc(len)?;
        self.count(len * size_of::<T>());
        Ok(buffer)
    }

    /// Allocates `len` values, and counts their bytes.
    pub(super) fn alloc_values<B: Backend>(
        &mut self,
        backend: &B,
        dtype: FloatDtype,
        len: usize,
    ) -> Result<Source<B>, ShardError> {
        let values = Source::alloc(backend, dtype, len)?;
        self.count(len * dtype.bytes());
        Ok(values)
    }

    fn count(&mut self, bytes: usize) {
        self.bytes += bytes;
        self.meter.allocations.fetch_add(1, Ordering::Relaxed);
        let now = bytes + self.meter.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.meter.most.fetch_max(now, Ordering::Relaxed);
    }
}

impl Drop for Metered {
    fn drop(&mut self) {
        self.meter.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
