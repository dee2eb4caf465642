//! Which encodes go through a ring of tiles in shared memory: matrices of bfloat16, and some of binary32, of whole tiles.

use std::cell::Cell;

use super::super::module::Kernel;
use super::super::table::{
    BLOCKS_RING_BYTES, BLOCKS_SIDE, Encode, LONG_RING_BYTES, Pass, RING_BYTES, RING_COLS,
    TRANSPOSED_COLS, TRANSPOSED_ROWS, WIDE_COLS, WIDE_RING_BYTES, WIDE_RING_COLS, WIDE_ROWS, code,
    extent, forms, path, rule, vector,
};
use super::encode::has_side;
use super::job::cdiv;

const FP8: Kernel = Kernel::with_shared("lowp_encode_ring_fp8", LONG_RING_BYTES);
const TWO_LEVEL_SQUARE: Kernel =
    Kernel::with_shared("lowp_encode_ring_two_level_square", RING_BYTES);
const TWO_LEVEL_TRANSFORMED: Kernel =
    Kernel::with_shared("lowp_encode_ring_two_level_transformed", RING_BYTES);
const TWO_LEVEL_RANDOM: Kernel =
    Kernel::with_shared("lowp_encode_ring_two_level_random", LONG_RING_BYTES);
const TWO_LEVEL_E8M0: Kernel = Kernel::with_shared("lowp_encode_ring_two_level_e8m0", RING_BYTES);
const E8M0_FP4_FP8: Kernel = Kernel::with_shared("lowp_encode_ring_e8m0_fp4_fp8", RING_BYTES);
const TWO_LEVEL: Kernel = Kernel::with_shared("lowp_encode_ring_two_level", RING_BYTES);
const E8M0_FP4: Kernel = Kernel::with_shared("lowp_encode_ring_e8m0_fp4", RING_BYTES);
pub(super) const E8M0_FP8: Kernel =
    Kernel::with_shared("lowp_encode_ring_e8m0_fp8", WIDE_RING_BYTES);
pub(super) const BLOCKS: Kernel = Kernel::with_shared("lowp_encode_ring_blocks", BLOCKS_RING_BYTES);

const F32_FP8: Kernel = Kernel::with_shared("lowp_encode_ring_f32_fp8", LONG_RING_BYTES);
const F32_TWO_LEVEL_E8M0: Kernel =
    Kernel::with_shared("lowp_encode_ring_f32_two_level_e8m0", RING_BYTES);
const F32_E8M0_FP8: Kernel = Kernel::with_shared("lowp_encode_ring_f32_e8m0_fp8", WIDE_RING_BYTES);
const F32_E8M0_FP4_FP8: Kernel =
    Kernel::with_shared("lowp_encode_ring_f32_e8m0_fp4_fp8", RING_BYTES);

/// The kernels of rings.
pub(super) const KERNELS: &[Kernel] = &[
    FP8,
    TWO_LEVEL_SQUARE,
    TWO_LEVEL_TRANSFORMED,
    TWO_LEVEL_RANDOM,
    TWO_LEVEL_E8M0,
    E8M0_FP4_FP8,
    TWO_LEVEL,
    E8M0_FP4,
    E8M0_FP8,
    BLOCKS,
    F32_FP8,
    F32_TWO_LEVEL_E8M0,
    F32_E8M0_FP4_FP8,
    F32_E8M0_FP8,
];

/// Tiles of 128 x 64 of a launch from which blocks of threads that do four of them keep a device as busy as one block each.
pub(super) const MANY_TILES: u64 = 4096;

thread_local! {
    /// Has the tests of a thread run wide tiles, whatever the matrix.
    pub static WIDE_TILES: Cell<bool> = const { Cell::new(false) };
}

/// What the ring knows of a pass: ingredients, blocks and the order of data. Of NVFP4 and MXFP8 passes those of
/// columns may differ from those of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Fp8(u8),
    TwoLevelSquare,
    TwoLevelRows,
    TwoLevelColumns {
        transformed: bool,
    },
    E8m0Fp4(u8),
    /// Element and rule.
    E8m0Fp8Rows(u8, u8),
    E8m0Fp8Columns(u8, u8),
    E8m0Fp8Square,
    BlockRows,
    BlockColumns,
    BlockSquare,
}

