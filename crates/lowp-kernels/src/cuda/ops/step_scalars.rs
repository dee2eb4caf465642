//! The scalars of a step: one block.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{GRAD_PART, STEP_GROUP, STEP_HEADER, StepScalars};
use super::job::Job;
use crate::{GradContribution, KernelError, StepScalarsJob};

/// The kernel goes through the records of docs/numerics.md 12.8 by these sizes.
const _: () = assert!(
    GRAD_PART as usize == GradContribution::BYTES
        && STEP_HEADER as usize == crate::StepScalars::bytes(0)
        && (STEP_HEADER + STEP_GROUP) as usize == crate::StepScalars::bytes(1)
);

pub(crate) fn job(job: &StepScalarsJob<Cuda>) -> Result<StepScalars, KernelError> {
    Ok(StepScalars {
        parts: job.parts.pointer(),
        options: job.options.pointer(),
        counts: job.counts.pointer(),
        out: job.out.pointer(),
        report: job.report.pointer(),
        ranks: (job.parts.len() / GradContribution::BYTES) as u64,
        shards: job.shards as u64,
        replica: job.replica as u64,
        groups: crate::StepScalars::groups_in(job.options.len())? as u64,
    })
}

impl Job for StepScalars {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_step_scalars")];
    fn lay_out(&mut self) {}
    fn tiles(&self) -> u64 {
        1
    }
}
