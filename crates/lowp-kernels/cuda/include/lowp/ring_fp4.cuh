// E2M1 of bfloat16 with block scales, through a ring of tiles.
#pragma once
#include <lowp/fp4.cuh>
#include <lowp/ring_tile.cuh>
#include <lowp/ring_transform.cuh>

namespace lowp {

// What codes of E2M1 with block scales are made of. A block raises `worst` to the bits of its amax, or more: from those of
// infinity on, the arithmetic of many values at a time is not enough. `large` says that a product may be 7 or more, `clamps` whether one of a
// warp may.
struct TwoLevelFp4 {
  static constexpr uint32_t SIDE = 16;
  float factor;
  const float* multipliers;  // of each scale
  // Every thread fills in the multiplier of a scale; they are there after the next barrier.
  static __device__ __forceinline__ TwoLevelFp4 of(const Ingredients& made, float* multipliers) {
    TwoLevel rule = TwoLevel::of(tensor_value(made, 0));
    if (threadIdx.x < 128) multipliers[threadIdx.x] = rule.multiplier(threadIdx.x);
    return {rule.factor, multipliers};
  }
  __device__ __forceinline__ Scaled block(float amax, uint32_t& worst, bool& large) const {
    uint32_t entry = E4m3::one(fminf(__fmul_rn(amax, factor), float_max()));
    float m = multipliers[entry];
    worst = max(worst, __float_as_uint(amax));
    large |= __fmul_rn(amax, m) >= 7.0f;
    return {entry, m};
  }
  __device__ __forceinline__ bool clamps(bool large) const { return must_clamp(large); }
  template <bool CLAMP>
  static __device__ __forceinline__ uint2 codes(const Run& v, float m) {
    return make_uint2(codes_of_eight<CLAMP>(v.x, m), codes_of_eight<CLAMP>(v.x + 4, m));
  }
  template <bool CLAMP>
  static __device__ __forceinline__ void codes(const TwoColumns& v, float first, float second, uint2 (&out)[2]) {
    out[0] = codes_of<CLAMP>(v, false, first);
    out[1] = codes_of<CLAMP>(v, true, second);
  }
};

// The rules of E8M0 scales as one: the exponent of the amax times a factor, plus something, less something.
struct E8m0Fp4 {
  static constexpr uint32_t SIDE = 32;
  float factor;
  uint32_t plus, less;
  bool clamp;  // the rule that takes the exponent as it is lets products reach 8
  static __device__ __forceinline__ E8m0Fp4 of(const Ingredients& made, float*) {
    if (made.rule == RULE_E8M0_TE) return {max_reciprocal(E2M1), 0x7FFFFFu, 0, false};
    const bool even = made.rule == RULE_E8M0_EVEN;
    return {1.0f, even ? half_step(E2M1) : 0, uint32_t(max_exponent(E2M1)), !even};
  }
  __device__ __forceinline__ bool clamps(bool) const { return !LOWP_FP4_CVT && clamp; }
  __device__ __forceinline__ Scaled block(float amax, uint32_t& worst, bool&) const {
    const int exponent = int(((__float_as_uint(__fmul_rn(amax, factor)) + plus) >> 23) - less);
    const uint32_t entry = max(exponent, 0);
    // The rest, but for blocks of zeros, has a subnormal somewhere, or an infinity or NaN.
    if (entry - 2 > 250 && amax != 0.0f) worst = 0x7F800000u;
    // Twice the multiplier of entry 0 would be infinite.
    return {entry, __uint_as_float(uint32_t(254 - max(exponent, 1)) << 23)};
  }
  template <bool CLAMP>
  static __device__ __forceinline__ uint2 codes(const Run& v, float m) {
#if LOWP_FP4_CVT
    return make_uint2(codes_of_eight<CLAMP>(v.x, m), codes_of_eight<CLAMP>(v.x + 4, m));
#else
    const auto pairs = PairMultipliers::of(m, m);
    return make_uint2(row_of_pairs<CLAMP>(v.x, pairs), row_of_pairs<CLAMP>(v.x + 4, pairs));
#endif
  }
  template <bool CLAMP>
  static __device__ __forceinline__ void codes(const TwoColumns& v, float first, float second, uint2 (&out)[2]) {
#if LOWP_FP4_CVT
    out[0] = codes_of<CLAMP>(v, false, first);
    out[1] = codes_of<CLAMP>(v, true, second);
#else
    const auto pairs = PairMultipliers::of(first, second);
    uint32_t rows[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) rows[k] = codes_of_pairs<CLAMP>(v.x + 4 * k, pairs);
    out[0] = make_uint2(__byte_perm(rows[0], rows[1], 0x5410), __byte_perm(rows[2], rows[3], 0x5410));
    out[1] = make_uint2(__byte_perm(rows[0], rows[1], 0x7632), __byte_perm(rows[2], rows[3], 0x7632));
#endif
  }
};

// What rounds stochastically: no random bytes, or a word for four values each.
struct Nearest {};
struct Random {
  uint4 words;
};

template <bool CLAMP, typename Kind>
__device__ __forceinline__ uint2 run_codes(const Kind&, const Run& v, float m, Nearest) {
  return Kind::template codes<CLAMP>(v, m);
}
template <bool CLAMP, typename Kind>
__device__ __forceinline__ uint2 run_codes(const Kind&, const Run& v, float m, const Random& random) {
  const uint4& w = random.words;
  return make_uint2(random_codes_of_eight(v.x, m, w.x, w.y), random_codes_of_eight(v.x + 4, m, w.z, w.w));
}

// The entry of the scale and the codes of 16 values that are a block, or half of one beside those of the next lane.
template <typename Kind, typename Values, typename Rounding>
__device__ __forceinline__ uint32_t ring_run(const Kind& kind, const Values& v, const Rounding& rounding, uint32_t& worst, uint2& codes) {
  float amax = v.amax();
  if (Kind::SIDE == 32) amax = larger_amax(amax, __shfl_xor_sync(FULL_WARP, amax, 1));
  bool large = false;
  Scaled s = kind.block(amax, worst, large);
  if (kind.clamps(large)) {
    codes = run_codes<true>(kind, v, s.multiplier, rounding);
  } else {
    codes = run_codes<false>(kind, v, s.multiplier, rounding);
  }
  return s.entry;
}

// The same of two columns, from their pairs.
template <typename Kind>
__device__ __forceinline__ uint32_t ring_pairs(const Kind& kind, const TwoColumns& v, uint32_t& worst, uint2 (&codes)[2]) {
  uint32_t amaxes = v.amaxes();
  if (Kind::SIDE == 32) amaxes = __vmaxu2(amaxes, __shfl_xor_sync(FULL_WARP, amaxes, 1));
  bool large = false;
  Scaled first = kind.block(widen_low(amaxes), worst, large), second = kind.block(widen_high(amaxes), worst, large);
  if (kind.clamps(large)) {
    Kind::template codes<true>(v, first.multiplier, second.multiplier, codes);
  } else {
    Kind::template codes<false>(v, first.multiplier, second.multiplier, codes);
  }
  return first.entry | second.entry << 8;
}

// One of two columns as a run down its rows.
__device__ __forceinline__ Run column_run(const TwoColumns& v, bool second) {
  Run run;
#pragma unroll
  for (int k = 0; k < 8; ++k) run.x[k] = __byte_perm(v.x[2 * k], v.x[2 * k + 1], second ? 0x7632 : 0x5410);
  return run;
}

// The random bytes of the elements of a tile, of which a run has a counter block of its own: from the threads that have the runs
// to those that have the columns.
struct RandomTile {
  uint8_t* bytes;
  // Chunks are exchanged between rows that are 16 apart.
  static __device__ __forceinline__ uint32_t place(uint32_t row, uint32_t col) { return row * 64 + (col / 16 ^ row / 16 % 4) * 16 + col % 16; }
  __device__ __forceinline__ void put(uint32_t which, const uint4& words) const {
    *reinterpret_cast<uint4*>(bytes + place(RunReader::row(which), RunReader::column())) = words;
  }
  // Those of 16 rows of two columns.
  __device__ __forceinline__ void get(Random (&of)[2]) const {
    uint32_t first[4], second[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      auto at = [&](int i) {
        return uint32_t(*reinterpret_cast<const uint16_t*>(bytes + place(ColumnReader::row(), ColumnReader::column()) + (4 * k + i) * 64));
      };
      uint32_t low = at(0) | at(1) << 16, high = at(2) | at(3) << 16;
      first[k] = __byte_perm(low, high, 0x6420);
      second[k] = __byte_perm(low, high, 0x7531);
    }
    of[0].words = make_uint4(first[0], first[1], first[2], first[3]);
    of[1].words = make_uint4(second[0], second[1], second[2], second[3]);
  }
};

// E2M1 with scales of blocks of a row, of a column, or both. TRANSFORM says that columns are transformed, RANDOM that all codes are
// rounded stochastically.
template <typename Kind, bool TRANSFORM, bool RANDOM, int STAGES>
__device__ __forceinline__ void ring_fp4(const RingTile& tile, const Step* step, RingMemory<STAGES>& shared) {
  const Encode& job = tile.job;
  const Pass *rows = nullptr, *columns = nullptr;
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) (job.pass[p].block_cols == 1 ? columns : rows) = &job.pass[p];
  const uint64_t pitch = job.cols / 2, lines = job.rows / 2;
  const uint64_t to_rows = rows ? rows->data[0] + (tile.row + RunReader::row(0)) * pitch + (tile.col + RunReader::column()) / 2 : 0;
  const uint64_t to_columns = columns ? columns->data[1] + (tile.col + ColumnReader::column()) * lines + (tile.row + ColumnReader::row()) / 2 : 0;
  const bool transform = TRANSFORM && columns && columns->ingredients.hadamard;
  const Kind kind = Kind::of(job.pass[0].ingredients, shared.multipliers);
  // What is transformed has amaxes of its own.
  const Kind column_kind = TRANSFORM && rows && columns ? Kind::of(columns->ingredients, shared.multipliers + 128) : kind;
  const RunReader runs;
  const ColumnReader pairs;
  const RandomTile random{shared.random};
  Philox philox{0, 0};
  uint64_t counter = 0;
  if (RANDOM) {
    philox = Philox{job.seed, job.stream + (step->random_step << 32)};
    counter = (job.first + (tile.row + RunReader::row(0)) * job.cols + tile.col + RunReader::column()) / 16;
  }
  uint32_t worst = 0;
  through_ring(shared.ring, job.source, job.cols, tile.row, tile.col, tile.steps, [&](const uint8_t* values, uint32_t s) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      std::conditional_t<RANDOM, Random, Nearest> rounding;
      if constexpr (RANDOM) {
        rounding.words = philox.block(counter + k * 8 * (job.cols / 16) + s * (TRANSPOSED_COLS / 16));
        if (to_columns) random.put(k, rounding.words);
      }
      if (!to_rows) continue;
      uint2 codes;
      uint32_t entry = ring_run(kind, runs.read(values, k), rounding, worst, codes);
      shared.scales[0][(RunReader::row(k) * RING_COLS + s * TRANSPOSED_COLS + RunReader::column()) / Kind::SIDE] = uint8_t(entry);
      store8_part(pointer<uint8_t>(to_rows + k * 8 * pitch + s * (TRANSPOSED_COLS / 2)), codes);
    }
    if (!to_columns) return;
    if (RANDOM) __syncthreads();
    const TwoColumns v = pairs.read(values);
    uint2 codes[2];
    uint32_t entries;
    if constexpr (RANDOM || TRANSFORM) {
      std::conditional_t<RANDOM, Random, Nearest> rounding[2];
      if constexpr (RANDOM) random.get(rounding);
      auto run = [&](bool second) { return transform ? transformed_run(v, second) : column_run(v, second); };
      entries = ring_run(column_kind, run(false), rounding[0], worst, codes[0]);
      entries |= ring_run(column_kind, run(true), rounding[1], worst, codes[1]) << 8;
    } else {
      entries = ring_pairs(kind, v, worst, codes);
    }
    uint8_t* scales = shared.scales[1] + ColumnReader::row() / Kind::SIDE * RING_COLS + s * TRANSPOSED_COLS + ColumnReader::column();
    *reinterpret_cast<uint16_t*>(scales) = uint16_t(entries);
    uint64_t to = to_columns + s * TRANSPOSED_COLS * lines;
    store8_part(pointer<uint8_t>(to), codes[0]);
    store8_part(pointer<uint8_t>(to + lines), codes[1]);
  });
  if (__syncthreads_or(worst >= 0x7F800000u)) return ring_carefully<8>(job, step, tile.row, tile.col, tile.steps, shared.mixed);
  const View view{job.rows, job.cols, 0};
  if (rows) store_scales<true>(*rows, view, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[0], RING_COLS);
  if (columns) store_scales<true>(*columns, view, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[1], RING_COLS);
}

