//! [`Reads`]: what work reads of the scalars that it is run with.

use crate::{Backend, KernelError, Work};

/// What work reads of the scalars of a step; the rest may be anything.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reads {
    /// Whether the run changes anything. Only what makes scalars does not ask.
    pub skip: bool,
    /// The random numbers of the run.
    pub random: bool,
    /// So many parameter groups and, if there are any, the factor of gradients.
    pub groups: usize,
}

impl Reads {
    /// What `work` reads.
    pub fn of<B: Backend>(work: &Work<B>) -> Self {
        let mut reads = Self {
            skip: !matches!(work, Work::StepScalars(_)),
            ..Self::default()
        };
        match work {
            Work::Encode(jobs) => reads.random = jobs.iter().any(|job| job.stochastic.is_some()),
            Work::Round(jobs) => {
                reads.random = jobs.iter().any(|job| job.encode.stochastic.is_some());
            }
            Work::Momentum(jobs) => {
                let groups = jobs.iter().map(|job| job.group.saturating_add(1));
                reads.groups = groups.max().unwrap_or(0);
            }
            Work::Update(jobs) => {
                let encodes = jobs.iter().filter_map(|job| job.encode.as_ref());
                reads.random = encodes.into_iter().any(|job| job.stochastic.is_some())
                    || jobs.iter().any(|job| job.is_stochastic());
                let groups = jobs.iter().map(|job| job.group.saturating_add(1));
                reads.groups = groups.max().unwrap_or(0);
            }
            _ => {}
        }
        reads
    }

    /// Checks that scalars of `given` parameter groups are enough.
    pub(crate) fn fit(self, given: usize) -> Result<(), KernelError> {
        let needed = self.groups;
        match given < needed {
            true => Err(KernelError::Scalars { needed, given }),
            false => Ok(()),
        }
    }

    /// Where it lies in [`crate::StepScalars::to_bytes`] (docs/numerics.md 12.8).
    fn ranges(self) -> impl Iterator<Item = std::ops::Range<usize>> {
        let bytes = crate::StepScalars::bytes;
        let groups = bytes(0)..bytes(self.groups);
        [
            (self.random, 0..8),
            (self.groups > 0, 8..12),
            (self.skip, 12..16),
            (self.groups > 0, groups),
        ]
        .into_iter()
        .filter_map(|(read, range)| read.then_some(range))
    }

    /// Whether scalars that lie in `there` serve a run with those of `wanted`.
    pub fn served(self, there: &[u8], wanted: &[u8]) -> bool {
        let mut ranges = self.ranges();
        ranges.all(|range| {
            there
                .get(range.clone())
                .is_some_and(|x| Some(x) == wanted.get(range))
        })
    }
}
