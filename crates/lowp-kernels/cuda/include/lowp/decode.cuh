// Decode to f32 or bf16 (numerics 5.3, 6.4 and 7.4). Row-major codes go through registers, transposed ones through shared
// memory; values leave row by row, 128 of them at a time.
#pragma once
#include <lowp/decoded.cuh>
#include <lowp/fetch.cuh>
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>
#include <type_traits>

namespace lowp {

// Where values go, four neighbouring ones at a time; those of bf16 are rounded to nearest even.
struct ToF32 {
  using Value = float;
  static __device__ __forceinline__ void four(float* to, float4 y) { store16(to, as_bits(y)); }
};
struct ToBf16 {
  using Value = uint16_t;
  static __device__ __forceinline__ void four(uint16_t* to, float4 y) {
    store8(to, make_uint2(narrow_pair(y.x, y.y), narrow_pair(y.z, y.w)));
  }
};

constexpr uint32_t SIDE = DECODE_SIDE;
constexpr uint32_t PITCH = SIDE + 1;

__device__ __forceinline__ float decode_element(uint8_t element, uint32_t code) {
  switch (element) {
    case E4M3: return E4m3::decode(code);
    case E5M2: return E5m2::decode(code);
    case E2M1: return E2m1::decode(code);
    case E8M0: return E8m0::decode(code);
    case BF16: return widen(uint16_t(code));
    default: return __uint_as_float(code);
  }
}

// The decode scale or the amax of the tensor, or of the line of element (row, col).
__device__ __forceinline__ float outer(const Decode& job, uint64_t row, uint64_t col) {
  const Ingredients& made = job.ingredients;
  return made.tensor ? __uint_as_float(load_f32(made.tensor + 4 * outer_entry(made, row, col))) : 1.0f;
}

// What the code of element (row, col) is multiplied by.
__device__ __forceinline__ float factor(const Decode& job, uint64_t row, uint64_t col) {
  const Ingredients& made = job.ingredients;
  float tensor = outer(job, row, col);
  if (made.rule == RULE_TENSOR) return tensor;
  uint64_t r = row / job.block_rows, c = col / job.block_cols;
  uint64_t line = job.scale_transposed ? c : r, at = job.scale_transposed ? r : c;
  uint64_t base = job.scale + line * job.scale_pitch;
  if (made.rule == RULE_BLOCK_F32) return __uint_as_float(load_f32(base + 4 * at));
  uint32_t entry = pointer<const uint8_t>(base)[at];
  return two_level(made.rule) ? two_level_decode_factor(entry, tensor, largest_reciprocal(made.largest)) : E8m0::decode(entry);
}

// How the factors of four neighbouring columns and of a lane's rows are laid out.
enum class Factors { TENSOR, ROWS, BLOCK, COLUMNS };

// The stored entry of the block at (r, c).
template <uint8_t RULE>
__device__ __forceinline__ uint32_t entry_at(uint64_t at) {
  return RULE == RULE_BLOCK_F32 ? *pointer<const uint32_t>(at) : *pointer<const uint8_t>(at);
}
// Its factor under `tensor`; `reciprocal` is that of the largest product of two-level scales.
template <uint8_t RULE>
__device__ __forceinline__ float entry_factor(uint32_t entry, float tensor, float reciprocal) {
  if (RULE == RULE_TENSOR) return tensor;
  if (RULE == RULE_BLOCK_F32) return __uint_as_float(entry);
  return RULE == RULE_TWO_LEVEL ? two_level_decode_factor(entry, tensor, reciprocal) : E8m0::decode(entry);
}

// Where the scales of blocks lie: bytes from one to the next along rows and columns, and the sides as powers of two.
struct Blocks {
  uint64_t base, down, across;
  uint32_t height, width;
  static __device__ __forceinline__ Blocks of(const Decode& job) {
    uint64_t size = job.ingredients.rule == RULE_BLOCK_F32 ? 4 : 1;
    return {job.scale, job.scale_transposed ? size : job.scale_pitch, job.scale_transposed ? job.scale_pitch : size,
            31u - __clz(job.block_rows), 31u - __clz(job.block_cols)};
  }
  __device__ __forceinline__ uint64_t at(uint64_t row, uint64_t col) const {
    return base + (row >> height) * down + (col >> width) * across;
  }
};

// Four neighbouring codes of a row: as many bits as they take.
template <typename E>
struct Four {
  static constexpr uint32_t BITS = 8;
  static __device__ __forceinline__ uint32_t load(const uint8_t* at) { return __ldcs(reinterpret_cast<const uint32_t*>(at)); }
  static __device__ __forceinline__ uint32_t one(uint32_t codes, int k) { return codes >> (8 * k) & 0xFF; }
};
template <>
struct Four<E2m1> {
  static constexpr uint32_t BITS = 4;
  static __device__ __forceinline__ uint32_t load(const uint8_t* at) { return __ldcs(reinterpret_cast<const uint16_t*>(at)); }
  static __device__ __forceinline__ uint32_t one(uint32_t codes, int k) { return codes >> (4 * k) & 15; }
};

// The codes of four columns, four or eight rows a word, as rows of four codes.
__device__ __forceinline__ void rows_of_columns(const uint32_t (&in)[4], uint32_t (&rows)[4]) { transpose_bytes4(in, rows); }
__device__ __forceinline__ void rows_of_columns(const uint32_t (&in)[4], uint32_t (&rows)[8]) {
  uint32_t even[2], odd[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    uint32_t a = in[2 * k], b = in[2 * k + 1];
    even[k] = (a & 0x0F0F0F0Fu) | ((b & 0x0F0F0F0Fu) << 4);
    odd[k] = ((a >> 4) & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    rows[2 * m] = __byte_perm(even[0], even[1], m | (4 + m) << 4);
    rows[2 * m + 1] = __byte_perm(odd[0], odd[1], m | (4 + m) << 4);
  }
}

// Four values of a row, stored.
template <typename E, typename To>
__device__ __forceinline__ void store_four(typename To::Value* to, uint32_t codes, float f0, float f1, float f2, float f3) {
  float4 x = E::decode_four(codes);
  float4 y = make_float4(__fmul_rn(x.x, f0), __fmul_rn(x.y, f1), __fmul_rn(x.z, f2), __fmul_rn(x.w, f3));
  float any = y.x + y.y + (y.z + y.w);
  if (any != any) {
    y.x = scaled(E::decode(Four<E>::one(codes, 0)), f0);
    y.y = scaled(E::decode(Four<E>::one(codes, 1)), f1);
    y.z = scaled(E::decode(Four<E>::one(codes, 2)), f2);
    y.w = scaled(E::decode(Four<E>::one(codes, 3)), f3);
  }
  To::four(to, y);
}

// Row-major codes: a warp does eight rows of 128 columns, a lane four columns of them.
constexpr uint32_t WARPS = THREADS / 32, ROWS = DECODE_SIDE / WARPS;
static_assert(DECODE_WIDE_COLS == 128 && DECODE_LINES == 128, "four columns per lane");

// LINED says that rows or columns have scales or amaxes of their own.
template <typename E, typename To, uint8_t RULE, Factors F, bool LINED>
__device__ __forceinline__ void decode_rows(const Decode& job, uint32_t index) {
  constexpr int ENTRIES = F == Factors::ROWS ? ROWS : F == Factors::COLUMNS ? 4 : 1;
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * DECODE_SIDE + threadIdx.x / 32 * ROWS;
  uint64_t col = uint64_t(index % across) * DECODE_WIDE_COLS + threadIdx.x % 32 * 4;
  uint64_t cols = job.cols, pitch = job.data_pitch;
  if (row >= job.rows || col >= cols) return;
  uint32_t rows = uint32_t(min(uint64_t(ROWS), job.rows - row));
  const uint8_t* data = pointer<const uint8_t>(job.data) + row * pitch + col * Four<E>::BITS / 8;
  uint32_t codes[ROWS], entries[ENTRIES];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) codes[i] = i < rows ? Four<E>::load(data + i * pitch) : 0;
  float tensor = outer(job, row, col), reciprocal = largest_reciprocal(job.ingredients.largest);
  if (F != Factors::TENSOR) {
    const Blocks blocks = Blocks::of(job);
    uint64_t at = blocks.at(row, col);
#pragma unroll
    for (int k = 0; k < ENTRIES; ++k) {
      uint64_t more = F == Factors::ROWS ? (k >> blocks.height) * blocks.down : (k >> blocks.width) * blocks.across;
      entries[k] = F != Factors::ROWS || k < rows ? entry_at<RULE>(at + more) : 0;
    }
  }
  auto* out = pointer<typename To::Value>(job.out) + row * cols + col;
  bool of_columns = LINED && job.ingredients.extent == EXTENT_COLUMNS;
  float f[4];
  auto factors = [&](int i) {
    if (LINED && !of_columns) tensor = outer(job, row + min(uint32_t(i), rows - 1), col);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (of_columns) tensor = outer(job, row, col + k);
      f[k] = entry_factor<RULE>(entries[F == Factors::ROWS ? i : F == Factors::COLUMNS ? k : 0], tensor, reciprocal);
    }
  };
  constexpr bool EACH = F == Factors::ROWS || LINED;
  if (!EACH) factors(0);
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (EACH) factors(i);
    if (i < rows) store_four<E, To>(out + i * cols, codes[i], f[0], f[1], f[2], f[3]);
  }
}

