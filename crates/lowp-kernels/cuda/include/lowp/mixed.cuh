// The encode of tiles of 128 x 64 of any ingredients by orientation: each pass has an element code and a scale rule of its
// own, scales of lines, four over six, stochastic rounding and a Hadamard transform included.
#pragma once
#include <lowp/choose.cuh>
#include <lowp/forms.cuh>
#include <lowp/hadamard.cuh>
#include <lowp/philox.cuh>
#include <lowp/quantize.cuh>

namespace lowp {

struct MixedStage : Stage<true> {
  // Of the lines of a pass: what values are multiplied by, or the scale rule's factor, what decodes, and the amax.
  float factor[2][128], decode[2][128], amax[2][128];
  // Where stochastic rounding begins: the random byte of the first element, and the generator.
  Philox philox;
  uint64_t random;
};

// What each element of a lane is multiplied by: one number for each of its rows, or for each of its columns.
template <int W>
struct Multipliers {
  float of[8];
  bool columns;
  __device__ __forceinline__ float at(int i, int j) const { return columns ? of[j] : of[i]; }
};

template <int W>
struct MixedPass {
  static constexpr int N = 32 / W;
  const Encode& job;
  MixedStage& stage;
  uint32_t p, lane;
  uint64_t tile_row, tile_col;

  using Tile = Tiling<true>;
  __device__ __forceinline__ const Pass& pass() const { return job.pass[p]; }
  __device__ __forceinline__ const Ingredients& made() const { return job.pass[p].ingredients; }
  __device__ __forceinline__ uint32_t local_row() const { return Tile::warp_row() + lane / N * N; }
  __device__ __forceinline__ uint32_t local_col() const { return Tile::warp_col() + lane % N * W; }

  // The scale of the block of HEIGHT x WIDTH at (row, col) of the warp's tile into the stage.
  template <uint32_t HEIGHT, uint32_t WIDTH>
  __device__ __forceinline__ void put(uint32_t row, uint32_t col, uint32_t entry) const {
    uint32_t r = (Tile::warp_row() + row) / HEIGHT, c = (Tile::warp_col() + col) / WIDTH;
    stage.scales[p][r * (Tile::COLS / WIDTH) + c] = uint8_t(entry);
  }

  // The rule of the tensor, or of the line of element (row, col) of the warp's tile.
  __device__ __forceinline__ ScaleRule rule(uint32_t row, uint32_t col) const {
    ScaleRule r;
    r.rule = made().rule;
    r.element = made().element;
    r.pow2 = false;
    r.epsilon = 0.0f;
    uint32_t line = made().extent == EXTENT_ROWS ? Tile::warp_row() + row : made().extent == EXTENT_COLUMNS ? Tile::warp_col() + col : 0;
    r.tensor = stage.amax[p][line];
    r.factor = stage.factor[p][line];
    r.decode = stage.decode[p][line];
    return r;
  }

  template <uint32_t HEIGHT, uint32_t WIDTH>
  __device__ __forceinline__ float block(uint32_t row, uint32_t col, float amax) const {
    Scaled s = rule(row, col).block(amax);
    put<HEIGHT, WIDTH>(row, col, s.entry);
    return s.multiplier;
  }

  template <int SIDE>
  __device__ __forceinline__ void rows(const Values<W>& v, Multipliers<W>& m) const {
    float a[2];
    v.template row_blocks<SIDE>(lane, a);
    uint32_t first = lane / N * N;
    if constexpr (SIDE == 32) {
      float mine = block<1, 32>(lane, 0, a[0]);
#pragma unroll
      for (int i = 0; i < N; ++i) m.of[i] = __shfl_sync(FULL_WARP, mine, first + i);
    } else {
      uint32_t half = lane / (N / 2) % 2, row = first + lane % (N / 2) * 2;
      float even = block<1, 16>(row, half * 16, a[0]), odd = block<1, 16>(row + 1, half * 16, a[1]);
#pragma unroll
      for (int i = 0; i < N; ++i) m.of[i] = __shfl_sync(FULL_WARP, i % 2 ? odd : even, first + half * (N / 2) + i / 2);
    }
  }

