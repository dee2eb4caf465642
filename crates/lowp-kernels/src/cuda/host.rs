//! Page-locked host memory, through which values go to the device and come back without a wait.

#![expect(
    unsafe_code,
    reason = "page-locked memory of the driver, and copies from and to it"
)]

use std::collections::VecDeque;
use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent as DriverEvent, CudaStream, result};

use super::cleanup::Cleanup;
use super::device::Device;
use super::event::EventPool;
use super::{capture, failed};
use crate::host::zeroed;
use crate::pending::Arrival;
use crate::{Element, KernelError};

/// Bytes that may be on their way to a device; more wait for the first of them.
const IN_FLIGHT: usize = 64 << 20;
/// Bytes of one copy to the device.
const CHUNK: usize = 8 << 20;
/// Bytes of the smallest block.
const SMALLEST: usize = 4096;

/// Page-locked memory.
struct Block {
    pointer: *mut u8,
    bytes: usize,
    lender: Lender,
    context: Arc<CudaContext>,
}

/// Whose blocks they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lender {
    /// Of the pool, which keeps small ones.
    Pool,
    /// Of what is kept for whole tensors.
    Staging,
}

// SAFETY: plain memory, of which there is one owner.
unsafe impl Send for Block {}
// SAFETY: as above; shared references do not reach the memory.
unsafe impl Sync for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        let _cleanup = Cleanup::begin(&self.context);
        self.context.record_err(self.context.bind_to_thread());
        let pointer: *mut c_void = self.pointer.cast();
        // SAFETY: allocated by `HostPool::take`, freed once; the device has passed every copy.
        self.context
            .record_err(unsafe { result::free_host(pointer) });
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
    fn take(&self, device: &Device, bytes: usize, limit: usize) -> Result<Block, KernelError> {
        loop {
            let mut inner = self.lock();
            inner.reclaim(&device.events)?;
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
                return allocate(
                    device,
                    bytes.next_power_of_two().max(SMALLEST),
                    Lender::Pool,
                );
            };
            if let Err(error) = device.wait(&event) {
                // The copy may not be done.
                std::mem::forget(block);
                return Err(error);
            }
            device.events.give_back(event);
            self.lock().retain(block);
        }
    }

    /// A block of `bytes` bytes, rounded up to whole pages, of those that are kept, or a new one.
    fn stage(&self, device: &Device, bytes: usize) -> Result<Block, KernelError> {
        let bytes = bytes.next_multiple_of(SMALLEST);
        let mut inner = self.lock();
        let kept = inner.staged.iter().position(|block| block.bytes == bytes);
        match kept {
            Some(at) => Ok(inner.staged.swap_remove(at)),
            None => {
                drop(inner);
                allocate(device, bytes, Lender::Staging)
            }
        }
    }

    /// Takes `block` back; it is lent again behind `event`.
    fn give_back(&self, block: Block, event: Option<DriverEvent>) {
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
    fn reclaim(&mut self, events: &EventPool) -> Result<(), KernelError> {
        // Of any stream: one that is behind does not hold up the others.
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

fn allocate(device: &Device, bytes: usize, lender: Lender) -> Result<Block, KernelError> {
    let context = &device.context;
    context
        .bind_to_thread()
        .map_err(failed("cuCtxSetCurrent"))?;
    // SAFETY: the result is checked, and freed with the block.
    let pointer = unsafe { result::malloc_host(bytes, 0) }.map_err(failed("cuMemHostAlloc"))?;
    Ok(Block {
        pointer: pointer.cast(),
        bytes,
        lender,
        context: Arc::clone(context),
    })
}

/// Copies `values` to address `to` in the order of `stream`. They are taken before this returns.
///
/// # Safety
/// The device memory at `to` has room for the values and lives until the stream has passed the copy.
pub(super) unsafe fn write<T: Element>(
    device: &Arc<Device>,
    stream: &CudaStream,
    to: u64,
    values: &[T],
) -> Result<(), KernelError> {
    // SAFETY: an `Element` is u8, f32 or bf16, without padding.
    let bytes =
        unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) };
    for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
        let block = device.host.take(device, chunk.len(), IN_FLIGHT)?;
        // SAFETY: the block has as many bytes, and nobody else has it.
        let staged = unsafe {
            std::ptr::copy_nonoverlapping(chunk.as_ptr(), block.pointer, chunk.len());
            std::slice::from_raw_parts(block.pointer, chunk.len())
        };
        let at = to + (index * CHUNK) as u64;
        // SAFETY: the caller's promise; the block is lent again behind the copy.
        let copied = unsafe { result::memcpy_htod_async(at, staged, stream.cu_stream()) };
        copied.map_err(failed("cuMemcpyHtoDAsync"))?;
        match device.events.record(&device.context, stream) {
            Ok(event) => device.host.give_back(block, Some(event)),
            Err(error) => {
                // The copy may read it at any time.
                std::mem::forget(block);
                return Err(error);
            }
        }
    }
    Ok(())
}

