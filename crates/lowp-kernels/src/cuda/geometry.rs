//! How a job is cut into tiles: a pure function of its other fields, so that one launch covers any
//! number of jobs.
//!
//! A job is made with its buffers, shapes and ingredients; [`Job::lay_out`] fills what follows from
//! them (paths, tile sizes, alignment), and [`Job::tiles`] counts its thread blocks.

use super::table::{
    Adamw, Amax, Decode, Encode, FlatEncode, Interleave, Kernel, Pass, Repack, Scale, SumSquares,
    Tile, Transpose, amax_path, code, decode_path, path, repack_path, rule, vector,
};

/// Elements of a tile of [`path::FLAT`].
const FLAT_TILE: u64 = 8192;
/// Columns of its rows, when it is seen as a matrix.
const FLAT_COLS: u64 = 256;
/// Elements of a tile of [`amax_path::FLAT`].
const AMAX_TILE: u64 = 16384;
/// Elements of a run of a flat encode, and of [`amax_path::GENERIC`].
const RUN: u64 = 2048;
/// Blocks whose multipliers a generic unit keeps at a time.
const UNIT_BLOCKS: u64 = 2048;
/// Elements of a generic unit, about.
const UNIT: u64 = 4096;
/// Bytes of a tile of an interleave.
const INTERLEAVE_TILE: u64 = 16384;
/// Tiles of a launch from which fewer and larger ones keep a device as busy.
const MANY_TILES: u64 = 16384;
/// Elements of a run of a sum of squares, and runs of a tile.
pub(crate) const SUM_RUN: u64 = 4096;
const SUM_RUNS: u64 = 8;

