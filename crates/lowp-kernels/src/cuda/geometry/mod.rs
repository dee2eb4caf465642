//! How a job is cut into tiles: a pure function of its other fields, so that one launch covers any
//! number of jobs.
//!
//! A job is made with its buffers, shapes and ingredients; [`Job::lay_out`] fills what follows from
//! them (paths, tile sizes, alignment), and [`Job::tiles`] counts its thread blocks.

mod amax;
mod encode;
mod flat;
pub(super) mod ring;
#[cfg(test)]
mod tests;

use super::table::{
    DECODE_LINES, DECODE_NIBBLES_COLS, DECODE_NIBBLES_ROWS, DECODE_SIDE, DECODE_WIDE_COLS, Decode,
    History, INTERLEAVE_TILE, Ingredients, Interleave, Kernel, REPACK_RUN, REPACK_SIDE,
    REPACK_SPREAD_COLS, Repack, SUM_RUN, SUM_RUNS, SUM_TILE, StepScalars, Sum, SumSquares,
    TRANSPOSE_ROW_BYTES, TRANSPOSE_ROWS, TRANSPOSE_SIDE, Tile, Transpose, code, decode_path,
    extent, repack_path, rule,
};

/// A job of the device table.
pub(crate) trait Job: Copy {
    /// The kernel that runs any such job.
    const KERNEL: Kernel;
    /// Whether tiles run from the last to the first: what such a launch read or wrote last is in the cache for the
    /// launch behind it, which begins with the first tile.
    const BACKWARDS: bool = false;
    /// The kernel that runs `jobs`, which were laid out, in one launch: the general one, or one that
    /// knows less and is faster for these.
    fn kernel(_jobs: &[Self]) -> Kernel {
        Self::KERNEL
    }
    /// Fills the fields that follow from the others.
    fn lay_out(&mut self);
    /// Fills those that follow from all jobs of a launch, once each was laid out.
    fn lay_out_together(_jobs: &mut [Self]) {}
    /// Thread blocks of a job that was laid out.
    fn tiles(&self) -> u64;
}

/// The tiles of all jobs, in order; `None` where there are more than a launch has blocks, which is 2^31 - 1.
pub(crate) fn tile_table<J: Job>(jobs: &[J]) -> Option<Vec<Tile>> {
    let total = jobs
        .iter()
        .try_fold(0u64, |sum, job| sum.checked_add(job.tiles()))?;
    let mut tiles = Vec::with_capacity(i32::try_from(total).ok()? as usize);
    for (job, desc) in jobs.iter().enumerate() {
        let job = u32::try_from(job).ok()?;
        let count = u32::try_from(desc.tiles()).ok()?;
        tiles.extend((0..count).map(|index| Tile { job, index }));
    }
    if J::BACKWARDS {
        tiles.reverse();
    }
    Some(tiles)
}

fn cdiv(a: u64, b: u64) -> u64 {
    a.div_ceil(b.max(1))
}

/// Bits of one entry of `code`.
fn bits(code: u8) -> u64 {
    match code {
        code::E2M1 => 4,
        code::BF16 => 16,
        code::F32 => 32,
        _ => 8,
    }
}

/// Whether `pointer` and every multiple of `pitch` bytes after it are aligned to `bytes`.
fn aligned(pointer: u64, pitch: u64, bytes: u64) -> bool {
    pointer.is_multiple_of(bytes) && pitch.is_multiple_of(bytes)
}

impl Job for History {
    const KERNEL: Kernel = Kernel::History;
    fn lay_out(&mut self) {}
    fn tiles(&self) -> u64 {
        1
    }
}

impl Decode {
    fn choose_path(&self) -> u8 {
        let Ingredients {
            element,
            rule,
            extent,
            ..
        } = self.ingredients;
        let known = match rule {
            rule::TENSOR | rule::E8M0_TE | rule::E8M0_FLOOR | rule::E8M0_EVEN => {
                matches!(element, code::E4M3 | code::E5M2 | code::E2M1)
            }
            rule::TWO_LEVEL | rule::FOUR_OVER_SIX => element == code::E2M1,
            rule::BLOCK_F32 => {
                matches!(element, code::E4M3 | code::E5M2)
                    && aligned(self.scale, self.scale_pitch, 4)
            }
            _ => false,
        };
        let [height, width] = [self.block_rows, self.block_cols];
        let whole = height == 0 && width == 0;
        let powers = whole || height.is_power_of_two() && width.is_power_of_two();
        if !known || !powers || self.vector == 0 {
            return decode_path::GENERIC;
        }
        let aligned = |bytes| aligned(self.data, self.data_pitch, bytes);
        if self.data_transposed != 0 {
            if aligned(16) && (whole || height >= 16) && extent != extent::ROWS {
                return decode_path::TRANSPOSED;
            }
        } else if element == code::E2M1
            && rule != rule::TENSOR
            && extent == extent::TENSOR
            && width >= 4
            && aligned(4)
            && self.cols.is_multiple_of(8)
        {
            return decode_path::NIBBLES;
        } else if aligned(bits(element) / 2) && (whole || width >= 4 || height >= 8) {
            return decode_path::WIDE;
        }
        decode_path::GENERIC
    }

