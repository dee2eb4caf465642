// E2M1 of blocks of a row and MXFP8 of blocks of a column, both row-major, of bfloat16 through a ring of tiles.
#pragma once
#include <lowp/ring_fp4.cuh>

namespace lowp {

// Amaxes here lose to no NaN: where there is one, `worst` says so, and the tile is done again.
__device__ __forceinline__ Scaled power_block(const PowerOfTwo<false>& rule, float amax, uint32_t& worst) {
  worst = max(worst, __float_as_uint(amax));
  return rule.block(amax, 0, 0);
}

// The multipliers of blocks of 32 rows of a column to where all threads find them, in pairs; their scales to the stage.
__device__ __forceinline__ void ring_multipliers(const PowerOfTwo<false>& rule, const TwoColumns& v, uint32_t s, uint32_t& worst,
                                                 uint8_t* scales, uint32_t (&pairs)[4][TRANSPOSED_COLS / 2]) {
  uint32_t amaxes = v.amaxes(), block_row = ColumnReader::row() / 32;
  amaxes = __vmaxu2(amaxes, __shfl_xor_sync(FULL_WARP, amaxes, 1));
  Scaled first = power_block(rule, widen_low(amaxes), worst), second = power_block(rule, widen_high(amaxes), worst);
  if (ColumnReader::row() % 32 != 0) return;
  pairs[block_row][ColumnReader::column() / 2] = __byte_perm(__float_as_uint(first.multiplier), __float_as_uint(second.multiplier), 0x7632);
  *reinterpret_cast<uint16_t*>(scales + block_row * RING_COLS + s * TRANSPOSED_COLS + ColumnReader::column()) =
      uint16_t(first.entry | second.entry << 8);
}

template <typename Kind, int STAGES>
__device__ __forceinline__ void ring_fp4_fp8(const RingTile& tile, const Step* step, RingMemory<STAGES>& shared) {
  const Encode& job = tile.job;
  const Pass &rows = job.pass[0], &columns = job.pass[1];
  const uint64_t pitch = job.cols, row_pitch = pitch / 2;
  const uint64_t first_row = tile.row + RunReader::row(0), first_col = tile.col + RunReader::column();
  const uint64_t to_rows = rows.data[0] + first_row * row_pitch + first_col / 2;
  const uint64_t to_columns = columns.data[0] + first_row * pitch + first_col;
  const auto rule = PowerOfTwo<false>::of(columns.ingredients);
  const Kind kind = Kind::of(rows.ingredients, shared.multipliers);
  const RunReader runs;
  const ColumnReader pairs;
  uint32_t worst = 0;
  through_ring(shared.ring, job.source, job.cols, tile.row, tile.col, tile.steps, [&](const uint8_t* values, uint32_t s) {
    ring_multipliers(rule, pairs.read(values), s, worst, shared.scales[1], shared.pairs);
    __syncthreads();
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const Run v = runs.read(values, k);
      uint2 codes;
      uint32_t entry = ring_run(kind, v, Nearest{}, worst, codes);
      store8_part(pointer<uint8_t>(to_rows + k * 8 * row_pitch + s * (TRANSPOSED_COLS / 2)), codes);
      shared.scales[0][(RunReader::row(k) * RING_COLS + s * TRANSPOSED_COLS + RunReader::column()) / Kind::SIDE] = uint8_t(entry);
      const uint4* m = reinterpret_cast<const uint4*>(shared.pairs[RunReader::row(k) / 32] + RunReader::column() / 2);
      const uint4 low = m[0], high = m[1];
      const uint32_t all[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      store16_part(pointer<uint8_t>(to_columns + k * 8 * pitch + s * TRANSPOSED_COLS), codes_by_powers<E4m3>(v, [&](int i) { return all[i]; }));
    }
  });
  if (__syncthreads_or(worst >= 0x7F800000u)) return ring_carefully<8>(job, step, tile.row, tile.col, tile.steps, shared.mixed);
  const View view{job.rows, job.cols, 0};
  store_scales<true>(rows, view, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[0], RING_COLS);
  store_scales<true>(columns, view, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[1], RING_COLS);
}

}  // namespace lowp
