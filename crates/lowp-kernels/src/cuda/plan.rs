//! [`CudaPlan`]: work as a table on the device, and the launch of one kernel over it.

#![expect(
    unsafe_code,
    reason = "launches kernels over a table of addresses, whose memory the plan keeps alive"
)]

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{result, sys};

use super::buffer::CudaBuffer;
use super::device::Device;
use super::driver::failed;
use super::handle::Cuda;
use super::memory::DeviceMemory;
use super::module::{CudaFunction, Kernel};
use super::ops::job::Job;
use super::table::{Step, Tile, flags};
use super::{capture, ops, step};
use crate::check::reads::Reads;
use crate::check::{Checked, check};
use crate::{KernelError, StepScalars, UpdateJob, Work};

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
    /// One for the work, or for each kind of jobs that has kernels of its own; none for work without elements.
    launches: Vec<Launch>,
    scratch: Option<Scratch>,
    /// Held: the launch points to its buffers.
    work: Work<Cuda>,
}

/// Memory that a launch adds up in: two runs at a time would spoil both.
#[derive(Debug)]
struct Scratch {
    #[expect(dead_code, reason = "held: the launch points into it")]
    memory: DeviceMemory,
    /// The queue that runs one after another.
    queue: u64,
}

impl CudaPlan {
    /// Checks `work` and puts it on the device of `cuda`.
    pub(super) fn new(cuda: &Cuda, work: Work<Cuda>) -> Result<Self, KernelError> {
        capture::not_in("planning")?;
        let Checked { reads, .. } = check(cuda, &work)?;
        let mut scratch = None;
        let launches = match &work {
            Work::Amax(jobs) => Launch::new(cuda, ops::amax::jobs(jobs)),
            Work::History(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::history::job(job)])),
            Work::Encode(jobs) => Launch::each(cuda, jobs, |job| ops::encode::jobs(cuda, job)),
            Work::FlatEncode(jobs) => {
                Launch::each(cuda, jobs, |job| ops::flat_encode::jobs(cuda, job))
            }
            Work::Decode(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::decode::job(job)])),
            Work::Round(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::round::job(cuda, job)?])),
            Work::Transpose(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::transpose::job(job)])),
            Work::Repack(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::repack::job(job)])),
            Work::Interleave(jobs) => {
                Launch::each(cuda, jobs, |job| Ok(ops::interleave::jobs(job)))
            }
            Work::Rearrange(jobs) => Launch::each(cuda, jobs, |job| Ok(ops::rearrange::jobs(job))),
            Work::Update(jobs) => Launch::updates(cuda, jobs),
            Work::SumSquares(jobs) if jobs.is_empty() => Ok(Vec::new()),
            Work::SumSquares(jobs) => {
                let (jobs, memory) = ops::sum_squares::jobs(cuda, jobs)?;
                let queue = cuda.queue.number;
                scratch = Some(Scratch { memory, queue });
                Launch::new(cuda, jobs)
            }
            Work::Sum(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::sum::sum(job)])),
            Work::SumParts(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::sum_parts::job(job)])),
            Work::Convert(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::sum::convert(job)])),
            Work::Momentum(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::momentum::job(job)])),
            Work::Normalize(jobs) => Launch::each(cuda, jobs, |job| Ok([ops::normalize::job(job)])),
            Work::StepScalars(jobs) => {
                Launch::each(cuda, jobs, |job| Ok([ops::step_scalars::job(job)?]))
            }
        }?;
        let planned = Planned {
            device: Arc::clone(cuda.device()),
            reads,
            launches,
            scratch,
            work,
        };
        Ok(Self {
            planned: Arc::new(planned),
        })
    }

    /// The address of the first job of a plan of roundings of blocks of 32, for kernels of other crates that do the same with values that
    /// they make (`lowp/round.cuh`). The jobs are there as long as the plan.
    pub fn rounds_of_blocks(&self) -> Option<u64> {
        match &*self.planned.launches {
            [launch] if launch.kernel == ops::round::E8M0_FP8 => Some(launch.jobs),
            _ => None,
        }
    }

    /// The address of the first job of a plan of amaxes that are all those of one whole matrix, not of blocks or lines, for kernels that make the matrix.
    pub fn amaxes_of_matrix(&self) -> Option<u64> {
        match (&*self.planned.launches, &self.planned.work) {
            ([launch], Work::Amax(jobs)) if ops::amax::are_of_one_matrix(jobs) => Some(launch.jobs),
            _ => None,
        }
    }

    /// Runs the work on the stream of `cuda`.
    pub(super) fn run(&self, cuda: &Cuda, scalars: &StepScalars) -> Result<(), KernelError> {
        self.fits(cuda, scalars)?;
        if capture::is_on() {
            return self.record(cuda, scalars);
        }
        let stream = &cuda.queue.stream;
        let reads = self.planned.reads;
        cuda.queue.step.with(stream, reads, scalars, |step| {
            // SAFETY: the step's memory is that of the handle, and freed after its work; what the
            // plan holds is freed after the work of every stream.
            unsafe { self.enqueue(stream.cu_stream(), step) }
        })
    }

    /// Adds the work to the capture of this thread. It gets the scalars of now at every launch.
    fn record(&self, cuda: &Cuda, scalars: &StepScalars) -> Result<(), KernelError> {
        let stream = cuda.queue.current()?;
        // On the stream that launches the graph, whichever this one is.
        let memory = step::constant(cuda.device(), &cuda.queue.origin().stream, scalars)?;
        // SAFETY: nothing runs yet; the graph keeps the plan and the scalars.
        unsafe { self.enqueue(stream.cu_stream(), memory.pointer)? };
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
        let reads = self.planned.reads;
        reads.fit(StepScalars::groups_in(scalars.len())?)?;
        let (pointer, size) = (scalars.pointer(), align_of::<Step>());
        if !pointer.is_multiple_of(size as u64) {
            return Err(KernelError::Misaligned { pointer, size });
        }
        cuda.bind()?;
        let stream = cuda.queue.current()?;
        // SAFETY: the buffer holds a step of enough groups, and like what the plan holds it is freed
        // after the work of every stream.
        unsafe { self.enqueue(stream.cu_stream(), pointer)? };
        capture::keep(|| (self.clone(), scalars.clone()));
        Ok(())
    }

    /// Checks that scalars and a device fit the plan.
    pub(super) fn fits(&self, cuda: &Cuda, scalars: &StepScalars) -> Result<(), KernelError> {
        self.on(cuda)?;
        self.planned.reads.fit(scalars.groups.len())
    }

    /// Checks that a device is that of the plan and, where the plan has memory to add up in, that its runs have an order: they are given
    /// to one stream, and a capture to the stream that launches the graph.
    pub(super) fn on(&self, cuda: &Cuda) -> Result<(), KernelError> {
        let device = &self.planned.device;
        cuda.device()
            .same(device, "the plan", "plan the work on each")?;
        match &self.planned.scratch {
            Some(Scratch { queue, .. })
                if [cuda.queue.number, cuda.queue.origin().number] != [*queue; 2] =>
            {
                Err(KernelError::OtherHandle)
            }
            _ => Ok(()),
        }
    }

    /// # Safety
    /// As [`Launch::enqueue`]; the plan answers for its buffers.
    unsafe fn enqueue(&self, stream: sys::CUstream, step: u64) -> Result<(), KernelError> {
        let mut launches = self.planned.launches.iter();
        // SAFETY: the caller's promise.
        launches.try_for_each(|launch| unsafe { launch.enqueue(stream, step) })
    }
}

