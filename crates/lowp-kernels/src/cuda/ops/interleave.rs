//! Interleaves.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{INTERLEAVE_TILE, Interleave};
use super::job::{Job, aligned, cdiv};
use crate::{InterleaveJob, PieceRows};

/// One row per piece that is not empty.
pub(crate) fn jobs(job: &InterleaveJob<Cuda>) -> Vec<Interleave> {
    let pitch = job.pieces.iter().map(|piece| piece.width).sum::<usize>();
    let mut before = 0;
    let mut rows = Vec::new();
    for &PieceRows {
        start,
        width,
        pitch: from_pitch,
    } in &job.pieces
    {
        if width > 0 && job.outer > 0 {
            rows.push(Interleave {
                from: job.from.at(start),
                from_pitch: from_pitch as u64,
                to: job.to.at(before),
                outer: job.outer as u64,
                width: width as u64,
                pitch: pitch as u64,
                vector: 0,
            });
        }
        before += width;
    }
    rows
}

impl Job for Interleave {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_interleave")];

    fn lay_out(&mut self) {
        // A single row has no pitch.
        let [from_pitch, pitch] = match self.outer {
            1 => [0; 2],
            _ => [self.from_pitch, self.pitch],
        };
        let vector = self.width.is_multiple_of(16)
            && aligned(self.from, from_pitch, 16)
            && aligned(self.to, pitch, 16);
        self.vector = u64::from(vector);
    }

    fn tiles(&self) -> u64 {
        cdiv(self.outer * self.width, INTERLEAVE_TILE)
    }
}
