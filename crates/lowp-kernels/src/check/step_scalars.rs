//! The check of jobs that make the scalars of a step.

use super::access::Mode;
use super::planner::{Done, Planner, missing, range};
use crate::{Backend, GradContribution, StepCounts, StepRecord, StepScalars, StepScalarsJob};

impl<B: Backend> Planner<'_, B> {
    pub(super) fn step_scalars(&mut self, index: usize, job: &StepScalarsJob<B>) -> Done {
        let StepScalarsJob {
            parts,
            shards,
            replica,
            options,
            counts,
            out,
            report,
        } = job;
        let len = |buffer| self.backend.len::<u8>(buffer);
        if *shards == 0 {
            return missing(index, "a shard in the replicas");
        }
        let bytes = shards.saturating_mul(GradContribution::BYTES);
        let replicas = len(parts).div_ceil(bytes).max(1);
        range("replica of step scalars", *replica, 1, replicas)?;
        let groups = StepScalars::groups_in(len(options))?;
        let scalars = StepScalars::bytes(groups);
        let needed = replicas.saturating_mul(bytes);
        self.whole::<u8>(index, "gradient parts", parts, needed, Mode::Read)?;
        self.whole::<u8>(index, "options", options, scalars, Mode::Read)?;
        self.whole::<u8>(index, "counts", counts, StepCounts::BYTES, Mode::Write)?;
        self.whole::<u8>(index, "scalars", out, scalars, Mode::Write)?;
        self.whole::<u8>(index, "report", report, StepRecord::BYTES, Mode::Write)
    }
}
