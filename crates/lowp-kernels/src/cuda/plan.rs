//! [`CudaPlan`]: work as a table on the device.

#![expect(
    unsafe_code,
    reason = "launches kernels whose memory the plan keeps alive"
)]

use std::sync::Arc;

use super::buffer::{CudaBuffer, Memory};
use super::device::{Cuda, Device};
use super::launch::Launch;
use super::table::{RunSum, Step, SumTotal};
use super::{capture, lower, step};
use crate::check::reads::Reads;
use crate::check::{Checked, check};
use crate::{KernelError, StepScalars, SumSquaresJob, Work};

/// Work that was checked and put on the device once, and runs any number of times.
///
/// Cloning clones the handle.
#[derive(Clone, Debug)]
pub struct CudaPlan {
    planned: Arc<Planned>,
}

#[derive(Debug)]
struct Planned {
    device: Arc<Device>,
    reads: Reads,
    /// `None` for work without elements.
    launch: Option<Launch>,
    scratch: Option<Scratch>,
    #[expect(dead_code, reason = "held: the launch points to its buffers")]
    work: Work<Cuda>,
}

/// Memory that a launch adds up in: two runs at a time would spoil both.
#[derive(Debug)]
struct Scratch {
    #[expect(dead_code, reason = "held: the launch points into it")]
    memory: Memory,
    /// The queue that runs one after another.
    queue: u64,
}

impl CudaPlan {
    /// Checks `work` and puts it on the device of `cuda`.
    pub(super) fn new(cuda: &Cuda, work: Work<Cuda>) -> Result<Self, KernelError> {
        capture::not_in("planning")?;
        let Checked { access, reads, .. } = check(cuda, &work)?;
        access
            .bytes
            .iter()
            .try_for_each(|used| cuda.own(&used.buffer))?;
        access
            .floats
            .iter()
            .try_for_each(|used| cuda.own(&used.buffer))?;
        access
            .halves
            .iter()
            .try_for_each(|used| cuda.own(&used.buffer))?;
        if reads.groups > step::GROUPS {
            return Err(step::too_many(reads.groups));
        }
        let mut scratch = None;
        let launch = match &work {
            Work::Amax(jobs) => Launch::new(cuda, lower::amaxes(jobs)),
            Work::History(jobs) => Launch::new(cuda, jobs.iter().map(lower::history).collect()),
            Work::Encode(jobs) => Launch::new(cuda, all(jobs, |job| lower::encode(cuda, job))?),
            Work::FlatEncode(jobs) => {
                Launch::new(cuda, all(jobs, |job| lower::flat_encode(cuda, job))?)
            }
            Work::Decode(jobs) => Launch::new(cuda, jobs.iter().map(lower::decode).collect()),
            Work::Transpose(jobs) => Launch::new(cuda, jobs.iter().map(lower::transpose).collect()),
            Work::Repack(jobs) => Launch::new(cuda, jobs.iter().map(lower::repack).collect()),
            Work::Interleave(jobs) => {
                let rows = jobs.iter().flat_map(lower::interleave).collect();
                Launch::new(cuda, rows)
            }
            Work::Adamw(jobs) => {
                let rows = jobs
                    .iter()
                    .map(|job| lower::adamw(cuda, job))
                    .collect::<Result<_, _>>()?;
                Launch::new(cuda, rows)
            }
            Work::SumSquares(jobs) if jobs.is_empty() => Ok(None),
            Work::SumSquares(jobs) => {
                let (memory, queue) = (sum_scratch(cuda, jobs)?, cuda.queue.number);
                let rows = sum_rows(jobs, memory.pointer);
                scratch = Some(Scratch { memory, queue });
                Launch::new(cuda, rows)
            }
            Work::Sum(jobs) => Launch::new(cuda, jobs.iter().map(lower::sum).collect()),
            Work::Convert(jobs) => Launch::new(cuda, jobs.iter().map(lower::convert).collect()),
            Work::StepScalars(jobs) => {
                let rows = jobs.iter().map(lower::step_scalars);
                Launch::new(cuda, rows.collect::<Result<_, _>>()?)
            }
        }?;
        let planned = Planned {
            device: Arc::clone(cuda.device()),
            reads,
            launch,
            scratch,
            work,
        };
        Ok(Self {
            planned: Arc::new(planned),
        })
    }

    /// Runs the work on the stream of `cuda`.
    pub(super) fn run(&self, cuda: &Cuda, scalars: &StepScalars) -> Result<(), KernelError> {
        self.fits(cuda, scalars)?;
        if capture::is_on() {
            return self.record(cuda, scalars);
        }
        let stream = &cuda.queue.stream;
        let needed = (self.planned.reads, scalars);
        cuda.queue.step.with(stream, needed, |step| {
            // SAFETY: the step's memory is that of the handle, and freed behind its work; what the
            // plan holds is freed behind the work of every stream.
            unsafe { self.enqueue(cuda, stream.cu_stream(), step) }
        })
    }

