// Written by `cargo xtask cuda` from src/cuda/table: change that.
//
// Sizes of tiles, and what the fields of the structs of jobs.cuh may hold.
#pragma once
#include <cstdint>

namespace lowp {

// Threads of a block of every kernel but `lowp_history`.
constexpr int THREADS = 256;
// Threads of a block of `lowp_history`.
constexpr int HISTORY_THREADS = 32;
// AMAX_FLAT: elements of a tile.
constexpr uint64_t AMAX_TILE = 16384;
// AMAX_TILES: rows and columns of a tile.
constexpr uint32_t AMAX_ROWS = 128;
constexpr uint32_t AMAX_COLS = 256;
// AMAX_GENERIC: elements of a tile.
constexpr uint64_t AMAX_RUN = 2048;
// PATH_WIDE: rows and columns that the threads of a block do at a time.
constexpr uint32_t WIDE_ROWS = 32;
constexpr uint32_t WIDE_COLS = 256;
// PATH_TRANSPOSED: rows and columns of a tile.
constexpr uint32_t TRANSPOSED_ROWS = 128;
constexpr uint32_t TRANSPOSED_COLS = 64;
// PATH_BLOCKS: rows and columns of a tile.
constexpr uint32_t BLOCKS_SIDE = 128;
// PATH_STREAM: elements of a tile.
constexpr uint64_t STREAM_RUN = 16384;
// lowp_encode_ring_*: bytes of shared memory with two tiles on their way and with three, and columns of a
// large tile.
constexpr uint32_t RING_BYTES = 48128;
constexpr uint32_t LONG_RING_BYTES = 64512;
constexpr uint32_t RING_COLS = 256;
// lowp_encode_ring_e8m0_fp8: the same of tiles of WIDE_ROWS x WIDE_COLS, of which three are on their way.
constexpr uint32_t WIDE_RING_BYTES = 51712;
constexpr uint32_t WIDE_RING_COLS = 1024;
// lowp_encode_ring_blocks: the same of tiles of BLOCKS_SIDE, of which two are on their way.
constexpr uint32_t BLOCKS_RING_BYTES = 65664;
// lowp_encode_ring_f32_*: the same of tiles of TRANSPOSED_ROWS x TRANSPOSED_COLS of binary32.
constexpr uint32_t F32_RING_BYTES = 71168;
// lowp_round_e8m0_fp8: the same. lowp_round_two_level: with two tiles on their way, and with three.
constexpr uint32_t ROUND_RING_BYTES = 52224;
constexpr uint32_t ROUND_FP4_BYTES = 47104;
constexpr uint32_t LONG_ROUND_FP4_BYTES = 63488;
// PATH_FLAT: elements of a tile, and columns of its rows when it is seen as a matrix.
constexpr uint64_t FLAT_TILE = 8192;
constexpr uint64_t FLAT_COLS = 256;
// PATH_GENERIC: blocks whose multipliers a unit keeps at a time.
constexpr uint32_t UNIT_BLOCKS = 2048;
// FlatEncode: elements of a tile where it is not tiled, or blocks of one.
constexpr uint64_t FLAT_ENCODE_RUN = 8192;
// FlatEncode: rows and columns that a warp does.
constexpr uint32_t FLAT_WARP_ROWS = 32;
constexpr uint32_t FLAT_WARP_COLS = 128;
// FlatEncode: rows of blocks of a tile of transposed scales, which has THREADS columns.
constexpr uint32_t FLAT_SCALES_DOWN = 32;
// Decode: rows of a tile and, with DECODE_GENERIC, its columns.
constexpr uint32_t DECODE_SIDE = 64;
// DECODE_WIDE: columns of a tile.
constexpr uint32_t DECODE_WIDE_COLS = 128;
// DECODE_EIGHT: columns of a tile.
constexpr uint32_t DECODE_EIGHT_COLS = 256;
// DECODE_NIBBLES: rows and columns of a tile.
constexpr uint32_t DECODE_NIBBLES_ROWS = 32;
constexpr uint32_t DECODE_NIBBLES_COLS = 256;
// DECODE_TRANSPOSED: sides of a tile.
constexpr uint32_t DECODE_LINES = 128;
// Transpose: sides of a tile, in entries.
constexpr uint32_t TRANSPOSE_SIDE = 64;
// Transpose with `vector`: rows of a tile, and bytes of a row.
constexpr uint32_t TRANSPOSE_ROWS = 128;
constexpr uint32_t TRANSPOSE_ROW_BYTES = 256;
// REPACK_GENERIC: bytes of `to` that a tile has.
constexpr uint64_t REPACK_RUN = 4096;
// The other paths of a repack: sides of a tile, in entries of `to`.
constexpr uint32_t REPACK_SIDE = 128;
// REPACK_SWIZZLE_SPREAD: entries of a tile along the inner axis.
constexpr uint32_t REPACK_SPREAD_COLS = 256;
// Interleave: bytes of a tile.
constexpr uint64_t INTERLEAVE_TILE = 16384;
// Rearrange: bytes of a tile.
constexpr uint64_t REARRANGE_TILE = 16384;
// SumSquares: elements of a run (or sums of a run of runs), and runs of a tile.
constexpr uint64_t SUM_RUN = 4096;
constexpr uint32_t SUM_RUNS = 16;
// Sum: elements of a tile.
constexpr uint64_t SUM_TILE = 8192;
// SumParts: elements of a tile.
constexpr uint64_t SUM_PARTS_TILE = 2048;
// Momentum and Normalize: elements of a tile.
constexpr uint64_t MOMENTUM_TILE = 2048;
// StoredUpdate: elements of a block of a state in fp8.
constexpr uint32_t STATE_BLOCK = 32;
// StepScalars: bytes of a rank's part, of the header of scalars, and of a group of them.
constexpr uint64_t GRAD_PART = 32;
constexpr uint64_t STEP_HEADER = 32;
constexpr uint64_t STEP_GROUP = 32;

// Codes of entries: lowp_format::Code in its order.
enum Code : uint8_t {
  E4M3 = 0,
  E5M2 = 1,
  E2M1 = 2,
  E8M0 = 3,
  BF16 = 4,
  F32 = 5,
};

// Scale rules: lowp_format::ScaleRule with the rounding of E8M0 scales folded in.
enum Rule : uint8_t {
  // The code holds the value itself.
  RULE_NONE = 0,
  // One f32 encode scale for the tensor, or for each line.
  RULE_TENSOR = 1,
  // A power of two per block, rounded up.
  RULE_E8M0_TE = 2,
  // A power of two per block, the exponent of the amax.
  RULE_E8M0_FLOOR = 3,
  // An E4M3 scale per block under the f32 tensor amax.
  RULE_TWO_LEVEL = 4,
  // An f32 scale per block; `pow2` and `epsilon` apply.
  RULE_BLOCK_F32 = 5,
  // A power of two per block, the exponent of the amax rounded to the precision of the elements.
  RULE_E8M0_EVEN = 6,
  // As TWO_LEVEL, with a choice of four over six.
  RULE_FOUR_OVER_SIX = 7,
};

// How an optimizer updates an element: lowp_kernels::Rule.
enum UpdateRule : uint8_t {
  UPDATE_ADAMW = 0,
  UPDATE_ADAM_L2 = 1,
  UPDATE_LION = 2,
  UPDATE_SGD = 3,
  UPDATE_SGD_MOMENTUM = 4,
  UPDATE_SGD_NESTEROV = 5,
  // SGD whose gradients are not multiplied by `Step::grad_scale`, and whose state belongs to another pass.
  UPDATE_MUON = 6,
};

// How a value of an optimizer is stored: lowp_kernels::StateDtype and MasterDtype.
enum Stored : uint8_t {
  STORED_F32 = 0,
  STORED_BF16 = 1,
  // Codes of 8 bits, with a scale for each block of STATE_BLOCK.
  STORED_FP8 = 2,
  // A master: parameters in bfloat16, and their remainders elsewhere.
  STORED_BF16_PLUS_16 = 3,
};

// What shares an amax above block scales, or a scale: lowp_format::Extent by orientation.
enum Extent : uint8_t {
  EXTENT_TENSOR = 0,
  EXTENT_ROWS = 1,
  EXTENT_COLUMNS = 2,
};

// How an encode walks its matrix.
enum Path : uint8_t {
  // Row-major outputs: FP8 with a tensor scale or with E8M0 scales of 1 x 32, 32 x 1 and 32 x 32
  // blocks; values as they are. Tiles of WIDE_ROWS x WIDE_COLS; lowp_encode_wide_bf16 takes larger
  // ones, too.
  PATH_WIDE = 0,
  // Row-major and transposed outputs: FP8 with a tensor scale; E2M1 with two-level scales of 1 x 16,
  // 16 x 1 and 16 x 16 blocks or, of binary32, with Compact E8M0 scales of 1 x 32, 32 x 1 and 32 x 32
  // blocks. Each order of data is filled by one pass.
  PATH_TRANSPOSED = 1,
  // An update without an encode: runs of FLAT_TILE elements, whatever the shape.
  PATH_FLAT = 2,
  // Anything else: tiles of tile_rows x tile_cols, whole blocks.
  PATH_GENERIC = 3,
  // Tiles as TRANSPOSED, of any ingredients by orientation: scales of tensors and lines, E8M0 scales
  // of blocks of 32, two-level ones of blocks of 16, four over six, stochastic rounding and a Hadamard
  // transform of the last pass. One pass, or two of one order of data each.
  PATH_MIXED = 4,
  // FP8 with f32 scales of 1 x 128, 128 x 1 and 128 x 128 blocks, in either order. Tiles of
  // BLOCKS_SIDE.
  PATH_BLOCKS = 5,
  // Row-major FP8 of a tensor scale, or of E8M0 scales of 1 x 32 in rows of whole blocks. Tiles of
  // STREAM_RUN consecutive elements; not in launches with jobs of other paths.
  PATH_STREAM = 6,
  // Matrices of whole tiles of TRANSPOSED_ROWS x TRANSPOSED_COLS, RING_COLS at a time where there are many:
  // lowp_encode_ring_*; not in launches with jobs of other paths. MXFP8 has tiles of
  // WIDE_ROWS x WIDE_COLS, WIDE_RING_COLS at a time, f32 scales of blocks of 128 those of BLOCKS_SIDE,
  // RING_COLS at a time.
  PATH_RING = 7,
};

// Bits of Encode::vector: 16-byte accesses stay aligned in every row.
enum Vector : uint8_t {
  // The source, or all inputs and outputs of an update.
  VECTOR_SOURCE = 1,
  // Row-major data of pass 0.
  VECTOR_ROWS_0 = 2,
  // Row-major data of pass 1.
  VECTOR_ROWS_1 = 4,
  // Transposed data of pass 0.
  VECTOR_COLUMNS_0 = 8,
  // Transposed data of pass 1.
  VECTOR_COLUMNS_1 = 16,
};

// Scales in other forms than Compact among the outputs of an encode.
enum Forms : uint8_t {
  FORMS_NONE = 0,
  // Swizzled ones at multiples of 4, of blocks along the inner axis, for every outer index.
  FORMS_SWIZZLED = 1,
  FORMS_ANY = 2,
};

// How an amax walks its elements.
enum AmaxPath : uint8_t {
  // Tensor only: runs of AMAX_TILE elements.
  AMAX_FLAT = 0,
  // Blocks of sides 1, 16, 32 or 128, and lines: tiles from a multiple of AMAX_ROWS on.
  AMAX_TILES = 1,
  // Any blocks: runs of AMAX_RUN elements, one maximum per element.
  AMAX_GENERIC = 2,
  // The tensor after the Hadamard transform: the same tiles.
  AMAX_TRANSFORMED = 3,
  // The same of a matrix of bfloat16 of whole tiles of TRANSPOSED_ROWS x TRANSPOSED_COLS, RING_COLS at a time:
  // lowp_amax_ring; not in launches with jobs of other paths.
  AMAX_RING = 4,
};

// What the elements of a flat pass are multiplied by, among 16 rows of FLAT_WARP_COLS elements.
enum FlatWalk : uint8_t {
  // Anything: element by element.
  FLAT_ANY = 0,
  // One number for each row, or for 16 or 32 elements of it.
  FLAT_BY_ROW = 1,
  // One for each column.
  FLAT_BY_COLUMN = 2,
  // One for 16 or more columns of all rows.
  FLAT_ONE = 3,
  // Nothing: bf16 or f32 elements.
  FLAT_PLAIN = 4,
};

// How a decode walks its matrix.
enum DecodePath : uint8_t {
  DECODE_GENERIC = 0,
  // Row-major codes of 4 or 8 bits, scaled, blocks of powers of two, at least four columns or eight rows.
  DECODE_WIDE = 1,
  // The same of transposed codes, blocks of at least sixteen rows.
  DECODE_TRANSPOSED = 2,
  // As WIDE, of 4 bits with block scales of at least four columns, none of lines; whole words of eight codes.
  DECODE_NIBBLES = 3,
  // Row-major codes of 8 bits to bf16 under E8M0 scales of blocks of eight or more columns, or of one column and eight or more
  // rows.
  DECODE_EIGHT = 4,
};

// How a repack walks its result.
enum RepackPath : uint8_t {
  // Entry by entry.
  REPACK_GENERIC = 0,
  // 8-bit Compact or Padded of the same axes and tiles to Swizzled.
  REPACK_SWIZZLE = 1,
  // The same with the axes exchanged.
  REPACK_SWIZZLE_TRANSPOSED = 2,
  // Of any axes, where 16 or more outer entries of the result share one of the source.
  REPACK_SWIZZLE_SPREAD = 3,
};

// Bits of the kernel parameter `flags`.
enum Flags : uint32_t {
  // Do nothing at all if Step::skip is not 0. Every launch has it, as a run on the CPU does;
  // lowp_step_scalars, which makes a Step, does not look at it.
  FLAG_HONOR_SKIP = 1,
};

}  // namespace lowp