impl Part {
    fn of(pass: &Pass) -> Option<Self> {
        let made = &pass.ingredients;
        let [rows, columns] = pass.data.map(|data| data != 0);
        let by_row = pass.block_rows == 1 && rows && !columns;
        let by_column = pass.block_cols == 1 && columns && !rows;
        let transformed = made.hadamard != 0;
        let of_tensor = made.extent == extent::TENSOR;
        match (made.rule, made.element) {
            (rule::TENSOR, code::E4M3 | code::E5M2) if has_side(pass, 0) && !transformed => {
                let extents = (!rows || made.extent != extent::COLUMNS)
                    && (!columns || made.extent != extent::ROWS);
                (extents && (rows || columns)).then_some(Self::Fp8(made.element))
            }
            (rule::TWO_LEVEL, code::E2M1) if has_side(pass, 16) && of_tensor => {
                if by_column {
                    Some(Self::TwoLevelColumns { transformed })
                } else if transformed {
                    None
                } else if by_row {
                    Some(Self::TwoLevelRows)
                } else {
                    (pass.block_rows == pass.block_cols && (rows || columns))
                        .then_some(Self::TwoLevelSquare)
                }
            }
            (rule::E8M0_TE | rule::E8M0_FLOOR | rule::E8M0_EVEN, code::E2M1)
                if has_side(pass, 32) && !transformed && (by_row || by_column) =>
            {
                Some(Self::E8m0Fp4(made.rule))
            }
            (rule::E8M0_TE | rule::E8M0_FLOOR, code::E4M3 | code::E5M2)
                if has_side(pass, 32) && !transformed && rows && !columns =>
            {
                Some(match [pass.block_rows, pass.block_cols] {
                    [1, _] => Self::E8m0Fp8Rows(made.element, made.rule),
                    [_, 1] => Self::E8m0Fp8Columns(made.element, made.rule),
                    _ => Self::E8m0Fp8Square,
                })
            }
            (rule::BLOCK_F32, _) if pass.fits_blocks() => {
                // Scales of lines lie beside those of their neighbours.
                if by_row && pass.scale[0] == 0 {
                    Some(Self::BlockRows)
                } else if by_column && pass.scale[1] == 0 {
                    Some(Self::BlockColumns)
                } else {
                    (pass.block_rows == pass.block_cols && (rows || columns))
                        .then_some(Self::BlockSquare)
                }
            }
            _ => None,
        }
    }
}

/// The kernel of passes of these parts.
fn kernel_of(parts: &[Part], stochastic: bool) -> Option<Kernel> {
    use Part::{
        BlockColumns, BlockRows, BlockSquare, E8m0Fp4, E8m0Fp8Columns, E8m0Fp8Rows, E8m0Fp8Square,
        Fp8, TwoLevelColumns, TwoLevelRows, TwoLevelSquare,
    };
    let kernel = match *parts {
        [TwoLevelRows | TwoLevelColumns { .. }] | [TwoLevelRows, TwoLevelColumns { .. }]
            if stochastic =>
        {
            return Some(TWO_LEVEL_RANDOM);
        }
        [Fp8(_)] => FP8,
        [Fp8(first), Fp8(second)] if first == second => FP8,
        [TwoLevelSquare] => TWO_LEVEL_SQUARE,
        [TwoLevelColumns { transformed: true }]
        | [TwoLevelRows, TwoLevelColumns { transformed: true }] => TWO_LEVEL_TRANSFORMED,
        [TwoLevelRows | TwoLevelColumns { .. }] | [TwoLevelRows, TwoLevelColumns { .. }] => {
            TWO_LEVEL
        }
        [E8m0Fp4(_)] => E8M0_FP4,
        [E8m0Fp4(first), E8m0Fp4(second)] if first == second => E8M0_FP4,
        [E8m0Fp8Rows(..) | E8m0Fp8Columns(..) | E8m0Fp8Square] => E8M0_FP8,
        [E8m0Fp8Rows(one, first), E8m0Fp8Columns(other, second)]
            if (one, first) == (other, second) =>
        {
            E8M0_FP8
        }
        [TwoLevelRows, E8m0Fp8Columns(code::E4M3, _)] => TWO_LEVEL_E8M0,
        [E8m0Fp4(_), E8m0Fp8Columns(code::E4M3, _)] => E8M0_FP4_FP8,
        [BlockRows | BlockColumns | BlockSquare] | [BlockRows, BlockColumns] => BLOCKS,
        _ => return None,
    };
    // Only E2M1 is rounded stochastically.
    let ignored = matches!(kernel, FP8 | E8M0_FP8 | BLOCKS);
    (!stochastic || ignored).then_some(kernel)
}

