//! The capture that a thread is in ([`crate::Backend::capture`]).
//!
//! While a thread captures, its work goes to streams that nothing else uses, one in place of each stream
//! that takes part. So the work of other threads, and what destructors do to the streams themselves, stays
//! out of the graph.

use std::any::Any;
use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{CudaContext, CudaStream, sys};

use super::driver::failed;
use crate::KernelError;

/// Names a capture in this process.
pub(super) type Id = u64;

/// What a graph holds: plans and buffers.
pub(super) type KeptAlive = Box<dyn Any + Send + Sync>;

/// A stream, with a number that no other stream of a handle has in this process.
#[derive(Clone)]
pub(super) struct Numbered {
    pub(super) number: u64,
    pub(super) stream: Arc<CudaStream>,
}

struct Capture {
    id: Id,
    /// The stream of the handle that captures, and launches the graph.
    origin: Numbered,
    /// What stands for the streams that take part, with their numbers.
    stands: Vec<Numbered>,
    kept: Vec<KeptAlive>,
}

/// The capture of this thread, as a stream sees it.
pub(super) struct Inside {
    pub(super) id: Id,
    /// The stream that launches the graph.
    pub(super) origin: Numbered,
    /// What stands for the stream, if it takes part.
    pub(super) stand: Option<Arc<CudaStream>>,
}

thread_local! {
    static CAPTURE: RefCell<Option<Capture>> = const { RefCell::new(None) };
}

/// Begins a capture by the handle of `origin` in this thread.
pub(super) fn begin(
    context: &Arc<CudaContext>,
    origin: &Numbered,
) -> Result<Arc<CudaStream>, KernelError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    not_in("a capture")?;
    let stream = context.new_stream().map_err(failed("cuStreamCreate"))?;
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream
        .begin_capture(mode)
        .map_err(failed("cuStreamBeginCapture"))?;
    CAPTURE.set(Some(Capture {
        id: NEXT.fetch_add(1, Ordering::Relaxed),
        origin: origin.clone(),
        stands: Vec::new(),
        kept: Vec::new(),
    }));
    join(origin.number, &stream);
    Ok(stream)
}

/// Has `stand` stand for the stream `number` in the capture of this thread.
pub(super) fn join(number: u64, stand: &Arc<CudaStream>) {
    let stream = Arc::clone(stand);
    CAPTURE.with_borrow_mut(|capture| {
        if let Some(capture) = capture {
            capture.stands.push(Numbered { number, stream });
        }
    });
}

/// Ends the capture of this thread. What its graph must hold, and the streams, which must live until the driver
/// has ended the capture.
pub(super) fn end() -> (Vec<KeptAlive>, Vec<Arc<CudaStream>>) {
    let Some(capture) = CAPTURE.take() else {
        return (Vec::new(), Vec::new());
    };
    let streams = capture.stands.into_iter().map(|stand| stand.stream);
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

/// The capture of this thread, as the stream `number` sees it.
pub(super) fn seen_by(number: u64) -> Option<Inside> {
    CAPTURE.with_borrow(|capture| {
        let capture = capture.as_ref()?;
        let mut stands = capture.stands.iter();
        let stand = stands.find(|stand| stand.number == number);
        Some(Inside {
            id: capture.id,
            origin: capture.origin.clone(),
            stand: stand.map(|stand| Arc::clone(&stand.stream)),
        })
    })
}
