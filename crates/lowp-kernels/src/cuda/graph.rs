//! [`CudaGraph`]: runs of several plans, captured once and replayed with one call.

use std::fmt;
use std::sync::Mutex;

use cudarc::driver::{result, sys};

use super::device::Cuda;
use super::failed;
use super::plan::CudaPlan;
use crate::{KernelError, StepScalars};

/// Runs of plans, one after the other, as one call of the driver.
///
/// The scalars are not part of the graph: each replay gets its own.
pub struct CudaGraph {
    cuda: Cuda,
    /// Also what the graph points to.
    plans: Vec<CudaPlan>,
    graph: Mutex<Handle>,
}

struct Handle(cudarc::driver::CudaGraph);

// SAFETY: a graph may be used from any thread, one at a time; the mutex sees to that.
unsafe impl Send for Handle {}

impl CudaGraph {
    /// Captures one run of each of `plans`, in order, for the stream of `cuda`.
    ///
    /// # Errors
    /// A plan of another device, plans without any work, or a driver failure.
    pub fn capture(cuda: &Cuda, plans: &[&CudaPlan]) -> Result<Self, KernelError> {
        plans.iter().try_for_each(|plan| plan.on(cuda))?;
        // A stream that nothing else uses: work of other threads stays out of the capture.
        let context = &cuda.device.context;
        let stream = context.new_stream().map_err(failed("cuStreamCreate"))?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream
            .begin_capture(mode)
            .map_err(failed("cuStreamBeginCapture"))?;
        let enqueued = plans.iter().try_for_each(|plan| {
            // SAFETY: nothing runs yet; `launch` replays on the handle's stream, whose scalars
            // these are, and this graph keeps the plans.
            unsafe { plan.enqueue(cuda, stream.cu_stream(), cuda.step.pointer()) }
        });
        // Ends the capture also where a launch was refused.
        let captured = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        enqueued?;
        let graph = captured.map_err(failed("cuStreamEndCapture"))?;
        let graph = graph.ok_or_else(|| KernelError::Missing {
            what: "work in the plans of a graph".to_owned(),
        })?;
        Ok(Self {
            cuda: cuda.clone(),
            plans: plans.iter().map(|&plan| plan.clone()).collect(),
            graph: Mutex::new(Handle(graph)),
        })
    }

    /// Replays the runs with `scalars`, behind the work that the stream has.
    ///
    /// # Errors
    /// Scalars that do not fit a plan, or a driver failure.
    pub fn launch(&self, scalars: &StepScalars) -> Result<(), KernelError> {
        let fits = |plan: &CudaPlan| plan.fits(&self.cuda, scalars);
        self.plans.iter().try_for_each(fits)?;
        let graph = self.graph.lock().map_err(|_| KernelError::Poisoned)?;
        let stream = &self.cuda.stream;
        self.cuda.step.with(stream, scalars, |_| {
            // SAFETY: the graph is instantiated and locked; what it points to is held here, and
            // freed behind the work of every stream.
            let launched =
                unsafe { result::graph::launch(graph.0.cu_graph_exec(), stream.cu_stream()) };
            launched.map_err(failed("cuGraphLaunch"))
        })
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGraph({} plans, {:?})", self.plans.len(), self.cuda)
    }
}
