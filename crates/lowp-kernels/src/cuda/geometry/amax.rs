//! Amaxes.

use super::super::table::{
    AMAX_COLS, AMAX_ROWS, AMAX_RUN, AMAX_TILE, Amax, AmaxBlocks, Kernel, RING_COLS,
    TRANSPOSED_COLS, TRANSPOSED_ROWS, amax_path, code,
};
use super::{Job, aligned, bits, cdiv};

/// Whether the tiles know blocks of this shape.
fn known(part: &AmaxBlocks) -> bool {
    let sides = [part.rows, part.cols];
    let lines = [[1, u32::MAX], [u32::MAX, 1]].contains(&sides);
    let of_side = |side| [[1, side], [side, 1], [side; 2]].contains(&sides);
    lines || [16, 32, 128].into_iter().any(of_side)
}

impl Amax {
    /// Whether lowp_amax_ring does what AMAX_TRANSFORMED would.
    fn fits_ring(&self) -> bool {
        let whole = self.rows.is_multiple_of(TRANSPOSED_ROWS.into())
            && self.cols.is_multiple_of(TRANSPOSED_COLS.into())
            && (self.start, self.len) == (0, self.rows * self.cols);
        let transformed = self.path == amax_path::TRANSFORMED && self.tensor != 0;
        transformed && whole && self.vector != 0 && self.source_code == code::BF16
    }
}

impl Job for Amax {
    const KERNEL: Kernel = Kernel::Amax;
    const BACKWARDS: bool = true;

    fn kernel(jobs: &[Self]) -> Kernel {
        let ring = |job: &Self| job.path == amax_path::RING;
        match !jobs.is_empty() && jobs.iter().all(ring) {
            true => Kernel::AmaxRing,
            false => Kernel::Amax,
        }
    }

    fn lay_out_together(jobs: &mut [Self]) {
        if jobs.iter().all(Self::fits_ring) {
            for job in jobs {
                job.path = amax_path::RING;
                job.tiles_across = cdiv(job.cols, RING_COLS.into());
            }
        }
    }

    fn lay_out(&mut self) {
        let size = bits(self.source_code) / 8;
        let mut blocks = self.blocks.iter().filter(|part| part.out != 0);
        self.path = match (blocks.clone().next(), blocks.all(known)) {
            (None, _) if self.hadamard != 0 => amax_path::TRANSFORMED,
            (None, _) => amax_path::FLAT,
            (Some(_), true) => amax_path::TILES,
            (Some(_), false) => amax_path::GENERIC,
        };
        let start = self.source.wrapping_sub(self.start.wrapping_mul(size));
        let vector = match self.path {
            amax_path::FLAT => aligned(self.source, 0, 16),
            amax_path::GENERIC => false,
            _ => aligned(start, self.cols * size, 16),
        };
        self.vector = u8::from(vector);
        let rows = u64::from(AMAX_ROWS);
        self.first_row = self.start / self.cols.max(1) / rows * rows;
        self.tiles_across = cdiv(self.cols, AMAX_COLS.into());
        // A few values of a very wide matrix would be found in tiles that are nearly all empty.
        if self.path == amax_path::TILES && self.tiles() > (self.len / 64).max(4) {
            self.path = amax_path::GENERIC;
            self.vector = 0;
        }
    }

    fn tiles(&self) -> u64 {
        if self.len == 0 {
            return 0;
        }
        match self.path {
            amax_path::FLAT => cdiv(self.len, AMAX_TILE),
            amax_path::GENERIC => cdiv(self.len, AMAX_RUN),
            amax_path::RING => self.rows / u64::from(TRANSPOSED_ROWS) * self.tiles_across,
            _ => {
                let end = cdiv(self.start + self.len, self.cols);
                cdiv(end - self.first_row, AMAX_ROWS.into()) * self.tiles_across
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_and_blocks_of_powers_of_two_are_tiled() {
        let whole = u32::MAX;
        let tiles = |shapes: [[u32; 2]; 2]| {
            let mut job = Amax {
                source: 256,
                rows: 512,
                cols: 512,
                start: 512 * 200,
                len: 512 * 100,
                blocks: shapes.map(|[rows, cols]| AmaxBlocks {
                    out: u64::from(rows) * 4,
                    rows,
                    cols,
                }),
                ..Amax::default()
            };
            job.lay_out();
            (job.path, job.first_row, job.tiles())
        };
        // Rows 128 to 384, two tiles across.
        let tiled = (amax_path::TILES, 128, 4);
        assert_eq!(tiles([[1, whole], [whole, 1]]), tiled);
        assert_eq!(tiles([[128, 128], [0, 0]]), tiled);
        assert_eq!(tiles([[1, 128], [16, 1]]), tiled);
        assert_eq!(tiles([[1, 32], [5, 3]]), (amax_path::GENERIC, 128, 25));
    }

    #[test]
    fn few_values_of_wide_matrices_have_few_tiles() {
        for len in [1, 63, 4096, 1 << 20] {
            let mut job = Amax {
                source: 256,
                rows: 1 << 20,
                cols: 1 << 40,
                start: 3,
                len,
                ..Amax::default()
            };
            job.blocks[0] = AmaxBlocks {
                out: 256,
                rows: 1,
                cols: u32::MAX,
            };
            job.lay_out();
            assert!(job.tiles() <= (len / 64).max(4), "{len}: {}", job.tiles());
        }
    }

    #[test]
    fn tensors_alone_are_walked_in_runs() {
        let path = |hadamard| {
            let mut job = Amax {
                rows: 4,
                cols: 4,
                len: 16,
                hadamard,
                ..Amax::default()
            };
            job.lay_out();
            job.path
        };
        let mut large = Amax {
            source: 256,
            rows: 256,
            cols: 320,
            len: 256 * 320,
            tensor: 8,
            source_code: code::BF16,
            hadamard: 1,
            ..Amax::default()
        };
        large.lay_out();
        let together = |jobs: &mut [Amax]| {
            Amax::lay_out_together(jobs);
            (Amax::kernel(jobs), jobs[0].tiles())
        };
        // Tiles of 128 x 256, as those of the other paths.
        assert_eq!(together(&mut [large]), (Kernel::AmaxRing, 4));
        assert_eq!(
            together(&mut [large, Amax { rows: 255, ..large }]),
            (Kernel::Amax, 4)
        );
        assert_eq!(path(0), amax_path::FLAT);
        assert_eq!(path(1), amax_path::TRANSFORMED);
    }
}
