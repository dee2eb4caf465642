// Values of bfloat16 as MXFP8 codes hold them (numerics 6), through a ring of tiles of 32 x 256 (ring_wide.cuh): blocks of 32 of rows
// and of columns, each as values or as codes.
#pragma once
#include <lowp/decoded.cuh>
#include <lowp/ring_wide.cuh>

namespace lowp {

// What a block of threads shares of tiles, whose scales are staged as those of COLS columns.
template <uint32_t COLS>
struct RoundShared {
  uint16_t multipliers[WIDE_COLS], factors[WIDE_COLS];  // in bfloat16, of columns: what values are multiplied by, and codes
  uint8_t scales[2][WIDE_ROWS * COLS / 32];             // of rows; of columns
};

struct alignas(128) RoundRing {
  uint8_t bytes[WIDE_RING_STAGES][WIDE_RING_TILE];
  RoundShared<WIDE_RING_COLS> shared;
};
static_assert(sizeof(RoundRing) == ROUND_RING_BYTES);

// The codes of eight values times pairs of powers of two.
template <typename E>
__device__ __forceinline__ uint2 round_codes(const uint4& v, const uint4& m) {
  uint32_t y[4], pairs[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    // As codes_by_powers.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y[k]) : "r"(word(v, k)), "r"(word(m, k)), "r"(0x80008000u));
    pairs[k] = E::pair(widen_low(y[k]), widen_high(y[k]));
  }
  return make_uint2(__byte_perm(pairs[0], pairs[1], 0x5410), __byte_perm(pairs[2], pairs[3], 0x5410));
}

// Where one orientation goes, from the first value of a thread on.
struct RoundTo {
  uint64_t values, codes;
  bool made;  // any of them, or scales alone
  __device__ __forceinline__ RoundTo(const Round& round, int pass, uint64_t first) {
    const uint64_t to = round.values[pass], data = round.encode.pass[pass].data[0];
    values = to ? to + 2 * first : 0;
    codes = data ? data + first : 0;
    made = (to | data | round.encode.pass[pass].scale[0]) != 0;
  }
  __device__ __forceinline__ bool any() const { return made; }
  template <typename E>
  __device__ __forceinline__ void put(uint64_t at, const uint4& v, const uint4& m, const uint4& f) const {
    const uint2 made = round_codes<E>(v, m);
    if (values) store16_part(pointer<uint8_t>(values + 2 * at), decoded_again<E>(made, f));
    if (codes) store8_part(pointer<uint8_t>(codes + at), made);
  }
};

__device__ __forceinline__ uint4 four_times(uint32_t x) { return make_uint4(x, x, x, x); }

// A thread's part of tiles of 32 x 256: eight values of every eighth row, and 16 rows of two columns, of which a warp has 32.
struct WidePart {
  static constexpr uint32_t ROWS = WIDE_ROWS / 8;
  uint32_t lane, warp, own, half, pair, pair_at;
  __device__ __forceinline__ WidePart()
      : lane(threadIdx.x % 32),
        warp(threadIdx.x / 32),
        own(wide_place(warp, lane)),
        half(lane / 16),
        pair(warp * 16 + lane % 16),
        pair_at(kept(wide_place(half * 16, pair / 4) + pair % 4 * 4)) {}
  // The place of its values of row `k`.
  __device__ __forceinline__ uint32_t at(uint32_t k) const { return (own ^ k / 2 * 64) + k * 8 * WIDE_RING_PITCH; }
};

// Rounds the values of tiles side by side, of `width` columns in all; a thread's first value is element `first`. All threads call it.
template <typename E, uint32_t COLS>
struct WideRounding {
  const WidePart& part;
  RoundShared<COLS>& shared;
  const PowerOfTwo<false> rule;
  const RoundTo rows, columns;
  const uint64_t pitch;
  const uint32_t width;

  __device__ __forceinline__ WideRounding(const Round& round, const WidePart& part, uint64_t first, uint32_t width, RoundShared<COLS>& shared)
      : part(part),
        shared(shared),
        rule(PowerOfTwo<false>::of(round.encode.pass[0].ingredients)),
        rows(round, 0, first),
        columns(round, 1, first),
        pitch(round.encode.cols),
        width(width) {}