// FP8 in rows to bfloat16 under E8M0 scales of blocks of eight or more columns, or of one column and eight or more rows: a warp does
// eight rows of 256 columns, a lane eight columns of them.
static_assert(DECODE_EIGHT_COLS == 256, "eight columns per lane");
template <typename E>
__device__ __forceinline__ void decode_eight(const Decode& job, uint32_t index) {
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * DECODE_SIDE + threadIdx.x / 32 * ROWS;
  uint64_t col = uint64_t(index % across) * DECODE_EIGHT_COLS + threadIdx.x % 32 * 8;
  uint64_t cols = job.cols, pitch = job.data_pitch;
  if (row >= job.rows || col >= cols) return;
  uint32_t rows = uint32_t(min(uint64_t(ROWS), job.rows - row));
  const uint8_t* data = pointer<const uint8_t>(job.data) + row * pitch + col;
  uint2 codes[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) codes[i] = i < rows ? load8(data + i * pitch) : make_uint2(0, 0);
  auto* out = pointer<uint16_t>(job.out) + row * cols + col;
  const Blocks blocks = Blocks::of(job);
  const uint64_t at = blocks.at(row, col);
  auto power = [](uint32_t entry) { return __float_as_uint(E8m0::decode(entry)) >> 16; };
  if (job.block_cols == 1) {
    const uint2 entries = *pointer<const uint2>(at);
    uint32_t f[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t two = (k < 2 ? entries.x : entries.y) >> (k % 2 * 16);
      f[k] = power(two & 0xFF) | power(two >> 8 & 0xFF) << 16;
    }
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
      if (i < rows) store16_part(out + i * cols, decoded_fp8<E>(codes[i], make_uint4(f[0], f[1], f[2], f[3])));
    }
    return;
  }
  uint32_t entries[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) entries[i] = i < rows ? *pointer<const uint8_t>(at + (i >> blocks.height) * blocks.down) : 0;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    const uint32_t f = power(entries[i]) * 0x10001u;
    if (i < rows) store16_part(out + i * cols, decoded_fp8<E>(codes[i], make_uint4(f, f, f, f)));
  }
}

