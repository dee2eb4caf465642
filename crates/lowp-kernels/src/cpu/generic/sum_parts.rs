//! Sums of parts in their order.

use super::convert::FloatSlice;
use super::stored::Stored;
use super::sum::Merge;
use super::{Context, for_each, source};
use crate::cpu::Cpu;
use crate::cpu::access::AllViews;
use crate::lanes::Isa;
use crate::{KernelError, SumPartsJob};

/// Elements of one task.
const TASK: usize = 64 * 1024;

/// Elements that are added over all parts before the next ones: their sums stay in the nearest cache.
const RUN: usize = 2048;

/// A range of the sums of one job.
struct Task<'v, 'j> {
    job: &'j SumPartsJob<Cpu>,
    /// All parts, each of `len` values.
    parts: FloatSlice<'v>,
    len: usize,
    own: Option<OwnSlice<'v>>,
    /// The element of a part that `into` begins at.
    start: usize,
    into: &'v mut [f32],
}

/// The part that lies elsewhere.
#[derive(Clone, Copy)]
struct OwnSlice<'v> {
    number: usize,
    values: FloatSlice<'v>,
}

impl Task<'_, '_> {
    /// What part `number` has of the elements from `start` on.
    fn part(&self, number: usize, start: usize, count: usize) -> FloatSlice<'_> {
        match &self.own {
            Some(own) if own.number == number => own.values.slice(start..start + count),
            _ => {
                let first = number * self.len + start;
                self.parts.slice(first..first + count)
            }
        }
    }

    fn run(self, isa: Isa) {
        let mut sums = [0.0; RUN];
        for at in (0..self.into.len()).step_by(RUN) {
            let count = RUN.min(self.into.len() - at);
            let sums = &mut sums[..count];
            for number in 0..self.job.count {
                match self.part(number, self.start + at, count) {
                    FloatSlice::F32(from) if number == 0 => sums.copy_from_slice(from),
                    FloatSlice::F32(from) => merge::<f32, true>(isa, from, sums),
                    FloatSlice::Bf16(from) if number == 0 => merge::<_, false>(isa, from, sums),
                    FloatSlice::Bf16(from) => merge::<_, true>(isa, from, sums),
                }
            }
            let into = &mut self.into[at..at + count];
            match self.job.accumulate {
                true => merge::<f32, true>(isa, sums, into),
                false => into.copy_from_slice(sums),
            }
        }
    }
}

fn merge<F: Stored, const ADD: bool>(isa: Isa, from: &[F], into: &mut [f32]) {
    isa.run(Merge::<F, f32, ADD> { from, into });
}

/// Runs every job of a plan.
pub(crate) fn run(
    jobs: &[SumPartsJob<Cpu>],
    context: &Context<'_>,
    views: &mut AllViews<'_>,
) -> Result<(), KernelError> {
    let mut tasks = Vec::new();
    for job in jobs {
        let parts = source(&job.parts, views)?;
        let own = match &job.own {
            Some(own) => Some(OwnSlice {
                number: own.number,
                values: source(&own.values, views)?,
            }),
            None => None,
        };
        let into = views.floats.take(&job.into)?;
        let len = into.len();
        for (index, into) in into.chunks_mut(TASK).enumerate() {
            tasks.push(Task {
                job,
                parts,
                len,
                own,
                start: index * TASK,
                into,
            });
        }
    }
    for_each(context, tasks, |task| {
        task.run(context.isa);
        Ok(())
    })
}
