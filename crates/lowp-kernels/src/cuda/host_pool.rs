//! [`HostPool`]: page-locked memory of the host for copies.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cudarc::driver::CudaEvent as DriverEvent;

use super::driver::failed;
use super::events::Events;
use super::host_block::HostBlock;
use crate::KernelError;

/// Bytes that may be on their way to a device; more wait for the first of them.
pub(super) const IN_FLIGHT: usize = 64 << 20;
/// Bytes of one copy to the device.
pub(super) const CHUNK: usize = 8 << 20;
/// Bytes of the smallest block.
const SMALLEST: usize = 4096;

/// Page-locked memory that is lent.
pub(super) struct Block {
    memory: HostBlock,
    bytes: usize,
    lender: Lender,
}

/// Whose blocks they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lender {
    /// Of the pool, which keeps small ones.
    Pool,
    /// Of what is kept for whole tensors.
    Staging,
}

impl Block {
    pub(super) fn pointer(&self) -> *mut u8 {
        self.memory.pointer
    }

    fn new(events: &Events, bytes: usize, lender: Lender) -> Result<Self, KernelError> {
        Ok(Self {
            memory: HostBlock::new(&events.context, bytes)?,
            bytes,
            lender,
        })
    }
}

/// Blocks of a device that are lent for one copy.
#[derive(Default)]
pub(super) struct HostPool {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    free: Vec<Block>,
    /// Blocks whose copy may not be done, oldest first.
    busy: VecDeque<(Block, DriverEvent)>,
    busy_bytes: usize,
    /// Blocks of whole tensors, as large as these. They are freed with the device: to free page-locked memory waits for all of its work,
    /// which ends the captures of other threads.
    staged: Vec<Block>,
}

impl HostPool {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Blocks are moved whole: whoever failed left the lists as they were.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A block of at least `bytes` bytes, of which at most `limit` are on their way at a time: more wait for the
    /// oldest.
    pub(super) fn take(
        &self,
        events: &Events,
        bytes: usize,
        limit: usize,
    ) -> Result<Block, KernelError> {
        loop {
            let mut inner = self.lock();
            inner.reclaim(events)?;
            let fits = |block: &&Block| block.bytes >= bytes;
            if let Some(best) = inner.free.iter().filter(fits).map(|b| b.bytes).min()
                && let Some(at) = inner.free.iter().position(|b| b.bytes == best)
            {
                return Ok(inner.free.swap_remove(at));
            }
            let full = inner.busy_bytes.saturating_add(bytes) > limit;
            let oldest = if full { inner.next() } else { None };
            drop(inner);
            let Some((block, event)) = oldest else {
                let bytes = bytes.next_power_of_two().max(SMALLEST);
                return Block::new(events, bytes, Lender::Pool);
            };
            if let Err(error) = events.wait(&event) {
                // The copy may not be done.
                std::mem::forget(block);
                return Err(error);
            }
            events.give_back(event);
            self.lock().retain(block);
        }
    }

    /// A block of `bytes` bytes, rounded up to whole pages, of those that are kept, or a new one.
    pub(super) fn stage(&self, events: &Events, bytes: usize) -> Result<Block, KernelError> {
        let bytes = bytes.next_multiple_of(SMALLEST);
        let mut inner = self.lock();
        let kept = inner.staged.iter().position(|block| block.bytes == bytes);
        match kept {
            Some(at) => Ok(inner.staged.swap_remove(at)),
            None => {
                drop(inner);
                Block::new(events, bytes, Lender::Staging)
            }
        }
    }

    /// Takes `block` back; it is lent again after `event`.
    pub(super) fn give_back(&self, block: Block, event: Option<DriverEvent>) {
        let mut inner = self.lock();
        match event {
            Some(event) => {
                inner.busy_bytes += block.bytes;
                inner.busy.push_back((block, event));
            }
            None => inner.retain(block),
        }
    }

    /// Keeps every block forever: a device that failed may still write to them.
    pub(super) fn leak(&self) {
        std::mem::forget(std::mem::take(&mut *self.lock()));
    }
}

impl Inner {
    /// The block whose copy began first.
    fn next(&mut self) -> Option<(Block, DriverEvent)> {
        let (block, event) = self.busy.pop_front()?;
        self.busy_bytes -= block.bytes;
        Some((block, event))
    }

    /// Keeps the blocks whose copies are done for others.
    fn reclaim(&mut self, events: &Events) -> Result<(), KernelError> {
        // Of any stream: one that has much to do does not hold up the others.
        let mut at = 0;
        while let Some((_, event)) = self.busy.get(at) {
            if !event.try_is_complete().map_err(failed("cuEventQuery"))? {
                at += 1;
            } else if let Some((block, event)) = self.busy.remove(at) {
                self.busy_bytes -= block.bytes;
                events.give_back(event);
                self.retain(block);
            }
        }
        Ok(())
    }

    /// Keeps a block that is not in use, unless it is large: it is page-locked, and others need memory, too.
    fn retain(&mut self, block: Block) {
        if block.lender == Lender::Staging {
            self.staged.push(block);
            return;
        }
        let kept: usize = self.free.iter().map(|block| block.bytes).sum();
        if block.bytes <= CHUNK && kept + block.bytes <= IN_FLIGHT {
            self.free.push(block);
        }
    }
}
