// A warp's tile of 32 x 32 elements in registers: each lane holds 32/W consecutive rows of W
// consecutive columns, one 16-byte chunk of input each. Where blocks and lanes meet, maxima are
// reduced over lanes by exchanging halves, so that each lane ends with its own block.
#pragma once
#include <lowp/memory.cuh>

namespace lowp {

constexpr uint32_t FULL_WARP = 0xFFFFFFFFu;

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
  // Elements of a row that lie inside, of `most` from (row, col) on.
  __device__ __forceinline__ uint32_t count(uint64_t row, uint64_t col, uint32_t most) const {
    if (!holds(row, col)) return 0;
    return uint32_t(min(uint64_t(most), min(cols - col, elements - (row * cols + col))));
  }
  // Whether all of a rectangle lies inside.
  __device__ __forceinline__ bool holds_all(uint64_t row, uint64_t col, uint32_t height, uint32_t width) const {
    return row + height <= rows && col + width <= cols && (row + height - 1) * cols + col + width <= elements;
  }
};

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

// Keeps the compiler from loading what follows before what precedes. The loads of edges are rare, and
// many at a time would take registers from the others.
__device__ __forceinline__ void one_by_one() { asm volatile("" ::: "memory"); }

// The values of a warp's tile; 0 outside the matrix. `row_blocks<SIDE>` are the amaxes of the blocks of
// 1 x SIDE that a lane ends with: with SIDE 32 that of row lane % N of its rows, with SIDE 16 those of
// rows lane % (N / 2) * 2 and the next. `column_blocks` are the same of columns, by lane / N.
template <int W>
struct Values;

// binary32.
template <>
struct Values<4> {
  float x[8][4];

  __device__ __forceinline__ float at(int i, int j) const { return x[i][j]; }
  __device__ __forceinline__ void put(int i, int j, float y) { x[i][j] = y; }

  __device__ __forceinline__ void load(uint64_t source, bool vector, const View& view, const Lane<4>& lane) {
    uint64_t row = lane.row + lane.local_row(), col = lane.col + lane.local_col();
    const float* from = pointer<const float>(source) + row * view.cols + col;
    if (vector && view.holds_all(lane.row, lane.col, 32, 32)) {
#pragma unroll
      for (int i = 0; i < 8; ++i) set(i, as_floats(load16_line(from + i * view.cols)));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        uint32_t inside = view.count(row + i, col, 4);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[i][j] = j < inside ? from[i * view.cols + j] : 0.0f;
        one_by_one();
      }
    }
  }
  // Element by element, from a function of the row and column within the warp's tile.
  template <typename At>
  __device__ __forceinline__ void gather(At value, const Lane<4>& lane) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i][j] = value(lane.local_row() + i, lane.local_col() + j);
    }
  }
  __device__ __forceinline__ void set(int i, float4 chunk) {
    x[i][0] = chunk.x;
    x[i][1] = chunk.y;
    x[i][2] = chunk.z;
    x[i][3] = chunk.w;
  }
  // Rounds to bfloat16.
  __device__ __forceinline__ void round() {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) x[i][j] = round_bf16(x[i][j]);
    }
  }
  // Keeps the compiler from doing what follows before a loop instead of in it.
  __device__ __forceinline__ void stay_in_loop() {}

  __device__ __forceinline__ void row_maxima(float (&a)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      a[i] = max_abs(max_abs(max_abs(max_abs(0.0f, x[i][0]), x[i][1]), x[i][2]), x[i][3]);
    }
  }
  __device__ __forceinline__ void column_maxima(float (&a)[4]) const {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      a[j] = 0.0f;
#pragma unroll
      for (int i = 0; i < 8; ++i) a[j] = max_abs(a[j], x[i][j]);
    }
  }
  __device__ __forceinline__ float maximum() const {
    float a[8];
    row_maxima(a);
    return fmaxf(fmaxf(fmaxf(a[0], a[1]), fmaxf(a[2], a[3])), fmaxf(fmaxf(a[4], a[5]), fmaxf(a[6], a[7])));
  }
  template <int SIDE>
  __device__ __forceinline__ void row_blocks(uint32_t lane, float (&out)[2]) const {
    float a[8];
    row_maxima(a);
    scatter_max<8, SIDE / 4, 1>(a, lane);
    out[0] = a[0], out[1] = a[1];
  }
  template <int SIDE>
  __device__ __forceinline__ void column_blocks(uint32_t lane, float (&out)[2]) const {
    float a[4];
    column_maxima(a);
    scatter_max<4, SIDE / 8, 8>(a, lane);
    out[0] = a[0], out[1] = a[1];
  }
  // Elements j and j + 1 of row i times a pair of powers of two in bfloat16.
  __device__ __forceinline__ float2 times(int i, int j, uint32_t m) const {
    return make_float2(__fmul_rn(x[i][j], widen_low(m)), __fmul_rn(x[i][j + 1], widen_high(m)));
  }
};

