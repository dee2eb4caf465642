// MXFP8 of bfloat16, or of binary32 (ring_f32.cuh), through a ring of tiles of 32 x 256, in which whole blocks of rows, of columns and of squares lie. A row of a tile is read as 512 bytes in a run and written as 256.
#pragma once
#include <lowp/ring.cuh>

namespace lowp {

constexpr uint32_t WIDE_RING_PITCH = 2 * WIDE_COLS, WIDE_RING_TILE = WIDE_ROWS * WIDE_RING_PITCH;

struct alignas(128) WideRing {
  uint8_t bytes[WIDE_RING_STAGES][WIDE_RING_TILE];
  union {
    uint16_t multipliers[WIDE_COLS];   // in bfloat16, of columns or, where they are squares, of 32 columns
    float of_columns[WIDE_COLS / 2];   // of a tile of binary32
  };
  uint8_t scales[2][WIDE_ROWS * WIDE_RING_COLS / 32];  // of rows; of columns or squares
};
static_assert(sizeof(WideRing) == WIDE_RING_BYTES);

// Where a row has its chunk of 16 bytes. Chunks are exchanged so that a quarter of a warp that reads runs of 16 values, and a
// warp that reads pairs of columns, or columns of binary32, of rows that are 16 apart, find them in different banks.
__device__ __forceinline__ uint32_t wide_place(uint32_t row, uint32_t chunk) {
  return row * WIDE_RING_PITCH + (chunk ^ (chunk / 8) % 4 ^ row / 16 % 2 * 4) * 16;
}

// Calls `work(tile, step)` for each tile of 32 rows of 512 bytes from the address `first` on, `steps` of them along rows that are `pitch` bytes
// apart.
template <typename Work>
__device__ __forceinline__ void through_wide(WideRing& ring, uint64_t first, uint64_t pitch, uint32_t steps, Work work) {
  // A warp copies every eighth row.
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t to = kept(uint32_t(__cvta_generic_to_shared(ring.bytes)) + wide_place(warp, lane));
  const uint64_t from = first + warp * pitch + lane * 16;
  auto start = [&](uint32_t slot, uint32_t step) {
#pragma unroll
    for (uint32_t k = 0; k < WIDE_ROWS / 8; ++k) {
      uint32_t there = (to ^ k / 2 * 64) + k * 8 * WIDE_RING_PITCH + slot * WIDE_RING_TILE;
      copy16_ring(there, from + step * WIDE_RING_PITCH + k * 8 * pitch);
    }
  };
  through_stages<WIDE_RING_STAGES>(steps, start, [&](uint32_t slot, uint32_t step) { work(ring.bytes[slot], step); });
}

// Whose blocks have scales: rows and columns, each with codes of their own, one of them, or squares.
enum class Sides { BOTH, ROWS, COLUMNS, SQUARES };

template <Sides SIDES, typename E>
__device__ __forceinline__ void ring_wide(const Encode& job, uint32_t index, WideRing& shared) {
  constexpr int LAST = SIDES == Sides::BOTH;  // the pass of columns or squares
  const uint32_t across = uint32_t(job.tiles_across), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t row = uint64_t(index / across) * WIDE_ROWS, col = uint64_t(index % across) * job.tile_cols, pitch = job.cols;
  const uint32_t steps = uint32_t(min(uint64_t(job.tile_cols), job.cols - col) / WIDE_COLS);
  const auto rule = PowerOfTwo<false>::of(job.pass[0].ingredients);

  // A thread's runs of 16 values, 16 rows apart, and its 16 rows of two columns, of which a warp has 32.
  const uint32_t run_row = threadIdx.x / 16, run_col = threadIdx.x % 16 * 16, run_at = kept(wide_place(run_row, run_col / 8));
  const uint32_t half = lane / 16, pair = warp * 16 + lane % 16, pair_at = kept(wide_place(half * 16, pair / 4) + pair % 4 * 4);
  const uint64_t first = (row + run_row) * pitch + col + run_col;
  const uint64_t to_rows = job.pass[0].data[0] + first, to_columns = job.pass[LAST].data[0] + first;

  through_wide(shared, job.source + 2 * (row * pitch + col), 2 * pitch, steps, [&](const uint8_t* tile, uint32_t s) {
    if constexpr (SIDES != Sides::ROWS) {
      uint32_t x[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = *reinterpret_cast<const uint32_t*>(tile + pair_at + i * WIDE_RING_PITCH);
      uint32_t a = largest_pairs(x);
      a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 16));
      if constexpr (SIDES == Sides::SQUARES) {
#pragma unroll
        for (int bit = 1; bit < 16; bit *= 2) a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, bit));
        const Scaled block = rule.block(largest_of(a), 0, 0);
        if (lane == 0) {
          shared.multipliers[warp] = uint16_t(__float_as_uint(block.multiplier) >> 16);
          shared.scales[LAST][s * (WIDE_COLS / 32) + warp] = uint8_t(block.entry);
        }
      } else {
        // Of the two columns, a half of the warp each.
        const Scaled block = rule.block(fmaxf(half ? widen_high(a) : widen_low(a), 0.0f), 0, 0);
        shared.multipliers[2 * pair + half] = uint16_t(__float_as_uint(block.multiplier) >> 16);
        shared.scales[LAST][s * WIDE_COLS + 2 * pair + half] = uint8_t(block.entry);
      }
    }
    Run v[2];
#pragma unroll
    for (uint32_t k = 0; k < 2; ++k) {
      const uint8_t* here = tile + k * 16 * WIDE_RING_PITCH;
      const uint4 low = *reinterpret_cast<const uint4*>(here + (run_at ^ k * 64));
      const uint4 high = *reinterpret_cast<const uint4*>(here + (run_at ^ k * 64 ^ 16));
      v[k] = {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
      if constexpr (SIDES == Sides::BOTH || SIDES == Sides::ROWS) {
        uint32_t a = largest_pairs(v[k].x);
        a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 1));
        const Scaled block = rule.block(largest_of(a), 0, 0);
        // Two threads have a block.
        if (threadIdx.x % 2 == 0) shared.scales[0][(run_row + 16 * k) * (WIDE_RING_COLS / 32) + (s * WIDE_COLS + run_col) / 32] = uint8_t(block.entry);
        const uint32_t m = twice(block.multiplier);
        store16_part(pointer<uint8_t>(to_rows + k * 16 * pitch + s * WIDE_COLS), codes_by_powers<E>(v[k], [&](int) { return m; }));
      }
    }
    if constexpr (SIDES == Sides::ROWS) return;
    // The multipliers of all columns are there.
    __syncthreads();
    uint32_t m[8];
    if constexpr (SIDES == Sides::SQUARES) {
#pragma unroll
      for (int i = 0; i < 8; ++i) m[i] = shared.multipliers[run_col / 32] * 0x10001u;
    } else {
      const uint4* all = reinterpret_cast<const uint4*>(shared.multipliers + run_col);
      const uint4 low = all[0], high = all[1];
      m[0] = low.x, m[1] = low.y, m[2] = low.z, m[3] = low.w, m[4] = high.x, m[5] = high.y, m[6] = high.z, m[7] = high.w;
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      store16_part(pointer<uint8_t>(to_columns + k * 16 * pitch + s * WIDE_COLS), codes_by_powers<E>(v[k], [&](int i) { return m[i]; }));
    }
  });
  __syncthreads();
  const View view{job.rows, job.cols, 0};
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) {
    store_scales<false>(job.pass[p], view, row, col, WIDE_ROWS, job.tile_cols, shared.scales[p], WIDE_RING_COLS);
  }
}

template <typename E>
__device__ __forceinline__ void ring_wide(const Encode& job, uint32_t index, WideRing& shared) {
  if (job.passes == 2) {
    ring_wide<Sides::BOTH, E>(job, index, shared);
  } else if (job.pass[0].block_rows == 1) {
    ring_wide<Sides::ROWS, E>(job, index, shared);
  } else if (job.pass[0].block_cols == 1) {
    ring_wide<Sides::COLUMNS, E>(job, index, shared);
  } else {
    ring_wide<Sides::SQUARES, E>(job, index, shared);
  }
}

}  // namespace lowp
