//! [`Scratch`]: buffers of f32 values that the users of a pool take turns in.

use std::sync::Arc;

use lowp_kernels::{Backend, KernelError};

use super::pool::GatherPool;
use crate::ShardError;

/// A free buffer of the pool, by number of entries.
#[derive(Debug)]
pub(super) struct Free<B: Backend> {
    len: usize,
    id: u64,
    buffer: B::Buffer<f32>,
    /// The point behind its last use.
    last_use: B::Event,
}

/// Memory for f32 values, borrowed from a [`GatherPool`] for one use: a decoded weight, for
/// example. Its content is what the last user left. It goes back when dropped, to be lent behind the work that
/// the pool's stream has by then: streams that use it besides are ordered before.
#[derive(Debug)]
pub struct Scratch<B: Backend> {
    pool: Arc<GatherPool<B>>,
    len: usize,
    id: u64,
    buffer: B::Buffer<f32>,
}

impl<B: Backend> Scratch<B> {
    /// The buffer.
    pub fn buffer(&self) -> &B::Buffer<f32> {
        &self.buffer
    }

    /// A number that no other buffer of the pool has: plans over the buffer can be kept by it.
    pub fn id(&self) -> u64 {
        self.id
    }
}

impl<B: Backend> GatherPool<B> {
    /// Borrows `len` f32 values. The buffer that was given back last is taken, so users of one length
    /// who do not overlap share one buffer.
    ///
    /// # Errors
    /// The backend has no room for another buffer.
    pub fn scratch(self: &Arc<Self>, len: usize) -> Result<Scratch<B>, ShardError> {
        let mut inner = self.lock();
        let free = self.take_scratch(&mut inner.scratch, len)?;
        let (id, buffer) = match free {
            Some(free) => (free.id, free.buffer),
            None => {
                let buffer = self.alloc::<f32>(&mut inner, len)?;
                (inner.allocations, buffer)
            }
        };
        Ok(Scratch {
            pool: Arc::clone(self),
            len,
            id,
            buffer,
        })
    }
}

impl<B: Backend> GatherPool<B> {
    /// A free buffer of `len` entries, behind its last use. One that was given back within a capture stays
    /// with the graph.
    fn take_scratch(
        &self,
        free: &mut Vec<Free<B>>,
        len: usize,
    ) -> Result<Option<Free<B>>, ShardError> {
        for at in (0..free.len())
            .rev()
            .filter(|&at| free[at].len == len)
            .collect::<Vec<_>>()
        {
            match self.backend.wait(&free[at].last_use) {
                Ok(()) => return Ok(Some(free.remove(at))),
                Err(KernelError::InCapture { .. }) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(None)
    }
}

impl<B: Backend> Drop for Scratch<B> {
    fn drop(&mut self) {
        // A device that cannot say when it is done does not get the memory again.
        if let Ok(last_use) = self.pool.backend.record() {
            let (len, id, buffer) = (self.len, self.id, self.buffer.clone());
            let free = Free {
                len,
                id,
                buffer,
                last_use,
            };
            self.pool.lock().scratch.push(free);
        }
    }
}
