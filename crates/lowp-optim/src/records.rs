//! [`Records`]: how many steps each parameter was updated in, on the device, and the scalars that follow from that.

use lowp_kernels::{Backend, StepCounts, StepRecord, StepScalars, StepScalarsJob};

use crate::OptimError;
use crate::plans::Buffers;

/// The header of the scalars is as long as one group. So the scalars of all records, which follow each other in one buffer, can be
/// read as the scalars of more groups, by one launch.
const GROUP: usize = StepScalars::bytes(1) - StepScalars::bytes(0);
const _: () = assert!(StepScalars::bytes(0) == GROUP);

/// Records of [`StepCounts`]. Parameters that were updated in the same steps share one, and have the same bias corrections.
/// Record 0 counts every step of the optimizer.
#[derive(Debug)]
pub(crate) struct Records<B: Backend> {
    backend: B,
    groups: usize,
    /// One of each for every record; as many as there can be.
    counts: B::Buffer<u8>,
    scalars: B::Buffer<u8>,
    reports: B::Buffer<u8>,
    sharing: Sharing,
}

/// Which parameters share a record.
#[derive(Clone, Debug)]
pub(crate) struct Sharing {
    /// The record of each parameter.
    record: Vec<usize>,
    /// For each record, the one that it began as a copy of.
    from: Vec<usize>,
}

impl Sharing {
    fn new(params: usize) -> Self {
        let (record, from) = (vec![0; params], vec![0]);
        Self { record, from }
    }

    /// Has parameters of equal `steps` share a record.
    pub(crate) fn of_equal(counts: StepCounts, steps: &[u64]) -> Self {
        let mut known = vec![counts.applied];
        let record = |steps: &u64| {
            let at = known.iter().position(|known| known == steps);
            at.unwrap_or_else(|| {
                known.push(*steps);
                known.len() - 1
            })
        };
        let record = steps.iter().map(record).collect();
        let from = vec![0; known.len()];
        Self { record, from }
    }

    /// Gives parameters that are not `present` other records than those that are, and than record 0.
    pub(crate) fn split(&self, present: &[bool]) -> Self {
        let mut split = self.clone();
        let mut counting = vec![false; self.from.len()];
        counting[0] = true;
        for (&record, _) in self.record.iter().zip(present).filter(|(_, p)| **p) {
            counting[record] = true;
        }
        let mut copies = vec![None; self.from.len()];
        for (record, _) in split.record.iter_mut().zip(present).filter(|(_, p)| !**p) {
            if counting[*record] {
                let own = *copies[*record].get_or_insert_with(|| {
                    split.from.push(*record);
                    split.from.len() - 1
                });
                *record = own;
            }
        }
        split
    }
}

impl<B: Backend> Records<B> {
    pub(crate) fn new(backend: &B, params: usize, groups: usize) -> Result<Self, OptimError> {
        let most = params + 1;
        Ok(Self {
            backend: backend.clone(),
            groups,
            counts: backend.alloc::<u8>(most * StepCounts::BYTES)?,
            scalars: backend.alloc::<u8>(most * StepScalars::bytes(groups))?,
            reports: backend.alloc::<u8>(most * StepRecord::BYTES)?,
            sharing: Sharing::new(params),
        })
    }

    /// Which parameters share a record from a step of those that are `present` on; `None` if that changes nothing.
    pub(crate) fn split_for(&self, present: &[bool]) -> Option<Sharing> {
        let split = self.sharing.split(present);
        (split.from.len() > self.sharing.from.len()).then_some(split)
    }

    /// How they share now.
    pub(crate) fn sharing(&self) -> &Sharing {
        &self.sharing
    }

    /// Shares records as `sharing` says, which splits some: each begins with the counts of the one that it was split from.
    pub(crate) fn split(&mut self, sharing: Sharing) -> Result<(), OptimError> {
        for record in self.sharing.from.len()..sharing.from.len() {
            let (from, size) = (sharing.from[record], StepCounts::BYTES);
            let range = from * size..(from + 1) * size;
            self.backend
                .copy(&self.counts, range, &self.counts, record * size)?;
        }
        self.sharing = sharing;
        Ok(())
    }

