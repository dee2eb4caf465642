//! [`CpuPlan`]: work that was checked and laid out.

use super::Cpu;
use super::access::Access;
use super::generic::{self, Context};
use super::isa::Isa;
use super::layout::Layout;
use crate::check::{Checked, check};
use crate::{AdamwJob, EncodeJob, KernelError, StepScalars, Work};

/// Work that was checked and laid out once, and runs any number of times.
#[derive(Debug)]
pub struct CpuPlan {
    work: Work<Cpu>,
    access: Access,
    /// The walk of each encode (also of those within AdamW jobs).
    layouts: Vec<Layout>,
    elements: usize,
    /// Parameter groups that the work uses.
    groups: usize,
    isa: Isa,
}

impl CpuPlan {
    /// Checks `work`.
    pub(crate) fn new(work: Work<Cpu>) -> Result<Self, KernelError> {
        let Checked {
            access,
            elements,
            groups,
        } = check(&Cpu, &work)?;
        let walk = |job: &EncodeJob<Cpu>| Layout::new(job.shape, &job.kernel, &job.targets);
        let layouts = match &work {
            Work::Encode(jobs) => jobs.iter().map(walk).collect::<Result<_, _>>()?,
            Work::Adamw(jobs) => {
                let walk = |job: &AdamwJob<Cpu>| match &job.encode {
                    Some(encode) => walk(encode),
                    None => Ok(Layout::default()),
                };
                jobs.iter().map(walk).collect::<Result<_, _>>()?
            }
            _ => Vec::new(),
        };
        Ok(Self {
            work,
            access: Access::new(access),
            layouts,
            elements,
            groups,
            isa: Isa::best(),
        })
    }

    /// The same plan for another instruction set.
    #[cfg(test)]
    pub(crate) fn with_isa(self, isa: Isa) -> Self {
        Self { isa, ..self }
    }

    /// Runs the work.
    pub(crate) fn run(&self, scalars: &StepScalars) -> Result<(), KernelError> {
        if scalars.adam.len() < self.groups {
            let (needed, given) = (self.groups, scalars.adam.len());
            return Err(KernelError::Scalars { needed, given });
        }
        if scalars.skip {
            return Ok(());
        }
        let context = &Context {
            isa: self.isa,
            scalars,
            elements: self.elements,
        };
        let mut locked = self.access.lock()?;
        let views = &mut locked.views();
        match &self.work {
            Work::Amax(jobs) => generic::amax::run(jobs, context, views),
            Work::Scale(jobs) => generic::scale::run(jobs, views),
            Work::Encode(jobs) => generic::encode::run(jobs, &self.layouts, context, views),
            Work::FlatEncode(jobs) => generic::flat::run(jobs, context, views),
            Work::Decode(jobs) => generic::decode::run(jobs, context, views),
            Work::Transpose(jobs) => generic::transpose::run(jobs, context, views),
            Work::Repack(jobs) => generic::repack::run(jobs, context, views),
            Work::Interleave(jobs) => generic::interleave::run(jobs, context, views),
            Work::Adamw(jobs) => generic::adamw::run(jobs, &self.layouts, context, views),
            Work::SumSquares(jobs) => generic::norm::run(jobs, context, views),
        }
    }
}
