//! The capture that a thread is in ([`crate::Backend::capture`]).
//!
//! While a thread captures, its work goes to streams that nothing else uses, one in place of each stream
//! that takes part. So the work of other threads, and what destructors do to the streams themselves, stays
//! out of the graph.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{CudaStream, sys};

use super::device::Cuda;
use super::event::CudaEvent;
use super::failed;
use super::queue::Queue;
use crate::KernelError;

/// Names a capture in this process.
pub(super) type Id = u64;

/// What a graph holds: plans and buffers.
pub(super) type Kept = Box<dyn Any + Send + Sync>;

struct Capture {
    id: Id,
    /// The handle that captures.
    origin: Cuda,
    /// Numbers of queues, and the streams that stand for theirs.
    streams: Vec<(u64, Arc<CudaStream>)>,
    kept: Vec<Kept>,
}

thread_local! {
    static CAPTURE: RefCell<Option<Capture>> = const { RefCell::new(None) };
}

/// Begins a capture by `cuda` in this thread.
pub(super) fn begin(cuda: &Cuda) -> Result<Arc<CudaStream>, KernelError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    not_in("a capture")?;
    let stream = cuda.device().context.new_stream();
    let stream = stream.map_err(failed("cuStreamCreate"))?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream
        .begin_capture(mode)
        .map_err(failed("cuStreamBeginCapture"))?;
    CAPTURE.set(Some(Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        origin: cuda.clone(),
        streams: vec![(cuda.queue.number, Arc::clone(&stream))],
        kept: Vec::new(),
    }));
    Ok(stream)
}

/// Ends the capture of this thread. What its graph must hold, and the streams, which must live until the driver
/// has ended the capture.
pub(super) fn end() -> (Vec<Kept>, Vec<Arc<CudaStream>>) {
    let Some(capture) = CAPTURE.take() else {
        return (Vec::new(), Vec::new());
    };
    let streams = capture.streams.into_iter().map(|(_, stream)| stream);
    (capture.kept, streams.collect())
}

pub(super) fn is_on() -> bool {
    CAPTURE.with_borrow(Option::is_some)
}

/// An error in a capture: `what` cannot be captured.
pub(super) fn not_in(what: &'static str) -> Result<(), KernelError> {
    if is_on() {
        return Err(KernelError::InCapture { what });
    }
    Ok(())
}

/// Makes the graph of the capture, if this thread is in one, hold something.
pub(super) fn keep<T: Any + Send + Sync>(what: impl FnOnce() -> T) {
    CAPTURE.with_borrow_mut(|capture| {
        if let Some(capture) = capture {
            capture.kept.push(Box::new(what()));
        }
    });
}

/// The handle that captures, and launches the graph; `cuda` where this thread does not capture.
pub(super) fn origin(cuda: &Cuda) -> Cuda {
    CAPTURE.with_borrow(|capture| {
        let capture = capture.as_ref();
        capture.map_or(cuda, |capture| &capture.origin).clone()
    })
}

/// Where this thread gives work of `queue` to: its stream, or what stands for it in a capture.
pub(super) fn stream_of(queue: &Queue) -> Result<Arc<CudaStream>, KernelError> {
    CAPTURE.with_borrow(|capture| match capture {
        None => Ok(Arc::clone(&queue.stream)),
        Some(capture) => capture.stream(queue).ok_or(KernelError::InCapture {
            what: "work of a stream that does not wait for the one that captures",
        }),
    })
}

impl Capture {
    fn stream(&self, queue: &Queue) -> Option<Arc<CudaStream>> {
        let mut streams = self.streams.iter();
        let found = streams.find(|(number, _)| *number == queue.number);
        found.map(|(_, stream)| Arc::clone(stream))
    }
}

/// The point behind what `queue` was given so far: within the capture where it takes part.
pub(super) fn record(queue: &Queue) -> Result<CudaEvent, KernelError> {
    let inside = CAPTURE.with_borrow(|capture| {
        let capture = capture.as_ref()?;
        Some((capture.stream(queue)?, capture.id))
    });
    match inside {
        Some((stream, id)) => CudaEvent::record(&queue.device, &stream, Some(id)),
        None => CudaEvent::record(&queue.device, &queue.stream, None),
    }
}

/// Makes later work of `queue` follow `event`. A queue that waits for a point of the capture takes part in it.
/// What the graph follows and is not part of it (an event from before, the earlier work of a queue that takes
/// part), the stream that launches it follows from now on.
pub(super) fn wait(queue: &Queue, event: &CudaEvent) -> Result<(), KernelError> {
    CAPTURE.with_borrow_mut(|capture| {
        let Some(capture) = capture else {
            return match event.capture() {
                None => event.hold(&queue.stream),
                Some(_) => Err(over()),
            };
        };
        match (event.capture(), capture.stream(queue)) {
            (Some(id), _) if id != capture.id => Err(over()),
            (Some(_), Some(stream)) => event.hold(&stream),
            (Some(_), None) => {
                let earlier = CudaEvent::record(&queue.device, &queue.stream, None)?;
                earlier.hold(&capture.origin.queue.stream)?;
                let stream = queue.device.context.new_stream();
                let stream = stream.map_err(failed("cuStreamCreate"))?;
                let stands = (queue.number, Arc::clone(&stream));
                capture.streams.push(stands);
                event.hold(&stream)
            }
            (None, Some(_)) => event.hold(&capture.origin.queue.stream),
            // A stream apart from the capture.
            (None, None) => event.hold(&queue.stream),
        }
    })
}

fn over() -> KernelError {
    KernelError::InCapture {
        what: "waiting for a point of another capture",
    }
}
