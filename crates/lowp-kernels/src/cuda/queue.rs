//! [`Queue`]: a stream that work is given to, with the scalars that its launches read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::CudaStream;

use super::cleanup::Cleanup;
use super::device::Device;
use super::step::StepMemory;
use crate::KernelError;

/// What the clones of a handle share. It waits for its work when the last of them goes: what is freed
/// afterwards need not be ordered behind this stream, which may be one of others and end then.
pub(super) struct Queue {
    /// A number that no other queue of the process has.
    pub(super) number: u64,
    pub(super) step: StepMemory,
    pub(super) stream: Arc<CudaStream>,
    pub(super) device: Arc<Device>,
}

impl Queue {
    pub(super) fn new(device: Arc<Device>, stream: Arc<CudaStream>) -> Result<Self, KernelError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let step = StepMemory::new(&device)?;
        device.follow(&stream);
        Ok(Self {
            number: NEXT.fetch_add(1, Ordering::Relaxed),
            step,
            stream,
            device,
        })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        {
            let context = &self.device.context;
            let _cleanup = Cleanup::begin(context);
            // A device that failed has ended its work.
            context.record_err(self.device.finish(&self.stream));
        }
        self.device.forget(&self.stream);
        self.device.reap();
    }
}
