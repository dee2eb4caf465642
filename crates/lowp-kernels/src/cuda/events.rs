//! [`Events`]: the events of a device, for points in its work, and waits for them.

#![expect(unsafe_code, reason = "waits for events and streams of the driver")]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError, result};

use super::driver::failed;
use crate::KernelError;

/// Events that nobody holds, as making one costs more than recording it; and how often the host waited.
pub(super) struct Events {
    pub(super) context: Arc<CudaContext>,
    free: Mutex<Vec<CudaEvent>>,
    waits: AtomicU64,
}

impl Events {
    pub(super) fn new(context: &Arc<CudaContext>) -> Self {
        Self {
            context: Arc::clone(context),
            free: Mutex::new(Vec::new()),
            waits: AtomicU64::new(0),
        }
    }

    /// An event at the point after what `stream` was given so far.
    pub(super) fn record(&self, stream: &CudaStream) -> Result<CudaEvent, KernelError> {
        let free = self.lock().pop();
        let event = match free {
            Some(event) => event,
            None => {
                let event = self.context.new_event(None);
                event.map_err(failed("cuEventCreate"))?
            }
        };
        event.record(stream).map_err(failed("cuEventRecord"))?;
        Ok(event)
    }

    /// Takes back an event that nobody waits for any more.
    pub(super) fn give_back(&self, event: CudaEvent) {
        self.lock().push(event);
    }

    /// Waits for `event`.
    pub(super) fn wait(&self, event: &CudaEvent) -> Result<(), KernelError> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        // Not by way of cudarc, which returns at once where a destructor has left an error to report.
        // SAFETY: the context and the event are alive.
        unsafe {
            result::ctx::set_current(self.context.cu_ctx()).map_err(failed("cuCtxSetCurrent"))?;
            result::event::synchronize(event.cu_event()).map_err(failed("cuEventSynchronize"))
        }
    }

    /// Waits until the work of `stream` is done, also where a destructor has left an error to report: host
    /// memory and streams of others depend on it. Then reports.
    pub(super) fn finish(&self, stream: &CudaStream) -> Result<(), DriverError> {
        self.waits.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the context and the stream are alive.
        let done = unsafe {
            result::ctx::set_current(self.context.cu_ctx())?;
            result::stream::synchronize(stream.cu_stream())
        };
        self.context.check_err().and(done)
    }

    /// How often the host waited.
    pub(super) fn waits(&self) -> u64 {
        self.waits.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<CudaEvent>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
