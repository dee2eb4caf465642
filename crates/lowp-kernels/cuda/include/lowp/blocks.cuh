// The encode of FP8 with f32 scales of 1 x 128, 128 x 1 and 128 x 128 blocks (numerics 8): tiles of 128 x 128, each half of
// which is laid out as a tile of quantize.cuh.
#pragma once
#include <lowp/forms.cuh>
#include <lowp/quantize.cuh>

namespace lowp {

struct alignas(16) BlocksStage {
  uint8_t codes[2][2][8192];  // of each half: row-major and transposed, or of the first and the second pass
  float maxima[4][128];       // of the warps that share rows, or columns
  float multipliers[2][128];  // of each pass: of rows, of columns, or one
};

template <int W>
struct BlocksPass {
  static constexpr int N = 32 / W;
  using Tile = Tiling<true>;
  const Encode& job;
  BlocksStage& stage;
  uint32_t p, lane;
  uint64_t tile_row, tile_col;

  __device__ __forceinline__ const Pass& pass() const { return job.pass[p]; }
  __device__ __forceinline__ bool by_row() const { return pass().block_rows == 1; }
  __device__ __forceinline__ bool by_column() const { return pass().block_cols == 1; }

  // Maxima of rows, of columns, or of all values, of each warp.
  __device__ __forceinline__ void maxima(const Values<W> (&v)[2]) const {
    uint32_t warp_down = threadIdx.x / 32 % 4, warp_across = threadIdx.x / 128;
    float a[2], b[2];
    if (by_row()) {
      v[0].template row_blocks<32>(lane, a);
      v[1].template row_blocks<32>(lane, b);
      stage.maxima[warp_across][Tile::warp_row() + lane] = fmaxf(a[0], b[0]);
    } else if (by_column()) {
      v[0].template column_blocks<32>(lane, a);
      v[1].template column_blocks<32>(lane, b);
      uint32_t col = Tile::warp_col() + lane % N * W + lane / N;
      stage.maxima[warp_down][col] = a[0];
      stage.maxima[warp_down][64 + col] = b[0];
    } else {
      float all = all_max(fmaxf(v[0].maximum(), v[1].maximum()), 31);
      if (lane == 0) stage.maxima[0][threadIdx.x / 32] = all;
    }
  }

  // The scale of a block, by one thread: where it is stored, and its multiplier.
  __device__ __forceinline__ void scale(uint32_t t) const {
    float a = stage.maxima[0][t];
    if (by_row()) {
      a = fmaxf(a, stage.maxima[1][t]);
    } else if (by_column()) {
      a = fmaxf(fmaxf(a, stage.maxima[1][t]), fmaxf(stage.maxima[2][t], stage.maxima[3][t]));
    } else {
#pragma unroll
      for (int warp = 1; warp < 8; ++warp) a = fmaxf(a, stage.maxima[0][warp]);
    }
    const Ingredients& made = pass().ingredients;
    float multiplier = tensor_scale(a, max_finite(made.element), made.pow2, made.epsilon);
    stage.multipliers[p][t] = multiplier;
    uint64_t row = tile_row + (by_row() ? t : 0), col = tile_col + (by_column() ? t : 0);
    if (row >= job.rows || col >= job.cols) return;
    uint64_t r = by_row() ? row : row / 128, c = by_column() ? col : col / 128;
    uint64_t down = by_row() ? job.rows : cdiv(job.rows, 128), across = by_column() ? job.cols : cdiv(job.cols, 128);
    uint32_t entry = __float_as_uint(__fdiv_rn(1.0f, multiplier));
    if (pass().scale[0]) pointer<uint32_t>(pass().scale[0])[r * across + c] = entry;
    if (pass().scale[1]) pointer<uint32_t>(pass().scale[1])[c * down + r] = entry;
#pragma unroll 1
    for (int order = 0; order < 2; ++order) {
      uint64_t to = pass().form[order].to;
      if (to) spread(job, pass(), order, r, c, entry, [&](uint64_t index, uint32_t bits) { pointer<uint32_t>(to)[index] = bits; });
    }
  }

  template <typename At>
  __device__ __forceinline__ void stage_half(const Values<W>& v, int half, At at) const {
    bool rows = pass().data[0], columns = pass().data[1];
    uint8_t* row_stage = stage.codes[half][job.passes == 1 ? 0 : p];
    uint8_t* column_stage = stage.codes[half][job.passes == 1 ? 1 : p];
    if (pass().ingredients.element == E4M3) {
      stage_codes8<W, true, false, E4m3>(v, lane, rows, columns, row_stage, column_stage, at);
    } else {
      stage_codes8<W, true, false, E5m2>(v, lane, rows, columns, row_stage, column_stage, at);
    }
  }

  __device__ __forceinline__ void codes(const Values<W> (&v)[2]) const {
    const float* m = stage.multipliers[p];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (by_column()) {
        float of[W];
#pragma unroll
        for (int j = 0; j < W; ++j) of[j] = m[half * 64 + Tile::warp_col() + lane % N * W + j];
        stage_half(v[half], half, [&](int, int j) { return of[j]; });
      } else {
        float of[N];
#pragma unroll
        for (int i = 0; i < N; ++i) of[i] = m[by_row() ? Tile::warp_row() + lane / N * N + i : 0];
        stage_half(v[half], half, [&](int i, int) { return of[i]; });
      }
    }
  }
};

// Encodes a tile from the source.
template <int W>
__device__ __forceinline__ void encode_blocks(const Encode& job, uint32_t index, BlocksStage& stage) {
  uint32_t lane = threadIdx.x % 32;
  uint32_t across = uint32_t(job.tiles_across);
  const uint64_t row = uint64_t(index / across) * BLOCKS_SIDE, col = uint64_t(index % across) * BLOCKS_SIDE;
  const View view{job.rows, job.cols, job.rows * job.cols};
  Values<W> v[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Lane<W> at{lane, row + Tiling<true>::warp_row(), col + half * 64 + Tiling<true>::warp_col()};
    v[half].load(job.source, job.vector & VECTOR_SOURCE, view, at);
    if (job.via_bf16) v[half].round();
  }
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) {
    v[0].stay_in_loop();
    v[1].stay_in_loop();
    BlocksPass<W> pass{job, stage, p, lane, row, col};
    if (p != 0) __syncthreads();
    pass.maxima(v);
    __syncthreads();
    uint32_t scales = pass.by_row() || pass.by_column() ? 128 : 1;
    if (threadIdx.x < scales) pass.scale(threadIdx.x);
    __syncthreads();
    pass.codes(v);
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) {
    const Pass& pass = job.pass[p];
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      uint64_t left = col + half * 64;
      if (left >= job.cols) break;
      if (pass.data[0]) {
        store_lines<RowTile<W, true, 8>>(pass.data[0], job.vector & (VECTOR_ROWS_0 << p), row, left, job.rows, job.cols, false,
                                         stage.codes[half][job.passes == 1 ? 0 : p]);
      }
      if (pass.data[1]) {
        store_lines<ColumnTile<W, 8>>(pass.data[1], job.vector & (VECTOR_COLUMNS_0 << p), left, row, job.cols, job.rows, false,
                                      stage.codes[half][job.passes == 1 ? 1 : p]);
      }
    }
  }
}

// Not inlined: with registers of its own.
template <int W>
__device__ __noinline__ void blocks_apart(const Encode& job, uint32_t index, BlocksStage& stage) {
  encode_blocks<W>(job, index, stage);
}

}  // namespace lowp
