// Values of bfloat16 as MXFP8 codes hold them (numerics 6), through a ring of tiles of 32 x 256 (ring_wide.cuh): blocks of 32 of rows
// and of columns, each as values or as codes.
#pragma once
#include <lowp/decoded.cuh>
#include <lowp/ring_wide.cuh>

namespace lowp {

struct alignas(128) RoundRing {
  uint8_t bytes[WIDE_RING_STAGES][WIDE_RING_TILE];
  uint16_t multipliers[WIDE_COLS], factors[WIDE_COLS];  // in bfloat16, of columns: what values are multiplied by, and codes
  uint8_t scales[2][WIDE_ROWS * WIDE_RING_COLS / 32];   // of rows; of columns
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
  __device__ __forceinline__ RoundTo(const Round& round, int pass, uint64_t first) {
    const uint64_t to = round.values[pass], data = round.encode.pass[pass].data[0];
    values = to ? to + 2 * first : 0;
    codes = data ? data + first : 0;
  }
  __device__ __forceinline__ bool any() const { return (values | codes) != 0; }
  template <typename E>
  __device__ __forceinline__ void put(uint64_t at, const uint4& v, const uint4& m, const uint4& f) const {
    const uint2 made = round_codes<E>(v, m);
    if (values) store16_part(pointer<uint8_t>(values + 2 * at), decoded_again<E>(made, f));
    if (codes) store8_part(pointer<uint8_t>(codes + at), made);
  }
};

__device__ __forceinline__ uint4 four_times(uint32_t x) { return make_uint4(x, x, x, x); }

template <typename E>
__device__ __forceinline__ void round_wide(const Round& round, uint32_t index, RoundRing& shared) {
  constexpr uint32_t ROWS = WIDE_ROWS / 8;  // of a thread: a warp has every eighth
  const Encode& job = round.encode;
  const uint32_t across = uint32_t(job.tiles_across), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t row = uint64_t(index / across) * WIDE_ROWS, col = uint64_t(index % across) * job.tile_cols, pitch = job.cols;
  const uint32_t width = uint32_t(min(uint64_t(job.tile_cols), pitch - col)), steps = (width + WIDE_COLS - 1) / WIDE_COLS;
  const auto rule = PowerOfTwo<false>::of(job.pass[0].ingredients);

  // A thread copies what it rounds: eight values of a row.
  const uint32_t own = wide_place(warp, lane), to = kept(uint32_t(__cvta_generic_to_shared(shared.bytes)) + own);
  const uint64_t first = (row + warp) * pitch + col + lane * 8;
  auto inside = [&](uint32_t step) { return step * WIDE_COLS + lane * 8 < width; };
  auto fetch = [&](uint32_t step, uint32_t slot) {
    if (step < steps && inside(step)) {
#pragma unroll
      for (uint32_t k = 0; k < ROWS; ++k) {
        uint32_t there = (to ^ k / 2 * 64) + k * 8 * WIDE_RING_PITCH + slot * WIDE_RING_TILE;
        copy16_ring(there, job.source + 2 * (first + step * WIDE_COLS + k * 8 * pitch));
      }
    }
    // Steps that there are not are empty groups.
    asm volatile("cp.async.commit_group;");
  };
  const RoundTo rows(round, 0, first), columns(round, 1, first);
  // 16 rows of two columns, of which a warp has 32.
  const uint32_t half = lane / 16, pair = warp * 16 + lane % 16, pair_at = kept(wide_place(half * 16, pair / 4) + pair % 4 * 4);

#pragma unroll
  for (uint32_t s = 0; s < WIDE_RING_STAGES - 1; ++s) fetch(s, s);
  uint32_t slot = 0;
#pragma unroll 1
  for (uint32_t s = 0; s < steps; ++s) {
    asm volatile("cp.async.wait_group %0;" ::"n"(WIDE_RING_STAGES - 2) : "memory");
    // All threads' copies of this tile are there, and all have read the one before.
    __syncthreads();
    fetch(s + WIDE_RING_STAGES - 1, slot == 0 ? WIDE_RING_STAGES - 1 : slot - 1);
    const uint8_t* tile = shared.bytes[slot];
    slot = slot == WIDE_RING_STAGES - 1 ? 0 : slot + 1;
    if (columns.any()) {
      uint32_t x[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = *reinterpret_cast<const uint32_t*>(tile + pair_at + i * WIDE_RING_PITCH);
      uint32_t a = largest_pairs(x);
      a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 16));
      // Of the two columns, a half of the warp each.
      const Scaled block = rule.block(fmaxf(half ? widen_high(a) : widen_low(a), 0.0f), 0, 0);
      shared.multipliers[2 * pair + half] = uint16_t(__float_as_uint(block.multiplier) >> 16);
      shared.factors[2 * pair + half] = uint16_t(__float_as_uint(E8m0::decode(block.entry)) >> 16);
      shared.scales[1][s * WIDE_COLS + 2 * pair + half] = uint8_t(block.entry);
    }
    uint4 v[ROWS];
#pragma unroll
    for (uint32_t k = 0; k < ROWS; ++k) {
      v[k] = *reinterpret_cast<const uint4*>(tile + (own ^ k / 2 * 64) + k * 8 * WIDE_RING_PITCH);
      if (!rows.any()) continue;
      // Four threads have a block.
      uint32_t a = max_abs_pairs(v[k].x, v[k].y, v[k].z, v[k].w);
      a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 1));
      a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 2));
      const Scaled block = rule.block(largest_of(a), 0, 0);
      if (lane % 4 == 0) shared.scales[0][(warp + k * 8) * (WIDE_RING_COLS / 32) + s * (WIDE_COLS / 32) + lane / 4] = uint8_t(block.entry);
      if (!inside(s)) continue;
      rows.put<E>(k * 8 * pitch + s * WIDE_COLS, v[k], four_times(twice(block.multiplier)), four_times(twice(E8m0::decode(block.entry))));
    }
    if (!columns.any()) continue;
    // The multipliers of all columns are there.
    __syncthreads();
    const uint4 m = reinterpret_cast<const uint4*>(shared.multipliers)[lane], f = reinterpret_cast<const uint4*>(shared.factors)[lane];
    if (!inside(s)) continue;
#pragma unroll
    for (uint32_t k = 0; k < ROWS; ++k) columns.put<E>(k * 8 * pitch + s * WIDE_COLS, v[k], m, f);
  }
  __syncthreads();
  const View view{job.rows, job.cols, 0};
#pragma unroll 1
  for (uint32_t p = 0; p < 2; ++p) {
    store_scales<false>(job.pass[p], view, row, col, WIDE_ROWS, job.tile_cols, shared.scales[p], WIDE_RING_COLS);
  }
}

}  // namespace lowp
