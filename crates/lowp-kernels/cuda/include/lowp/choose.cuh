// Four over six (numerics 20.1) on a warp's tile: the scales of its blocks of 16, for 6 or for 4, by the smaller error. The
// errors of a block's values are added up in their order, so partial sums go from lane to lane.
#pragma once
#include <lowp/stage.cuh>

namespace lowp {

// The errors of the candidates of one block: sums over `COUNT` values of each of `LANES` lanes whose numbers differ in the
// bits from STRIDE on, in the order of the lanes. `x(i)` is value i of a lane, `inside(i)` whether it is in the matrix.
template <int LANES, int STRIDE, int COUNT, typename At, typename Inside>
__device__ __forceinline__ float chained_error(const ChoiceError& error, uint32_t lane, At x, Inside inside) {
  float terms[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; ++i) terms[i] = inside(i) ? error.of(x(i)) : 0.0f;
  constexpr uint32_t MASK = (LANES - 1) * STRIDE;
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < LANES; ++k) {
    float own = sum;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) own = __fadd_rn(own, terms[i]);
    sum = __shfl_sync(FULL_WARP, own, (lane & ~MASK) | k * STRIDE);
  }
  return sum;
}

// The choice between two candidates with these errors.
__device__ __forceinline__ Scaled chosen(const ScaleRule& rule, const uint32_t (&entries)[2], const float (&errors)[2]) {
  uint32_t entry = errors[1] < errors[0] ? entries[1] : entries[0];
  return {entry, rule.two_level_multiplier(entry)};
}

template <int W>
struct Choice {
  static constexpr int N = 32 / W;             // rows of a lane, and lanes of a row
  static constexpr int ACROSS = 16 / W;        // lanes of a row of a block
  static constexpr int DOWN = 16 / N;          // lanes of a column of a block
  const Ingredients& made;
  uint32_t lane;
  uint64_t first_row, rows;  // of the warp's tile, and of the matrix

  __device__ __forceinline__ ChoiceError error(const ScaleRule& rule, uint32_t entry) const {
    return {rule.two_level_multiplier(entry), E4m3::decode(entry), rule.tensor, made.largest, made.squares != 0};
  }
  __device__ __forceinline__ bool inside(int i) const { return first_row + lane / N * N + i < rows; }

  // Of the block of row i of the lane.
  __device__ __forceinline__ Scaled row(const ScaleRule& rule, const Values<W>& v, int i) const {
    float a = 0.0f;
#pragma unroll
    for (int j = 0; j < W; ++j) a = max_abs(a, v.at(i, j));
    uint32_t entries[2];
    rule.candidates(all_max(a, ACROSS - 1), entries);
    float errors[2];
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
      errors[c] = chained_error<ACROSS, 1, W>(error(rule, entries[c]), lane, [&](int j) { return v.at(i, j); }, [](int) { return true; });
    }
    return chosen(rule, entries, errors);
  }

  // Of the block of column j of the lane.
  __device__ __forceinline__ Scaled column(const ScaleRule& rule, const Values<W>& v, int j) const {
    float a = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) a = max_abs(a, v.at(i, j));
    uint32_t entries[2];
    rule.candidates(all_max(a, (DOWN - 1) * N), entries);
    float errors[2];
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
      errors[c] = chained_error<DOWN, N, N>(error(rule, entries[c]), lane, [&](int i) { return v.at(i, j); },
                                            [&](int i) { return inside(i); });
    }
    return chosen(rule, entries, errors);
  }

  // Of the block of 16 x 16 that the lane has a part of.
  __device__ __forceinline__ Scaled square(const ScaleRule& rule, const Values<W>& v) const {
    float a = all_max(v.maximum(), (ACROSS - 1) | (DOWN - 1) * N);
    uint32_t entries[2];
    rule.candidates(a, entries);
    float errors[2];
#pragma unroll 1
    for (int c = 0; c < 2; ++c) {
      ChoiceError of_candidate = error(rule, entries[c]);
      float sums[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float sum = chained_error<ACROSS, 1, W>(of_candidate, lane, [&](int j) { return v.at(i, j); }, [](int) { return true; });
        sums[i] = inside(i) ? sum : 0.0f;
      }
#pragma unroll
      for (int half = 8; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (half >= N) {
            sums[i] = __fadd_rn(sums[i], __shfl_xor_sync(FULL_WARP, sums[i], half));
          } else if (i < half) {
            sums[i] = __fadd_rn(sums[i], sums[i + half]);
          }
        }
      }
      errors[c] = __shfl_sync(FULL_WARP, sums[0], lane & ~uint32_t((DOWN - 1) * N));
    }
    return chosen(rule, entries, errors);
  }
};

}  // namespace lowp