  template <int SIDE>
  __device__ __forceinline__ void columns(const Values<W>& v, Multipliers<W>& m) const {
    float a[2];
    v.template column_blocks<SIDE>(lane, a);
    uint32_t first = lane % N;
    if constexpr (SIDE == 32) {
      float mine = block<32, 1>(0, first * W + lane / N, a[0]);
#pragma unroll
      for (int j = 0; j < W; ++j) m.of[j] = __shfl_sync(FULL_WARP, mine, first + j * N);
    } else {
      uint32_t half = lane / 16, col = first * W + lane / N % (W / 2) * 2;
      float even = block<16, 1>(half * 16, col, a[0]), odd = block<16, 1>(half * 16, col + 1, a[1]);
#pragma unroll
      for (int j = 0; j < W; ++j) m.of[j] = __shfl_sync(FULL_WARP, j % 2 ? odd : even, first + N * (half * (W / 2) + j / 2));
    }
  }

  template <int SIDE>
  __device__ __forceinline__ void square(const Values<W>& v, Multipliers<W>& m) const {
    float a = all_max(v.maximum(), (N / 2 - 1) | (W / 2 - 1) * N);
    if (SIDE == 32) a = all_max(a, N / 2 | 16);
    float one = block<SIDE, SIDE>(lane / N * N, lane % N * W, a);
#pragma unroll
    for (int i = 0; i < N; ++i) m.of[i] = one;
  }

  // Multipliers of a pass with block scales of side SIDE.
  template <int SIDE>
  __device__ __forceinline__ void blocks(const Values<W>& v, Multipliers<W>& m) const {
    m.columns = pass().block_cols == 1;
    if (m.columns) {
      columns<SIDE>(v, m);
    } else if (pass().block_rows == 1) {
      rows<SIDE>(v, m);
    } else {
      square<SIDE>(v, m);
    }
  }

