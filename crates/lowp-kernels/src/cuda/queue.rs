//! [`Queue`]: a stream that work is given to, with the scalars that its launches read.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::CudaStream;

use super::capture::{self, Numbered};
use super::cleanup::Cleanup;
use super::device::Device;
use super::driver::failed;
use super::event::CudaEvent;
use super::step::StepMemory;
use crate::KernelError;

/// What the clones of a handle share. It waits for its work when the last of them goes: what is freed
/// afterwards need not be ordered after this stream, which may be one of others and end then.
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

    /// The stream with its number.
    pub(super) fn numbered(&self) -> Numbered {
        Numbered {
            number: self.number,
            stream: Arc::clone(&self.stream),
        }
    }

    /// Where this thread gives work to: the stream, or what stands for it in a capture.
    pub(super) fn current(&self) -> Result<Arc<CudaStream>, KernelError> {
        match capture::seen_by(self.number) {
            None => Ok(Arc::clone(&self.stream)),
            Some(inside) => inside.stand.ok_or(KernelError::InCapture {
                what: "work of a stream that does not wait for the one that captures",
            }),
        }
    }

    /// The stream that launches the graph of this thread's capture; this one where it does not capture.
    pub(super) fn origin(&self) -> Numbered {
        let inside = capture::seen_by(self.number);
        inside.map_or_else(|| self.numbered(), |inside| inside.origin)
    }

    /// The point after what the stream was given so far: within the capture where it takes part.
    pub(super) fn record(&self) -> Result<CudaEvent, KernelError> {
        let inside = capture::seen_by(self.number);
        match inside.and_then(|inside| Some((inside.stand?, inside.id))) {
            Some((stand, id)) => CudaEvent::record(&self.device, &stand, Some(id)),
            None => CudaEvent::record(&self.device, &self.stream, None),
        }
    }

    /// Makes later work follow `event`. A queue that waits for a point of the capture takes part in it.
    /// What the graph follows and is not part of it (an event from before, the earlier work of a queue that
    /// takes part), the stream that launches it follows from now on.
    pub(super) fn wait(&self, event: &CudaEvent) -> Result<(), KernelError> {
        let over = || KernelError::InCapture {
            what: "waiting for a point of another capture",
        };
        let Some(inside) = capture::seen_by(self.number) else {
            return match event.capture() {
                None => event.hold(&self.stream),
                Some(_) => Err(over()),
            };
        };
        match (event.capture(), inside.stand) {
            (Some(id), _) if id != inside.id => Err(over()),
            (Some(_), Some(stand)) => event.hold(&stand),
            (Some(_), None) => {
                let earlier = CudaEvent::record(&self.device, &self.stream, None)?;
                earlier.hold(&inside.origin.stream)?;
                let stand = self.device.context.new_stream();
                let stand = stand.map_err(failed("cuStreamCreate"))?;
                capture::join(self.number, &stand);
                event.hold(&stand)
            }
            (None, Some(_)) => event.hold(&inside.origin.stream),
            // A stream apart from the capture.
            (None, None) => event.hold(&self.stream),
        }
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        {
            let context = &self.device.context;
            let _cleanup = Cleanup::begin(context);
            // A device that failed has ended its work.
            context.record_err(self.device.events.finish(&self.stream));
        }
        self.device.forget(&self.stream);
        self.device.reap();
    }
}