    /// Rows and columns of a tile.
    fn tile(&self) -> [u64; 2] {
        let sides = match self.path {
            decode_path::WIDE => [DECODE_SIDE, DECODE_WIDE_COLS],
            decode_path::NIBBLES => [DECODE_NIBBLES_ROWS, DECODE_NIBBLES_COLS],
            decode_path::TRANSPOSED => [DECODE_LINES; 2],
            _ => [DECODE_SIDE; 2],
        };
        sides.map(u64::from)
    }
}

impl Job for Decode {
    const KERNEL: Kernel = Kernel::Decode;

    fn kernel(jobs: &[Self]) -> Kernel {
        let narrow = |job: &Self| job.out_code == code::BF16;
        match !jobs.is_empty() && jobs.iter().all(narrow) {
            true => Kernel::DecodeBf16,
            false => Kernel::Decode,
        }
    }

    /// The kernel of f32 writes bfloat16 in its general path alone.
    fn lay_out_together(jobs: &mut [Self]) {
        if Self::kernel(jobs) == Kernel::Decode {
            for job in jobs.iter_mut().filter(|job| job.out_code == code::BF16) {
                job.path = decode_path::GENERIC;
                job.tiles_across = cdiv(job.cols, job.tile()[1]);
            }
        }
    }

    fn lay_out(&mut self) {
        let bytes = bits(self.out_code) / 8;
        self.vector = u8::from(aligned(self.out, self.cols * bytes, 4 * bytes));
        self.path = self.choose_path();
        self.tiles_across = cdiv(self.cols, self.tile()[1]);
    }

    fn tiles(&self) -> u64 {
        cdiv(self.rows, self.tile()[0]) * self.tiles_across
    }
}

impl Job for Transpose {
    const KERNEL: Kernel = Kernel::Transpose;

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

impl Repack {
    fn choose_path(&self) -> (u8, u8) {
        let Self {
            from_layout: from,
            to_layout: to,
            ..
        } = self;
        let generic = (repack_path::GENERIC, 0);
        // The tiled paths write 16 bytes at a time.
        let bytes = self.bits == 8 && aligned(self.to, 0, 16);
        if !bytes || to.swizzled == 0 || from.swizzled != 0 {
            return generic;
        }
        let transposed = from.cols_first != to.cols_first;
        let [outer, inner] = if transposed {
            [from.tile[1], from.tile[0]]
        } else {
            from.tile
        };
        let spread = outer / to.tile[0].max(1);
        let whole = inner == to.tile[1] && outer == spread * to.tile[0];
        match (whole, spread, transposed) {
            (true, 1, false) => (repack_path::SWIZZLE, 0),
            (true, 1, true) => (repack_path::SWIZZLE_TRANSPOSED, 0),
            (true, 16.., _) if spread.is_power_of_two() => {
                (repack_path::SWIZZLE_SPREAD, spread.ilog2() as u8)
            }
            _ => generic,
        }
    }
}

impl Job for Repack {
    const KERNEL: Kernel = Kernel::Repack;

    fn lay_out(&mut self) {
        let padded = self.to_layout.padded;
        self.bytes = padded[0] * cdiv(padded[1] * u64::from(self.bits), 8);
        (self.path, self.spread) = self.choose_path();
        let inner = match self.path {
            repack_path::SWIZZLE_SPREAD => REPACK_SPREAD_COLS,
            _ => REPACK_SIDE,
        };
        self.tiles_across = cdiv(padded[1], inner.into());
        self.vector = u8::from(aligned(self.from, self.from_layout.padded[1], 16));
    }

    fn tiles(&self) -> u64 {
        match self.path {
            repack_path::GENERIC => cdiv(self.bytes, REPACK_RUN),
            _ => cdiv(self.to_layout.padded[0], REPACK_SIDE.into()) * self.tiles_across,
        }
    }
}

impl Job for Interleave {
    const KERNEL: Kernel = Kernel::Interleave;

    fn lay_out(&mut self) {
        let vector = self.width.is_multiple_of(16)
            && aligned(self.from, 0, 16)
            && aligned(self.to, self.pitch, 16);
        self.vector = u64::from(vector);
    }

    fn tiles(&self) -> u64 {
        cdiv(self.outer * self.width, INTERLEAVE_TILE)
    }
}

impl Job for SumSquares {
    const KERNEL: Kernel = Kernel::SumSquares;

    fn lay_out(&mut self) {
        self.tiles = cdiv(self.len, SUM_RUN * u64::from(SUM_RUNS)).max(1) as u32;
        self.vector = u8::from(aligned(self.source, 0, 16));
    }

    fn tiles(&self) -> u64 {
        u64::from(self.tiles)
    }
}

impl Job for Sum {
    const KERNEL: Kernel = Kernel::Sum;

    fn lay_out(&mut self) {
        self.vector = u8::from(aligned(self.from | self.into, 0, 16));
    }

    fn tiles(&self) -> u64 {
        cdiv(self.len, SUM_TILE)
    }
}

impl Job for StepScalars {
    const KERNEL: Kernel = Kernel::StepScalars;
    fn lay_out(&mut self) {}
    fn tiles(&self) -> u64 {
        1
    }
}