    /// Parameters share records as `sharing` says from here on. Sets the step counts: `counts` of the optimizer, `steps` of each parameter.
    pub(crate) fn share(
        &mut self,
        sharing: Sharing,
        counts: StepCounts,
        steps: &[u64],
    ) -> Result<(), OptimError> {
        self.sharing = sharing;
        self.write(counts, steps)
    }

    /// The scalars of all records of `sharing`, as one.
    pub(crate) fn scalars(&self, sharing: &Sharing) -> Result<B::Buffer<u8>, OptimError> {
        let bytes = sharing.from.len() * StepScalars::bytes(self.groups);
        Ok(self.backend.view::<u8>(&self.scalars, 0..bytes)?)
    }

    /// The scalars of parameter `param`, of a group, among them.
    pub(crate) fn group(&self, sharing: &Sharing, param: usize, group: usize) -> usize {
        sharing.record[param] * StepScalars::bytes(self.groups) / GROUP + group
    }

    /// What makes them in a step of the parameters that are `present`; other records stay.
    pub(crate) fn jobs(
        &self,
        sharing: &Sharing,
        present: &[bool],
        buffers: &Buffers<B>,
    ) -> Result<Vec<StepScalarsJob<B>>, OptimError> {
        let mut counting = vec![false; sharing.from.len()];
        counting[0] = true;
        for (&record, &present) in sharing.record.iter().zip(present) {
            counting[record] |= present;
        }
        let records = counting
            .iter()
            .enumerate()
            .filter(|(_, counting)| **counting);
        let view = |buffer, record: usize, size: usize| {
            self.backend
                .view::<u8>(buffer, record * size..(record + 1) * size)
        };
        let job = |(record, _)| {
            Ok(StepScalarsJob {
                parts: buffers.parts.clone(),
                shards: buffers.shards,
                replica: buffers.replica,
                options: buffers.options.clone(),
                counts: view(&self.counts, record, StepCounts::BYTES)?,
                out: view(&self.scalars, record, StepScalars::bytes(self.groups))?,
                report: view(&self.reports, record, StepRecord::BYTES)?,
            })
        };
        records.map(job).collect()
    }

    /// Where the report of a step begins.
    pub(crate) fn reports(&self) -> &B::Buffer<u8> {
        &self.reports
    }

    /// How many steps were applied and skipped, once the stream is done.
    pub(crate) fn counts(&self) -> Result<StepCounts, OptimError> {
        let mut bytes = [0; StepCounts::BYTES];
        self.backend.read(&self.counts, 0, &mut bytes)?;
        Ok(StepCounts::from_bytes(&bytes))
    }

    /// How many steps each parameter was updated in, once the stream is done.
    pub(crate) fn steps(&self) -> Result<Vec<u64>, OptimError> {
        let mut bytes = vec![0; self.sharing.from.len() * StepCounts::BYTES];
        self.backend.read(&self.counts, 0, &mut bytes)?;
        let (records, _) = bytes.as_chunks::<{ StepCounts::BYTES }>();
        let applied = |&record: &usize| StepCounts::from_bytes(&records[record]).applied;
        Ok(self.sharing.record.iter().map(applied).collect())
    }

    /// The first parameter that has another number of `steps` than one that it shares a record with: `None` if they fit.
    pub(crate) fn first_conflict(&self, counts: StepCounts, steps: &[u64]) -> Option<usize> {
        let mut counts_of: Vec<Option<u64>> = vec![None; self.sharing.from.len()];
        counts_of[0] = Some(counts.applied);
        let mut params = self.sharing.record.iter().zip(steps);
        params.position(|(&record, &steps)| *counts_of[record].get_or_insert(steps) != steps)
    }

    /// Sets the step counts: `counts` of the optimizer, `steps` of each parameter.
    pub(crate) fn write(&self, counts: StepCounts, steps: &[u64]) -> Result<(), OptimError> {
        let mut records = vec![counts; self.sharing.from.len()];
        for (&record, &applied) in self.sharing.record.iter().zip(steps) {
            records[record].applied = applied;
        }
        records[0] = counts;
        let bytes: Vec<u8> = records.iter().flat_map(StepCounts::to_bytes).collect();
        Ok(self.backend.write(&self.counts, 0, &bytes)?)
    }
}
