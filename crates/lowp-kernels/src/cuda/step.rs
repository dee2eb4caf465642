//! The scalars of a step, in device memory: written when what a launch reads of them changes.

#![expect(
    unsafe_code,
    reason = "fills page-locked memory that the device copies from"
)]

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream, result};

use super::cleanup::Cleanup;
use super::device::Device;
use super::driver::failed;
use super::host;
use super::memory::DeviceMemory;
use super::table::{GroupScalars, Step};
use crate::check::reads::Reads;
use crate::{KernelError, StepScalars};

/// Parameter groups that fit.
pub(super) const GROUPS: usize = 1024;
/// Bytes of the scalars of so many groups.
const BYTES: usize = StepScalars::bytes(GROUPS);
const _: () = assert!(BYTES == size_of::<Step>() + GROUPS * size_of::<GroupScalars>());
/// Copies that may be in flight; the host waits for the device when it is so many steps ahead.
const SLOTS: usize = 16;

/// The scalars of one stream: launches hold the address, so it never changes.
pub(super) struct StepMemory {
    pointer: u64,
    device: Arc<Device>,
    ring: Mutex<Ring>,
}

/// Page-locked copies on their way to the device.
struct Ring {
    bytes: *mut u8,
    next: usize,
    /// When the copy of each slot was done.
    done: [Option<CudaEvent>; SLOTS],
    /// What the device has, or will have at this point of the stream.
    written: Vec<u8>,
    /// How often the scalars were written.
    changes: u64,
}

// SAFETY: the pointer is memory of this ring alone.
unsafe impl Send for Ring {}

impl StepMemory {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, KernelError> {
        device.bind()?;
        let context = &device.context;
        // SAFETY: results are checked; both are freed when this is dropped.
        let pointer = unsafe { result::malloc_sync(BYTES) }.map_err(failed("cuMemAlloc"))?;
        // SAFETY: as above.
        let locked = unsafe { result::malloc_host(SLOTS * BYTES, 0) };
        let locked = locked.map_err(|error| {
            // SAFETY: just allocated, not used yet.
            context.record_err(unsafe { result::free_sync(pointer) });
            failed("cuMemHostAlloc")(error)
        })?;
        Ok(Self {
            pointer,
            device: Arc::clone(device),
            ring: Mutex::new(Ring {
                bytes: locked.cast(),
                next: 0,
                done: [const { None }; SLOTS],
                written: Vec::new(),
                changes: 0,
            }),
        })
    }

    /// Has what `reads` names of `scalars` on the device when `work`, given to `stream` with their address, begins.
    pub(super) fn with(
        &self,
        stream: &CudaStream,
        reads: Reads,
        scalars: &StepScalars,
        work: impl FnOnce(u64) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        // Held until the work is enqueued: another thread's scalars come after it.
        let mut ring = self.ring.lock().map_err(|_| KernelError::Poisoned)?;
        self.device.bind()?;
        let wanted = bytes(scalars)?;
        if !reads.served(&ring.written, &wanted) {
            ring.write(&self.device, self.pointer, stream, wanted)?;
        }
        work(self.pointer)
    }

    /// How often scalars were written.
    pub(super) fn changes(&self) -> u64 {
        let ring = self.ring.lock();
        ring.unwrap_or_else(PoisonError::into_inner).changes
    }
}

impl Ring {
    fn write(
        &mut self,
        device: &Device,
        pointer: u64,
        stream: &CudaStream,
        bytes: Vec<u8>,
    ) -> Result<(), KernelError> {
        let slot = self.next;
        if let Some(done) = &self.done[slot] {
            device.events.wait(done)?;
        }
        // SAFETY: slot `slot` has `BYTES` bytes, `bytes` is no longer (see `bytes`), and the last
        // copy out of the slot is done.
        let locked = unsafe {
            let start = self.bytes.add(slot * BYTES);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), start, bytes.len());
            std::slice::from_raw_parts(start, bytes.len())
        };
        self.written.clear();
        // SAFETY: the device memory has `BYTES` bytes; the slot is not written again before the copy
        // is done, nor freed.
        let copied = unsafe { result::memcpy_htod_async(pointer, locked, stream.cu_stream()) };
        copied.map_err(failed("cuMemcpyHtoDAsync"))?;
        match &self.done[slot] {
            Some(done) => done.record(stream),
            None => stream
                .record_event(None)
                .map(|event| self.done[slot] = Some(event)),
        }
        .map_err(failed("cuEventRecord"))?;
        self.next = (slot + 1) % SLOTS;
        self.written = bytes;
        self.changes += 1;
        Ok(())
    }
}

impl Drop for StepMemory {
    fn drop(&mut self) {
        let context = &self.device.context;
        let _cleanup = Cleanup::begin(context);
        context.record_err(context.bind_to_thread());
        let ring = self.ring.get_mut().unwrap_or_else(PoisonError::into_inner);
        for done in ring.done.iter().flatten() {
            context.record_err(done.synchronize());
        }
        let locked: *mut c_void = ring.bytes.cast();
        // SAFETY: allocated by `new`, freed once; no copy out of it is in flight. The stream whose work
        // reads the device memory was waited for (`Queue`), and freeing it waits, too.
        unsafe {
            context.record_err(result::free_host(locked));
            context.record_err(result::free_sync(self.pointer));
        }
    }
}

/// Scalars in memory of their own, for a graph that `stream` launches: they are there before its launches.
pub(super) fn constant(
    device: &Arc<Device>,
    stream: &Arc<CudaStream>,
    scalars: &StepScalars,
) -> Result<DeviceMemory, KernelError> {
    let bytes = bytes(scalars)?;
    // Memory and copy are work of the stream itself, which nothing captures.
    let _apart = Cleanup::begin(&device.context);
    let memory = DeviceMemory::zeros(device, stream, bytes.len())?;
    let to = host::Address {
        pointer: memory.pointer,
        on_host: false,
    };
    // SAFETY: the memory was just allocated for them.
    unsafe { host::write(device, stream, to, &bytes)? };
    Ok(memory)
}

/// A `Step` and its `GroupScalars`s, as many as fit.
fn bytes(scalars: &StepScalars) -> Result<Vec<u8>, KernelError> {
    match scalars.groups.len() {
        0..=GROUPS => Ok(scalars.to_bytes()),
        groups => Err(too_many(groups)),
    }
}

/// More parameter groups than the device's memory for scalars holds.
pub(super) fn too_many(groups: usize) -> KernelError {
    KernelError::Groups {
        groups,
        most: GROUPS,
    }
}
