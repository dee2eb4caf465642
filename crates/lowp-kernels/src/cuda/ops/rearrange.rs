//! Copies in another order.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{REARRANGE_TILE, Rearrange};
use super::job::{Job, aligned, cdiv};
use crate::{RearrangeJob, Rearranged, Runs};

/// One row per copy that is not empty.
pub(crate) fn jobs(job: &RearrangeJob<Cuda>) -> Vec<Rearrange> {
    let (from, to, size) = match &job.buffers {
        Rearranged::Bytes([from, to]) => (from.pointer(), to.pointer(), 1),
        Rearranged::F32([from, to]) => (from.pointer(), to.pointer(), 4),
        Rearranged::Bf16([from, to]) => (from.pointer(), to.pointer(), 2),
    };
    let bytes = |entries: usize| entries as u64 * size;
    let copies = job.copies.iter().filter_map(Runs::normalized);
    let row = |copy: Runs| Rearrange {
        from: from + bytes(copy.from),
        to: to + bytes(copy.to),
        bytes: bytes(copy.len),
        counts: copy.counts.map(|count| count as u64),
        from_pitch: copy.from_pitch.map(bytes),
        to_pitch: copy.to_pitch.map(bytes),
        vector: 0,
    };
    copies.map(row).collect()
}

impl Job for Rearrange {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_rearrange")];

    fn lay_out(&mut self) {
        let pitches = self.from_pitch.iter().chain(&self.to_pitch);
        let pitches = pitches.fold(self.bytes, |all, pitch| all | pitch);
        let fits = |bytes: &u64| aligned(self.from | self.to, pitches, *bytes);
        self.vector = [16, 8, 4].into_iter().find(fits).unwrap_or(1);
    }

    fn tiles(&self) -> u64 {
        let all: u64 = self.counts.iter().product();
        cdiv(all * self.bytes, REARRANGE_TILE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_stay_aligned_in_every_run() {
        let vector = |from, bytes, pitch| {
            let mut job = Rearrange {
                from,
                bytes,
                counts: [1, 2, 3],
                to_pitch: [pitch; 3],
                ..Rearrange::default()
            };
            job.lay_out();
            (job.vector, job.tiles())
        };
        assert_eq!(vector(256, 32, 64), (16, 1));
        assert_eq!(vector(256, 8, 64), (8, 1));
        assert_eq!(vector(260, 32, 64), (4, 1));
        assert_eq!(vector(256, REARRANGE_TILE, 65), (1, 6));
    }
}
