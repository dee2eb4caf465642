//! Numbers that host and device share: sizes of tiles, and what the fields of a job may hold.

use super::declare::{Shared, Value, constant, constants, enumeration, values};

constants! {
    /// Threads of a block of every kernel but `lowp_history`.
    THREADS: i32 = 256;
    /// Threads of a block of `lowp_history`.
    HISTORY_THREADS: i32 = 32;
    /// AMAX_FLAT: elements of a tile.
    AMAX_TILE: u64 = 16384;
    /// AMAX_TILES: rows and columns of a tile.
    AMAX_ROWS: u32 = 128;
    AMAX_COLS: u32 = 256;
    /// AMAX_GENERIC: elements of a tile.
    AMAX_RUN: u64 = 2048;
    /// PATH_WIDE: rows and columns that the threads of a block do at a time.
    WIDE_ROWS: u32 = 32;
    WIDE_COLS: u32 = 256;
    /// PATH_TRANSPOSED: rows and columns of a tile.
    TRANSPOSED_ROWS: u32 = 128;
    TRANSPOSED_COLS: u32 = 64;
    /// PATH_BLOCKS: rows and columns of a tile.
    BLOCKS_SIDE: u32 = 128;
    /// PATH_STREAM: elements of a tile.
    STREAM_RUN: u64 = 16384;
    /// lowp_encode_ring_*: bytes of shared memory with two tiles on their way and with three, and columns of a
    /// large tile.
    RING_BYTES: u32 = 48128;
    LONG_RING_BYTES: u32 = 64512;
    RING_COLS: u32 = 256;
    /// lowp_encode_ring_e8m0_fp8: the same of tiles of WIDE_ROWS x WIDE_COLS, of which three are on their way.
    WIDE_RING_BYTES: u32 = 51712;
    WIDE_RING_COLS: u32 = 1024;
    /// lowp_encode_ring_blocks: the same of tiles of BLOCKS_SIDE, of which two are on their way.
    BLOCKS_RING_BYTES: u32 = 65664;
    /// lowp_encode_ring_f32_*: the same of tiles of TRANSPOSED_ROWS x TRANSPOSED_COLS of binary32.
    F32_RING_BYTES: u32 = 71168;
    /// lowp_round_e8m0_fp8: the same. lowp_round_two_level: with two tiles on their way, and with three.
    ROUND_RING_BYTES: u32 = 52224;
    ROUND_FP4_BYTES: u32 = 47104;
    LONG_ROUND_FP4_BYTES: u32 = 63488;
    /// PATH_FLAT: elements of a tile, and columns of its rows when it is seen as a matrix.
    FLAT_TILE: u64 = 8192;
    FLAT_COLS: u64 = 256;
    /// PATH_GENERIC: blocks whose multipliers a unit keeps at a time.
    UNIT_BLOCKS: u32 = 2048;
    /// FlatEncode: elements of a tile where it is not tiled, or blocks of one.
    FLAT_ENCODE_RUN: u64 = 8192;
    /// FlatEncode: rows and columns that a warp does.
    FLAT_WARP_ROWS: u32 = 32;
    FLAT_WARP_COLS: u32 = 128;
    /// FlatEncode: rows of blocks of a tile of transposed scales, which has THREADS columns.
    FLAT_SCALES_DOWN: u32 = 32;
    /// Decode: rows of a tile and, with DECODE_GENERIC, its columns.
    DECODE_SIDE: u32 = 64;
    /// DECODE_WIDE: columns of a tile.
    DECODE_WIDE_COLS: u32 = 128;
    /// DECODE_EIGHT: columns of a tile.
    DECODE_EIGHT_COLS: u32 = 256;
    /// DECODE_NIBBLES: rows and columns of a tile.
    DECODE_NIBBLES_ROWS: u32 = 32;
    DECODE_NIBBLES_COLS: u32 = 256;
    /// DECODE_TRANSPOSED: sides of a tile.
    DECODE_LINES: u32 = 128;
    /// Transpose: sides of a tile, in entries.
    TRANSPOSE_SIDE: u32 = 64;
    /// Transpose with `vector`: rows of a tile, and bytes of a row.
    TRANSPOSE_ROWS: u32 = 128;
    TRANSPOSE_ROW_BYTES: u32 = 256;
    /// REPACK_GENERIC: bytes of `to` that a tile has.
    REPACK_RUN: u64 = 4096;
    /// The other paths of a repack: sides of a tile, in entries of `to`.
    REPACK_SIDE: u32 = 128;
    /// REPACK_SWIZZLE_SPREAD: entries of a tile along the inner axis.
    REPACK_SPREAD_COLS: u32 = 256;
    /// Interleave: bytes of a tile.
    INTERLEAVE_TILE: u64 = 16384;
    /// Rearrange: bytes of a tile.
    REARRANGE_TILE: u64 = 16384;
    /// SumSquares: elements of a run (or sums of a run of runs), and runs of a tile.
    SUM_RUN: u64 = 4096;
    SUM_RUNS: u32 = 16;
    /// Sum: elements of a tile.
    SUM_TILE: u64 = 8192;
    /// SumParts: elements of a tile.
    SUM_PARTS_TILE: u64 = 2048;
    /// Momentum and Normalize: elements of a tile.
    MOMENTUM_TILE: u64 = 2048;
    /// StoredUpdate: elements of a block of a state in fp8.
    STATE_BLOCK: u32 = 32;
    /// StepScalars: bytes of a rank's part, of the header of scalars, and of a group of them.
    GRAD_PART: u64 = 32;
    STEP_HEADER: u64 = 32;
    STEP_GROUP: u64 = 32;
}

