// A warp's tile of 32 x 32 elements in registers: each lane holds 32/W consecutive rows of W
// consecutive columns, one 16-byte chunk of input each. Where blocks and lanes meet, maxima are
// reduced over lanes by exchanging halves, so that each lane ends with its own block.
#pragma once
#include <lowp/memory.cuh>

namespace lowp {

constexpr uint32_t FULL_WARP = 0xFFFFFFFFu;
constexpr int THREADS = 256;

// Where the 32 x 32 elements of a warp lie.
template <int W>
struct Lane {
  static constexpr int N = 32 / W;  // rows of a lane, and lanes of a row

  uint32_t lane;
  uint64_t row, col;  // of the warp's first element
  __device__ __forceinline__ uint32_t local_row() const { return lane / N * N; }
  __device__ __forceinline__ uint32_t local_col() const { return lane % N * W; }
};

// A matrix, or a run of elements seen as one.
struct View {
  uint64_t rows, cols;
  uint64_t elements;  // rows * cols, or less where the last row is not full
  __device__ __forceinline__ bool holds(uint64_t row, uint64_t col) const {
    return row < rows && col < cols && row * cols + col < elements;
  }
  // Whether all of a rectangle lies inside.
  __device__ __forceinline__ bool holds_all(uint64_t row, uint64_t col, uint32_t height, uint32_t width) const {
    return row + height <= rows && col + width <= cols && (row + height - 1) * cols + col + width <= elements;
  }
};

// The values of a warp's tile; 0 outside the matrix.
template <int W>
__device__ __forceinline__ void load_values(uint64_t source, uint8_t code, bool vector, const View& view,
                                            const Lane<W>& at, float (&v)[32 / W][W]) {
  constexpr int N = 32 / W;
  uint64_t row = at.row + at.local_row(), col = at.col + at.local_col();
  if (vector && view.holds_all(at.row, at.col, 32, 32)) {
    if constexpr (W == 8) {
      const uint16_t* from = pointer<const uint16_t>(source) + row * view.cols + col;
      uint4 raw[N];
#pragma unroll
      for (int i = 0; i < N; ++i) raw[i] = load16(from + i * view.cols);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          v[i][2 * j] = widen_low(words[j]);
          v[i][2 * j + 1] = widen_high(words[j]);
        }
      }
    } else {
      const float* from = pointer<const float>(source) + row * view.cols + col;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        float4 chunk = as_floats(load16(from + i * view.cols));
        v[i][0] = chunk.x;
        v[i][1] = chunk.y;
        v[i][2] = chunk.z;
        v[i][3] = chunk.w;
      }
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      bool inside = view.holds(row + i, col + j);
      v[i][j] = inside ? load_source(source, W == 8 ? BF16 : F32, (row + i) * view.cols + col + j) : 0.0f;
    }
  }
}

template <int W>
__device__ __forceinline__ void round_values(float (&v)[32 / W][W]) {
#pragma unroll
  for (int i = 0; i < 32 / W; ++i) {
#pragma unroll
    for (int j = 0; j < W; ++j) v[i][j] = round_bf16(v[i][j]);
  }
}

// max(a, |x|), where a NaN loses.
__device__ __forceinline__ float max_abs(float a, float x) { return fmaxf(a, fabsf(x)); }

// Reduces a[0 .. N) over LANES lanes whose numbers differ in the bits STRIDE .. STRIDE * LANES / 2:
// lane k of them ends with the maxima of a[k * N / LANES + r] in a[r].
template <int N, int LANES, int STRIDE>
__device__ __forceinline__ void scatter_max(float (&a)[N], uint32_t lane) {
  int n = N;
#pragma unroll
  for (int l = LANES / 2; l >= 1; l /= 2) {
    n /= 2;
    bool upper = (lane & (l * STRIDE)) != 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      if (i < n) {
        float keep = upper ? a[i + n] : a[i];
        float send = upper ? a[i] : a[i + n];
        a[i] = fmaxf(keep, __shfl_xor_sync(FULL_WARP, send, l * STRIDE));
      }
    }
  }
}

// The maximum over lanes whose numbers differ in the bits of `mask`.
__device__ __forceinline__ float all_max(float a, uint32_t mask) {
#pragma unroll
  for (uint32_t bit = 1; bit < 32; bit *= 2) {
    if (mask & bit) a = fmaxf(a, __shfl_xor_sync(FULL_WARP, a, bit));
  }
  return a;
}

// The maximum over a block of threads, in thread 0; every thread calls it once.
__device__ __forceinline__ float block_max(float a) {
  __shared__ float warps[THREADS / 32];
  a = all_max(a, 31);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = a;
  __syncthreads();
  if (threadIdx.x < 32) {
    a = threadIdx.x < THREADS / 32 ? warps[threadIdx.x] : 0.0f;
    a = all_max(a, THREADS / 32 - 1);
  }
  return a;
}

}  // namespace lowp