// NVFP4 with scales of 16 x 16 blocks: the codes of both orders are the same.
template <int STAGES>
__device__ __forceinline__ void ring_square(const RingTile& tile, const Step* step, RingMemory<STAGES>& shared) {
  using Rows = RowTile<8, true, 4>;
  using Columns = ColumnTile<8, 4>;
  const Encode& job = tile.job;
  const Pass& pass = job.pass[0];
  const uint64_t pitch = job.cols / 2, lines = job.rows / 2, to_rows = pass.data[0], to_columns = pass.data[1];
  const TwoLevelFp4 kind = TwoLevelFp4::of(pass.ingredients, shared.multipliers);
  const TileReader reader;
  const uint32_t row = TileReader::row(), col = TileReader::column();
  const uint32_t row_at = kept(Rows::chunk(row, col / 32) + col % 32 / 2), column_at = kept(Columns::chunk(col, row / 32) + row % 32 / 2);
  uint32_t worst = 0;
  through_ring(shared.ring, job.source, job.cols, tile.row, tile.col, tile.steps, [&](const uint8_t* values, uint32_t s) {
    uint32_t x[4][4], maxima[4], codes[4], columns[4];
    reader.read(values, x);
#pragma unroll
    for (int i = 0; i < 4; ++i) maxima[i] = largest_magnitudes(x[i]);
    uint32_t most = largest_magnitudes(maxima);
    // Four lanes down, two across.
#pragma unroll
    for (uint32_t bit : {1u, 4u, 8u}) most = __vmaxu2(most, __shfl_xor_sync(FULL_WARP, most, bit));
    float amax = __uint_as_float(max(most << 16, most & 0xFFFF0000u));
    bool large = false;
    Scaled block = kind.block(amax, worst, large);
    shared.scales[0][row / 16 * (RING_COLS / 16) + (s * TRANSPOSED_COLS + col) / 16] = uint8_t(block.entry);
    if (must_clamp(large)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = codes_of_eight<true>(x[i], block.multiplier);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) codes[i] = codes_of_eight<false>(x[i], block.multiplier);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) *reinterpret_cast<uint32_t*>(shared.rows + row_at + i * Rows::PITCH) = codes[i];
    transpose_nibbles(codes, columns);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint8_t* to = shared.columns + column_at + j * (Columns::CHUNKS * 16);
      *reinterpret_cast<uint16_t*>(to) = uint16_t(j % 2 ? columns[j / 2] >> 16 : columns[j / 2]);
    }
    __syncthreads();
    uint64_t left = tile.col + s * TRANSPOSED_COLS;
    if (to_rows) store_lines<Rows>(to_rows, true, tile.row, left / 2, job.rows, pitch, false, shared.rows);
    if (to_columns) store_lines<Columns>(to_columns, true, left, tile.row / 2, job.cols, lines, false, shared.columns);
  });
  if (__syncthreads_or(worst >= 0x7F800000u)) return ring_carefully<8>(job, step, tile.row, tile.col, tile.steps, shared.mixed);
  store_scales<true>(pass, View{job.rows, job.cols, 0}, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[0], RING_COLS);
}

}  // namespace lowp
