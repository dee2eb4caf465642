// FP8 of bfloat16 through a ring of tiles.
#pragma once
#include <lowp/ring_tile.cuh>

namespace lowp {

// FP8 of scales of the tensor, its rows or its columns.
template <typename E>
__device__ __forceinline__ uint32_t four_codes(float a, float b, float c, float d) {
  return __byte_perm(E::pair(a, b), E::pair(c, d), 0x5410);
}

template <typename E>
__device__ __forceinline__ uint4 codes8(const Run& v, float m) {
  uint32_t out[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t a = v.x[2 * k], b = v.x[2 * k + 1];
    out[k] = four_codes<E>(__fmul_rn(widen_low(a), m), __fmul_rn(widen_high(a), m), __fmul_rn(widen_low(b), m), __fmul_rn(widen_high(b), m));
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

template <typename E>
__device__ __forceinline__ uint4 codes8(const TwoColumns& v, bool second, float m) {
  uint32_t out[4];
  auto at = [&](int i) { return __fmul_rn(second ? widen_high(v.x[i]) : widen_low(v.x[i]), m); };
#pragma unroll
  for (int k = 0; k < 4; ++k) out[k] = four_codes<E>(at(4 * k), at(4 * k + 1), at(4 * k + 2), at(4 * k + 3));
  return make_uint4(out[0], out[1], out[2], out[3]);
}

template <typename E, int STAGES>
__device__ __forceinline__ void ring_fp8(const RingTile& tile, RingMemory<STAGES>& shared) {
  const Encode& job = tile.job;
  const Pass *rows = tile.filling(0), *columns = tile.filling(1);
  float of_rows[2] = {0.0f, 0.0f};
  if (rows) {
#pragma unroll
    for (int k = 0; k < 2; ++k) of_rows[k] = tensor_value(rows->ingredients, outer_entry(rows->ingredients, tile.row + RunReader::row(k), 0));
  }
  float* of_columns = shared.multipliers;
  if (columns) {
    uint64_t col = min(tile.col + threadIdx.x, job.cols - 1);
    of_columns[threadIdx.x] = tensor_value(columns->ingredients, outer_entry(columns->ingredients, 0, col));
  }
  const uint64_t to_rows = rows ? rows->data[0] + (tile.row + RunReader::row(0)) * job.cols + tile.col + RunReader::column() : 0;
  const uint64_t to_columns = columns ? columns->data[1] + (tile.col + ColumnReader::column()) * job.rows + tile.row + ColumnReader::row() : 0;
  const uint64_t pitch = job.cols, lines = job.rows;
  const RunReader runs;
  const ColumnReader pairs;
  through_ring(shared.ring, job.source, job.cols, tile.row, tile.col, tile.steps, [&](const uint8_t* values, uint32_t step) {
    if (to_rows) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint4 codes = codes8<E>(runs.read(values, k), of_rows[k]);
        store16_part(pointer<uint8_t>(to_rows + k * 8 * pitch + step * TRANSPOSED_COLS), codes);
      }
    }
    if (to_columns) {
      const TwoColumns v = pairs.read(values);
      float2 m = *reinterpret_cast<const float2*>(of_columns + step * TRANSPOSED_COLS + ColumnReader::column());
      uint64_t to = to_columns + step * TRANSPOSED_COLS * lines;
      store16_part(pointer<uint8_t>(to), codes8<E>(v, false, m.x));
      store16_part(pointer<uint8_t>(to + lines), codes8<E>(v, true, m.y));
    }
  });
}

}  // namespace lowp