/// The kernel that does with binary32 what `kernel` does with bfloat16, if there is one: one scale of the tensor, and MXFP8 of one orientation, are
/// as fast without a ring.
fn of_f32(kernel: Kernel, passes: &[Pass]) -> Option<Kernel> {
    let of_lines = |pass: &Pass| pass.ingredients.extent != extent::TENSOR;
    Some(match kernel {
        FP8 if passes.iter().any(of_lines) => F32_FP8,
        TWO_LEVEL_E8M0 => F32_TWO_LEVEL_E8M0,
        E8M0_FP4_FP8 => F32_E8M0_FP4_FP8,
        E8M0_FP8 if passes.len() == 2 => F32_E8M0_FP8,
        _ => return None,
    })
}

/// Rows and columns of a tile, the least or where there are `many`.
fn tile(kernel: Kernel, many: bool) -> [u32; 2] {
    match (kernel, many) {
        (E8M0_FP8 | F32_E8M0_FP8, false) => [WIDE_ROWS, WIDE_COLS],
        (E8M0_FP8 | F32_E8M0_FP8, true) => [WIDE_ROWS, WIDE_RING_COLS],
        (BLOCKS, false) => [BLOCKS_SIDE; 2],
        (BLOCKS, true) => [BLOCKS_SIDE, RING_COLS],
        (_, false) => [TRANSPOSED_ROWS, TRANSPOSED_COLS],
        (_, true) => [TRANSPOSED_ROWS, RING_COLS],
    }
}

/// Whether two passes are of blocks of rows and then of columns, or of the lines of either order of data; and whether what they
/// share is the same.
fn agree(passes: &[Pass]) -> bool {
    let [first, second] = passes else {
        return true;
    };
    let [one, other] = [first, second].map(|pass| &pass.ingredients);
    if [one.rule, other.rule].contains(&rule::TENSOR) {
        return one.rule == other.rule && first.data[1] == 0 && second.data[0] == 0;
    }
    let alike = one.rule == other.rule && one.element == other.element;
    let tensor = one.tensor == other.tensor || other.hadamard != 0;
    if one.rule == rule::BLOCK_F32 && one != other {
        return false;
    }
    first.block_rows == 1 && second.block_cols == 1 && (!alike || tensor)
}

impl Encode {
    /// The kernel that encodes this matrix through a ring, if one does.
    pub(crate) fn ring(&self) -> Option<Kernel> {
        let passes = &self.pass[..usize::from(self.passes).min(2)];
        let outputs = passes.iter().zip([
            [vector::ROWS_0, vector::COLUMNS_0],
            [vector::ROWS_1, vector::COLUMNS_1],
        ]);
        let aligned = self.vector & vector::SOURCE != 0
            && outputs.into_iter().all(|(pass, bits)| {
                (0..2).all(|order| pass.data[order] == 0 || self.vector & bits[order] != 0)
            });
        let f32 = self.source_code == code::F32 && self.via_bf16 == 0;
        let known = (f32 || self.source_code == code::BF16) && self.forms == forms::NONE;
        // A run of 16 elements has a counter block of its own.
        let counters = self.stochastic == 0 || self.first.is_multiple_of(16);
        if !(aligned && known && counters && agree(passes)) {
            return None;
        }
        let parts = passes.iter().map(Part::of).collect::<Option<Vec<_>>>()?;
        let kernel = kernel_of(&parts, self.stochastic != 0)?;
        // It stores scales in the order of rows alone.
        let crossed = passes.iter().any(|pass| pass.scale[1] != 0);
        if kernel == E8M0_FP8 && crossed {
            return None;
        }
        let kernel = if f32 { of_f32(kernel, passes)? } else { kernel };
        let [rows, cols] = tile(kernel, false);
        let whole = self.rows.is_multiple_of(rows.into()) && self.cols.is_multiple_of(cols.into());
        whole.then_some(kernel)
    }

