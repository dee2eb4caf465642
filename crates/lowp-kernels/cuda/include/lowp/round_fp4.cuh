// Values of bfloat16 as NVFP4 codes hold them (numerics 7), through a ring of tiles of 128 x 64: blocks of 16 of rows and of columns, of
// which these may be transformed, each as values or as codes.
#pragma once
#include <lowp/decoded.cuh>
#include <lowp/philox.cuh>
#include <lowp/ring_fp4.cuh>

namespace lowp {

template <int STAGES>
struct RoundFp4Memory {
  Ring<STAGES> ring;
  uint8_t random[TRANSPOSED_ROWS * TRANSPOSED_COLS];  // bytes of stochastic rounding
  uint8_t scales[2][2048];                            // of rows, and of columns
  float multipliers[256], factors[256];               // of each scale of rows, and of columns
};
static_assert(sizeof(RoundFp4Memory<2>) == ROUND_FP4_BYTES && sizeof(RoundFp4Memory<3>) == LONG_ROUND_FP4_BYTES);

// What the codes of a block of 16 decode to. The factor is finite.
__device__ __forceinline__ void fp4_values(const uint2& codes, float factor, uint32_t (&y)[8]) {
  const auto decoded = DecodedFp4::of(factor);
  const uint4 low = decoded.values(codes.x), high = decoded.values(codes.y);
  y[0] = low.x, y[1] = low.y, y[2] = low.z, y[3] = low.w, y[4] = high.x, y[5] = high.y, y[6] = high.z, y[7] = high.w;
}

// Stores the run of each lane, of two that lie side by side whole sectors at a time.
__device__ __forceinline__ void store_run(uint64_t at, const uint32_t (&y)[8]) {
  const uint32_t odd = threadIdx.x % 2;
  uint32_t got[4], first[4], second[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    got[k] = __shfl_xor_sync(FULL_WARP, odd ? y[k] : y[4 + k], 1);
    first[k] = odd ? got[k] : y[k];
    second[k] = odd ? y[4 + k] : got[k];
  }
  // Lane 0 of two has the first chunks of both runs, lane 1 the second ones.
  const uint64_t to = at - odd * 16;
  store16_part(pointer<uint8_t>(to), make_uint4(first[0], first[1], first[2], first[3]));
  store16_part(pointer<uint8_t>(to + 32), make_uint4(second[0], second[1], second[2], second[3]));
}

// Blocks of one orientation of a tile, with the arithmetic that knows every value.
__device__ __forceinline__ void round_block(const Round& round, const Philox& philox, int p, uint64_t row, uint64_t col) {
  const Encode& job = round.encode;
  const Pass& pass = job.pass[p];
  const Ingredients& made = pass.ingredients;
  const ScaleRule rule = ScaleRule::of(made, 0);
  const uint16_t* from = pointer<const uint16_t>(job.source);
  auto place = [&](uint32_t i) { return (row + (p ? i : 0)) * job.cols + col + (p ? 0 : i); };
  float x[16], a = 0.0f;
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) {
    x[i] = widen(from[place(i)]);
    if (made.hadamard) x[i] = signed_quarter(x[i], i);
  }
  if (made.hadamard) butterflies(x);
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) {
    if (made.hadamard) x[i] = round_bf16(x[i]);
    a = max_abs(a, x[i]);
  }
  const Scaled block = rule.block(a);
  const float factor = two_level_decode_factor(block.entry, rule.tensor, largest_reciprocal(made.largest));
  const uint64_t line = p ? col : row, at = p ? row : col, lines = p ? job.rows : job.cols;
  if (uint64_t to = pass.scale[p]) pointer<uint8_t>(to)[line * (lines / 16) + at / 16] = uint8_t(block.entry);
  uint32_t codes[2] = {0, 0};
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) {
    const float y = __fmul_rn(x[i], block.multiplier);
    const uint32_t code = job.stochastic ? E2m1::stochastic(y, philox.byte(job.first + place(i))) : E2m1::one(y);
    codes[i / 8] |= code << (i % 8 * 4);
    if (uint64_t to = round.values[p]) pointer<uint16_t>(to)[place(i)] = narrow(scaled(E2m1::decode(code), factor));
  }
  if (uint64_t to = pass.data[p]) store8_part(pointer<uint8_t>(to + (line * lines + at) / 2), make_uint2(codes[0], codes[1]));
}

__device__ __noinline__ void round_carefully(const Round& round, const Step* step, uint64_t row, uint64_t col, uint32_t width) {
  const Philox philox{round.encode.seed, round.encode.stream + (round.encode.stochastic ? step->random_step << 32 : 0)};
#pragma unroll 1
  for (uint32_t b = threadIdx.x; b < TRANSPOSED_ROWS * width / 16; b += THREADS) {
    round_block(round, philox, 0, row + b / (width / 16), col + b % (width / 16) * 16);
    round_block(round, philox, 1, row + b / width * 16, col + b % width);
  }
}

