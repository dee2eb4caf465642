//! Amaxes: a source that several parts are taken of is read once.

use super::super::device::Cuda;
use super::super::table::{Amax, AmaxBlocks};
use super::{sides, source, via_bf16};
use crate::AmaxJob;

/// Parts of jobs with the same elements share rows, where these follow each other.
pub(in super::super) fn amaxes(jobs: &[AmaxJob<Cuda>]) -> Vec<Amax> {
    let mut rows: Vec<Amax> = Vec::new();
    for row in jobs.iter().flat_map(amax) {
        if !rows.last_mut().is_some_and(|last| last.take(&row)) {
            rows.push(row);
        }
    }
    rows
}

fn amax(job: &AmaxJob<Cuda>) -> Vec<Amax> {
    let (source, source_code, len) = source(&job.source);
    let base = Amax {
        source,
        rows: job.shape.rows as u64,
        cols: job.shape.cols as u64,
        start: job.start as u64,
        len,
        source_code,
        via_bf16: via_bf16(job.source_rounding),
        hadamard: u8::from(job.hadamard),
        ..Amax::default()
    };
    let pairs = job.blocks.chunks(2).map(|parts| {
        let mut row = base;
        for (slot, part) in row.blocks.iter_mut().zip(parts) {
            let [rows, cols] = sides(Some(part.block));
            let out = job.out.at(part.start);
            *slot = AmaxBlocks { out, rows, cols };
        }
        row
    });
    let mut rows: Vec<_> = pairs.collect();
    if let Some(entry) = job.tensor {
        if rows.is_empty() {
            rows.push(base);
        }
        rows[0].tensor = job.out.at(entry);
    }
    rows
}

impl Amax {
    /// Takes the parts of `other`, if it has room for all and they are of the same elements.
    fn take(&mut self, other: &Self) -> bool {
        let elements = |row: &Self| Self {
            tensor: 0,
            blocks: Default::default(),
            ..*row
        };
        let parts = |row: &Self| {
            let used = row.blocks.iter().filter(|part| part.out != 0);
            used.copied().collect::<Vec<_>>()
        };
        let (own, added) = (parts(self), parts(other));
        let room = own.len() + added.len() <= self.blocks.len();
        // Transformed amaxes are of the tensor alone.
        let one_tensor = self.tensor == 0 || other.tensor == 0;
        if !room || !one_tensor || self.hadamard != 0 || elements(self) != elements(other) {
            return false;
        }
        for (slot, part) in self.blocks.iter_mut().zip(own.into_iter().chain(added)) {
            *slot = part;
        }
        self.tensor |= other.tensor;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(tensor: u64, outs: [u64; 2]) -> Amax {
        Amax {
            source: 256,
            rows: 4,
            cols: 4,
            len: 16,
            tensor,
            blocks: outs.map(|out| AmaxBlocks {
                out,
                rows: 1,
                cols: 16,
            }),
            ..Amax::default()
        }
    }

    #[test]
    fn parts_of_the_same_elements_are_taken_together() {
        let outs = |row: &Amax| (row.tensor, row.blocks.map(|part| part.out));
        let mut one = row(8, [0, 0]);
        assert!(one.take(&row(0, [16, 24])));
        assert_eq!(outs(&one), (8, [16, 24]));
        // There is no room for another tensor, or for a third shape.
        assert!(!one.take(&row(32, [0, 0])) && !one.take(&row(0, [32, 0])));
        let mut lines = row(0, [16, 0]);
        assert!(lines.take(&row(8, [24, 0])));
        assert_eq!(outs(&lines), (8, [16, 24]));
    }

    #[test]
    fn other_elements_are_read_apart() {
        let [mut one, other] = [row(8, [0, 0]), row(0, [16, 0])];
        assert!(!one.take(&Amax { start: 1, ..other }));
        assert!(!one.take(&Amax { source: 8, ..other }));
        assert!(!one.take(&Amax {
            via_bf16: 1,
            ..other
        }));
        let mut transformed = Amax { hadamard: 1, ..one };
        assert!(!transformed.take(&row(0, [0, 0])) && !one.take(&transformed));
        assert_eq!(one, row(8, [0, 0]));
    }
}
