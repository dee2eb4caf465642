//! Amaxes: a source that several parts are taken of is read once.

use super::super::handle::Cuda;
use super::super::module::Kernel;
use super::super::table::{
    AMAX_COLS, AMAX_ROWS, AMAX_RUN, AMAX_TILE, Amax, AmaxBlocks, RING_COLS, TRANSPOSED_COLS,
    TRANSPOSED_ROWS, amax_path, code,
};
use super::job::{Job, Vector, aligned, bits, cdiv, sides, via_bf16};
use crate::AmaxJob;

const AMAX: Kernel = Kernel::new("lowp_amax");
const RING: Kernel = Kernel::new("lowp_amax_ring");

/// Parts of jobs with the same elements share rows, where these follow each other.
pub(crate) fn jobs(jobs: &[AmaxJob<Cuda>]) -> Vec<Amax> {
    let mut rows: Vec<Amax> = Vec::new();
    for row in jobs.iter().flat_map(amax) {
        if !rows.last_mut().is_some_and(|last| last.take(&row)) {
            rows.push(row);
        }
    }
    rows
}

/// Whether `jobs` are one row: amaxes of a whole matrix.
pub(crate) fn are_of_one_matrix(of: &[AmaxJob<Cuda>]) -> bool {
    match *jobs(of) {
        [row] => {
            let whole = (row.start, row.len) == (0, row.rows * row.cols);
            whole && row.blocks.iter().all(|part| part.out == 0)
        }
        _ => false,
    }
}

fn amax(job: &AmaxJob<Cuda>) -> Vec<Amax> {
    let source = Vector::new(&job.source);
    let base = Amax {
        source: source.pointer,
        rows: job.shape.rows as u64,
        cols: job.shape.cols as u64,
        start: job.start as u64,
        len: source.len,
        source_code: source.code,
        via_bf16: via_bf16(job.source_rounding),
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
        let slot = match job.hadamard {
            true => &mut rows[0].transformed,
            false => &mut rows[0].tensor,
        };
        *slot = job.out.at(entry);
    }
    rows
}

/// Whether the tiles know blocks of this shape.
fn known(part: &AmaxBlocks) -> bool {
    let sides = [part.rows, part.cols];
    let lines = [[1, u32::MAX], [u32::MAX, 1]].contains(&sides);
    let of_side = |side| [[1, side], [side, 1], [side; 2]].contains(&sides);
    lines || [16, 32, 128].into_iter().any(of_side)
}

impl Amax {
    /// Takes the parts of `other`, if it has room for all and they are of the same elements.
    fn take(&mut self, other: &Self) -> bool {
        let elements = |row: &Self| Self {
            tensor: 0,
            transformed: 0,
            blocks: Default::default(),
            ..*row
        };
        let parts = |row: &Self| {
            let used = row.blocks.iter().filter(|part| part.out != 0);
            used.copied().collect::<Vec<_>>()
        };
        let (own, added) = (parts(self), parts(other));
        let blocks = own.len() + added.len();
        let transforms = (self.transformed | other.transformed) != 0;
        let room = blocks <= if transforms { 0 } else { self.blocks.len() };
        let one = |slot: fn(&Self) -> u64| slot(self) == 0 || slot(other) == 0;
        let one_each = one(|row| row.tensor) && one(|row| row.transformed);
        if !room || !one_each || elements(self) != elements(other) {
            return false;
        }
        for (slot, part) in self.blocks.iter_mut().zip(own.into_iter().chain(added)) {
            *slot = part;
        }
        self.tensor |= other.tensor;
        self.transformed |= other.transformed;
        true
    }

    /// Whether lowp_amax_ring does what AMAX_TRANSFORMED would.
    fn fits_ring(&self) -> bool {
        let whole = self.rows.is_multiple_of(TRANSPOSED_ROWS.into())
            && self.cols.is_multiple_of(TRANSPOSED_COLS.into())
            && (self.start, self.len) == (0, self.rows * self.cols);
        let transformed = self.path == amax_path::TRANSFORMED;
        transformed && whole && self.vector != 0 && self.source_code == code::BF16
    }
}

impl Job for Amax {
    const KERNELS: &'static [Kernel] = &[AMAX, RING];
    const BACKWARDS: bool = true;

    fn kernel(jobs: &[Self]) -> Kernel {
        let ring = |job: &Self| job.path == amax_path::RING;
        match !jobs.is_empty() && jobs.iter().all(ring) {
            true => RING,
            false => AMAX,
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
            (None, _) if self.transformed != 0 => amax_path::TRANSFORMED,
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
        assert_eq!(one, row(8, [0, 0]));
    }

    #[test]
    fn amaxes_before_and_after_a_transform_are_taken_together() {
        let transformed = |transformed, outs| Amax {
            transformed,
            ..row(0, outs)
        };
        let both = Amax {
            tensor: 8,
            ..transformed(32, [0, 0])
        };
        let plain = row(8, [0, 0]);
        for [first, second] in [
            [plain, transformed(32, [0, 0])],
            [transformed(32, [0, 0]), plain],
        ] {
            let mut one = first;
            assert!(one.take(&second));
            assert_eq!(one, both);
            // There is no room for another of either kind, or for blocks.
            assert!(!one.take(&plain) && !one.take(&transformed(16, [0, 0])));
            assert!(!one.take(&row(0, [24, 0])) && !row(0, [24, 0]).take(&second));
        }
    }

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
        let path = |transformed| {
            let mut job = Amax {
                rows: 4,
                cols: 4,
                len: 16,
                transformed,
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
            transformed: 8,
            source_code: code::BF16,
            ..Amax::default()
        };
        large.lay_out();
        let together = |jobs: &mut [Amax]| {
            Amax::lay_out_together(jobs);
            (Amax::kernel(jobs), jobs[0].tiles())
        };
        // Tiles of 128 x 256, as those of the other paths.
        assert_eq!(together(&mut [large]), (RING, 4));
        assert_eq!(
            together(&mut [large, Amax { rows: 255, ..large }]),
            (AMAX, 4)
        );
        assert_eq!(path(0), amax_path::FLAT);
        assert_eq!(path(8), amax_path::TRANSFORMED);
    }
}