  // Tile `s`, whose values all threads have stored.
  __device__ __forceinline__ void operator()(const uint8_t* tile, uint32_t s) const {
    const uint32_t lane = part.lane, half = part.half, pair = part.pair;
    const bool inside = s * WIDE_COLS + lane * 8 < width;
    if (columns.any()) {
      uint32_t x[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = *reinterpret_cast<const uint32_t*>(tile + part.pair_at + i * WIDE_RING_PITCH);
      uint32_t a = largest_pairs(x);
      a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 16));
      // Of the two columns, a half of the warp each.
      const Scaled block = rule.block(fmaxf(half ? widen_high(a) : widen_low(a), 0.0f), 0, 0);
      shared.multipliers[2 * pair + half] = uint16_t(__float_as_uint(block.multiplier) >> 16);
      shared.factors[2 * pair + half] = uint16_t(__float_as_uint(E8m0::decode(block.entry)) >> 16);
      shared.scales[1][s * WIDE_COLS + 2 * pair + half] = uint8_t(block.entry);
    }
    uint4 v[WidePart::ROWS];
#pragma unroll
    for (uint32_t k = 0; k < WidePart::ROWS; ++k) {
      v[k] = *reinterpret_cast<const uint4*>(tile + part.at(k));
      if (!rows.any()) continue;
      // Four threads have a block.
      uint32_t a = max_abs_pairs(v[k].x, v[k].y, v[k].z, v[k].w);
      a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 1));
      a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 2));
      const Scaled block = rule.block(largest_of(a), 0, 0);
      if (lane % 4 == 0) shared.scales[0][(part.warp + k * 8) * (COLS / 32) + s * (WIDE_COLS / 32) + lane / 4] = uint8_t(block.entry);
      if (!inside) continue;
      rows.put<E>(k * 8 * pitch + s * WIDE_COLS, v[k], four_times(twice(block.multiplier)), four_times(twice(E8m0::decode(block.entry))));
    }
    if (!columns.any()) return;
    // The multipliers of all columns are there.
    __syncthreads();
    const uint4 m = reinterpret_cast<const uint4*>(shared.multipliers)[lane], f = reinterpret_cast<const uint4*>(shared.factors)[lane];
    if (!inside) return;
#pragma unroll
    for (uint32_t k = 0; k < WidePart::ROWS; ++k) columns.put<E>(k * 8 * pitch + s * WIDE_COLS, v[k], m, f);
  }
};

// Stores the scales of rows and of columns of tiles from (row, col) on, once all threads have rounded them.
template <uint32_t COLS>
__device__ __forceinline__ void store_rounded_scales(const Encode& job, uint64_t row, uint64_t col, uint32_t width, const RoundShared<COLS>& shared) {
  const View view{job.rows, job.cols, 0};
#pragma unroll 1
  for (uint32_t p = 0; p < 2; ++p) store_scales<false>(job.pass[p], view, row, col, WIDE_ROWS, width, shared.scales[p], COLS);
}

template <typename E>
__device__ __forceinline__ void round_wide(const Round& round, uint32_t index, RoundRing& ring) {
  const Encode& job = round.encode;
  const WidePart part;
  const uint32_t across = uint32_t(job.tiles_across);
  const uint64_t row = uint64_t(index / across) * WIDE_ROWS, col = uint64_t(index % across) * job.tile_cols, pitch = job.cols;
  const uint32_t width = uint32_t(min(uint64_t(job.tile_cols), pitch - col)), steps = (width + WIDE_COLS - 1) / WIDE_COLS;

  // A thread copies what it rounds.
  const uint32_t to = kept(uint32_t(__cvta_generic_to_shared(ring.bytes)) + part.own);
  const uint64_t first = (row + part.warp) * pitch + col + part.lane * 8;
  auto start = [&](uint32_t slot, uint32_t step) {
    if (step * WIDE_COLS + part.lane * 8 >= width) return;
#pragma unroll
    for (uint32_t k = 0; k < WidePart::ROWS; ++k) {
      uint32_t there = (to ^ k / 2 * 64) + k * 8 * WIDE_RING_PITCH + slot * WIDE_RING_TILE;
      copy16_ring(there, job.source + 2 * (first + step * WIDE_COLS + k * 8 * pitch));
    }
  };
  const WideRounding<E, WIDE_RING_COLS> rounding(round, part, first, width, ring.shared);

  through_stages<WIDE_RING_STAGES>(steps, start, [&](uint32_t slot, uint32_t s) { rounding(ring.bytes[slot], s); });
  __syncthreads();
  store_rounded_scales(job, row, col, job.tile_cols, ring.shared);
}

}  // namespace lowp