  // The same with a choice of four over six.
  __device__ __forceinline__ void choices(const Values<W>& v, Multipliers<W>& m) const {
    const Choice<W> choice{made(), lane, tile_row + Tile::warp_row(), job.rows};
    uint32_t row = lane / N * N, col = lane % N * W;
    m.columns = pass().block_cols == 1;
    if (m.columns) {
#pragma unroll
      for (int j = 0; j < W; ++j) {
        Scaled s = choice.column(rule(0, col + j), v, j);
        put<16, 1>(row, col + j, s.entry);
        m.of[j] = s.multiplier;
      }
    } else if (pass().block_rows == 1) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        Scaled s = choice.row(rule(row + i, 0), v, i);
        put<1, 16>(row + i, col, s.entry);
        m.of[i] = s.multiplier;
      }
    } else {
      Scaled s = choice.square(rule(0, 0), v);
      put<16, 16>(row, col, s.entry);
#pragma unroll
      for (int i = 0; i < N; ++i) m.of[i] = s.multiplier;
    }
  }

  // Multipliers of a pass without block scales.
  __device__ __forceinline__ void lines(Multipliers<W>& m) const {
    uint8_t extent = made().extent;
    m.columns = extent == EXTENT_COLUMNS;
    uint32_t first = extent == EXTENT_ROWS ? local_row() : extent == EXTENT_COLUMNS ? local_col() : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < (N > W ? N : W)) m.of[i] = stage.factor[p][extent == EXTENT_TENSOR ? 0 : min(first + i, 127u)];
    }
  }

  __device__ __forceinline__ uint8_t* codes(int order) const { return stage.codes[job.passes == 1 ? order : p]; }

  // The random bytes of row i of the lane, W of them.
  __device__ __forceinline__ void random(int i, uint32_t (&words)[W / 4]) const {
    uint64_t index = stage.random + (tile_row + local_row() + i) * job.cols + tile_col + local_col();
#pragma unroll
    for (int w = 0; w < W / 4; ++w) {
      uint32_t word = 0;
      if ((index + 4 * w) % 4 == 0) {
        uint4 block = stage.philox.block((index + 4 * w) / 16);
        uint32_t which = uint32_t((index + 4 * w) / 4 % 4);
        word = which == 0 ? block.x : which == 1 ? block.y : which == 2 ? block.z : block.w;
      } else {
        for (int b = 0; b < 4; ++b) word |= stage.philox.byte(index + 4 * w + b) << (8 * b);
      }
      words[w] = word;
    }
  }

  // Codes of 4 bits, rounded stochastically.
  __device__ __forceinline__ void stage_random(const Values<W>& v, const Multipliers<W>& m) const {
    uint32_t all[N];
    uint32_t row = local_row(), col = local_col();
#pragma unroll
    for (int i = 0; i < N; ++i) {
      uint32_t words[W / 4];
      random(i, words);
      uint32_t packed = 0;
#pragma unroll
      for (int j = 0; j < W; ++j) {
        uint32_t byte = words[j / 4] >> (8 * (j % 4)) & 0xFF;
        packed |= E2m1::stochastic(__fmul_rn(v.at(i, j), m.at(i, j)), byte) << (4 * j);
      }
      all[i] = packed;
      if (pass().data[0]) {
        uint8_t* to = codes(0) + RowTile<W, true, 4>::chunk(row + i, col / 32) + col % 32 / 2;
        if constexpr (W == 8) {
          *reinterpret_cast<uint32_t*>(to) = packed;
        } else {
          *reinterpret_cast<uint16_t*>(to) = uint16_t(packed);
        }
      }
    }
    if (!pass().data[1]) return;
#pragma unroll
    for (int j = 0; j < W; ++j) {
      uint32_t packed = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) packed |= (all[i] >> (4 * j) & 15) << (4 * i);
      uint8_t* to = codes(1) + ColumnTile<W, 4>::chunk(col + j, row / 32) + row % 32 / 2;
      if constexpr (N == 8) {
        *reinterpret_cast<uint32_t*>(to) = packed;
      } else {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(packed);
      }
    }
  }

  template <typename At>
  __device__ __forceinline__ void stage_codes(const Values<W>& v, At at) const {
    bool rows = pass().data[0], columns = pass().data[1];
    switch (made().element) {
      case E4M3: return stage_codes8<W, true, false, E4m3>(v, lane, rows, columns, codes(0), codes(1), at);
      case E5M2: return stage_codes8<W, true, false, E5m2>(v, lane, rows, columns, codes(0), codes(1), at);
      default: return stage_codes4<W>(v, lane, rows, columns, codes(0), codes(1), at);
    }
  }

  // Codes and scales of the pass into the stage.
  __device__ __forceinline__ void quantize(const Values<W>& v) const {
    Multipliers<W> m;
    switch (made().rule) {
      case RULE_TENSOR: lines(m); break;
      case RULE_TWO_LEVEL: blocks<16>(v, m); break;
      case RULE_FOUR_OVER_SIX: choices(v, m); break;
      default: blocks<32>(v, m);
    }
    if (job.stochastic && made().element == E2M1) return stage_random(v, m);
    if (m.columns) {
      stage_codes(v, [&](int, int j) { return m.of[j]; });
    } else {
      stage_codes(v, [&](int i, int) { return m.of[i]; });
    }
  }
};

// What the lines of a pass are scaled by, for the tile from (row, col) on; of a tensor in the first place.
__device__ __forceinline__ void stage_lines(const Encode& job, MixedStage& stage, uint64_t row, uint64_t col) {
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) {
    const Ingredients& made = job.pass[p].ingredients;
    bool rows = made.extent == EXTENT_ROWS, columns = made.extent == EXTENT_COLUMNS;
    uint32_t count = rows ? 128 : columns ? 64 : 1;
    uint64_t first = rows ? row : columns ? col : 0, end = rows ? job.rows : columns ? job.cols : 1;
    uint32_t t = threadIdx.x;
    if (t >= count) continue;
    ScaleRule rule = ScaleRule::of(made, min(first + t, end - 1));
    stage.amax[p][t] = rule.tensor;
    stage.factor[p][t] = made.rule == RULE_TENSOR ? rule.tensor : rule.factor;
    stage.decode[p][t] = rule.decode;
  }
}