/// A kernel over a table that stays on the device.
#[derive(Debug)]
struct Launch {
    kernel: Kernel,
    function: CudaFunction,
    blocks: u32,
    tiles: u64,
    jobs: u64,
    /// Tiles, then jobs.
    #[expect(dead_code, reason = "held: `tiles` and `jobs` point into it")]
    table: DeviceMemory,
}

impl Launch {
    /// Lays `jobs` out and puts them on the device, in the launches that they need; none if there is nothing to do.
    fn new<J: Job>(cuda: &Cuda, jobs: Vec<J>) -> Result<Vec<Self>, KernelError> {
        let launches = J::launches(jobs).into_iter();
        let launches = launches.map(|jobs| Self::one(cuda, jobs).transpose());
        launches.flatten().collect()
    }

    /// One launch of `jobs`.
    fn one<J: Job>(cuda: &Cuda, mut jobs: Vec<J>) -> Result<Option<Self>, KernelError> {
        jobs.iter_mut().for_each(Job::lay_out);
        J::lay_out_together(&mut jobs);
        let kernel = J::kernel(&jobs);
        let tiles = tile_table(&jobs).ok_or(KernelError::TooManyTiles {
            kernel: kernel.name,
        })?;
        if tiles.is_empty() {
            return Ok(None);
        }
        let function = cuda.device().modules.function(&kernel)?;
        let blocks = tiles.len() as u32;
        // Jobs have 8-byte fields.
        let jobs_at = (tiles.len() * size_of::<Tile>()).next_multiple_of(align_of::<J>().max(16));
        let stream = &cuda.queue.stream;
        let table =
            DeviceMemory::zeros(cuda.device(), stream, jobs_at + jobs.len() * size_of::<J>())?;
        let jobs_pointer = table.pointer + jobs_at as u64;
        // SAFETY: both lie within the memory that was just allocated for them, one after the other.
        unsafe {
            table.upload(stream, table.pointer, &tiles)?;
            table.upload(stream, jobs_pointer, &jobs)?;
        }
        Ok(Some(Self {
            kernel,
            function,
            blocks,
            tiles: table.pointer,
            jobs: jobs_pointer,
            table,
        }))
    }

