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
// The Rust mirror of this file is src/cuda/table.rs; sizes and offsets are checked on both sides.
// A pointer is 8 bytes; 0 says that the buffer is absent. Sizes and indices are 64-bit. Structs have
// no implicit padding.
#pragma once
#include <cstddef>
#include <cstdint>

namespace lowp {

// Codes of entries, in the order of lowp_format::Code.
enum Code : uint8_t { E4M3 = 0, E5M2 = 1, E2M1 = 2, E8M0 = 3, BF16 = 4, F32 = 5 };

// Scale rules: lowp_format::ScaleRule with the rounding of E8M0 scales folded in.
enum Rule : uint8_t {
  RULE_NONE = 0,        // the code holds the value itself
  RULE_TENSOR = 1,      // one f32 encode scale for the tensor
  RULE_E8M0_TE = 2,     // a power of two per block, rounded up
  RULE_E8M0_FLOOR = 3,  // a power of two per block, the exponent of the amax
  RULE_TWO_LEVEL = 4,   // an E4M3 scale per block under the f32 tensor amax
  RULE_BLOCK_F32 = 5,   // an f32 scale per block; `pow2` and `epsilon` apply
};

// How an encode walks its matrix.
enum Path : uint8_t {
  PATH_WIDE = 0,     // tiles of 32 x 256, row-major outputs: FP8 with a tensor scale or with E8M0 scales of
                     // 1 x 32, 32 x 1 and 32 x 32 blocks; values as they are. lowp_encode_wide_bf16: of tile_cols
                     // columns
  PATH_TURNED = 1,   // tiles of 128 x 64: FP8 with a tensor scale; E2M1 with two-level scales of 1 x 16,
                     // 16 x 1 and 16 x 16 blocks, each order of data filled by one pass
  PATH_FLAT = 2,     // AdamW without an encode: runs of 8192 elements, whatever the shape
  PATH_GENERIC = 3,  // anything else: tiles of tile_rows x tile_cols, whole blocks
};

// Bits of Encode::vector: 16-byte accesses stay aligned in every row.
enum Vector : uint8_t {
  VECTOR_SOURCE = 1,      // source, or all inputs and outputs of an AdamW update
  VECTOR_ROWS_0 = 2,      // row-major data of pass 0
  VECTOR_ROWS_1 = 4,      // row-major data of pass 1
  VECTOR_COLUMNS_0 = 8,   // transposed data of pass 0
  VECTOR_COLUMNS_1 = 16,  // transposed data of pass 1
};

// Bits of the kernel parameter `flags`.
enum Flags : uint32_t {
  FLAG_HONOR_SKIP = 1,  // do nothing at all if step->skip is not 0 (set in every launch)
};

// One thread block's work.
struct Tile {
  uint32_t job;
  uint32_t index;  // tile within the job
};

// The scalars of AdamW for one parameter group (numerics 12).
struct AdamGroup {
  float lr, beta1, beta2, eps, weight_decay, correction1, correction2;
  uint32_t reserved;
};

// What changes from run to run, in device memory. Groups follow the header directly.
struct Step {
  uint64_t random_step;  // separates the random numbers of this run from those of others
  float grad_scale;      // gradients are multiplied by this before use
  uint32_t skip;         // not 0: launches with FLAG_HONOR_SKIP change nothing
  uint64_t reserved[2];
  // AdamGroup groups[];
};

// out = max(out, amax) for a tensor and for blocks of up to two shapes, over the elements
// start .. start + len of a flattened matrix.
struct AmaxBlocks {
  uint64_t out;          // float*: entry 0 of the row-major array of this part; 0: no such part
  uint32_t rows, cols;   // block sides
};

enum AmaxPath : uint8_t {
  AMAX_FLAT = 0,     // tensor only: runs of 16384 elements
  AMAX_TILES = 1,    // blocks of sides 1, 16 or 32: tiles of 32 x 256 from the block row of `start` on
  AMAX_GENERIC = 2,  // any blocks: runs of 2048 elements, one maximum per element
};

struct Amax {
  uint64_t source;  // element `start` of the matrix
  uint64_t rows, cols;
  uint64_t start, len;
  uint64_t tensor;  // float* or 0
  AmaxBlocks blocks[2];
  uint64_t first_row;     // AMAX_TILES: the row that tile 0 begins at, a multiple of 32
  uint64_t tiles_across;  // AMAX_TILES
  uint8_t source_code;    // F32 or BF16
  uint8_t via_bf16;       // round the source to bf16 first
  uint8_t path;           // AmaxPath
  uint8_t vector;         // AMAX_FLAT, AMAX_TILES: 16-byte loads stay aligned
  uint32_t reserved;
};

// HistoryJob: one warp each.
struct History {
  uint64_t observed;   // float*: this job's entry
  uint64_t scale;      // float*: this job's entry
  uint64_t history;    // float*
  uint64_t window;     // entries of the history
  float numerator;     // f32(max_finite * 2^-margin)
  uint8_t most_recent;
  uint8_t reserved[3];
};

// A buffer of block scales in another form than Compact.
struct Scales {
  uint64_t to;                    // 0: none
  uint64_t rows, cols;            // entries along the matrix's rows and columns, padding included
  uint32_t tile_rows, tile_cols;  // elements of an entry: the sides of a block, or 1 where its scale is repeated
  uint32_t swizzled;              // tiles of 128 x 4; else Padded
  uint32_t reserved;
};

// The outputs of one quantization: what shares a block shape. Index 0 is row-major, 1 transposed.
struct Pass {
  uint64_t data[2];
  uint64_t scale[2];                // Compact
  uint32_t block_rows, block_cols;  // 0 where blocks have no scale
  uint32_t unit_rows, unit_cols;    // PATH_GENERIC: what the threads of a block do at a time
  Scales form[2];
};

// Scales in other forms than Compact among the outputs.
enum Forms : uint8_t {
  FORMS_NONE = 0,
  FORMS_SWIZZLED = 1,  // swizzled ones at multiples of 4, of blocks along the inner axis, for every outer index
  FORMS_ANY = 2,
};

// EncodeJob; within AdamW `source` is the master.
struct Encode {
  uint64_t source;
  uint64_t rows, cols;
  uint64_t tensor;        // float*: encode scale or tensor amax; 0: none
  uint64_t tensor_scale;  // float*: tensor-scale target or 0
  uint64_t seed, stream, first;  // stochastic rounding
  Pass pass[2];
  uint64_t tiles_across;
  uint32_t tile_rows, tile_cols;
  float epsilon;        // RULE_BLOCK_F32; RULE_TENSOR of an observed amax
  uint8_t pow2;         // the same
  uint8_t passes;       // 0, 1 or 2
  uint8_t element;      // Code
  uint8_t rule;         // Rule
  uint8_t source_code;  // F32 or BF16
  uint8_t via_bf16;
  uint8_t stochastic;
  uint8_t path;    // Path
  uint8_t vector;  // Vector bits
  uint8_t observed;  // `tensor` holds an observed amax: its magnitude counts, and it is spent
  uint8_t forms;     // Forms
  uint8_t reserved;
};

// AdamwJob. Without an encode `encode.passes` is 0, of its fields only via_bf16 counts (the rounding of
// the amax), and its
// path is PATH_FLAT.
struct Adamw {
  uint64_t master, exp_avg, exp_avg_sq, grad;
  uint64_t amax;  // float* raised to the amax of the new master, or 0
  uint64_t len;
  uint32_t group;
  uint8_t moments_code;  // F32 or BF16
  uint8_t grad_code;     // F32 or BF16
  uint8_t l2;            // AdamMode::L2
  uint8_t reserved;
  Encode encode;
};

// FlatEncodeJob. Data are those of elements start .. start + len; scales are whole arrays.
struct FlatPass {
  uint64_t amaxes;    // float*: entry 0 of this part of the agreed vector, which is spent; 0: no blocks
  uint64_t data;      // row-major; byte 0 is the first byte that element `start` touches; or 0
  uint64_t scale[2];  // row-major, transposed
  uint32_t block_rows, block_cols;
};

struct FlatEncode {
  uint64_t source;  // element `start`
  uint64_t rows, cols;
  uint64_t start, len;
  uint64_t tensor;
  uint64_t tensor_scale;
  FlatPass pass[2];
  uint64_t data_tiles;      // tiles 0 .. data_tiles: runs of 2048 elements, cut at multiples of 2048
  uint64_t scale_tiles[2];  // then those of the scales of each pass: runs of 2048 blocks
  float epsilon;
  uint8_t pow2;
  uint8_t passes;
  uint8_t element;
  uint8_t rule;
  uint8_t source_code;
  uint8_t via_bf16;
  uint8_t observed;  // as Encode::observed
  uint8_t reserved[5];
};

enum DecodePath : uint8_t {
  DECODE_GENERIC = 0,  // tiles of 64 x 64
  DECODE_WIDE = 1,     // row-major codes of 4 or 8 bits, scaled, blocks of powers of two, four codes at a time: 64 x 128
};

// DecodeJob.
struct Decode {
  uint64_t data;    // codes
  uint64_t scale;   // block scales or 0
  uint64_t tensor;  // const float*: tensor-scale buffer or 0
  uint64_t out;     // float*
  uint64_t rows, cols;
  uint64_t data_pitch, scale_pitch;  // bytes of a physical row
  uint64_t tiles_across;
  uint32_t block_rows, block_cols;
  uint8_t element;
  uint8_t rule;
  uint8_t data_transposed;
  uint8_t scale_transposed;
  uint8_t vector;  // 16-byte stores to `out` stay aligned in every row
  uint8_t path;    // DecodePath
  uint8_t reserved[2];
};

// TransposeJob. Where `vector`, tiles of 128 x 128 bytes or 256 x 256 nibbles, else of 64 x 64 entries.
struct Transpose {
  uint64_t from, to;
  uint64_t outer, inner;          // entries of `from`
  uint64_t from_pitch, to_pitch;  // bytes of a physical row
  uint64_t tiles_across;          // tiles along `inner`
  uint8_t bits;                   // 4, 8, 16 or 32
  uint8_t vector;                 // 4 or 8 bits, both pitches and addresses multiples of 16
  uint8_t reserved[6];
};

// RepackJob. A layout is lowp_format::ScaleLayout.
struct Layout {
  uint64_t tile[2];     // logical elements per entry along each physical axis
  uint64_t entries[2];
  uint64_t padded[2];
  uint32_t swizzled;    // 128 x 4 tiles
  uint32_t cols_first;  // physical axis 0 follows the columns
};

enum RepackPath : uint8_t {
  REPACK_GENERIC = 0,    // entry by entry: tiles of 4096 bytes of `to`
  REPACK_SWIZZLE = 1,    // 8-bit Compact or Padded of the same axes and tiles to Swizzled: tiles of 128 x 128 entries
  REPACK_SWIZZLE_TURNED = 2,  // the same with the axes exchanged
  REPACK_SWIZZLE_SPREAD = 3,  // of any axes, where 16 or more outer entries of the result share one of the source
};

struct Repack {
  uint64_t from, to;
  Layout from_layout, to_layout;
  uint64_t tiles_across;
  uint64_t bytes;  // of `to`
  uint8_t bits;    // of an entry
  uint8_t path;    // RepackPath
  uint8_t vector;  // REPACK_SWIZZLE: 16-byte loads of `from` stay aligned in every row
  uint8_t spread;  // REPACK_SWIZZLE_SPREAD: how many do, as a power of two
  uint8_t reserved[4];
};

// One piece of an InterleaveJob: `outer` rows of `width` bytes, densely from `from`, to rows of
// `pitch` bytes from `to` on. Tiles are runs of 16384 bytes of the piece.
struct Interleave {
  uint64_t from, to;
  uint64_t outer, width, pitch;
  uint64_t vector;  // 16-byte accesses stay aligned in every row
};

// SumSquaresJob. The last block of a job adds up its runs; the last job of the launch adds
// the totals to the outputs in order and leaves the scratch as it found it. Scratch is zeroed once,
// when it is allocated.
struct RunSum {
  double sum;
  uint64_t odd;  // values that are not finite
};

struct SumTotal {
  double sum;
  uint64_t odd;
  uint64_t done;  // blocks that have finished
};

struct SumSquares {
  uint64_t source;
  uint64_t len;
  uint64_t out;      // 8 bytes of binary64, 8 bytes of count
  uint64_t runs;     // RunSum*: of this job's cdiv(len, 4096) runs, then of runs of them, until one is left
  uint64_t totals;   // SumTotal*: one entry per job of the plan, the same address in every job
  uint64_t state;    // uint64_t*: jobs that have finished, the same address in every job
  uint64_t jobs;     // jobs of the plan
  uint32_t tiles;    // blocks of this job: at least one, 8 runs each
  uint8_t source_code;
  uint8_t vector;    // 16-byte loads stay aligned
  uint8_t reserved[2];
};

static_assert(sizeof(Tile) == 8 && sizeof(AdamGroup) == 32 && sizeof(Step) == 32, "table.rs");
static_assert(sizeof(Amax) == 104 && offsetof(Amax, blocks) == 48 && offsetof(Amax, source_code) == 96, "table.rs");
static_assert(sizeof(History) == 40 && offsetof(History, most_recent) == 36 && sizeof(Scales) == 40, "table.rs");
static_assert(sizeof(Pass) == 128 && sizeof(Encode) == 352 && offsetof(Encode, pass) == 64, "table.rs");
static_assert(offsetof(Encode, tiles_across) == 320 && offsetof(Encode, observed) == 349, "table.rs");
static_assert(sizeof(Adamw) == 408 && offsetof(Adamw, encode) == 56, "table.rs");
static_assert(sizeof(FlatPass) == 40 && sizeof(FlatEncode) == 176 && offsetof(FlatEncode, epsilon) == 160, "table.rs");
static_assert(sizeof(Decode) == 88 && offsetof(Decode, element) == 80, "table.rs");
static_assert(sizeof(Transpose) == 64 && sizeof(Layout) == 56 && sizeof(Repack) == 152, "table.rs");
static_assert(sizeof(Interleave) == 48 && sizeof(RunSum) == 16 && sizeof(SumTotal) == 24, "table.rs");
static_assert(sizeof(SumSquares) == 64 && offsetof(SumSquares, tiles) == 56, "table.rs");

}  // namespace lowp
