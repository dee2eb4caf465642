//! [`CudaGraph`]: runs of several plans, with work of other libraries between them, captured once and
//! replayed with one call.

#![expect(unsafe_code, reason = "captures launches and replays them")]

use std::fmt;
use std::sync::Mutex;

use cudarc::driver::{CudaStream, result, sys};

use super::device::Cuda;
use super::failed;
use super::plan::CudaPlan;
use crate::{KernelError, StepScalars};

/// Runs of plans, one after the other, as one call of the driver; [`CudaGraph::record`] takes work of
/// other libraries between them.
///
/// The scalars are not part of the graph: each replay gets its own.
pub struct CudaGraph {
    /// First: it is gone before what it points to.
    graph: Mutex<Handle>,
    plans: Vec<CudaPlan>,
    cuda: Cuda,
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
        Self::record(cuda, |recorder| {
            plans.iter().try_for_each(|&plan| recorder.run(plan))
        })
    }

    /// Captures what `work` gives to the recorder, and what other libraries give to its stream: the
    /// update of a step, a collective over its amaxes, and the encode, for instance.
    ///
    /// `work` may drop buffers, plans and handles. It allocates, plans, reads and writes nothing: the driver
    /// may refuse that while it records.
    ///
    /// What the work of other libraries points to must be there, at the same address, whenever the
    /// graph is launched. Libraries that set things up on first use, as NCCL connects ranks, must have
    /// done so before.
    ///
    /// # Errors
    /// The error of `work`, no work at all, or a driver failure.
    pub fn record(
        cuda: &Cuda,
        work: impl FnOnce(&mut CudaRecorder<'_>) -> Result<(), KernelError>,
    ) -> Result<Self, KernelError> {
        cuda.bind()?;
        // A stream that nothing else uses: work of other threads stays out of the capture.
        let context = &cuda.device().context;
        let stream = context.new_stream().map_err(failed("cuStreamCreate"))?;
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream
            .begin_capture(mode)
            .map_err(failed("cuStreamBeginCapture"))?;
        let mut recorder = CudaRecorder {
            cuda,
            stream: &stream,
            plans: Vec::new(),
        };
        let recorded = work(&mut recorder);
        let plans = recorder.plans;
        // Ends the capture also where the work was refused.
        let captured = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        recorded?;
        let graph = captured.map_err(failed("cuStreamEndCapture"))?;
        let graph = graph.ok_or_else(|| KernelError::Missing {
            what: "work in the plans of a graph".to_owned(),
        })?;
        Ok(Self {
            graph: Mutex::new(Handle(graph)),
            plans,
            cuda: cuda.clone(),
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
        let stream = &self.cuda.queue.stream;
        self.cuda.queue.step.with(stream, scalars, |_| {
            // SAFETY: the graph is instantiated and locked; what it points to is held here, and
            // freed behind the work of every stream.
            let launched =
                unsafe { result::graph::launch(graph.0.cu_graph_exec(), stream.cu_stream()) };
            launched.map_err(failed("cuGraphLaunch"))
        })
    }
}

/// Takes the work of a graph, in order ([`CudaGraph::record`]).
pub struct CudaRecorder<'g> {
    cuda: &'g Cuda,
    stream: &'g CudaStream,
    plans: Vec<CudaPlan>,
}

impl CudaRecorder<'_> {
    /// Adds a run of `plan`.
    ///
    /// # Errors
    /// A plan of another device, or a driver failure.
    pub fn run(&mut self, plan: &CudaPlan) -> Result<(), KernelError> {
        plan.on(self.cuda)?;
        self.plans.push(plan.clone());
        // SAFETY: nothing runs yet; `launch` replays on the handle's stream, whose scalars these
        // are, and the graph keeps the plans.
        unsafe {
            plan.enqueue(
                self.cuda,
                self.stream.cu_stream(),
                self.cuda.queue.step.pointer(),
            )
        }
    }

    /// The stream that is captured, a `CUstream`: for work of other libraries, which belongs to the
    /// graph then. It must not be used after the recording.
    pub fn stream(&self) -> u64 {
        self.stream.cu_stream() as u64
    }
}

impl fmt::Debug for CudaRecorder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plans = self.plans.len();
        write!(f, "CudaRecorder({plans} plans, {:?})", self.cuda)
    }
}

impl fmt::Debug for CudaGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaGraph({} plans, {:?})", self.plans.len(), self.cuda)
    }
}
