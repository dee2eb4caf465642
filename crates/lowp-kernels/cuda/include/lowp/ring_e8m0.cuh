// FP8 with E8M0 scales of bfloat16 through a ring of tiles: row-major codes of blocks of a row, or of a column. Beside those of a
// column there may be two-level E2M1 codes of blocks of a row.
#pragma once
#include <lowp/ring_fp4.cuh>

namespace lowp {

// FP8 codes of a run times pairs of powers of two. A product is exact in bfloat16 unless it is subnormal, where every code is 0;
// adding -0 keeps the sign of a zero.
template <typename At>
__device__ __forceinline__ uint4 codes_by_powers(const Run& v, At m) {
  uint32_t out[4], y[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y[k]) : "r"(v.x[k]), "r"(m(k)), "r"(0x80008000u));
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t a = y[2 * k], b = y[2 * k + 1];
    out[k] = __byte_perm(E4m3::pair(widen_low(a), widen_high(a)), E4m3::pair(widen_low(b), widen_high(b)), 0x5410);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Amaxes here lose to no NaN: where there is one, `worst` says so, and the tile is done again.
struct E8m0Fp8 {
  static constexpr uint32_t SIDE = 32;
  PowerOfTwo<false> rule;
  __device__ __forceinline__ Scaled block(float amax, uint32_t& worst) const {
    worst = max(worst, __float_as_uint(amax));
    return rule.block(amax, 0, 0);
  }
};

// The multipliers of blocks of 32 rows of a column to where all threads find them, in pairs; their scales to the stage.
__device__ __forceinline__ void ring_multipliers(const E8m0Fp8& kind, const TwoColumns& v, uint32_t s, uint32_t& worst, uint8_t* scales,
                                                 uint32_t (&pairs)[4][TRANSPOSED_COLS / 2]) {
  uint32_t amaxes = v.amaxes(), block_row = ColumnReader::row() / 32;
  amaxes = __vmaxu2(amaxes, __shfl_xor_sync(FULL_WARP, amaxes, 1));
  Scaled first = kind.block(widen_low(amaxes), worst), second = kind.block(widen_high(amaxes), worst);
  if (ColumnReader::row() % 32 != 0) return;
  pairs[block_row][ColumnReader::column() / 2] = __byte_perm(__float_as_uint(first.multiplier), __float_as_uint(second.multiplier), 0x7632);
  *reinterpret_cast<uint16_t*>(scales + block_row * RING_COLS + s * TRANSPOSED_COLS + ColumnReader::column()) =
      uint16_t(first.entry | second.entry << 8);
}

// Codes and scales of blocks of a row: a block is a run of a thread and that of the next.
template <int STAGES>
__device__ __forceinline__ void ring_e8m0_rows(const RingTile& tile, const Step* step, RingMemory<STAGES>& shared) {
  const Encode& job = tile.job;
  const Pass& pass = job.pass[0];
  const uint64_t pitch = job.cols;
  const uint64_t to = pass.data[0] + (tile.row + RunReader::row(0)) * pitch + tile.col + RunReader::column();
  const E8m0Fp8 kind{PowerOfTwo<false>::of(pass.ingredients)};
  const RunReader runs;
  uint32_t worst = 0;
  through_ring(shared.ring, job.source, job.cols, tile.row, tile.col, tile.steps, [&](const uint8_t* values, uint32_t s) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Run v = runs.read(values, k);
      float amax = v.amax();
      Scaled scale = kind.block(larger_amax(amax, __shfl_xor_sync(FULL_WARP, amax, 1)), worst);
      uint32_t m = twice(scale.multiplier);
      store16_part(pointer<uint8_t>(to + k * 8 * pitch + s * TRANSPOSED_COLS), codes_by_powers(v, [&](int) { return m; }));
      shared.scales[0][(RunReader::row(k) * RING_COLS + s * TRANSPOSED_COLS + RunReader::column()) / 32] = uint8_t(scale.entry);
    }
  });
  if (__syncthreads_or(worst >= 0x7F800000u)) return ring_carefully(job, step, tile.row, tile.col, tile.steps, shared.mixed);
  store_scales<true>(pass, View{job.rows, job.cols, 0}, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[0], RING_COLS);
}

// Those of blocks of a column, of the last pass. TWO_LEVEL_ROWS says that the first has two-level E2M1 codes of blocks of a row.
template <bool TWO_LEVEL_ROWS, int STAGES>
__device__ __forceinline__ void ring_e8m0_columns(const RingTile& tile, const Step* step, RingMemory<STAGES>& shared) {
  const Encode& job = tile.job;
  const Pass &rows = job.pass[0], &columns = job.pass[TWO_LEVEL_ROWS];
  const uint64_t pitch = job.cols, row_pitch = pitch / 2;
  const uint64_t first_row = tile.row + RunReader::row(0), first_col = tile.col + RunReader::column();
  const uint64_t to_rows = TWO_LEVEL_ROWS ? rows.data[0] + first_row * row_pitch + first_col / 2 : 0;
  const uint64_t to_columns = columns.data[0] + first_row * pitch + first_col;
  const E8m0Fp8 kind{PowerOfTwo<false>::of(columns.ingredients)};
  TwoLevelFp4 row_kind{0.0f, nullptr};
  if constexpr (TWO_LEVEL_ROWS) row_kind = TwoLevelFp4::of(rows.ingredients, shared.multipliers);
  const RunReader runs;
  const ColumnReader pairs;
  uint32_t worst = 0;
  through_ring(shared.ring, job.source, job.cols, tile.row, tile.col, tile.steps, [&](const uint8_t* values, uint32_t s) {
    ring_multipliers(kind, pairs.read(values), s, worst, shared.scales[1], shared.pairs);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Run v = runs.read(values, k);
      if constexpr (TWO_LEVEL_ROWS) {
        uint2 codes;
        uint32_t entry = ring_run(row_kind, v, Nearest{}, worst, codes);
        store8_part(pointer<uint8_t>(to_rows + k * 8 * row_pitch + s * (TRANSPOSED_COLS / 2)), codes);
        shared.scales[0][(RunReader::row(k) * RING_COLS + s * TRANSPOSED_COLS + RunReader::column()) / 16] = uint8_t(entry);
      }
      const uint4* m = reinterpret_cast<const uint4*>(shared.pairs[RunReader::row(k) / 32] + RunReader::column() / 2);
      const uint4 low = m[0], high = m[1];
      const uint32_t all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      store16_part(pointer<uint8_t>(to_columns + k * 8 * pitch + s * TRANSPOSED_COLS), codes_by_powers(v, [&](int i) { return all[i]; }));
    }
  });
  if (__syncthreads_or(worst >= 0x7F800000u)) return ring_carefully(job, step, tile.row, tile.col, tile.steps, shared.mixed);
  const View view{job.rows, job.cols, 0};
  if (TWO_LEVEL_ROWS) store_scales<true>(rows, view, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[0], RING_COLS);
  store_scales<true>(columns, view, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[1], RING_COLS);
}

}  // namespace lowp