// Row-major codes of four bits, blocks of at least four columns: a warp does four rows of 256 columns, 128 bytes of codes and
// 1024 of values each. A lane reads eight codes, and stores four of those of two other lanes.
constexpr uint32_t NIBBLE_ROWS = DECODE_NIBBLES_ROWS / WARPS;
static_assert(DECODE_NIBBLES_COLS == 256, "eight columns per lane");

// The eight codes of a lane in each row, at (row, col), to bfloat16.
template <uint8_t RULE, bool TALL>
__device__ __forceinline__ void nibbles_to_bf16(const Decode& job, uint64_t row, uint64_t col, uint32_t rows,
                                                const uint32_t (&codes)[NIBBLE_ROWS]) {
  if (col >= job.cols) return;
  const Blocks blocks = Blocks::of(job);
  uint32_t entries[TALL ? 1 : NIBBLE_ROWS];
#pragma unroll
  for (uint32_t i = 0; i < (TALL ? 1 : NIBBLE_ROWS); ++i) entries[i] = i < rows ? entry_at<RULE>(blocks.at(row + i, col)) : 0;
  const float tensor = outer(job, row, col), reciprocal = largest_reciprocal(job.ingredients.largest);
  auto* out = pointer<uint16_t>(job.out) + row * job.cols + col;
  DecodedFp4 decoded;
#pragma unroll
  for (uint32_t i = 0; i < NIBBLE_ROWS; ++i) {
    if (!TALL || i == 0) decoded = DecodedFp4::of(entry_factor<RULE>(entries[TALL ? 0 : i], tensor, reciprocal));
    if (i < rows) store16_part(out + i * job.cols, decoded.any_values(codes[i]));
  }
}

