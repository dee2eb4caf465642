//! [`CudaEvent`]: a point in a stream's work.

use std::fmt;
use std::sync::Arc;

use cudarc::driver::{CudaEvent as DriverEvent, CudaStream};

use super::capture;
use super::device::Device;
use super::driver::failed;
use crate::KernelError;

/// A point in the work of a stream ([`crate::Backend::record`]). Cloning clones the handle.
#[derive(Clone)]
pub struct CudaEvent {
    point: Arc<Point>,
}

struct Point {
    /// `None` once it went back to the device.
    event: Option<DriverEvent>,
    device: Arc<Device>,
    /// The capture that it is a point of.
    capture: Option<capture::Id>,
}

impl CudaEvent {
    /// The point after what `stream` was given so far, which stands for a stream in `capture`.
    pub(super) fn record(
        device: &Arc<Device>,
        stream: &CudaStream,
        capture: Option<capture::Id>,
    ) -> Result<Self, KernelError> {
        let point = Point {
            event: Some(device.events.record(stream)?),
            device: Arc::clone(device),
            capture,
        };
        Ok(Self {
            point: Arc::new(point),
        })
    }

    /// Makes `stream` wait for the point.
    pub(super) fn hold(&self, stream: &CudaStream) -> Result<(), KernelError> {
        match &self.point.event {
            Some(event) => stream.wait(event).map_err(failed("cuStreamWaitEvent")),
            None => Ok(()),
        }
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.point.device
    }

    pub(super) fn capture(&self) -> Option<capture::Id> {
        self.point.capture
    }

    /// Whether the stream has passed the point. Does not wait.
    ///
    /// # Errors
    /// It is a point of a capture, or the device failed.
    pub fn passed(&self) -> Result<bool, KernelError> {
        self.outside()?;
        let event = self.point.event.as_ref();
        event
            .map_or(Ok(true), DriverEvent::try_is_complete)
            .map_err(failed("cuEventQuery"))
    }

    /// Waits until the stream has passed the point.
    ///
    /// # Errors
    /// It is a point of a capture, or the device failed.
    pub fn synchronize(&self) -> Result<(), KernelError> {
        self.outside()?;
        let event = self.point.event.as_ref();
        event.map_or(Ok(()), |event| self.device().events.wait(event))
    }

    fn outside(&self) -> Result<(), KernelError> {
        capture::not_in("the state of a point")?;
        match self.point.capture {
            Some(_) => Err(KernelError::InCapture {
                what: "the state of a point of a capture",
            }),
            None => Ok(()),
        }
    }
}

impl Drop for Point {
    fn drop(&mut self) {
        // Points of captures belong to their graphs.
        if let (Some(event), None) = (self.event.take(), self.capture) {
            self.device.events.give_back(event);
        }
    }
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaEvent(device {})", self.device().context.ordinal())
    }
}
