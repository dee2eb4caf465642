// The random Hadamard transform of groups of 16 rows (numerics 15): butterflies of distance 1, 2, 4 and 8 in binary32.
#pragma once
#include <lowp/memory.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// Bit i is set where the sign of row i is negative.
constexpr uint32_t HADAMARD_SIGNS = 0xD7E8u;

// Row i of a group times its sign and 1/4.
__device__ __forceinline__ float signed_quarter(float x, uint32_t i) {
  return __fmul_rn(x, (HADAMARD_SIGNS >> i & 1) != 0 ? -0.25f : 0.25f);
}

// Butterflies of distance FROM and its doubles below N.
template <uint32_t FROM = 1, uint32_t N>
__device__ __forceinline__ void butterflies(float (&x)[N]) {
#pragma unroll
  for (uint32_t half = FROM; half < N; half *= 2) {
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) {
      if (i & half) continue;
      float a = x[i], b = x[i + half];
      x[i] = __fadd_rn(a, b);
      x[i + half] = __fsub_rn(a, b);
    }
  }
}

// Row `row` of a transformed group, rounded; `at` gives its 16 values.
template <typename At>
__device__ __forceinline__ float transformed(At at, uint32_t row) {
  float v[16];
#pragma unroll
  for (uint32_t i = 0; i < 16; ++i) v[i] = signed_quarter(at(i), i);
  butterflies(v);
  float y = v[0];
#pragma unroll
  for (uint32_t i = 1; i < 16; ++i) y = i == row ? v[i] : y;
  return round_bf16(y);
}

// Transforms the columns of a warp's tile whose first row is a multiple of 16, in place, and rounds. Rows of the last group
// of a matrix of `rows` rows, where that is not whole, are only rounded. A group of rows lies in neighbouring lanes of a
// column: distances within a lane are sums of its own values, others of those of another lane.
template <int W>
__device__ __forceinline__ void transform(Values<W>& v, uint32_t lane, uint64_t first_row, uint64_t rows) {
  constexpr uint32_t N = 32 / W;  // rows of a lane, and lanes of a row
  uint32_t group_row = lane / N * N;
  bool whole = first_row + (group_row | 15) < rows;
#pragma unroll
  for (int j = 0; j < W; ++j) {
    float x[N];
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) x[i] = signed_quarter(v.at(i, j), (group_row + i) % 16);
    butterflies(x);
#pragma unroll
    for (uint32_t half = N; half < 16; half *= 2) {
      // Rows that are `half` apart lie `half` lanes apart: N lanes hold N rows.
      bool upper = (lane & half) != 0;
#pragma unroll
      for (uint32_t i = 0; i < N; ++i) {
        float other = __shfl_xor_sync(FULL_WARP, x[i], half);
        x[i] = upper ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
      }
    }
#pragma unroll
    for (uint32_t i = 0; i < N; ++i) v.put(i, j, whole ? x[i] : v.at(i, j));
  }
  v.round();
}

}  // namespace lowp