values! {
    /// Codes of entries: lowp_format::Code in its order.
    mod code: u8 as Code, "" {
        E4M3 = 0,
        E5M2 = 1,
        E2M1 = 2,
        E8M0 = 3,
        BF16 = 4,
        F32 = 5,
    }

    /// Scale rules: lowp_format::ScaleRule with the rounding of E8M0 scales folded in.
    mod rule: u8 as Rule, "RULE_" {
        /// The code holds the value itself.
        NONE = 0,
        /// One f32 encode scale for the tensor, or for each line.
        TENSOR = 1,
        /// A power of two per block, rounded up.
        E8M0_TE = 2,
        /// A power of two per block, the exponent of the amax.
        E8M0_FLOOR = 3,
        /// An E4M3 scale per block under the f32 tensor amax.
        TWO_LEVEL = 4,
        /// An f32 scale per block; `pow2` and `epsilon` apply.
        BLOCK_F32 = 5,
        /// A power of two per block, the exponent of the amax rounded to the precision of the elements.
        E8M0_EVEN = 6,
        /// As TWO_LEVEL, with a choice of four over six.
        FOUR_OVER_SIX = 7,
    }

    /// How an optimizer updates an element: lowp_kernels::Rule.
    mod update_rule: u8 as UpdateRule, "UPDATE_" {
        ADAMW = 0,
        ADAM_L2 = 1,
        LION = 2,
        SGD = 3,
        SGD_MOMENTUM = 4,
        SGD_NESTEROV = 5,
        /// SGD whose gradients are not multiplied by `Step::grad_scale`, and whose state belongs to another pass.
        MUON = 6,
    }

    /// How a value of an optimizer is stored: lowp_kernels::StateDtype and MasterDtype.
    mod stored: u8 as Stored, "STORED_" {
        F32 = 0,
        BF16 = 1,
        /// Codes of 8 bits, with a scale for each block of STATE_BLOCK.
        FP8 = 2,
        /// A master: parameters in bfloat16, and their remainders elsewhere.
        BF16_PLUS_16 = 3,
    }

    /// What shares an amax above block scales, or a scale: lowp_format::Extent by orientation.
    mod extent: u8 as Extent, "EXTENT_" {
        TENSOR = 0,
        ROWS = 1,
        COLUMNS = 2,
    }

    /// How an encode walks its matrix.
    mod path: u8 as Path, "PATH_" {
        /// Row-major outputs: FP8 with a tensor scale or with E8M0 scales of 1 x 32, 32 x 1 and 32 x 32
        /// blocks; values as they are. Tiles of WIDE_ROWS x WIDE_COLS; lowp_encode_wide_bf16 takes larger
        /// ones, too.
        WIDE = 0,
        /// Row-major and transposed outputs: FP8 with a tensor scale; E2M1 with two-level scales of 1 x 16,
        /// 16 x 1 and 16 x 16 blocks or, of binary32, with Compact E8M0 scales of 1 x 32, 32 x 1 and 32 x 32
        /// blocks. Each order of data is filled by one pass.
        TRANSPOSED = 1,
        /// An update without an encode: runs of FLAT_TILE elements, whatever the shape.
        FLAT = 2,
        /// Anything else: tiles of tile_rows x tile_cols, whole blocks.
        GENERIC = 3,
        /// Tiles as TRANSPOSED, of any ingredients by orientation: scales of tensors and lines, E8M0 scales
        /// of blocks of 32, two-level ones of blocks of 16, four over six, stochastic rounding and a Hadamard
        /// transform of the last pass. One pass, or two of one order of data each.
        MIXED = 4,
        /// FP8 with f32 scales of 1 x 128, 128 x 1 and 128 x 128 blocks, in either order. Tiles of
        /// BLOCKS_SIDE.
        BLOCKS = 5,
        /// Row-major FP8 of a tensor scale, or of E8M0 scales of 1 x 32 in rows of whole blocks. Tiles of
        /// STREAM_RUN consecutive elements; not in launches with jobs of other paths.
        STREAM = 6,
        /// Matrices of whole tiles of TRANSPOSED_ROWS x TRANSPOSED_COLS, RING_COLS at a time where there are many:
        /// lowp_encode_ring_*; not in launches with jobs of other paths. MXFP8 has tiles of
        /// WIDE_ROWS x WIDE_COLS, WIDE_RING_COLS at a time, f32 scales of blocks of 128 those of BLOCKS_SIDE,
        /// RING_COLS at a time.
        RING = 7,
    }

    /// Bits of Encode::vector: 16-byte accesses stay aligned in every row.
    mod vector: u8 as Vector, "VECTOR_" {
        /// The source, or all inputs and outputs of an update.
        SOURCE = 1,
        /// Row-major data of pass 0.
        ROWS_0 = 2,
        /// Row-major data of pass 1.
        ROWS_1 = 4,
        /// Transposed data of pass 0.
        COLUMNS_0 = 8,
        /// Transposed data of pass 1.
        COLUMNS_1 = 16,
    }

    /// Scales in other forms than Compact among the outputs of an encode.
    mod forms: u8 as Forms, "FORMS_" {
        NONE = 0,
        /// Swizzled ones at multiples of 4, of blocks along the inner axis, for every outer index.
        SWIZZLED = 1,
        ANY = 2,
    }

    /// How an amax walks its elements.
    mod amax_path: u8 as AmaxPath, "AMAX_" {
        /// Tensor only: runs of AMAX_TILE elements.
        FLAT = 0,
        /// Blocks of sides 1, 16, 32 or 128, and lines: tiles from a multiple of AMAX_ROWS on.
        TILES = 1,
        /// Any blocks: runs of AMAX_RUN elements, one maximum per element.
        GENERIC = 2,
        /// The tensor after the Hadamard transform: the same tiles.
        TRANSFORMED = 3,
        /// The same of a matrix of bfloat16 of whole tiles of TRANSPOSED_ROWS x TRANSPOSED_COLS, RING_COLS at a time:
        /// lowp_amax_ring; not in launches with jobs of other paths.
        RING = 4,
    }

    /// What the elements of a flat pass are multiplied by, among 16 rows of FLAT_WARP_COLS elements.
    mod flat_walk: u8 as FlatWalk, "FLAT_" {
        /// Anything: element by element.
        ANY = 0,
        /// One number for each row, or for 16 or 32 elements of it.
        BY_ROW = 1,
        /// One for each column.
        BY_COLUMN = 2,
        /// One for 16 or more columns of all rows.
        ONE = 3,
        /// Nothing: bf16 or f32 elements.
        PLAIN = 4,
    }

    /// How a decode walks its matrix.
    mod decode_path: u8 as DecodePath, "DECODE_" {
        GENERIC = 0,
        /// Row-major codes of 4 or 8 bits, scaled, blocks of powers of two, at least four columns or eight rows.
        WIDE = 1,
        /// The same of transposed codes, blocks of at least sixteen rows.
        TRANSPOSED = 2,
        /// As WIDE, of 4 bits with block scales of at least four columns, none of lines; whole words of eight codes.
        NIBBLES = 3,
        /// Row-major codes of 8 bits to bf16 under E8M0 scales of blocks of eight or more columns, or of one column and eight or more
        /// rows.
        EIGHT = 4,
    }

    /// How a repack walks its result.
    mod repack_path: u8 as RepackPath, "REPACK_" {
        /// Entry by entry.
        GENERIC = 0,
        /// 8-bit Compact or Padded of the same axes and tiles to Swizzled.
        SWIZZLE = 1,
        /// The same with the axes exchanged.
        SWIZZLE_TRANSPOSED = 2,
        /// Of any axes, where 16 or more outer entries of the result share one of the source.
        SWIZZLE_SPREAD = 3,
    }

    /// Bits of the kernel parameter `flags`.
    mod flags: u32 as Flags, "FLAG_" {
        /// Do nothing at all if Step::skip is not 0. Every launch has it, as a run on the CPU does;
        /// lowp_step_scalars, which makes a Step, does not look at it.
        HONOR_SKIP = 1,
    }
}