    /// Adds the work to the capture of this thread. It gets the scalars of now at every launch.
    fn record(&self, cuda: &Cuda, scalars: &StepScalars) -> Result<(), KernelError> {
        let stream = capture::stream_of(&cuda.queue)?;
        // On the stream that launches the graph, whichever this one is.
        let memory = step::constant(&capture::origin(cuda), scalars)?;
        // SAFETY: nothing runs yet; the graph keeps the plan and the scalars.
        unsafe { self.enqueue(cuda, stream.cu_stream(), memory.pointer)? };
        capture::keep(|| (self.clone(), memory));
        Ok(())
    }

    /// Runs the work on the stream of `cuda`, with scalars that lie in device memory.
    pub(super) fn run_with(
        &self,
        cuda: &Cuda,
        scalars: &CudaBuffer<u8>,
    ) -> Result<(), KernelError> {
        self.on(cuda)?;
        cuda.own(scalars)?;
        let needed = self.planned.reads.groups;
        let given = StepScalars::groups(scalars.len())?;
        if given < needed {
            return Err(KernelError::Scalars { needed, given });
        }
        let (pointer, size) = (scalars.pointer(), align_of::<Step>());
        if !pointer.is_multiple_of(size as u64) {
            return Err(KernelError::Misaligned { pointer, size });
        }
        cuda.bind()?;
        let stream = capture::stream_of(&cuda.queue)?;
        // SAFETY: the buffer holds a step of enough groups, and like what the plan holds it is freed
        // behind the work of every stream.
        unsafe { self.enqueue(cuda, stream.cu_stream(), pointer)? };
        capture::keep(|| (self.clone(), scalars.clone()));
        Ok(())
    }

    /// Checks that scalars and a device fit the plan.
    pub(super) fn fits(&self, cuda: &Cuda, scalars: &StepScalars) -> Result<(), KernelError> {
        self.on(cuda)?;
        let (needed, given) = (self.planned.reads.groups, scalars.adam.len());
        if given < needed {
            return Err(KernelError::Scalars { needed, given });
        }
        Ok(())
    }

    /// Checks that a device is that of the plan and, where the plan has memory to add up in, that its runs have an order: they are given
    /// to one stream, and a capture to the stream that launches the graph.
    pub(super) fn on(&self, cuda: &Cuda) -> Result<(), KernelError> {
        let device = &self.planned.device;
        cuda.device()
            .same(device, "the plan", "plan the work on each")?;
        match &self.planned.scratch {
            Some(Scratch { queue, .. })
                if [cuda, &capture::origin(cuda)].map(|cuda| cuda.queue.number) != [*queue; 2] =>
            {
                Err(KernelError::OtherHandle)
            }
            _ => Ok(()),
        }
    }

    /// # Safety
    /// As [`Launch::enqueue`]; the plan answers for its buffers.
    pub(super) unsafe fn enqueue(
        &self,
        cuda: &Cuda,
        stream: cudarc::driver::sys::CUstream,
        step: u64,
    ) -> Result<(), KernelError> {
        match &self.planned.launch {
            // SAFETY: the caller's promise.
            Some(launch) => unsafe { launch.enqueue(cuda, stream, step) },
            None => Ok(()),
        }
    }
}

fn all<T, J>(
    jobs: &[T],
    lower: impl Fn(&T) -> Result<Vec<J>, KernelError>,
) -> Result<Vec<J>, KernelError> {
    let mut rows = Vec::new();
    for job in jobs {
        rows.extend(lower(job)?);
    }
    Ok(rows)
}

/// Sums of runs of all jobs, totals of jobs, and the counter of jobs.
fn sum_scratch(cuda: &Cuda, jobs: &[SumSquaresJob<Cuda>]) -> Result<Memory, KernelError> {
    let runs: usize = jobs.iter().map(lower::runs).sum();
    let bytes = runs * size_of::<RunSum>() + jobs.len() * size_of::<SumTotal>() + 8;
    Memory::zeros(cuda, bytes)
}

fn sum_rows(jobs: &[SumSquaresJob<Cuda>], scratch: u64) -> Vec<super::table::SumSquares> {
    let runs: usize = jobs.iter().map(lower::runs).sum();
    let totals = scratch + (runs * size_of::<RunSum>()) as u64;
    let state = totals + (jobs.len() * size_of::<SumTotal>()) as u64;
    let mut runs = scratch;
    jobs.iter()
        .map(|job| {
            let row = lower::sum_squares(job, jobs.len(), [runs, totals, state]);
            runs += (lower::runs(job) * size_of::<RunSum>()) as u64;
            row
        })
        .collect()
}