// RANDOM says that all codes are rounded stochastically.
template <bool RANDOM, int STAGES>
__device__ __forceinline__ void round_fp4(const Round& round, uint32_t index, const Step* step, RoundFp4Memory<STAGES>& shared) {
  using Rounding = std::conditional_t<RANDOM, Random, Nearest>;
  const Encode& job = round.encode;
  const RingTile tile(job, index);
  // Where a thread's first run begins.
  const uint64_t first = (tile.row + RunReader::row(0)) * job.cols + tile.col + RunReader::column();
  const bool transform = job.pass[1].ingredients.hadamard;
  // Fields of the job are read again where they are needed: registers are few.
  auto again = [&]() -> const Round& {
    const Round* at = &round;
    asm volatile("" : "+l"(at));
    return *at;
  };
  const TwoLevelFp4 kinds[2] = {TwoLevelFp4::of(job.pass[0].ingredients, shared.multipliers),
                                TwoLevelFp4::of(job.pass[1].ingredients, shared.multipliers + 128)};
  uint32_t worst = 0;
  {
    // Of the largest scale it is finite or none is enough.
    const float amax = tensor_value(job.pass[threadIdx.x / 128].ingredients, 0), reciprocal = largest_reciprocal(2688.0f);
    shared.factors[threadIdx.x] = two_level_decode_factor(threadIdx.x % 128, amax, reciprocal);
    if (!is_finite(two_level_decode_factor(126, amax, reciprocal))) worst = 0x7F800000u;
  }
  const RunReader runs;
  const ColumnReader pairs;
  const RandomTile random{shared.random};
  through_ring(shared.ring, job.source, job.cols, tile.row, tile.col, tile.steps, [&](const uint8_t* values, uint32_t s) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      Rounding rounding;
      if constexpr (RANDOM) {
        const Encode& of = again().encode;
        const uint64_t element = of.first + first + k * 8 * of.cols + s * TRANSPOSED_COLS;
        rounding.words = Philox{of.seed, of.stream + (step->random_step << 32)}.block(element / 16);
        random.put(k, rounding.words);
      }
      const uint64_t row_values = again().values[0], row_codes = again().encode.pass[0].data[0];
      // Scales alone are made of the values, too.
      if (!(row_values | row_codes | again().encode.pass[0].scale[0])) continue;
      uint2 codes;
      const uint32_t entry = ring_run(kinds[0], runs.read(values, k), rounding, worst, codes);
      shared.scales[0][(RunReader::row(k) * RING_COLS + s * TRANSPOSED_COLS + RunReader::column()) / 16] = uint8_t(entry);
      const uint64_t at = first + k * 8 * again().encode.cols + s * TRANSPOSED_COLS;
      if (row_codes) store8_part(pointer<uint8_t>(row_codes + at / 2), codes);
      if (row_values) {
        uint32_t y[8];
        fp4_values(codes, shared.factors[entry], y);
        store_run(row_values + 2 * at, y);
      }
    }
    if (!(again().values[1] | again().encode.pass[1].data[1] | again().encode.pass[1].scale[1])) return;
    // All runs were read, and all random bytes are there.
    __syncthreads();
    const TwoColumns v = pairs.read(values);
    uint2 codes[2];
    uint32_t entries[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      Rounding rounding[2];
      if constexpr (RANDOM) random.get(rounding);
      entries[c] = ring_run(kinds[1], transform ? transformed_run(v, c) : column_run(v, c), rounding[c], worst, codes[c]);
    }
    uint8_t* scales = shared.scales[1] + ColumnReader::row() / 16 * RING_COLS + s * TRANSPOSED_COLS + ColumnReader::column();
    *reinterpret_cast<uint16_t*>(scales) = uint16_t(entries[0] | entries[1] << 8);
    if (uint64_t to = again().encode.pass[1].data[1]) {
      const uint64_t lines = again().encode.rows / 2;
      to += (tile.col + s * TRANSPOSED_COLS + ColumnReader::column()) * lines + (tile.row + ColumnReader::row()) / 2;
      store8_part(pointer<uint8_t>(to), codes[0]);
      store8_part(pointer<uint8_t>(to + lines), codes[1]);
    }
    if (!again().values[1]) return;
    uint32_t one[8], other[8];
    fp4_values(codes[0], shared.factors[128 + entries[0]], one);
    fp4_values(codes[1], shared.factors[128 + entries[1]], other);
    // To the threads that have the rows, in the place of what this one read.
    uint8_t* there = const_cast<uint8_t*>(values);
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) {
      const uint32_t both = __byte_perm(one[i / 2], other[i / 2], i % 2 ? 0x7632 : 0x5410);
      *reinterpret_cast<uint32_t*>(there + (pairs.at ^ i % 8 * 16) + i * 128) = both;
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Run y = runs.read(values, k);
      store_run(again().values[1] + 2 * (first + k * 8 * again().encode.cols + s * TRANSPOSED_COLS), y.x);
    }
  });
  // Runs of 16 elements have counter blocks of their own.
  const bool apart = RANDOM && job.first % 16 != 0;
  if (__syncthreads_or(worst >= 0x7F800000u || apart)) {
    return round_carefully(round, step, tile.row, tile.col, tile.steps * TRANSPOSED_COLS);
  }
  const View view{job.rows, job.cols, 0};
#pragma unroll 1
  for (uint32_t p = 0; p < 2; ++p) {
    store_scales<true>(job.pass[p], view, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[p], RING_COLS);
  }
}

}  // namespace lowp