    /// Makes the tiles of `jobs` those of a ring where one kernel knows all of them.
    pub(crate) fn through_ring(jobs: &mut [Self]) -> bool {
        let [first, ..] = jobs else { return false };
        let Some(kernel) = first.ring() else {
            return false;
        };
        let tiles = |job: &Self| {
            cdiv(job.rows, TRANSPOSED_ROWS.into()) * cdiv(job.cols, TRANSPOSED_COLS.into())
        };
        let many = WIDE_TILES.get() || jobs.iter().map(tiles).sum::<u64>() >= MANY_TILES;
        if jobs.iter().any(|job| job.ring() != Some(kernel)) {
            return false;
        }
        let [height, width] = tile(kernel, many);
        for job in jobs {
            job.path = path::RING;
            [job.tile_rows, job.tile_cols] = [height, width];
            job.tiles_across = cdiv(job.cols, width.into());
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PARTS: [Part; 16] = [
        Part::Fp8(code::E4M3),
        Part::Fp8(code::E5M2),
        Part::TwoLevelSquare,
        Part::TwoLevelRows,
        Part::TwoLevelColumns { transformed: false },
        Part::TwoLevelColumns { transformed: true },
        Part::E8m0Fp4(rule::E8M0_TE),
        Part::E8m0Fp4(rule::E8M0_FLOOR),
        Part::E8m0Fp4(rule::E8M0_EVEN),
        Part::E8m0Fp8Rows(code::E4M3, rule::E8M0_TE),
        Part::E8m0Fp8Columns(code::E4M3, rule::E8M0_TE),
        Part::E8m0Fp8Columns(code::E5M2, rule::E8M0_FLOOR),
        Part::E8m0Fp8Square,
        Part::BlockRows,
        Part::BlockColumns,
        Part::BlockSquare,
    ];

    #[test]
    fn pairs_of_passes_have_a_kernel_only_where_it_knows_both() {
        use Part::{
            BlockColumns, BlockRows, E8m0Fp4, E8m0Fp8Columns, E8m0Fp8Rows, Fp8, TwoLevelColumns,
            TwoLevelRows,
        };
        for first in PARTS {
            for second in PARTS {
                let known = match (first, second) {
                    (Fp8(one), Fp8(other)) | (E8m0Fp4(one), E8m0Fp4(other)) => one == other,
                    (E8m0Fp8Rows(one, rule), E8m0Fp8Columns(other, second)) => {
                        (one, rule) == (other, second)
                    }
                    (TwoLevelRows, TwoLevelColumns { .. })
                    | (TwoLevelRows | E8m0Fp4(_), E8m0Fp8Columns(code::E4M3, _))
                    | (BlockRows, BlockColumns) => true,
                    _ => false,
                };
                assert_eq!(
                    kernel_of(&[first, second], false).is_some(),
                    known,
                    "{first:?} {second:?}"
                );
                let random = matches!((first, second), (TwoLevelRows, TwoLevelColumns { .. }));
                let fp8 = match (first, second) {
                    (Fp8(_), Fp8(_))
                    | (E8m0Fp8Rows(..), E8m0Fp8Columns(..))
                    | (BlockRows, BlockColumns) => known,
                    _ => false,
                };
                assert_eq!(kernel_of(&[first, second], true).is_some(), random || fp8);
            }
        }
    }

    #[test]
    fn passes_agree_on_what_they_share() {
        let pass = |rule, blocks: [u32; 2], order: usize, tensor| {
            let mut pass = Pass::default();
            pass.ingredients.rule = rule;
            pass.ingredients.tensor = tensor;
            [pass.block_rows, pass.block_cols] = blocks;
            pass.data[order] = 256;
            pass
        };
        let rows = pass(rule::TWO_LEVEL, [1, 16], 0, 8);
        assert!(agree(&[rows, pass(rule::TWO_LEVEL, [16, 1], 1, 8)]));
        assert!(!agree(&[rows, pass(rule::TWO_LEVEL, [16, 1], 1, 12)]));
        assert!(!agree(&[pass(rule::TWO_LEVEL, [16, 1], 1, 8), rows]));
        let line = pass(rule::TENSOR, [0, 0], 0, 8);
        assert!(agree(&[line, pass(rule::TENSOR, [0, 0], 1, 12)]));
        assert!(!agree(&[line, pass(rule::TENSOR, [0, 0], 0, 12)]));
        assert!(!agree(&[line, pass(rule::TWO_LEVEL, [16, 1], 1, 8)]));
        let rows = pass(rule::BLOCK_F32, [1, 128], 0, 0);
        let mut columns = pass(rule::BLOCK_F32, [128, 1], 1, 0);
        assert!(agree(&[rows, columns]));
        columns.ingredients.epsilon = 0.5;
        assert!(!agree(&[rows, columns]));
    }
}