// Encodes the tile from (row, col) on, whose values are loaded by `load(values, lane)`.
template <int W, typename Load>
__device__ __forceinline__ void encode_mixed(const Encode& job, const Step* step, const uint64_t row, const uint64_t col,
                                             MixedStage& stage, Load load) {
  uint32_t lane = threadIdx.x % 32;
  stage_lines(job, stage, row, col);
  if (job.stochastic && threadIdx.x == 0) {
    stage.philox = Philox{job.seed, job.stream + (step->random_step << 32)};
    stage.random = job.first;
  }
  Values<W> v;
  load(v, Lane<W>{lane, row + Tiling<true>::warp_row(), col + Tiling<true>::warp_col()});
  if (job.via_bf16) v.round();
  __syncthreads();
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) {
    v.stay_in_loop();
    if (job.pass[p].ingredients.hadamard) transform<W>(v, lane, row + Tiling<true>::warp_row(), job.rows);
    MixedPass<W>{job, stage, p, lane, row, col}.quantize(v);
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) {
    const Pass& pass = job.pass[p];
    const View view{job.rows, job.cols, 0};
    uint32_t vector = job.vector;
    const uint8_t* rows = stage.codes[job.passes == 1 ? 0 : p];
    const uint8_t* columns = stage.codes[job.passes == 1 ? 1 : p];
    bool nibbles = pass.ingredients.element == E2M1;
    if (pass.data[0]) {
      bool aligned = vector & (VECTOR_ROWS_0 << p);
      if (nibbles) {
        store_lines<RowTile<W, true, 4>>(pass.data[0], aligned, row, col / 2, view.rows, view.cols / 2, false, rows);
      } else {
        store_lines<RowTile<W, true, 8>>(pass.data[0], aligned, row, col, view.rows, view.cols, false, rows);
      }
    }
    if (pass.data[1]) {
      bool aligned = vector & (VECTOR_COLUMNS_0 << p);
      if (nibbles) {
        store_lines<ColumnTile<W, 4>>(pass.data[1], aligned, col, row / 2, view.cols, (view.rows + 1) / 2, view.rows % 2, columns);
      } else {
        store_lines<ColumnTile<W, 8>>(pass.data[1], aligned, col, row, view.cols, view.rows, false, columns);
      }
    }
    store_scales<true>(pass, view, row, col, Tiling<true>::ROWS, Tiling<true>::COLS, stage.scales[p]);
#pragma unroll 1
    for (int order = 0; order < 2; ++order) {
      if (pass.form[order].to) FormTile(job, row, col, pass, order, stage.scales[p]).store(order);
    }
  }
}

// The same from the source.
template <int W>
__device__ __forceinline__ void encode_mixed_source(const Encode& job, const Step* step, uint64_t row, uint64_t col,
                                                    MixedStage& stage) {
  encode_mixed<W>(job, step, row, col, stage, [&](Values<W>& v, const Lane<W>& at) {
    v.load(job.source, job.vector & VECTOR_SOURCE, View{job.rows, job.cols, job.rows * job.cols}, at);
  });
}
template <int W>
__device__ __forceinline__ void encode_mixed_source(const Encode& job, const Step* step, uint32_t index, MixedStage& stage) {
  uint32_t across = uint32_t(job.tiles_across);
  encode_mixed_source<W>(job, step, uint64_t(index / across) * TRANSPOSED_ROWS, uint64_t(index % across) * TRANSPOSED_COLS, stage);
}

// Not inlined: with registers of its own.
template <int W>
__device__ __noinline__ void mixed_apart(const Encode& job, const Step* step, uint32_t index, MixedStage& stage) {
  encode_mixed_source<W>(job, step, index, stage);
}

}  // namespace lowp