// TALL says that the rows of a warp lie in one block.
template <typename To, uint8_t RULE, bool TALL>
__device__ __forceinline__ void decode_nibbles(const Decode& job, uint32_t index) {
  constexpr uint32_t ENTRIES = TALL ? 1 : NIBBLE_ROWS;
  uint32_t across = uint32_t(job.tiles_across), lane = threadIdx.x % 32;
  uint64_t row = uint64_t(index / across) * DECODE_NIBBLES_ROWS + threadIdx.x / 32 * NIBBLE_ROWS;
  uint64_t first = uint64_t(index % across) * DECODE_NIBBLES_COLS, cols = job.cols, pitch = job.data_pitch;
  if (row >= job.rows) return;
  uint32_t rows = uint32_t(min(uint64_t(NIBBLE_ROWS), job.rows - row));
  const uint8_t* data = pointer<const uint8_t>(job.data) + row * pitch + (first + lane * 8) / 2;
  bool inside = first + lane * 8 < cols;
  uint32_t codes[NIBBLE_ROWS], entries[ENTRIES][2];
#pragma unroll
  for (uint32_t i = 0; i < NIBBLE_ROWS; ++i) {
    codes[i] = inside && i < rows ? __ldcs(reinterpret_cast<const uint32_t*>(data + i * pitch)) : 0;
  }
  if constexpr (std::is_same_v<To, ToBf16>) {
    // A lane stores what it read: blocks have eight columns or more.
    return nibbles_to_bf16<RULE, TALL>(job, row, first + lane * 8, rows, codes);
  }
  const Blocks blocks = Blocks::of(job);
#pragma unroll
  for (uint32_t i = 0; i < ENTRIES; ++i) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uint64_t col = first + half * 128 + lane * 4;
      entries[i][half] = col < cols && i < rows ? entry_at<RULE>(blocks.at(row + i, col)) : 0;
    }
  }
  float tensor = outer(job, row, first), reciprocal = largest_reciprocal(job.ingredients.largest);
  auto* out = pointer<typename To::Value>(job.out) + row * cols + first + lane * 4;
#pragma unroll
  for (uint32_t i = 0; i < NIBBLE_ROWS; ++i) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      uint32_t eight = __shfl_sync(FULL_WARP, codes[i], half * 16 + lane / 2);
      uint32_t four = lane % 2 ? eight >> 16 : eight & 0xFFFFu;
      float f = entry_factor<RULE>(entries[TALL ? 0 : i][half], tensor, reciprocal);
      if (i < rows && first + half * 128 + lane * 4 < cols) store_four<E2m1, To>(out + i * cols + half * 128, four, f, f, f, f);
    }
  }
}

