//! Sums of squares, which add up in memory of the plan.

use super::super::handle::Cuda;
use super::super::memory::DeviceMemory;
use super::super::module::Kernel;
use super::super::table::{RunSum, SUM_RUN, SUM_RUNS, SumSquares, SumTotal};
use super::job::{Job, Vector, aligned, cdiv};
use crate::{KernelError, SumSquaresJob};

/// The jobs, and the memory that a launch of them adds up in: sums of runs of all jobs, totals of jobs, and the
/// counter of jobs.
pub(crate) fn jobs(
    cuda: &Cuda,
    jobs: &[SumSquaresJob<Cuda>],
) -> Result<(Vec<SumSquares>, DeviceMemory), KernelError> {
    let runs_bytes = |job: &SumSquaresJob<Cuda>| (runs(job) * size_of::<RunSum>()) as u64;
    let all: u64 = jobs.iter().map(runs_bytes).sum();
    let bytes = all as usize + jobs.len() * size_of::<SumTotal>() + 8;
    let memory = DeviceMemory::zeros(cuda.device(), &cuda.queue.stream, bytes)?;
    let totals = memory.pointer + all;
    let state = totals + (jobs.len() * size_of::<SumTotal>()) as u64;
    let mut next = memory.pointer;
    let fill = |job: &SumSquaresJob<Cuda>| {
        let source = Vector::new(&job.source);
        let runs = next;
        next += runs_bytes(job);
        SumSquares {
            source: source.pointer,
            len: source.len,
            out: job.out.pointer(),
            runs,
            totals,
            state,
            jobs: jobs.len() as u64,
            source_code: source.code,
            ..SumSquares::default()
        }
    };
    Ok((jobs.iter().map(fill).collect(), memory))
}

/// Sums of runs that a job needs room for: of its elements, then of those sums, until one is left.
fn runs(job: &SumSquaresJob<Cuda>) -> usize {
    let mut level = Vector::new(&job.source).len;
    let mut runs = 0;
    while level > 1 || runs == 0 {
        level = cdiv(level, SUM_RUN);
        runs += level.max(1);
    }
    runs as usize
}

impl Job for SumSquares {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_sum_squares")];

    fn lay_out(&mut self) {
        self.tiles = cdiv(self.len, SUM_RUN * u64::from(SUM_RUNS)).max(1) as u32;
        self.vector = u8::from(aligned(self.source, 0, 16));
    }

    fn tiles(&self) -> u64 {
        u64::from(self.tiles)
    }
}