    /// Launches of all that `fill` makes of `jobs`.
    fn each<T, J: Job, I: IntoIterator<Item = J>>(
        cuda: &Cuda,
        jobs: &[T],
        fill: impl Fn(&T) -> Result<I, KernelError>,
    ) -> Result<Vec<Self>, KernelError> {
        let mut filled = Vec::new();
        for job in jobs {
            filled.extend(fill(job)?);
        }
        Self::new(cuda, filled)
    }

    /// Updates: those of values that are stored in few bits have launches of their own.
    fn updates(cuda: &Cuda, jobs: &[UpdateJob<Cuda>]) -> Result<Vec<Self>, KernelError> {
        let (stored, others): (Vec<_>, Vec<_>) =
            jobs.iter().partition(|job| ops::stored::takes(job));
        let stored = ops::stored::rows(cuda, stored.into_iter())?;
        let mut launches = Self::each(cuda, &others, |job| Ok([ops::update::job(cuda, job)?]))?;
        launches.extend(Self::new(cuda, stored.updates)?);
        launches.extend(Self::new(cuda, stored.amaxes)?);
        launches.extend(Self::new(cuda, stored.encodes)?);
        Ok(launches)
    }

    /// Gives the launch to `stream`, with the scalars at `step`.
    ///
    /// # Safety
    /// The buffers that the jobs point to, this launch and `step` must live until the work is done;
    /// `stream` must be of the device of the plan.
    unsafe fn enqueue(&self, stream: sys::CUstream, step: u64) -> Result<(), KernelError> {
        let (mut tiles, mut jobs, mut step, mut honor_skip) =
            (self.tiles, self.jobs, step, flags::HONOR_SKIP);
        let mut parameters: [*mut c_void; 4] = [
            (&raw mut tiles).cast(),
            (&raw mut jobs).cast(),
            (&raw mut step).cast(),
            (&raw mut honor_skip).cast(),
        ];
        // SAFETY: the parameters are those of every kernel (`table`) and are read before the call
        // returns; for what they point to the caller answers.
        let launched = unsafe {
            result::launch_kernel(
                self.function.0,
                (self.blocks, 1, 1),
                (self.kernel.threads, 1, 1),
                self.kernel.shared_bytes,
                stream,
                &mut parameters,
            )
        };
        launched.map_err(failed("cuLaunchKernel"))
    }
}

/// The tiles of all jobs, in order; `None` where there are more than a launch has blocks, which is 2^31 - 1.
fn tile_table<J: Job>(jobs: &[J]) -> Option<Vec<Tile>> {
    let total = jobs
        .iter()
        .try_fold(0u64, |sum, job| sum.checked_add(job.tiles()))?;
    let mut tiles = Vec::with_capacity(i32::try_from(total).ok()? as usize);
    for (job, desc) in jobs.iter().enumerate() {
        let job = u32::try_from(job).ok()?;
        let count = u32::try_from(desc.tiles()).ok()?;
        tiles.extend((0..count).map(|index| Tile { job, index }));
    }
    if J::BACKWARDS {
        tiles.reverse();
    }
    Some(tiles)
}

#[cfg(test)]
mod tests {
    use super::super::table::Sum;
    use super::*;

    #[test]
    fn a_table_has_every_tile_of_every_job() {
        let jobs = [(0, 8192), (0, 0), (8, 8193)].map(|(from, len)| {
            let mut job = Sum {
                from,
                len,
                ..Sum::default()
            };
            job.lay_out();
            job
        });
        let tiles = tile_table(&jobs).expect("few tiles");
        let found: Vec<_> = tiles.iter().map(|tile| (tile.job, tile.index)).collect();
        assert_eq!(found, [(0, 0), (2, 0), (2, 1)]);
    }
}
