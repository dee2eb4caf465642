//! Transposes.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{TRANSPOSE_ROW_BYTES, TRANSPOSE_ROWS, TRANSPOSE_SIDE, Transpose};
use super::job::{Job, aligned, cdiv};
use crate::TransposeJob;

pub(crate) fn job(job: &TransposeJob<Cuda>) -> Transpose {
    Transpose {
        from: job.from.pointer(),
        to: job.to.pointer(),
        outer: job.entries[0] as u64,
        inner: job.entries[1] as u64,
        bits: job.code.bits() as u8,
        ..Transpose::default()
    }
}

impl Job for Transpose {
    const KERNELS: &'static [Kernel] = &[Kernel::new("lowp_transpose")];

    fn lay_out(&mut self) {
        let bits = u64::from(self.bits);
        self.from_pitch = cdiv(self.inner * bits, 8);
        self.to_pitch = cdiv(self.outer * bits, 8);
        let vector = bits <= 8
            && aligned(self.from, self.from_pitch, 16)
            && aligned(self.to, self.to_pitch, 16);
        self.vector = u8::from(vector);
        self.tiles_across = cdiv(self.inner, self.tile()[1]);
    }

    fn tiles(&self) -> u64 {
        cdiv(self.outer, self.tile()[0]) * self.tiles_across
    }
}

impl Transpose {
    /// Outer and inner entries of a tile.
    fn tile(&self) -> [u64; 2] {
        if self.vector == 0 {
            return [TRANSPOSE_SIDE.into(); 2];
        }
        let row = u64::from(TRANSPOSE_ROW_BYTES) * 8;
        [TRANSPOSE_ROWS.into(), row / u64::from(self.bits)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transposes_are_cut_into_bytes() {
        let tiles = |from, bits, outer, inner| {
            let mut job = Transpose {
                from,
                to: 512,
                outer,
                inner,
                bits,
                ..Transpose::default()
            };
            job.lay_out();
            (job.vector, job.tiles())
        };
        assert_eq!(tiles(256, 8, 256, 512), (1, 4));
        assert_eq!(tiles(256, 4, 256, 512), (1, 2));
        assert_eq!(tiles(256, 4, 160, 544), (1, 4));
        assert_eq!(tiles(264, 8, 256, 512), (0, 32));
        assert_eq!(tiles(256, 16, 256, 512), (0, 32));
    }
}