// Transposed codes: 128 x 128 elements. A warp does sixteen rows, which lie in one block, a lane four columns of them.
constexpr uint32_t LINES = DECODE_LINES, HEIGHT = LINES / WARPS;
struct Columns {
  alignas(16) uint8_t codes[LINES * LINES];
  alignas(16) float factors[WARPS * LINES];
};

// The factors of a tile's blocks of rows, for each of its columns.
template <uint8_t RULE>
__device__ __forceinline__ void load_factors(const Decode& job, uint64_t row0, uint64_t col0, float tensor, float* factors) {
  const Blocks blocks = Blocks::of(job);
  float reciprocal = largest_reciprocal(job.ingredients.largest);
  bool lined = job.ingredients.extent == EXTENT_COLUMNS;
  // Blocks of a column, as a power of two; they are taken column by column, as most lie in memory.
  uint32_t n = blocks.height < 7 ? 7 - blocks.height : 0;
  uint32_t entries[WARPS * LINES / THREADS];
#pragma unroll
  for (uint32_t k = 0; k < WARPS * LINES / THREADS; ++k) {
    uint32_t e = threadIdx.x + k * THREADS;
    uint64_t row = row0 + ((e & ((1u << n) - 1)) << blocks.height), col = col0 + (e >> n);
    entries[k] = e >> n < LINES && row < job.rows && col < job.cols ? entry_at<RULE>(blocks.at(row, col)) : 0;
  }
#pragma unroll
  for (uint32_t k = 0; k < WARPS * LINES / THREADS; ++k) {
    uint32_t e = threadIdx.x + k * THREADS;
    uint64_t col = col0 + (e >> n);
    if (lined && e >> n < LINES && col < job.cols) tensor = outer(job, row0, col);
    if (e >> n < LINES) factors[(e & ((1u << n) - 1)) * LINES + (e >> n)] = entry_factor<RULE>(entries[k], tensor, reciprocal);
  }
}

template <typename E, typename To, uint8_t RULE>
__device__ __forceinline__ void decode_columns(const Decode& job, uint32_t index, Columns& shared) {
  constexpr uint32_t BITS = Four<E>::BITS, LINE = LINES * BITS / 8, CHUNKS = LINE / 16, BYTES = HEIGHT * BITS / 8;
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row0 = uint64_t(index / across) * LINES, col0 = uint64_t(index % across) * LINES;
  uint64_t pitch = job.data_pitch, cols = job.cols, first = row0 * BITS / 8;
  const uint8_t* data = pointer<const uint8_t>(job.data);
#pragma unroll
  for (uint32_t k = 0; k < LINES * CHUNKS / THREADS; ++k) {
    uint32_t line = threadIdx.x / CHUNKS + k * (THREADS / CHUNKS), chunk = threadIdx.x % CHUNKS;
    bool inside = col0 + line < cols && first + chunk * 16 < pitch;
    const uint8_t* from = data + (col0 + line) * pitch + first + chunk * 16;
    // Lanes that read together find their chunks in other banks.
    copy16(shared.codes + line * LINE + (chunk ^ line / 4 % CHUNKS) * 16, inside ? from : data, inside ? 16 : 0);
  }
  float tensor = outer(job, row0, col0);
  if (RULE != RULE_TENSOR) load_factors<RULE>(job, row0, col0, tensor, shared.factors);
  wait_copies();
  uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint64_t row = row0 + warp * HEIGHT, col = col0 + lane * 4;
  if (row >= job.rows || col >= cols) return;
  float4 f = make_float4(tensor, tensor, tensor, tensor);
  if (RULE == RULE_TENSOR && job.ingredients.extent == EXTENT_COLUMNS) {
    f = make_float4(outer(job, row, col), outer(job, row, col + 1), outer(job, row, col + 2), outer(job, row, col + 3));
  }
  if (RULE != RULE_TENSOR) {
    uint32_t block = warp * HEIGHT >> (31u - __clz(job.block_rows));
    f = *reinterpret_cast<const float4*>(shared.factors + block * LINES + lane * 4);
  }
  uint32_t rows = uint32_t(min(uint64_t(HEIGHT), job.rows - row));
  auto* out = pointer<typename To::Value>(job.out) + row * cols + col;
  constexpr uint32_t PER_WORD = 32 / BITS;
#pragma unroll
  for (uint32_t half = 0; half < BYTES / 8; ++half) {
    uint2 in[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint8_t* line = shared.codes + (lane * 4 + k) * LINE + (warp * BYTES / 16 ^ lane % CHUNKS) * 16;
      in[k] = *reinterpret_cast<const uint2*>(line + (warp * BYTES + half * 8) % 16);
    }
#pragma unroll
    for (uint32_t w = 0; w < 2; ++w) {
      const uint32_t columns[4] = {w ? in[0].y : in[0].x, w ? in[1].y : in[1].x, w ? in[2].y : in[2].x, w ? in[3].y : in[3].x};
      uint32_t codes[PER_WORD];
      rows_of_columns(columns, codes);
#pragma unroll
      for (uint32_t i = 0; i < PER_WORD; ++i) {
        uint32_t at = (half * 2 + w) * PER_WORD + i;
        if (at < rows) store_four<E, To>(out + at * cols, codes[i], f.x, f.y, f.z, f.w);
      }
    }
  }
}

