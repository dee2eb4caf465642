//! Values that go to the device, and come back, by way of page-locked memory and without a wait.

#![expect(unsafe_code, reason = "copies from and to page-locked memory")]

use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::{CudaEvent as DriverEvent, CudaStream};

use super::capture;
use super::device::Device;
use super::driver::{copy, copy_on_host};
use super::host_pool::{Block, CHUNK, IN_FLIGHT, Lender};
use crate::host::zeroed;
use crate::pending::Arrival;
use crate::{Element, KernelError};

/// Where values are.
#[derive(Clone, Copy)]
pub(super) struct Address {
    pub(super) pointer: u64,
    /// Whether it is in page-locked memory of the host, not on the device.
    pub(super) on_host: bool,
}

/// Copies `values` to `to`, in the order of `stream`. They are taken before this returns.
///
/// # Safety
/// The memory at `to` has room for the values and lives until the stream has passed the copy.
pub(super) unsafe fn write<T: Element>(
    device: &Arc<Device>,
    stream: &CudaStream,
    to: Address,
    values: &[T],
) -> Result<(), KernelError> {
    let copy = if to.on_host { copy_on_host } else { copy };
    let bytes: &[u8] = bytemuck::cast_slice(values);
    for (index, chunk) in bytes.chunks(CHUNK).enumerate() {
        let block = device.host.take(&device.events, chunk.len(), IN_FLIGHT)?;
        let at = to.pointer + (index * CHUNK) as u64;
        // SAFETY: the block has as many bytes, and nobody else has it; it is lent again after the copy. The rest is the caller's promise.
        unsafe {
            std::ptr::copy_nonoverlapping(chunk.as_ptr(), block.pointer(), chunk.len());
            copy(at, block.pointer() as u64, chunk.len(), stream.cu_stream())?;
        }
        match device.events.record(stream) {
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

/// Starts to copy `len` values from `from`, in the order of `stream`.
///
/// # Safety
/// The memory at `from` holds the values and lives until the stream has passed the copy.
pub(super) unsafe fn start_read<T: Element>(
    device: &Arc<Device>,
    stream: &CudaStream,
    from: Address,
    len: usize,
    lender: Lender,
) -> Result<OnItsWay<T>, KernelError> {
    let copy = if from.on_host { copy_on_host } else { copy };
    let bytes = len * size_of::<T>();
    // A read never waits.
    let block = match lender {
        Lender::Pool => device.host.take(&device.events, bytes, usize::MAX)?,
        Lender::Staging => device.host.stage(&device.events, bytes)?,
    };
    // SAFETY: the caller's promise; the block has as many bytes, nobody else has it, and it is held until the copy is done.
    unsafe {
        copy(
            block.pointer() as u64,
            from.pointer,
            bytes,
            stream.cu_stream(),
        )?
    };
    match device.events.record(stream) {
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
    fn wait(mut self: Box<Self>) -> Result<Vec<T>, KernelError> {
        capture::not_in("the arrival of values")?;
        let mut values = zeroed::<T>(self.len)?;
        if let Some((block, event)) = &self.copy {
            self.device.events.wait(event)?;
            // SAFETY: the copy, of as many values, is done; every bit pattern is an `Element`.
            unsafe {
                let to = values.as_mut_ptr().cast::<u8>();
                std::ptr::copy_nonoverlapping(block.pointer(), to, self.len * size_of::<T>());
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
