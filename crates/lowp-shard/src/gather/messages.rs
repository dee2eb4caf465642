//! [`MessageMemory`]: where the messages of gathers arrive.

use std::ptr::addr_eq;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use lowp_comm::Communicator;
use lowp_kernels::Backend;

use super::GatherPool;
use super::meter::Metered;
use crate::ShardError;

/// Memory for the messages of one gather after the other: all are work of the stream of one communicator. It is allocated with the first
/// set of destination buffers that needs it.
#[derive(Debug)]
pub(super) struct MessageMemory<B: Backend> {
    comm: Weak<dyn Communicator<B>>,
    bytes: usize,
    buffer: Mutex<Option<(B::Buffer<u8>, Metered)>>,
}

impl<B: Backend> MessageMemory<B> {
    pub(super) fn new(comm: &Arc<dyn Communicator<B>>, bytes: usize) -> Self {
        Self {
            comm: Arc::downgrade(comm),
            bytes,
            buffer: Mutex::default(),
        }
    }

    /// Whether gathers of `comm` whose messages have `bytes` can use it.
    pub(super) fn serves(&self, comm: &Arc<dyn Communicator<B>>, bytes: usize) -> bool {
        addr_eq(self.comm.as_ptr(), Arc::as_ptr(comm)) && self.bytes >= bytes
    }

    /// The memory of the messages, allocated for the first gather.
    pub(super) fn buffer(&self, pool: &GatherPool<B>) -> Result<B::Buffer<u8>, ShardError> {
        let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((buffer, _)) = &*buffer {
            return Ok(buffer.clone());
        }
        let mut metered = pool.metered();
        let made: B::Buffer<u8> = metered.alloc(&pool.backend, self.bytes)?;
        *buffer = Some((made.clone(), metered));
        Ok(made)
    }
}