/// A job of the device table.
pub(crate) trait Job: Copy {
    /// The kernel that runs any such job.
    const KERNEL: Kernel;
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

/// The tiles of all jobs, in order; `None` where there are more than a table can count.
pub(crate) fn tile_table<J: Job>(jobs: &[J]) -> Option<Vec<Tile>> {
    let mut tiles = Vec::new();
    for (job, desc) in jobs.iter().enumerate() {
        let job = u32::try_from(job).ok()?;
        let count = u32::try_from(desc.tiles()).ok()?;
        tiles.extend((0..count).map(|index| Tile { job, index }));
    }
    // The grid of a launch has at most 2^31 - 1 blocks.
    i32::try_from(tiles.len()).ok().map(|_| tiles)
}

fn cdiv(a: u64, b: u64) -> u64 {
    a.div_ceil(b.max(1))
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

fn lcm(a: u64, b: u64) -> u64 {
    a / gcd(a, b).max(1) * b
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

/// Whether the blocks of `pass` are `1 x side`, `side x 1` or `side x side`; 0: have no scale.
fn has_side(pass: &Pass, side: u32) -> bool {
    let sides = [pass.block_rows, pass.block_cols];
    sides == [side; 2] || (side != 0 && (sides == [1, side] || sides == [side, 1]))
}

/// Rows and columns that a generic pass does at a time: whole blocks, even, few enough that their
/// multipliers fit shared memory.
fn unit(pass: &Pass) -> [u64; 2] {
    let [height, width] = [pass.block_rows, pass.block_cols].map(|side| u64::from(side.max(1)));
    let [rows, cols] = [lcm(height, 2), lcm(width, 2)];
    let rows = rows * (32 / rows).max(1);
    let blocks = (rows / height) * (cols / width);
    let times = (UNIT / (rows * cols)).min(UNIT_BLOCKS / blocks.max(1));
    [rows, cols * times.max(1)]
}

impl Encode {
    fn passes_mut(&mut self) -> &mut [Pass] {
        let passes = usize::from(self.passes);
        &mut self.pass[..passes.min(2)]
    }

    fn passes(&self) -> &[Pass] {
        &self.pass[..usize::from(self.passes).min(2)]
    }

    fn choose_path(&self) -> u8 {
        let passes = self.passes();
        let [first, ..] = passes else {
            return path::FLAT;
        };
        let turned = passes
            .iter()
            .any(|pass| pass.data[1] != 0 || pass.scale[1] != 0);
        let sides = |side| passes.iter().all(|pass| has_side(pass, side));
        let plain = passes.len() == 1 && first.data[0] != 0;
        let once = |order: usize| passes.iter().filter(|pass| pass.data[order] != 0).count() <= 1;
        match (self.element, self.rule) {
            _ if self.stochastic != 0 => path::GENERIC,
            (code::E4M3 | code::E5M2, rule::TENSOR) if sides(0) && passes.len() == 1 => {
                if turned {
                    path::TURNED
                } else {
                    path::WIDE
                }
            }
            (code::E4M3 | code::E5M2, rule::E8M0_TE | rule::E8M0_FLOOR) if sides(32) && !turned => {
                path::WIDE
            }
            (code::E2M1, rule::TWO_LEVEL) if sides(16) && once(0) && once(1) => path::TURNED,
            (code::BF16 | code::F32, rule::NONE) if plain && !turned => path::WIDE,
            _ => path::GENERIC,
        }
    }

    /// Makes tiles so wide that their rows of scales are whole sectors of 32 bytes.
    fn widen(&mut self) {
        let mx = matches!(self.rule, rule::E8M0_TE | rule::E8M0_FLOOR);
        if mx && self.path == path::WIDE {
            self.tile_cols = 1024;
            self.tiles_across = cdiv(self.cols, 1024);
        }
    }

    fn vector_outputs(&self) -> u8 {
        let bits = bits(self.element);
        let mut found = 0;
        for (i, pass) in self.passes().iter().enumerate() {
            if aligned(pass.data[0], cdiv(self.cols * bits, 8), 16) {
                found |= vector::ROWS[i];
            }
            if aligned(pass.data[1], cdiv(self.rows * bits, 8), 16) {
                found |= vector::COLUMNS[i];
            }
        }
        found
    }

    /// Paths and tiles; `source` says whether whole chunks of the input are aligned.
    fn lay_out_with(&mut self, source: bool) {
        self.path = self.choose_path();
        let [rows, cols] = match self.path {
            path::WIDE => [32, 256],
            path::TURNED => [128, 64],
            path::FLAT => [FLAT_TILE / FLAT_COLS, FLAT_COLS],
            _ => {
                let mut tile = [2, 2];
                for pass in self.passes_mut() {
                    let unit = unit(pass);
                    [pass.unit_rows, pass.unit_cols] = unit.map(|side| side as u32);
                    tile = [lcm(tile[0], unit[0]), lcm(tile[1], unit[1])];
                }
                tile
            }
        };
        [self.tile_rows, self.tile_cols] = [rows as u32, cols as u32];
        self.tiles_across = if self.path == path::FLAT {
            1
        } else {
            cdiv(self.cols, cols)
        };
        self.vector = self.vector_outputs() | if source { vector::SOURCE } else { 0 };
    }
}

impl Job for Encode {
    const KERNEL: Kernel = Kernel::Encode;

    fn kernel(jobs: &[Self]) -> Kernel {
        let fits = |job: &Self| {
            job.source_code == code::BF16
                && job.path == path::WIDE
                && matches!(job.element, code::E4M3 | code::E5M2)
        };
        if jobs.iter().all(fits) {
            Kernel::EncodeBf16
        } else {
            Kernel::Encode
        }
    }

    fn lay_out(&mut self) {
        let pitch = self.cols * bits(self.source_code) / 8;
        self.lay_out_with(aligned(self.source, pitch, 16));
    }

    fn lay_out_together(jobs: &mut [Self]) {
        let many = jobs.iter().map(Job::tiles).sum::<u64>() >= MANY_TILES;
        if many && Self::kernel(jobs) == Kernel::EncodeBf16 {
            jobs.iter_mut().for_each(Encode::widen);
        }
    }

    /// An empty matrix has one tile where a tensor scale must be written.
    fn tiles(&self) -> u64 {
        if self.passes == 0 && self.tensor_scale == 0 {
            return 0;
        }
        let tiles = cdiv(self.rows, u64::from(self.tile_rows)) * self.tiles_across;
        tiles.max(u64::from(self.tensor_scale != 0))
    }
}

impl Job for Adamw {
    const KERNEL: Kernel = Kernel::Adamw;

    fn lay_out(&mut self) {
        let chunk = |code: u8| bits(code) / 2;
        let flat = self.encode.passes == 0;
        let cols = if flat { FLAT_COLS } else { self.encode.cols };
        let moments = chunk(self.moments_code);
        let source = cols.is_multiple_of(4)
            && aligned(self.master, 0, 16)
            && aligned(self.exp_avg, 0, moments)
            && aligned(self.exp_avg_sq, 0, moments)
            && aligned(self.grad, 0, chunk(self.grad_code));
        self.encode.source = self.master;
        self.encode.source_code = code::F32;
        self.encode.lay_out_with(source);
    }

    fn tiles(&self) -> u64 {
        if self.encode.path == path::FLAT {
            cdiv(self.len, FLAT_TILE).max(u64::from(self.encode.tensor_scale != 0))
        } else {
            self.encode.tiles()
        }
    }
}

impl Job for Amax {
    const KERNEL: Kernel = Kernel::Amax;

    fn lay_out(&mut self) {
        let size = bits(self.source_code) / 8;
        let blocks = self.blocks.iter().filter(|part| part.out != 0);
        let known = blocks.clone().all(|part| {
            let pass = Pass {
                block_rows: part.rows,
                block_cols: part.cols,
                ..Pass::default()
            };
            has_side(&pass, 16) || has_side(&pass, 32)
        });
        let start = self.source.wrapping_sub(self.start.wrapping_mul(size));
        (self.path, self.vector) = match (blocks.count(), known) {
            (0, _) => (amax_path::FLAT, u8::from(aligned(self.source, 0, 16))),
            (_, true) => (
                amax_path::TILES,
                u8::from(aligned(start, self.cols * size, 16)),
            ),
            _ => (amax_path::GENERIC, 0),
        };
        self.first_row = self.start / self.cols.max(1) / 32 * 32;
        self.tiles_across = cdiv(self.cols, 256);
    }

    fn tiles(&self) -> u64 {
        if self.len == 0 {
            return 0;
        }
        match self.path {
            amax_path::FLAT => cdiv(self.len, AMAX_TILE),
            amax_path::TILES => {
                let end = cdiv(self.start + self.len, self.cols);
                cdiv(end - self.first_row, 32) * self.tiles_across
            }
            _ => cdiv(self.len, RUN),
        }
    }
}

impl Job for Scale {
    const KERNEL: Kernel = Kernel::Scale;
    fn lay_out(&mut self) {}
    fn tiles(&self) -> u64 {
        1
    }
}

impl Job for FlatEncode {
    const KERNEL: Kernel = Kernel::FlatEncode;

    fn lay_out(&mut self) {
        let end = self.start + self.len;
        self.data_tiles = if self.len == 0 {
            0
        } else {
            cdiv(end, RUN) - self.start / RUN
        };
        for (tiles, pass) in self.scale_tiles.iter_mut().zip(&self.pass) {
            let [height, width] = [pass.block_rows, pass.block_cols].map(u64::from);
            let blocks = cdiv(self.rows, height) * cdiv(self.cols, width);
            let wanted = pass.amaxes != 0 && pass.scale != [0, 0];
            *tiles = if wanted { cdiv(blocks, RUN) } else { 0 };
        }
    }

    fn tiles(&self) -> u64 {
        let tiles = self.data_tiles + self.scale_tiles[0] + self.scale_tiles[1];
        tiles.max(u64::from(self.tensor_scale != 0))
    }
}

impl Decode {
    fn choose_path(&self) -> u8 {
        let coded = matches!(self.element, code::E4M3 | code::E5M2 | code::E2M1);
        let powers = [self.block_rows, self.block_cols]
            .iter()
            .all(|side| *side == 0 || side.is_power_of_two());
        let aligned =
            self.vector != 0 && aligned(self.data, self.data_pitch, bits(self.element) / 2);
        if coded && powers && aligned && self.rule != rule::NONE && self.data_transposed == 0 {
            decode_path::WIDE
        } else {
            decode_path::GENERIC
        }
    }

    fn tile_cols(&self) -> u64 {
        if self.path == decode_path::WIDE {
            128
        } else {
            64
        }
    }
}

impl Job for Decode {
    const KERNEL: Kernel = Kernel::Decode;

    fn lay_out(&mut self) {
        self.vector = u8::from(aligned(self.out, self.cols * 4, 16));
        self.path = self.choose_path();
        self.tiles_across = cdiv(self.cols, self.tile_cols());
    }

    fn tiles(&self) -> u64 {
        cdiv(self.rows, 64) * self.tiles_across
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
    /// Entries of a tile, outer x inner.
    fn tile(&self) -> [u64; 2] {
        match (self.vector, self.bits) {
            (0, _) => [64, 64],
            (_, 4) => [256, 256],
            _ => [128, 128],
        }
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
        let turned = from.cols_first != to.cols_first;
        let [outer, inner] = if turned {
            [from.tile[1], from.tile[0]]
        } else {
            from.tile
        };
        let spread = outer / to.tile[0].max(1);
        let whole = inner == to.tile[1] && outer == spread * to.tile[0];
        match (whole, spread, turned) {
            (true, 1, false) => (repack_path::SWIZZLE, 0),
            (true, 1, true) => (repack_path::SWIZZLE_TURNED, 0),
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
        self.tiles_across = cdiv(padded[1], 128);
        self.vector = u8::from(aligned(self.from, self.from_layout.padded[1], 16));
    }

    fn tiles(&self) -> u64 {
        match self.path {
            repack_path::GENERIC => cdiv(self.bytes, 4096),
            _ => cdiv(self.to_layout.padded[0], 128) * self.tiles_across,
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
        self.tiles = cdiv(self.len, SUM_RUN * SUM_RUNS).max(1) as u32;
        self.vector = u8::from(aligned(self.source, 0, 16));
    }

    fn tiles(&self) -> u64 {
        u64::from(self.tiles)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn encode(rows: u64, cols: u64, blocks: &[[u32; 2]]) -> Encode {
        let mut job = Encode {
            source: 256,
            rows,
            cols,
            passes: blocks.len() as u8,
            source_code: code::F32,
            rule: if blocks == [[0, 0]] {
                rule::TENSOR
            } else {
                rule::E8M0_TE
            },
            ..Encode::default()
        };
        for (pass, block) in job.pass.iter_mut().zip(blocks) {
            [pass.block_rows, pass.block_cols] = *block;
            pass.data[0] = 512;
        }
        job.lay_out();
        job
    }

    #[test]
    fn known_blocks_are_tiled() {
        let job = encode(33, 512, &[[1, 32], [32, 1]]);
        assert_eq!((job.path, job.tiles()), (path::WIDE, 4));
        assert_eq!(
            job.vector,
            vector::SOURCE | vector::ROWS[0] | vector::ROWS[1]
        );
        assert_eq!(
            encode(1, 10, &[[0, 0]]).vector & (vector::SOURCE | vector::ROWS[0]),
            0
        );
    }

    #[test]
    fn bf16_sources_have_a_kernel_of_their_own() {
        let f32 = encode(64, 256, &[[1, 32]]);
        let mut bf16 = Encode {
            source_code: code::BF16,
            ..f32
        };
        bf16.lay_out();
        assert_eq!(Encode::kernel(&[bf16, bf16]), Kernel::EncodeBf16);
        assert_eq!(Encode::kernel(&[bf16, f32]), Kernel::Encode);
        let mut generic = Encode {
            stochastic: 1,
            ..bf16
        };
        generic.lay_out();
        assert_eq!(Encode::kernel(&[bf16, generic]), Kernel::Encode);
    }

    #[test]
    fn many_tiles_are_widened() {
        let bf16 = |rows| {
            let mut job = Encode {
                source_code: code::BF16,
                ..encode(rows, 4100, &[[1, 32], [32, 1]])
            };
            job.lay_out();
            job
        };
        let together = |mut jobs: Vec<Encode>| {
            Encode::lay_out_together(&mut jobs);
            jobs.iter().map(Job::tiles).collect::<Vec<_>>()
        };
        // 17 tiles of 256 columns are 5 of 1024.
        assert_eq!(together(vec![bf16(3200)]), [1700]);
        assert_eq!(together(vec![bf16(32_000), bf16(32)]), [5000, 5]);
        assert_eq!(
            together(vec![bf16(32_000), encode(32, 256, &[[1, 32]])]),
            [17_000, 1]
        );
    }

    #[test]
    fn other_blocks_are_walked_in_whole_units() {
        for [height, width] in [
            [1, 128],
            [128, 128],
            [5, 3],
            [4096, 4096],
            [1, 1],
            [4095, 4093],
        ] {
            let job = encode(1000, 1000, &[[height, width], [width, height]]);
            assert_eq!(job.path, path::GENERIC);
            for pass in &job.pass {
                let [rows, cols] = [pass.unit_rows, pass.unit_cols];
                assert!(rows % 2 == 0 && cols % 2 == 0);
                assert!(rows % pass.block_rows == 0 && cols % pass.block_cols == 0);
                let blocks = (rows / pass.block_rows) * (cols / pass.block_cols);
                assert!(
                    u64::from(blocks) <= UNIT_BLOCKS,
                    "{height}x{width}: {blocks}"
                );
                assert!(job.tile_rows.is_multiple_of(rows) && job.tile_cols.is_multiple_of(cols));
            }
        }
    }

    #[test]
    fn a_table_has_every_tile_of_every_job() {
        let jobs = [
            encode(64, 256, &[[1, 32]]),
            encode(0, 256, &[[1, 32]]),
            encode(1, 257, &[[0, 0]]),
        ];
        let tiles = tile_table(&jobs).expect("few tiles");
        let found: Vec<_> = tiles.iter().map(|tile| (tile.job, tile.index)).collect();
        assert_eq!(found, [(0, 0), (0, 1), (2, 0), (2, 1)]);
    }

    #[test]
    fn more_than_two_billion_elements_are_counted() {
        let job = encode(1 << 20, 1 << 14, &[[1, 32], [32, 1]]);
        assert_eq!(job.tiles(), (1 << 15) * (1 << 6));
    }
}