// The larger of pairs of bfloat16, where a NaN loses.
__device__ __forceinline__ uint32_t max_pair(uint32_t a, uint32_t b) {
  uint32_t y;
  asm("max.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// The largest magnitudes of four pairs; a NaN only where there is nothing else.
__device__ __forceinline__ uint32_t max_abs_pairs(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  constexpr uint32_t MAGNITUDE = 0x7FFF7FFFu;
#if LOWP_MAX_MAGNITUDE
  // The sign of the result is that of a product, and dropped.
  asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(c) : "r"(d));
  asm("max.xorsign.abs.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(c));
  return a & MAGNITUDE;
#else
  return max_pair(max_pair(a & MAGNITUDE, b & MAGNITUDE), max_pair(c & MAGNITUDE, d & MAGNITUDE));
#endif
}

// bfloat16, in pairs.
template <>
struct Values<8> {
  uint32_t x[4][4];

  __device__ __forceinline__ float at(int i, int j) const { return j % 2 ? widen_high(x[i][j / 2]) : widen_low(x[i][j / 2]); }
  // Rounded to bfloat16.
  __device__ __forceinline__ void put(int i, int j, float y) {
    uint32_t bits = narrow(y);
    x[i][j / 2] = __byte_perm(x[i][j / 2], bits, j % 2 ? 0x5410 : 0x3254);
  }

  __device__ __forceinline__ void load(uint64_t source, bool vector, const View& view, const Lane<8>& lane) {
    uint64_t row = lane.row + lane.local_row(), col = lane.col + lane.local_col();
    const uint16_t* from = pointer<const uint16_t>(source) + row * view.cols + col;
    if (vector && view.holds_all(lane.row, lane.col, 32, 32)) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint4 raw = load16_line(from + i * view.cols);
        x[i][0] = raw.x;
        x[i][1] = raw.y;
        x[i][2] = raw.z;
        x[i][3] = raw.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t inside = view.count(row + i, col, 8);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          uint32_t bits = j < inside ? from[i * view.cols + j] : 0;
          x[i][j / 2] = j % 2 ? x[i][j / 2] | bits << 16 : bits;
        }
        one_by_one();
      }
    }
  }
  template <typename At>
  __device__ __forceinline__ void gather(At value, const Lane<8>& lane) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint32_t bits = __float_as_uint(value(lane.local_row() + i, lane.local_col() + j));
        x[i][j / 2] = j % 2 ? x[i][j / 2] | (bits & 0xFFFF0000u) : bits >> 16;
      }
    }
  }
  __device__ __forceinline__ void round() {}
  __device__ __forceinline__ void stay_in_loop() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) asm volatile("" : "+r"(x[i][j]));
    }
  }

  // Rows 2k and 2k + 1 in pair k.
  __device__ __forceinline__ void row_maxima(uint32_t (&a)[2]) const {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t first = max_abs_pairs(x[2 * k][0], x[2 * k][1], x[2 * k][2], x[2 * k][3]);
      uint32_t second = max_abs_pairs(x[2 * k + 1][0], x[2 * k + 1][1], x[2 * k + 1][2], x[2 * k + 1][3]);
      a[k] = max_pair(__byte_perm(first, second, 0x5410), __byte_perm(first, second, 0x7632));
    }
  }
  // Columns 2k and 2k + 1 in pair k.
  __device__ __forceinline__ void column_maxima(uint32_t (&a)[4]) const {
#pragma unroll
    for (int k = 0; k < 4; ++k) a[k] = max_abs_pairs(x[0][k], x[1][k], x[2][k], x[3][k]);
  }
  __device__ __forceinline__ float maximum() const {
    uint32_t a[2];
    row_maxima(a);
    return larger(max_pair(a[0], a[1]));
  }
  template <int SIDE>
  __device__ __forceinline__ void row_blocks(uint32_t lane, float (&out)[2]) const {
    uint32_t a[2];
    row_maxima(a);
    scatter_pairs<2, SIDE / 8, 1>(a, lane, out);
  }
  template <int SIDE>
  __device__ __forceinline__ void column_blocks(uint32_t lane, float (&out)[2]) const {
    uint32_t a[4];
    column_maxima(a);
    scatter_pairs<4, SIDE / 4, 4>(a, lane, out);
  }
  // A product with a power of two is exact in bfloat16 unless it is subnormal, where every code is 0.
  __device__ __forceinline__ float2 times(int i, int j, uint32_t m) const {
    uint32_t y;
    // Adding -0 keeps the sign of a zero.
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y) : "r"(x[i][j / 2]), "r"(m), "r"(0x80008000u));
    return make_float2(widen_low(y), widen_high(y));
  }

 private:
  // A NaN loses here, too.
  static __device__ __forceinline__ float larger(uint32_t pair) {
    return fmaxf(fmaxf(widen_low(pair), widen_high(pair)), 0.0f);
  }
  // scatter_max over pairs: each lane ends with one value, or with two where there are half as many lanes.
  template <int PAIRS, int LANES, int STRIDE>
  static __device__ __forceinline__ void scatter_pairs(uint32_t (&a)[PAIRS], uint32_t lane, float (&out)[2]) {
    constexpr bool SPLIT = LANES == 2 * PAIRS;
    int n = PAIRS;
#pragma unroll
    for (int l = LANES / 2; l >= (SPLIT ? 2 : 1); l /= 2) {
      n /= 2;
      bool upper = (lane & (l * STRIDE)) != 0;
#pragma unroll
      for (int i = 0; i < PAIRS / 2; ++i) {
        if (i < n) {
          uint32_t keep = upper ? a[i + n] : a[i];
          uint32_t send = upper ? a[i] : a[i + n];
          a[i] = max_pair(keep, __shfl_xor_sync(FULL_WARP, send, l * STRIDE));
        }
      }
    }
    if (SPLIT) {
      a[0] = max_pair(a[0], __shfl_xor_sync(FULL_WARP, a[0], STRIDE));
      out[0] = fmaxf((lane & STRIDE) != 0 ? widen_high(a[0]) : widen_low(a[0]), 0.0f);
    } else {
      out[0] = fmaxf(widen_low(a[0]), 0.0f);
      out[1] = fmaxf(widen_high(a[0]), 0.0f);
    }
  }
};

// Four words of four bytes, transposed: byte r of out[c] is byte c of in[r].
__device__ __forceinline__ void transpose_bytes4(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  uint32_t a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
  uint32_t c = __byte_perm(in[0], in[1], 0x7362), d = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(a, b, 0x5410);
  out[1] = __byte_perm(a, b, 0x7632);
  out[2] = __byte_perm(c, d, 0x5410);
  out[3] = __byte_perm(c, d, 0x7632);
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