/// Starts to copy `len` values from address `from` in the order of `stream`.
///
/// # Safety
/// The device memory at `from` holds the values and lives until the stream has passed the copy.
pub(super) unsafe fn start_read<T: Element>(
    device: &Arc<Device>,
    stream: &CudaStream,
    from: u64,
    len: usize,
    lender: Lender,
) -> Result<OnItsWay<T>, KernelError> {
    let bytes = len * size_of::<T>();
    // A read never waits.
    let block = match lender {
        Lender::Pool => device.host.take(device, bytes, usize::MAX)?,
        Lender::Staging => device.host.stage(device, bytes)?,
    };
    // SAFETY: the block has as many bytes, and nobody else has it.
    let host = unsafe { std::slice::from_raw_parts_mut(block.pointer, bytes) };
    // SAFETY: the caller's promise; the block is held until the copy is done.
    let copied = unsafe { result::memcpy_dtoh_async(host, from, stream.cu_stream()) };
    copied.map_err(failed("cuMemcpyDtoHAsync"))?;
    match device.events.record(&device.context, stream) {
        Ok(event) => Ok(OnItsWay {
            copy: Some((block, event)),
            device: Arc::clone(device),
            len,
            values: PhantomData,
        }),
        Err(error) => {
            // The copy may write it at any time.
            std::mem::forget(block);
            Err(error)
        }
    }
}

/// Values that a copy brings to the host.
pub(super) struct OnItsWay<T> {
    /// Where they arrive, and when they are there; `None` once they were taken.
    copy: Option<(Block, DriverEvent)>,
    device: Arc<Device>,
    len: usize,
    values: PhantomData<fn() -> T>,
}

impl<T: Element> Arrival<T> for OnItsWay<T> {
    fn is_ready(&self) -> Result<bool, KernelError> {
        capture::not_in("the arrival of values")?;
        let copy = self.copy.as_ref();
        copy.map_or(Ok(true), |(_, event)| event.try_is_complete())
            .map_err(failed("cuEventQuery"))
    }

    fn wait(mut self: Box<Self>) -> Result<Vec<T>, KernelError> {
        capture::not_in("the arrival of values")?;
        let mut values = zeroed::<T>(self.len)?;
        if let Some((block, event)) = &self.copy {
            self.device.wait(event)?;
            // SAFETY: the copy, of as many values, is done; every bit pattern is an `Element`.
            unsafe {
                let to = values.as_mut_ptr().cast::<u8>();
                std::ptr::copy_nonoverlapping(block.pointer, to, self.len * size_of::<T>());
            }
        }
        if let Some((block, event)) = self.copy.take() {
            self.device.events.give_back(event);
            self.device.host.give_back(block, None);
        }
        Ok(values)
    }
}

impl<T> Drop for OnItsWay<T> {
    fn drop(&mut self) {
        if let Some((block, event)) = self.copy.take() {
            self.device.host.give_back(block, Some(event));
        }
    }
}
