//! [`CudaGraph`]: captured work, replayed with one call.

#![expect(unsafe_code, reason = "captures launches and replays them")]

use std::fmt;
use std::sync::{Arc, Mutex};

use cudarc::driver::{DriverError, result, sys};

use super::capture::{self, KeptAlive};
use super::driver::failed;
use super::handle::Cuda;
use crate::KernelError;

/// Work that was captured ([`crate::Backend::capture`]): one call of the driver runs all of it. It holds the
/// plans and buffers of the work. Cloning clones the handle.
///
/// Work of other libraries belongs to it where they gave it, within the capture, to the stream that
/// [`Cuda::stream`] named there. What that work points to must be there, at the same address, whenever the
/// graph is launched; libraries that set things up on first use, as NCCL connects ranks, must have done so
/// before.
#[derive(Clone)]
pub struct CudaGraph {
    captured: Arc<Captured>,
}

struct Captured {
    /// First: it is gone before what it points to.
    graph: Mutex<Handle>,
    kept: Vec<KeptAlive>,
    cuda: Cuda,
}

struct Handle(cudarc::driver::CudaGraph);

// SAFETY: a graph may be used from any thread, one at a time; the mutex sees to that.
unsafe impl Send for Handle {}

impl CudaGraph {
    pub(super) fn capture<E: From<KernelError>>(
        cuda: &Cuda,
        work: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        /// Ends the capture also where `work` panics.
        struct End<'s>(Option<&'s cudarc::driver::CudaStream>);
        impl Drop for End<'_> {
            fn drop(&mut self) {
                if let Some(stream) = self.0 {
                    // SAFETY: the stream captures; what comes of it is not used.
                    if let Ok(graph) = unsafe { result::stream::end_capture(stream.cu_stream()) }
                        && !graph.is_null()
                    {
                        // SAFETY: nobody else has the graph.
                        let _ = unsafe { result::graph::destroy(graph) };
                    }
                    drop(capture::end());
                }
            }
        }
        cuda.bind()?;
        let stream = capture::begin(&cuda.device().context, &cuda.queue.numbered())?;
        let mut end = End(Some(&stream));
        let worked = work();
        if lost(&stream) {
            return Err(KernelError::CaptureLost.into());
        }
        worked?;
        // Errors that destructors left for the next call must not keep the capture from its end.
        let left = cuda.device().context.check_err();
        let graph = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        if graph.is_ok() {
            end.0 = None;
        }
        // A call that failed may not have come to the driver.
        drop(end);
        let (kept, streams) = capture::end();
        // The driver has ended the capture: the streams may go.
        drop(streams);
        left.map_err(failed("an earlier call"))?;
        let graph = graph
            .map_err(unfinished)?
            .filter(has_work)
            .ok_or_else(crate::cpu::nothing_captured)?;
        Ok(Self {
            captured: Arc::new(Captured {
                graph: Mutex::new(Handle(graph)),
                kept,
                cuda: cuda.clone(),
            }),
        })
    }

    /// Runs the work on the stream of `cuda`, which captured it, after what that stream has.
    pub(super) fn launch(&self, cuda: &Cuda) -> Result<(), KernelError> {
        capture::not_in("the launch of a graph")?;
        if !Arc::ptr_eq(&self.captured.cuda.queue, &cuda.queue) {
            return Err(KernelError::OtherStream);
        }
        cuda.bind()?;
        let graph = self.captured.graph.lock();
        let graph = graph.map_err(|_| KernelError::Poisoned)?;
        let stream = &cuda.queue.stream;
        // SAFETY: the graph is instantiated and locked; what it points to is held here, and freed after
        // the work of every stream.
        let launched =
            unsafe { result::graph::launch(graph.0.cu_graph_exec(), stream.cu_stream()) };
        launched.map_err(failed("cuGraphLaunch"))
    }
}

/// Whether there is anything to do, be it work of other libraries.
fn has_work(graph: &cudarc::driver::CudaGraph) -> bool {
    let mut nodes = 0;
    // SAFETY: the graph is alive; without an array only the number is written.
    let counted =
        unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &mut nodes) };
    counted != sys::CUresult::CUDA_SUCCESS || nodes > 0
}

/// Whether the driver has ended the capture of `stream` because of a call that no capture allows.
fn lost(stream: &cudarc::driver::CudaStream) -> bool {
    use sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED as INVALIDATED;
    stream
        .capture_status()
        .is_ok_and(|status| status == INVALIDATED)
}

/// Says why the driver makes no graph of a capture.
fn unfinished(error: DriverError) -> KernelError {
    match error.0 {
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_UNJOINED => {
            let what = "work of a stream that the one that captures does not wait for at the end";
            KernelError::InCapture { what }
        }
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => KernelError::CaptureLost,
        _ => failed("cuStreamEndCapture")(error),
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kept = self.captured.kept.len();
        write!(f, "CudaGraph({kept} calls, {:?})", self.captured.cuda)
    }
}
