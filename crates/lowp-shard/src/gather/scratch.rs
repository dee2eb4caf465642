//! [`Scratch`]: buffers of values that the users of a pool use one after the other.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use lowp_kernels::{Backend, FloatDtype, Source};

use super::lending::Lending;
use super::meter::{Meter, Metered};
use crate::ShardError;

/// Buffers of one dtype and length of a pool ([`GatherPool::scratches`](super::GatherPool::scratches)), which go with the last handle.
#[derive(Debug)]
pub struct Scratches<B: Backend> {
    backend: B,
    meter: Arc<Meter>,
    pub(super) dtype: FloatDtype,
    /// Values of each buffer.
    pub(super) len: usize,
    free: Lending<B, Memory<B>>,
}

#[derive(Debug)]
struct Memory<B: Backend> {
    id: u64,
    values: Source<B>,
    /// The bytes of the memory.
    _metered: Metered,
}

/// Memory for values, borrowed from a pool for one use: a decoded weight, for
/// example. Its content is what the last user left. It goes back when dropped, to be lent after the work that
/// the pool's stream has by then: streams that use it besides are ordered before.
#[derive(Debug)]
pub struct Scratch<B: Backend> {
    of: Arc<Scratches<B>>,
    memory: Arc<Memory<B>>,
}

impl<B: Backend> Scratch<B> {
    /// The buffer.
    pub fn values(&self) -> &Source<B> {
        &self.memory.values
    }

    /// A number that no other buffer has: plans over the buffer can be kept by it.
    pub fn id(&self) -> u64 {
        self.memory.id
    }
}

impl<B: Backend> Scratches<B> {
    pub(super) fn new(backend: &B, meter: &Arc<Meter>, dtype: FloatDtype, len: usize) -> Self {
        Self {
            backend: backend.clone(),
            meter: Arc::clone(meter),
            dtype,
            len,
            free: Lending::new(),
        }
    }

    /// Borrows a buffer. The one that was given back last is taken, so users who do not overlap share one.
    ///
    /// # Errors
    /// The backend has no room for another buffer.
    pub fn lend(self: &Arc<Self>) -> Result<Scratch<B>, ShardError> {
        let memory = match self.free.take(&[&self.backend])? {
            Some(memory) => memory,
            None => Arc::new(self.make()?),
        };
        let of = Arc::clone(self);
        Ok(Scratch { of, memory })
    }

    fn make(&self) -> Result<Memory<B>, ShardError> {
        static MADE: AtomicU64 = AtomicU64::new(1);
        let mut metered = Metered::new(&self.meter);
        Ok(Memory {
            values: metered.alloc_values(&self.backend, self.dtype, self.len)?,
            id: MADE.fetch_add(1, Ordering::Relaxed),
            _metered: metered,
        })
    }
}

impl<B: Backend> Drop for Scratch<B> {
    fn drop(&mut self) {
        self.of.free.give_back(&self.memory, &self.of.backend);
    }
}
