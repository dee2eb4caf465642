// Written by `cargo xtask cuda` from src/cuda/table: change that.
//
// The table that a launch reads: what the host plans once and leaves on the device. One launch
// covers any number of tensors, recipes and dtypes.
//
// Every kernel has the same signature and one thread block per tile:
//
//   lowp_*<<<tile_count, threads>>>(const Tile* tiles, const Job* jobs, const Step* step, uint32_t flags)
//
// Block b does tile `tiles[b].index` of `jobs[tiles[b].job]`. `step` holds what changes from run to
// run; no pointer in a job ever does, so a launch can be captured in a graph and replayed.
//
// A pointer is 8 bytes; 0 says that the buffer is absent. Sizes and indices are 64-bit. Structs have
// no implicit padding.
#pragma once
#include <lowp/values.cuh>

namespace lowp {

// One thread block's work.
struct Tile {
  uint32_t job;
  // Tile within the job.
  uint32_t index;
};
static_assert(sizeof(Tile) == 8);

// The scalars of one parameter group (numerics 12).
struct GroupScalars {
  float lr, beta1, beta2, eps, weight_decay, correction1, correction2;
  // Not 0: lowp_step_scalars makes the corrections of the betas.
  uint32_t bias_correction;
};
static_assert(sizeof(GroupScalars) == 32);

// What changes from run to run. The `GroupScalars`s follow this header directly.
struct Step {
  // Separates the random numbers of this run from those of others.
  uint64_t random_step;
  // Gradients are multiplied by this before use.
  float grad_scale;
  // Not 0: launches with FLAG_HONOR_SKIP change nothing.
  uint32_t skip;
  // lowp_step_scalars scales gradients of a larger norm down to it.
  float max_norm;
  // Groups that follow.
  uint32_t groups;
  uint64_t reserved;
};
static_assert(sizeof(Step) == 32);

// One part of `AmaxJob::blocks`.
struct AmaxBlocks {
  // float*: entry 0 of the row-major array of this part; 0: no such part.
  uint64_t out;
  // Sides of a block.
  uint32_t rows;
  uint32_t cols;
};
static_assert(sizeof(AmaxBlocks) == 16);

// `AmaxJob`: out = max(out, amax) for a tensor and for blocks of up to two shapes, over the elements
// start .. start + len of a flattened matrix. More block shapes make more jobs.
struct Amax {
  // Element `start` of the matrix.
  uint64_t source;
  uint64_t rows, cols, start, len;
  // float* or 0.
  uint64_t tensor;
  // The same of values after the Hadamard transform of groups of 16 rows; with it there are no blocks.
  uint64_t transformed;
  AmaxBlocks blocks[2];
  // AMAX_TILES: the row that tile 0 begins at, a multiple of AMAX_ROWS.
  uint64_t first_row;
  // AMAX_TILES: tiles along the columns.
  uint64_t tiles_across;
  // F32 or BF16.
  uint8_t source_code;
  // Round the source to bf16 first.
  uint8_t via_bf16;
  // AmaxPath.
  uint8_t path;
  // 16-byte loads stay aligned.
  uint8_t vector;
  uint8_t reserved[4];
};
static_assert(sizeof(Amax) == 112);

// `HistoryJob`: one warp each.
struct History {
  // float*: this job's entry.
  uint64_t observed;
  // float*: this job's entry.
  uint64_t scale;
  // float*.
  uint64_t history;
  // Entries of the history.
  uint64_t window;
  // f32(max_finite * 2^-margin).
  float numerator;
  uint8_t most_recent, reserved[3];
};
static_assert(sizeof(History) == 40);

// A buffer of block scales in another form than Compact.
struct Scales {
  // 0: none.
  uint64_t to;
  // Entries along the matrix's rows, padding included.
  uint64_t rows;
  // The same along its columns.
  uint64_t cols;
  // Elements of an entry: a side of the block, or 1 where its scale is repeated.
  uint32_t tile_rows;
  uint32_t tile_cols;
  // Tiles of 128 x 4; else Padded.
  uint32_t swizzled;
  uint32_t reserved;
};
static_assert(sizeof(Scales) == 40);

// What one orientation is made of: `lowp_format::KernelKey`, and what is known of its tensor or lines.
struct Ingredients {
  // float*: encode scales or amaxes of the tensor or its lines; 0: none.
  uint64_t tensor;
  // Two-level rules: 6 times the largest block scale.
  float largest;
  // RULE_BLOCK_F32; RULE_TENSOR of observed amaxes.
  float epsilon;
  // The same.
  uint8_t pow2;
  // Code.
  uint8_t element;
  // Rule.
  uint8_t rule;
  // Extent of what `tensor` holds.
  uint8_t extent;
  // `tensor` holds observed amaxes: their magnitudes count, and the run consumes them.
  uint8_t observed;
  // RULE_FOUR_OVER_SIX: errors are squared.
  uint8_t squares;
  // Groups of 16 rows are transformed first.
  uint8_t hadamard;
  uint8_t reserved;
};
static_assert(sizeof(Ingredients) == 24);

// Scales or amaxes of a tensor or its lines, and where they are written to.
struct Outer {
  Ingredients ingredients;
  // float*, or 0.
  uint64_t to;
};
static_assert(sizeof(Outer) == 32);

// The outputs of one quantization. Index 0 is row-major, 1 transposed
// (physical rows follow the matrix's columns).
struct Pass {
  Ingredients ingredients;
  uint64_t data[2];
  // Compact.
  uint64_t scale[2];
  // Sides of a block; 0 where blocks have no scale.
  uint32_t block_rows;
  uint32_t block_cols;
  // PATH_GENERIC: what the threads of a block do at a time.
  uint32_t unit_rows;
  uint32_t unit_cols;
  Scales form[2];
};
static_assert(sizeof(Pass) == 152);

// `EncodeJob`; within `Update` the source is the master. A second target of the same part and order
// makes another job.
struct Encode {
  uint64_t source, rows, cols;
  // By orientation, rowwise first; one that is of no use has no rule.
  Outer outer[2];
  // Of stochastic rounding, as `stream` and `first`.
  uint64_t seed;
  uint64_t stream, first;
  Pass pass[2];
  uint64_t tiles_across;
  uint32_t tile_rows, tile_cols;
  // 0, 1 or 2.
  uint8_t passes;
  // F32 or BF16.
  uint8_t source_code;
  // Round the source to bf16 first.
  uint8_t via_bf16;
  uint8_t stochastic;
  // Path.
  uint8_t path;
  // Bits of Vector.
  uint8_t vector;
  // Forms.
  uint8_t forms;
  uint8_t reserved;
};
static_assert(sizeof(Encode) == 440);

// `UpdateJob`; without an encode `encode.passes` is 0, of its fields only `via_bf16` counts (the
// rounding of the amax), and its path is PATH_FLAT.
struct Update {
  uint64_t master;
  // Those of the rule; 0 where it has fewer.
  uint64_t states[2];
  uint64_t grad;
  // float* raised to the amax of the new master, or 0.
  uint64_t amax;
  // float*: entry 0 of the amaxes of its rows, and of its columns; or 0.
  uint64_t lines[2];
  uint64_t len;
  uint32_t group;
  // F32 or BF16, of each state.
  uint8_t state_codes[2];
  // F32 or BF16.
  uint8_t grad_code;
  // UpdateRule.
  uint8_t rule;
  Encode encode;
};
static_assert(sizeof(Update) == 512);

// `UpdateJob` with a state in fp8, or a master in bf16 or in two halves (numerics 23). The codes of a state in fp8 are followed by the
// scales of its blocks. `update` says nothing of how states are stored.
struct StoredUpdate {
  Update update;
  // Of the random bits, without the step.
  uint64_t seed;
  uint64_t stream;
  // The first element in the flattened tall matrix.
  uint64_t first;
  // Rows and columns of a shard tile; 0 where the tall matrix is the matrix.
  uint64_t tile_rows;
  uint64_t tile_cols;
  // Tiles side by side.
  uint64_t tiles_across;
  // Of masters in halves, whose parameters are `update.master`; or 0.
  uint64_t remainder;
  // Stored: of the master.
  uint8_t master;
  // Stored: of each state. The second is in UE4M4 where it is in fp8, the first in E4M3.
  uint8_t states[2];
  uint8_t reserved[5];
  // Whole lines of memory.
  uint64_t reserved_line[8];
};
static_assert(sizeof(StoredUpdate) == 640);

// The outputs of a flat encode of one orientation.
struct FlatPass {
  Ingredients ingredients;
  // float*: entry 0 of this part of the agreed vector, which the run consumes; 0: no blocks.
  uint64_t amaxes;
  // Row-major codes; byte 0 is the first that element `start` touches; or 0.
  uint64_t data;
  // Row-major, transposed.
  uint64_t scale[2];
  uint32_t block_rows, block_cols;
  // FlatWalk.
  uint8_t walk;
  // The codes of four elements of a row are stored at once.
  uint8_t aligned;
  uint8_t reserved[6];
};
static_assert(sizeof(FlatPass) == 72);

// `FlatEncodeJob`. Data are those of elements start .. start + len; scales are whole arrays.
struct FlatEncode {
  // Element `start`.
  uint64_t source;
  uint64_t rows, cols, start, len;
  Outer outer[2];
  FlatPass pass[2];
  // Tiles of codes: of as many warps as a thread block has, or runs of elements, cut at multiples of FLAT_ENCODE_RUN.
  uint64_t data_tiles;
  // Those of the scales of each pass: runs of blocks, or tiles where they are stored transposed. They are spread
  // among the others.
  uint64_t scale_tiles[2];
  // Where the first warp begins, a multiple of FLAT_WARP_ROWS.
  uint64_t first_row;
  // Warps along the columns.
  uint64_t tiles_across;
  uint8_t passes, source_code, via_bf16;
  // No pass walks FLAT_ANY.
  uint8_t tiled;
  // Loads of four elements stay aligned in every row.
  uint8_t vector;
  uint8_t reserved[3];
};
static_assert(sizeof(FlatEncode) == 296);

// `DecodeJob`.
struct Decode {
  // Codes.
  uint64_t data;
  // Block scales, or 0.
  uint64_t scale;
  // `tensor` holds the bytes of decode scales, or of amaxes.
  Ingredients ingredients;
  // Values of `out_code`.
  uint64_t out;
  uint64_t rows, cols;
  // Bytes of a physical row.
  uint64_t data_pitch;
  uint64_t scale_pitch, tiles_across;
  uint32_t block_rows, block_cols;
  uint8_t data_transposed, scale_transposed;
  // Stores of four values to `out` stay aligned in every row.
  uint8_t vector;
  // DecodePath.
  uint8_t path;
  // Code of what is written: F32 or BF16.
  uint8_t out_code;
  uint8_t reserved[3];
};
static_assert(sizeof(Decode) == 104);

// `RoundJob`: a pass of `encode` for each orientation, which has codes or values or neither.
struct Round {
  Encode encode;
  // bf16, row-major: of rows, of columns; 0: none.
  uint64_t values[2];
};
static_assert(sizeof(Round) == 456);

// `TransposeJob`.
struct Transpose {
  uint64_t from, to;
  // Entries of `from`.
  uint64_t outer;
  uint64_t inner;
  // Bytes of a physical row.
  uint64_t from_pitch;
  uint64_t to_pitch;
  // Tiles along `inner`.
  uint64_t tiles_across;
  // 4, 8, 16 or 32.
  uint8_t bits;
  // 4 or 8 bits, both pitches and addresses multiples of 16.
  uint8_t vector;
  uint8_t reserved[6];
};
static_assert(sizeof(Transpose) == 64);

// `lowp_format::ScaleLayout`.
struct Layout {
  // Logical elements per entry along each physical axis.
  uint64_t tile[2];
  uint64_t entries[2], padded[2];
  // Tiles of 128 x 4.
  uint32_t swizzled;
  // Physical axis 0 follows the columns.
  uint32_t cols_first;
};
static_assert(sizeof(Layout) == 56);

// `RepackJob`.
struct Repack {
  uint64_t from, to;
  Layout from_layout, to_layout;
  uint64_t tiles_across;
  // Bytes of `to`.
  uint64_t bytes;
  // Of an entry.
  uint8_t bits;
  // RepackPath.
  uint8_t path;
  // REPACK_SWIZZLE: 16-byte loads of `from` stay aligned in every row.
  uint8_t vector;
  // REPACK_SWIZZLE_SPREAD: outer entries of `to` that share an entry of `from`, as a power of two.
  uint8_t spread;
  uint8_t reserved[4];
};
static_assert(sizeof(Repack) == 152);

// One piece of an `InterleaveJob`: `outer` rows of `width` bytes, from rows of `from_pitch` bytes to rows of
// `pitch` bytes. Pieces of width 0 make no job.
struct Interleave {
  // The first byte of the piece.
  uint64_t from;
  // Bytes from one of its rows to the next.
  uint64_t from_pitch;
  // Its first byte in the result.
  uint64_t to;
  uint64_t outer, width;
  // Bytes of a row of the result.
  uint64_t pitch;
  // 16-byte accesses stay aligned in every row.
  uint64_t vector;
};
static_assert(sizeof(Interleave) == 56);

// One copy of a `RearrangeJob`, in bytes: runs in three nested orders, outermost first.
struct Rearrange {
  // The first byte of the source.
  uint64_t from;
  // The first byte of the destination.
  uint64_t to;
  // Bytes of a run.
  uint64_t bytes;
  uint64_t counts[3];
  // Bytes from one to the next in the source.
  uint64_t from_pitch[3];
  // Bytes from one to the next in the destination.
  uint64_t to_pitch[3];
  // Bytes that are copied at once, which stay aligned in every run.
  uint64_t vector;
};
static_assert(sizeof(Rearrange) == 104);

// Scratch: the sum of a run of SUM_RUN elements, or of as many such sums.
struct RunSum {
  double sum;
  // Values that are not finite.
  uint64_t non_finite;
};
static_assert(sizeof(RunSum) == 16);

// Scratch: the sum of one job.
struct SumTotal {
  double sum;
  uint64_t non_finite;
  // Blocks that have finished.
  uint64_t done;
};
static_assert(sizeof(SumTotal) == 24);

// `SumSquaresJob`. The last block of a job adds up its runs; the last job of the launch adds the
// totals to the outputs in order. Scratch of a plan: per job `RunSum`s (of its runs, then of runs of
// them), one `SumTotal` per job, one `u64`. It is zeroed once, when it is allocated; a run leaves it so.
struct SumSquares {
  uint64_t source, len;
  // 8 bytes of binary64, 8 bytes of count.
  uint64_t out;
  // RunSum* of this job: cdiv(len, SUM_RUN), then of runs of them, until one is left.
  uint64_t runs;
  // SumTotal* of the plan, the same in every job: one entry per job.
  uint64_t totals;
  // uint64_t* of the plan, the same in every job: jobs that have finished.
  uint64_t state;
  // Jobs of the plan.
  uint64_t jobs;
  // Blocks of this job: at least one, SUM_RUNS runs each.
  uint32_t tiles;
  uint8_t source_code;
  // 16-byte loads stay aligned.
  uint8_t vector;
  uint8_t reserved[2];
};
static_assert(sizeof(SumSquares) == 64);

// `SumJob` or `ConvertJob`: `into[i] = into[i] + from[i]`, or `into[i] = from[i]`, in tiles of SUM_TILE elements.
struct Sum {
  uint64_t from, into, len;
  // F32 or BF16.
  uint8_t from_code;
  uint8_t into_code;
  // Without the sum.
  uint8_t convert;
  // 16-byte accesses stay aligned.
  uint8_t vector;
  uint32_t reserved;
};
static_assert(sizeof(Sum) == 32);

// `SumPartsJob`: `into[i] = parts[0][i] + parts[1][i] + ..`, in tiles of SUM_PARTS_TILE elements.
struct SumParts {
  // The parts, `len` values each.
  uint64_t parts;
  // The part of this number, in place of what `parts` has of it.
  uint64_t own;
  uint64_t into, len, count;
  // Of `own`; of no part where there is none.
  uint64_t number;
  // F32 or BF16.
  uint8_t code;
  // Adds to what `into` holds.
  uint8_t accumulate;
  // 16-byte accesses stay aligned.
  uint8_t vector;
  uint8_t reserved[5];
};
static_assert(sizeof(SumParts) == 56);

// `MomentumJob`, in tiles of MOMENTUM_TILE elements.
struct Momentum {
  uint64_t grad;
  // float*.
  uint64_t momentum;
  // bf16*.
  uint64_t out;
  uint64_t len;
  uint32_t group;
  // F32 or BF16.
  uint8_t grad_code;
  // 16-byte accesses stay aligned.
  uint8_t vector;
  uint8_t reserved[2];
};
static_assert(sizeof(Momentum) == 40);

// `NormalizeJob`, in tiles of MOMENTUM_TILE elements.
struct Normalize {
  // bf16*.
  uint64_t from;
  // 8 bytes of binary64.
  uint64_t sum;
  // bf16*.
  uint64_t out;
  uint64_t len;
  // 16-byte accesses stay aligned.
  uint8_t vector;
  uint8_t reserved[7];
};
static_assert(sizeof(Normalize) == 40);

// `StepScalarsJob`: one block each. Records lie at any address, as docs/numerics.md 12.8 has them.
struct StepScalars {
  // The part of every rank.
  uint64_t parts;
  uint64_t options, counts, out, report, ranks;
  // Ranks of a replica.
  uint64_t shards;
  // The replica whose norm counts.
  uint64_t replica;
  // Groups of the options.
  uint64_t groups;
};
static_assert(sizeof(StepScalars) == 72);

}  // namespace lowp
