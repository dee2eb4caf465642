//! The scalars of a step, in device memory: written when they change, read by every launch.

#![expect(
    unsafe_code,
    reason = "fills page-locked memory that the device copies from"
)]

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaEvent, CudaStream, result};

use super::buffer::Memory;
use super::cleanup::Cleanup;
use super::device::{Cuda, Device};
use super::table::{AdamGroup, Step};
use super::{failed, host};
use crate::{KernelError, StepScalars};

/// Parameter groups that fit.
pub(super) const GROUPS: usize = 1024;
/// Words of four bytes.
const WORDS: usize = (size_of::<Step>() + GROUPS * size_of::<AdamGroup>()) / 4;
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
    words: *mut u32,
    next: usize,
    /// When the copy of each slot was done.
    done: [Option<CudaEvent>; SLOTS],
    /// What the device has, or will have at this point of the stream.
    written: Vec<u32>,
}

// SAFETY: the pointer is memory of this ring alone.
unsafe impl Send for Ring {}

impl StepMemory {
    pub(super) fn new(device: &Arc<Device>) -> Result<Self, KernelError> {
        let context = &device.context;
        context
            .bind_to_thread()
            .map_err(failed("cuCtxSetCurrent"))?;
        // SAFETY: results are checked; both are freed when this is dropped.
        let pointer = unsafe { result::malloc_sync(WORDS * 4) }.map_err(failed("cuMemAlloc"))?;
        // SAFETY: as above.
        let locked = unsafe { result::malloc_host(SLOTS * WORDS * 4, 0) };
        let locked = locked.map_err(|error| {
            // SAFETY: just allocated, not used yet.
            context.record_err(unsafe { result::free_sync(pointer) });
            failed("cuMemHostAlloc")(error)
        })?;
        Ok(Self {
            pointer,
            device: Arc::clone(device),
            ring: Mutex::new(Ring {
                words: locked.cast(),
                next: 0,
                done: [const { None }; SLOTS],
                written: Vec::new(),
            }),
        })
    }

    /// Has `scalars` on the device when `work`, given to `stream` with their address, begins.
    pub(super) fn with(
        &self,
        stream: &CudaStream,
        scalars: &StepScalars,
        work: impl FnOnce(u64) -> Result<(), KernelError>,
    ) -> Result<(), KernelError> {
        // Held until the work is enqueued: another thread's scalars come behind it.
        let mut ring = self.ring.lock().map_err(|_| KernelError::Poisoned)?;
        let context = &self.device.context;
        context
            .bind_to_thread()
            .map_err(failed("cuCtxSetCurrent"))?;
        let words = words(scalars)?;
        if ring.written != words {
            ring.write(&self.device, self.pointer, stream, words)?;
        }
        work(self.pointer)
    }
}

impl Ring {
    fn write(
        &mut self,
        device: &Device,
        pointer: u64,
        stream: &CudaStream,
        words: Vec<u32>,
    ) -> Result<(), KernelError> {
        let slot = self.next;
        if let Some(done) = &self.done[slot] {
            device.wait(done)?;
        }
        // SAFETY: slot `slot` has `WORDS` words, `words` is no longer (see `words`), and the last
        // copy out of the slot is done.
        let locked = unsafe {
            let start = self.words.add(slot * WORDS);
            std::ptr::copy_nonoverlapping(words.as_ptr(), start, words.len());
            std::slice::from_raw_parts(start, words.len())
        };
        self.written.clear();
        // SAFETY: the device memory has `WORDS` words; the slot is not written again before the copy
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
        self.written = words;
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
        let locked: *mut c_void = ring.words.cast();
        // SAFETY: allocated by `new`, freed once; no copy out of it is in flight. The stream whose work
        // reads the device memory was waited for (`Queue`), and freeing it waits, too.
        unsafe {
            context.record_err(result::free_host(locked));
            context.record_err(result::free_sync(self.pointer));
        }
    }
}

/// Scalars in memory of their own, for a graph that `cuda` captures: they are there before its launches.
pub(super) fn constant(cuda: &Cuda, scalars: &StepScalars) -> Result<Memory, KernelError> {
    let words = words(scalars)?;
    let device = cuda.device();
    // Memory and copy are work of the handle's own stream, which nothing captures.
    let _apart = Cleanup::begin(&device.context);
    let memory = Memory::zeros(cuda, words.len() * 4)?;
    let words: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
    // SAFETY: the memory was just allocated for them.
    unsafe { host::write(device, &cuda.queue.stream, memory.pointer, &words)? };
    Ok(memory)
}

/// A `Step` and its `AdamGroup`s as words.
fn words(scalars: &StepScalars) -> Result<Vec<u32>, KernelError> {
    if scalars.adam.len() > GROUPS {
        return Err(too_many(scalars.adam.len()));
    }
    let random = scalars.random_step;
    let mut words = vec![
        random as u32,
        (random >> 32) as u32,
        scalars.grad_scale.to_bits(),
        u32::from(scalars.skip),
        scalars.max_norm.to_bits(),
        scalars.adam.len() as u32,
        0,
        0,
    ];
    for group in &scalars.adam {
        let fields = [
            group.lr,
            group.beta1,
            group.beta2,
            group.eps,
            group.weight_decay,
            group.correction1,
            group.correction2,
        ];
        words.extend(fields.map(f32::to_bits));
        words.push(u32::from(group.bias_correction));
    }
    Ok(words)
}

/// More parameter groups than the device's memory for scalars holds.
pub(super) fn too_many(groups: usize) -> KernelError {
    KernelError::Groups {
        groups,
        most: GROUPS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::AdamScalars;

    #[test]
    fn scalars_lie_as_the_device_reads_them() {
        let group = |seed: u16| AdamScalars {
            lr: f32::from(seed) / 8.0,
            bias_correction: seed % 2 == 1,
            ..AdamScalars::default().at_step(seed.into())
        };
        let scalars = StepScalars {
            adam: vec![group(3), group(4)],
            grad_scale: 0.5,
            random_step: 0x1_0000_0002,
            skip: true,
            max_norm: 0.25,
        };
        let words = words(&scalars).unwrap();
        assert_eq!(
            words.len() * 4,
            size_of::<Step>() + 2 * size_of::<AdamGroup>()
        );
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        assert_eq!(bytes, scalars.to_bytes());
    }
}
