// Encode of a contiguous range of a flattened matrix with agreed amaxes (numerics 11). Only bytes
// that the range touches change, and of its first and last byte only the owned nibble.
#include <lowp/generic.cuh>

namespace lowp {

constexpr uint32_t CHUNK = 8;  // elements that a thread does at a time; whole bytes of any code

// The rule of the tensor, or of the line of element (row, col).
__device__ __forceinline__ ScaleRule rule_at(const FlatPass& pass, uint64_t row, uint64_t col) {
  return ScaleRule::of(pass.ingredients, outer_entry(pass.ingredients, row, col));
}

// The multiplier of one block.
__device__ __forceinline__ float multiplier(const FlatPass& pass, const ScaleRule& rule, uint64_t block) {
  float amax = pass.amaxes ? fabsf(pointer<const float>(pass.amaxes)[block]) : 0.0f;
  return rule.block(amax).multiplier;
}

__device__ __forceinline__ uint32_t encode_one(const ScaleRule& rule, float x, float m) {
  if (rule.scaled()) x = __fmul_rn(x, m);
  switch (rule.element) {
    case E4M3: return E4m3::one(x);
    case E5M2: return E5m2::one(x);
    case E2M1: return E2m1::one(x);
    case BF16: return narrow(x);
    default: return __float_as_uint(x);
  }
}

// Codes of elements first .. end of the matrix, `first` a multiple of CHUNK or the start.
__device__ __noinline__ void codes(const FlatEncode& job, const FlatPass& pass, uint64_t first, uint64_t end) {
  const Ingredients& made = pass.ingredients;
  uint32_t bits = code_bits(made.element);
  ScaleRule rule = rule_at(pass, first / job.cols, first % job.cols);
  uint64_t start_byte = job.start * bits / 8;
  uint64_t across = pass.amaxes ? cdiv(job.cols, pass.block_cols) : 1;
  uint64_t seen = ~uint64_t(0), line = ~uint64_t(0);
  float m = 1.0f;
  for (uint64_t e = first; e < end; ++e) {
    uint64_t row = e / job.cols, col = e % job.cols, entry = outer_entry(made, row, col);
    uint64_t block = pass.amaxes ? row / pass.block_rows * across + col / pass.block_cols : 0;
    if (block != seen || entry != line) {
      if (made.extent != EXTENT_TENSOR) rule = ScaleRule::of(made, entry);
      m = multiplier(pass, rule, block);
      seen = block;
      line = entry;
    }
    float x = load_source(job.source, job.source_code, e - job.start);
    if (job.via_bf16) x = round_bf16(x);
    uint32_t code = encode_one(rule, x, m);
    uint8_t* to = pointer<uint8_t>(pass.data) + (e * bits / 8 - start_byte);
    if (bits == 4) {
      *to = e % 2 ? uint8_t((*to & 0x0F) | (code << 4)) : uint8_t((*to & 0xF0) | code);
    } else {
      for (uint32_t b = 0; b < bits / 8; ++b) to[b] = uint8_t(code >> (8 * b));
    }
  }
}

// Row or column numbers and what is left, of indices of any size; most are of 32 bits, whose division is a fifth of the work.
__device__ __forceinline__ uint64_t divide(uint64_t a, uint64_t b, uint64_t& rest) {
  if ((a | b) >> 32 == 0) {
    uint32_t quotient = uint32_t(a) / uint32_t(b);
    rest = uint32_t(a) - quotient * uint32_t(b);
    return quotient;
  }
  uint64_t quotient = a / b;
  rest = a - quotient * b;
  return quotient;
}

// The multipliers of the elements of a whole chunk in one row: one, or one of each. False where there are others.
__device__ __forceinline__ bool multipliers(const FlatPass& pass, const ScaleRule& tensor, uint64_t row, uint64_t col, uint64_t cols,
                                            float (&m)[CHUNK]) {
  const Ingredients& made = pass.ingredients;
  const bool lines = made.extent == EXTENT_COLUMNS;
  ScaleRule rule = tensor;
  if (made.extent == EXTENT_ROWS) rule = ScaleRule::of(made, row);
  uint64_t rest = 0, block = 0;
  bool each = lines;
  if (pass.amaxes) {
    uint64_t across = cols;
    if (pass.block_cols == 1) {
      each = true;
      rest = col;
    } else {
      uint64_t start;
      block = divide(col, pass.block_cols, start);
      if (start + CHUNK > pass.block_cols || lines) return false;
      across = divide(cols + pass.block_cols - 1, pass.block_cols, start);
    }
    uint64_t below;
    block += divide(row, pass.block_rows, below) * across + rest;
  }
  if (!each) {
    float one = multiplier(pass, rule, block);
#pragma unroll
    for (uint32_t k = 0; k < CHUNK; ++k) m[k] = one;
    return true;
  }
#pragma unroll
  for (uint32_t k = 0; k < CHUNK; ++k) m[k] = multiplier(pass, lines ? ScaleRule::of(made, col + k) : rule, block + k);
  return true;
}

// Words of codes: eight of 8 bits, or of 4.
template <uint32_t WORDS>
__device__ __forceinline__ void store_words(uint64_t to, const uint32_t (&words)[WORDS]) {
  if (to % (4 * WORDS) == 0) {
    if constexpr (WORDS == 2) {
      store8(pointer<uint8_t>(to), make_uint2(words[0], words[1]));
    } else {
      *pointer<uint32_t>(to) = words[0];
    }
    return;
  }
#pragma unroll
  for (uint32_t b = 0; b < 4 * WORDS; ++b) pointer<uint8_t>(to)[b] = uint8_t(words[b / 4] >> (8 * (b % 4)));
}

template <typename E>
__device__ __forceinline__ void store_codes(uint64_t to, const float (&x)[CHUNK], const float (&m)[CHUNK]) {
  uint32_t words[2];
#pragma unroll
  for (int w = 0; w < 2; ++w) {
    auto two = [&](int k) { return E::pair(__fmul_rn(x[k], m[k]), __fmul_rn(x[k + 1], m[k + 1])); };
    words[w] = __byte_perm(two(4 * w), two(4 * w + 2), 0x5410);
  }
  store_words(to, words);
}

// The values of a whole chunk.
__device__ __forceinline__ void load_chunk(const FlatEncode& job, uint64_t first, float (&x)[CHUNK]) {
  uint64_t from = job.source + (first - job.start) * (job.source_code == BF16 ? 2 : 4);
  if (from % 16 != 0) {
#pragma unroll
    for (uint32_t k = 0; k < CHUNK; ++k) x[k] = load_source(job.source, job.source_code, first - job.start + k);
  } else if (job.source_code == BF16) {
    uint4 raw = load16(pointer<const uint4>(from));
#pragma unroll
    for (uint32_t k = 0; k < CHUNK; k += 2) x[k] = widen_low(word(raw, k / 2)), x[k + 1] = widen_high(word(raw, k / 2));
  } else {
#pragma unroll
    for (uint32_t k = 0; k < CHUNK; k += 4) {
      float4 v = as_floats(load16(pointer<const uint4>(from) + k / 4));
      x[k] = v.x, x[k + 1] = v.y, x[k + 2] = v.z, x[k + 3] = v.w;
    }
  }
  if (job.via_bf16) {
#pragma unroll
    for (uint32_t k = 0; k < CHUNK; ++k) x[k] = round_bf16(x[k]);
  }
}

// The codes of a pass of run `index` of the range: whole chunks in one row at once, the others element by element.
__device__ __forceinline__ void encode_run(const FlatEncode& job, const FlatPass& pass, uint64_t index) {
  const uint64_t begin = (job.start / FLAT_ENCODE_RUN + index) * FLAT_ENCODE_RUN, stop = job.start + job.len;
  const ScaleRule tensor = ScaleRule::of(pass.ingredients, 0);
  const uint8_t element = pass.ingredients.element;
#pragma unroll 1
  for (uint32_t at = threadIdx.x * CHUNK; at < FLAT_ENCODE_RUN; at += THREADS * CHUNK) {
    const uint64_t first = max(begin + at, job.start), end = min(begin + at + CHUNK, stop);
    if (first >= end) continue;
    uint64_t col;
    const uint64_t row = divide(first, job.cols, col);
    float x[CHUNK], m[CHUNK];
    if (end - first < CHUNK || col + CHUNK > job.cols || element > E2M1 || !multipliers(pass, tensor, row, col, job.cols, m)) {
      codes(job, pass, first, end);
      continue;
    }
    load_chunk(job, first, x);
    if (element == E2M1) {
      const uint32_t words[1] = {E2m1::eight([&](int k) { return __fmul_rn(x[k], m[k]); })};
      store_words(pass.data + first / 2 - job.start / 2, words);
    } else if (element == E4M3) {
      store_codes<E4m3>(pass.data + first - job.start, x, m);
    } else {
      store_codes<E5m2>(pass.data + first - job.start, x, m);
    }
  }
}

// The scales of a run of blocks, row-major. Consumes their amaxes, which others may still read: the
// magnitudes stay.
__device__ __forceinline__ void scales(const FlatEncode& job, const FlatPass& pass, uint64_t first) {
  uint64_t down = cdiv(job.rows, pass.block_rows), across = cdiv(job.cols, pass.block_cols);
  uint64_t end = min(first + FLAT_ENCODE_RUN, down * across);
  const bool lines = pass.ingredients.extent != EXTENT_TENSOR;
  ScaleRule rule = ScaleRule::of(pass.ingredients, 0);
  for (uint64_t b = first + threadIdx.x; b < end; b += THREADS) {
    uint32_t* amax = pointer<uint32_t>(pass.amaxes) + b;
    uint64_t c;
    const uint64_t r = divide(b, across, c);
    if (lines) rule = rule_at(pass, r * pass.block_rows, c * pass.block_cols);
    const uint32_t seen = *amax & 0x7FFFFFFFu;
    const uint32_t entry = rule.block(__uint_as_float(seen)).entry;
    *amax = seen | 0x80000000u;
    for (int transposed = 0; transposed < 2; ++transposed) {
      uint64_t base = transposed ? pass.scale[1] : pass.scale[0];
      if (base == 0) continue;
      uint64_t at = transposed ? c * down + r : b;
      if (rule.entry_bytes() == 1) {
        pointer<uint8_t>(base)[at] = uint8_t(entry);
      } else {
        store_f32(base + 4 * at, entry);
      }
    }
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, 3)
    lowp_flat_encode(const Tile* __restrict__ tiles, const FlatEncode* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const FlatEncode& job = jobs[tile.job];
  if (tile.index == 0) store_all_outers(job.outer, job.rows, job.cols);
  uint64_t index = tile.index;
  if (index < job.data_tiles) {
#pragma unroll 1
    for (uint32_t p = 0; p < job.passes; ++p) {
      if (job.pass[p].data) encode_run(job, job.pass[p], index);
    }
    return;
  }
  index -= job.data_tiles;
  if (index < job.scale_tiles[0]) return scales(job, job.pass[0], index * FLAT_ENCODE_RUN);
  index -= job.scale_tiles[0];
  if (index < job.scale_tiles[1]) scales(job, job.pass[1], index * FLAT_ENCODE_RUN);
}