template <typename E, typename To, uint8_t RULE>
__device__ __forceinline__ void decode_tile(const Decode& job, uint32_t index, Columns& shared) {
  if (job.path == DECODE_TRANSPOSED) return decode_columns<E, To, RULE>(job, index, shared);
  if constexpr (Four<E>::BITS == 4 && RULE != RULE_TENSOR) {
    if (job.path == DECODE_NIBBLES) {
      return job.block_rows >= NIBBLE_ROWS ? decode_nibbles<To, RULE, true>(job, index) : decode_nibbles<To, RULE, false>(job, index);
    }
  }
  bool lined = job.ingredients.extent != EXTENT_TENSOR;
  if constexpr (RULE == RULE_TENSOR) {
    lined ? decode_rows<E, To, RULE, Factors::TENSOR, true>(job, index) : decode_rows<E, To, RULE, Factors::TENSOR, false>(job, index);
  } else if (job.block_cols < 4) {
    decode_rows<E, To, RULE, Factors::COLUMNS, RULE == RULE_TWO_LEVEL>(job, index);
  } else if (job.block_rows >= ROWS) {
    decode_rows<E, To, RULE, Factors::BLOCK, false>(job, index);
  } else if (RULE == RULE_TWO_LEVEL && lined) {
    decode_rows<E, To, RULE, Factors::ROWS, RULE == RULE_TWO_LEVEL>(job, index);
  } else {
    decode_rows<E, To, RULE, Factors::ROWS, false>(job, index);
  }
}

// The rules that elements of four and of eight bits have.
template <typename E, typename To>
__device__ __forceinline__ void decode_rule(const Decode& job, uint32_t index, Columns& shared) {
  constexpr uint8_t OWN = Four<E>::BITS == 4 ? RULE_TWO_LEVEL : RULE_BLOCK_F32;
  uint8_t rule = job.ingredients.rule == RULE_FOUR_OVER_SIX ? uint8_t(RULE_TWO_LEVEL) : job.ingredients.rule;
  if (rule == RULE_TENSOR) return decode_tile<E, To, RULE_TENSOR>(job, index, shared);
  if (rule == OWN) return decode_tile<E, To, OWN>(job, index, shared);
  decode_tile<E, To, RULE_E8M0_TE>(job, index, shared);
}

// 64 x 64 elements of anything, to either dtype.
__device__ __forceinline__ void decode_any(const Decode& job, uint32_t index, uint32_t* codes) {
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * SIDE, col = uint64_t(index % across) * SIDE;
  uint32_t rows = uint32_t(min(uint64_t(SIDE), job.rows - row)), cols = uint32_t(min(uint64_t(SIDE), job.cols - col));
  uint32_t bits = code_bits(job.ingredients.element), transposed = job.data_transposed;
  // Physical rows of the tile.
  uint64_t line = transposed ? col : row, at = transposed ? row : col;
  uint32_t lines = transposed ? cols : rows, entries = transposed ? rows : cols;
  for (uint32_t e = threadIdx.x; e < lines * SIDE; e += THREADS) {
    uint32_t i = e / SIDE, j = e % SIDE;
    if (j >= entries) continue;
    const uint8_t* from = pointer<const uint8_t>(job.data) + (line + i) * job.data_pitch + (at + j) * bits / 8;
    uint32_t code = *from;
    if (bits == 4) code = (code >> (j % 2 * 4)) & 15;
    for (uint32_t b = 1; b < bits / 8; ++b) code |= uint32_t(from[b]) << (8 * b);
    codes[transposed ? j * PITCH + i : i * PITCH + j] = code;
  }
  __syncthreads();
  for (uint32_t e = threadIdx.x; e < rows * (SIDE / 4); e += THREADS) {
    uint32_t i = e / (SIDE / 4), j = e % (SIDE / 4) * 4;
    float x[4];
    uint64_t seen = ~uint64_t(0);
    float f = 1.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[k] = 0.0f;
      if (j + k >= cols) continue;
      x[k] = decode_element(job.ingredients.element, codes[i * PITCH + j + k]);
      if (job.ingredients.rule == RULE_NONE) continue;
      bool each = job.ingredients.extent == EXTENT_COLUMNS;
      uint64_t block = each ? col + j + k : job.block_cols ? (col + j + k) / job.block_cols : 0;
      if (block != seen) f = factor(job, row + i, col + j + k);
      seen = block;
      x[k] = scaled(x[k], f);
    }
    uint64_t to = (row + i) * job.cols + col + j;
    bool four = job.vector && j + 4 <= cols;
    float4 y = make_float4(x[0], x[1], x[2], x[3]);
    if (job.out_code == BF16) {
      uint16_t* out = pointer<uint16_t>(job.out) + to;
      if (four) ToBf16::four(out, y);
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        if (!four && j + k < cols) out[k] = narrow(x[k]);
      }
    } else {
      float* out = pointer<float>(job.out) + to;
      if (four) ToF32::four(out, y);
#pragma unroll
      for (uint32_t k = 0; k < 4; ++k) {
        if (!four && j + k < cols) out[k] = x[k];
      }
    }
  }
}

// A tile of a launch. What is written in bfloat16 goes to ToBf16 or through the general path.
template <typename To>
__device__ __forceinline__ void decode_one(const Tile* tiles, const Decode* jobs, const Step* step, uint32_t flags) {
  __shared__ Fetched<Decode> fetched;
  __shared__ union {
    uint32_t codes[SIDE * PITCH];
    Columns columns;
  } shared;
  fetch(fetched, tiles, jobs, step, flags);
  if (fetched.skip) return;
  const Decode& job = fetched.job();
  uint32_t index = fetched.tile.index;
  if (job.path == DECODE_GENERIC) return decode_any(job, index, shared.codes);
  if constexpr (std::is_same_v<To, ToBf16>) {
    if (job.path == DECODE_EIGHT) return job.ingredients.element == E4M3 ? decode_eight<E4m3>(job, index) : decode_eight<E5m2>(job, index);
  }
  switch (job.ingredients.element) {
    case E4M3: return decode_rule<E4m3, To>(job, index, shared.columns);
    case E5M2: return decode_rule<E5m2, To>(job, index, shared.columns);
    default: return decode_rule<E2m1, To>(job, index, shared.columns);
  }
}

}  // namespace lowp
