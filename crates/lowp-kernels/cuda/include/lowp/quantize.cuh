// The tiled encode: the values of a block of threads, in registers, become codes and scales of one
// or both orientations. The input is read once. Codes and scales pass through shared memory and
// leave in runs of 16 bytes, with one barrier in between.
//
// Two tilings: 32 x 256 for outputs that are all row-major (FP8 with a known scale, MXFP8), and 128 x 64 where an
// output is transposed (FP8 with a known scale, NVFP4, MXFP4). Whole tiles of bfloat16 go through ring.cuh instead,
// formats by orientation through mixed.cuh, f32 scales of blocks of 128 through blocks.cuh, the rest through generic.cuh.
#pragma once
#include <lowp/stage.cuh>
#include <type_traits>

namespace lowp {

// Block scales of a warp's tile: staged, and as multipliers of each lane's rows, columns or all of
// its elements. `SIDE` is the side of the blocks.
template <int W, bool TRANSPOSED, uint32_t SIDE, typename Rule>
struct BlockScales {
  static constexpr int N = 32 / W;
  // Powers of two are kept as pairs of bfloat16: one row's twice, those of neighbouring columns.
  static constexpr bool PAIRS = SIDE == 32;
  static constexpr int COLUMNS = PAIRS ? W / 2 : W;
  using Multiplier = std::conditional_t<PAIRS, uint32_t, float>;
  using Tile = Tiling<TRANSPOSED>;

  const Rule& rule;
  uint32_t lane;
  ScaleStage stage;

  __device__ __forceinline__ float put(uint32_t row, uint32_t col, uint32_t height, uint32_t width, float amax) const {
    uint32_t tile_row = stage.first_row + Tile::warp_row() + row, tile_col = stage.first_col + Tile::warp_col() + col;
    Scaled s = rule.block(amax, tile_row, tile_col);
    uint32_t r = tile_row / height, c = tile_col / width;
    stage.bytes[r * (stage.cols / width) + c] = uint8_t(s.entry);
    return s.multiplier;
  }

  __device__ __forceinline__ void rows(const Values<W>& v, Multiplier (&m)[N]) const {
    float a[2];
    v.template row_blocks<SIDE>(lane, a);
    uint32_t first = lane / N * N;
    if constexpr (SIDE == 32) {
      uint32_t mine = twice(put(lane, 0, 1, 32, a[0]));
#pragma unroll
      for (int i = 0; i < N; ++i) m[i] = __shfl_sync(FULL_WARP, mine, first + i);
    } else {
      uint32_t half = lane / (N / 2) % 2, row = first + lane % (N / 2) * 2;
      float even = put(row, half * 16, 1, 16, a[0]), odd = put(row + 1, half * 16, 1, 16, a[1]);
#pragma unroll
      for (int i = 0; i < N; ++i) m[i] = __shfl_sync(FULL_WARP, i % 2 ? odd : even, first + half * (N / 2) + i / 2);
    }
  }

  __device__ __forceinline__ void columns(const Values<W>& v, Multiplier (&m)[COLUMNS]) const {
    float a[2];
    v.template column_blocks<SIDE>(lane, a);
    uint32_t first = lane % N;
    if constexpr (SIDE == 32) {
      uint32_t mine = __float_as_uint(put(0, first * W + lane / N, 32, 1, a[0]));
      uint32_t other = __shfl_xor_sync(FULL_WARP, mine, N);
      mine = lane & N ? __byte_perm(other, mine, 0x7632) : __byte_perm(mine, other, 0x7632);
#pragma unroll
      for (int j = 0; j < W / 2; ++j) m[j] = __shfl_sync(FULL_WARP, mine, first + 2 * j * N);
    } else {
      uint32_t half = lane / 16, col = first * W + lane / N % (W / 2) * 2;
      float even = put(half * 16, col, 16, 1, a[0]), odd = put(half * 16, col + 1, 16, 1, a[1]);
#pragma unroll
      for (int j = 0; j < W; ++j) m[j] = __shfl_sync(FULL_WARP, j % 2 ? odd : even, first + N * (half * (W / 2) + j / 2));
    }
  }

  __device__ __forceinline__ Multiplier square(const Values<W>& v) const {
    float a = all_max(v.maximum(), (N / 2 - 1) | (W / 2 - 1) * N);
    if (SIDE == 32) a = all_max(a, N / 2 | 16);
    float m = put(lane / N * N, lane % N * W, SIDE, SIDE, a);
    if constexpr (PAIRS) return twice(m);
    return m;
  }
};

// Keeps the compiler from computing a code again for each place that it goes to.
__device__ __forceinline__ void once(uint32_t& code) { asm volatile("" : "+r"(code)); }

// Codes of 8 bits into the staged tiles. POWERS says that the multipliers are pairs of powers of two.
template <int W, bool TRANSPOSED, bool POWERS, typename E, typename Multiplier>
__device__ __forceinline__ void stage_codes8(const Values<W>& v, uint32_t lane, bool rows, bool columns, uint8_t* row_stage,
                                             uint8_t* column_stage, Multiplier m) {
  constexpr int N = 32 / W;
  uint32_t row = Tiling<TRANSPOSED>::warp_row() + lane / N * N, col = Tiling<TRANSPOSED>::warp_col() + lane % N * W;
  uint32_t codes[N][W / 4];
#pragma unroll
  for (int i = 0; i < N; ++i) {
#pragma unroll
    for (int j = 0; j < W; j += 4) {
      uint32_t pairs[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        int first = j + 2 * k;
        float2 y;
        if constexpr (POWERS) {
          y = v.times(i, first, m(i, first));
        } else {
          y = make_float2(__fmul_rn(v.at(i, first), m(i, first)), __fmul_rn(v.at(i, first + 1), m(i, first + 1)));
        }
        pairs[k] = E::pair(y.x, y.y);
      }
      codes[i][j / 4] = __byte_perm(pairs[0], pairs[1], 0x5410);
      once(codes[i][j / 4]);
    }
    if (rows) {
      uint8_t* to = row_stage + RowTile<W, TRANSPOSED, 8>::chunk(row + i, col / 16) + col % 16;
      if constexpr (W == 8) {
        *reinterpret_cast<uint2*>(to) = make_uint2(codes[i][0], codes[i][1]);
      } else {
        *reinterpret_cast<uint32_t*>(to) = codes[i][0];
      }
    }
  }
  if constexpr (TRANSPOSED) {
    if (columns) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int j = 0; j < W; j += 4) {
          const uint32_t in[4] = {codes[i][j / 4], codes[i + 1][j / 4], codes[i + 2][j / 4], codes[i + 3][j / 4]};
          uint32_t out[4];
          transpose_bytes4(in, out);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            uint32_t at = ColumnTile<W, 8>::chunk(col + j + k, (row + i) / 16) + (row + i) % 16;
            *reinterpret_cast<uint32_t*>(column_stage + at) = out[k];
          }
        }
      }
    }
  }
}

// Codes of 4 bits into the staged rows.
template <int W, typename Multiplier>
__device__ __forceinline__ void stage_rows4(const Values<W>& v, uint32_t lane, uint8_t* row_stage, Multiplier m) {
  constexpr int N = 32 / W, ROWS = 8 / W;
  uint32_t row = Tiling<true>::warp_row() + lane / N * N, col = Tiling<true>::warp_col() + lane % N * W;
#pragma unroll
  for (int i = 0; i < N; i += ROWS) {
    uint32_t codes = E2m1::eight([&](int k) { return __fmul_rn(v.at(i + k / W, k % W), m(i + k / W, k % W)); });
    auto to = [&](int i) { return row_stage + RowTile<W, true, 4>::chunk(row + i, col / 32) + col % 32 / 2; };
    if constexpr (W == 8) {
      *reinterpret_cast<uint32_t*>(to(i)) = codes;
    } else {
      *reinterpret_cast<uint16_t*>(to(i)) = uint16_t(codes);
      *reinterpret_cast<uint16_t*>(to(i + 1)) = uint16_t(codes >> 16);
    }
  }
}

// Codes of 4 bits into the staged columns.
template <int W, typename Multiplier>
__device__ __forceinline__ void stage_columns4(const Values<W>& v, uint32_t lane, uint8_t* column_stage, Multiplier m) {
  constexpr int N = 32 / W, COLUMNS = 8 / N;
  uint32_t row = Tiling<true>::warp_row() + lane / N * N, col = Tiling<true>::warp_col() + lane % N * W;
#pragma unroll
  for (int j = 0; j < W; j += COLUMNS) {
    uint32_t codes = E2m1::eight([&](int k) { return __fmul_rn(v.at(k % N, j + k / N), m(k % N, j + k / N)); });
    auto to = [&](int j) { return column_stage + ColumnTile<W, 4>::chunk(col + j, row / 32) + row % 32 / 2; };
    if constexpr (N == 8) {
      *reinterpret_cast<uint32_t*>(to(j)) = codes;
    } else {
      *reinterpret_cast<uint16_t*>(to(j)) = uint16_t(codes);
      *reinterpret_cast<uint16_t*>(to(j + 1)) = uint16_t(codes >> 16);
    }
  }
}

// Codes of 4 bits into the staged rows, columns, both, or neither where only scales are asked for.
template <int W, typename Multiplier>
__device__ __forceinline__ void stage_codes4(const Values<W>& v, uint32_t lane, bool rows, bool columns, uint8_t* row_stage,
                                             uint8_t* column_stage, Multiplier m) {
  if (!(rows && columns)) {
    if (rows) stage_rows4<W>(v, lane, row_stage, m);
    if (columns) stage_columns4<W>(v, lane, column_stage, m);
    return;
  }
  constexpr int N = 32 / W;
  uint32_t row = Tiling<true>::warp_row() + lane / N * N, col = Tiling<true>::warp_col() + lane % N * W;
  uint32_t transposed[W];
#pragma unroll
  for (int j = 0; j < W; ++j) transposed[j] = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    uint32_t codes = 0;
#pragma unroll
    for (int j = 0; j < W; j += 2) {
      uint32_t two[2];
      E2m1::each(__fmul_rn(v.at(i, j), m(i, j)), __fmul_rn(v.at(i, j + 1), m(i, j + 1)), two);
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        once(two[k]);
        codes += two[k] << (4 * (j + k));
        transposed[j + k] += two[k] << (4 * i);
      }
    }
    uint8_t* to = row_stage + RowTile<W, true, 4>::chunk(row + i, col / 32) + col % 32 / 2;
    if constexpr (W == 8) {
      *reinterpret_cast<uint32_t*>(to) = codes;
    } else {
      *reinterpret_cast<uint16_t*>(to) = uint16_t(codes);
    }
  }
#pragma unroll
  for (int j = 0; j < W; ++j) {
    uint8_t* to = column_stage + ColumnTile<W, 4>::chunk(col + j, row / 32) + row % 32 / 2;
    if constexpr (N == 8) {
      *reinterpret_cast<uint32_t*>(to) = transposed[j];
    } else {
      *reinterpret_cast<uint16_t*>(to) = uint16_t(transposed[j]);
    }
  }
}

// Codes and scales of one pass into the stage, with what each element is multiplied by.
template <int W, bool TRANSPOSED, uint32_t SIDE, typename Rule, typename Codes>
__device__ __forceinline__ void stage_blocks(const Pass& pass, const Rule& rule, const Values<W>& v, uint32_t lane,
                                             const ScaleStage& scales, Codes codes) {
  using Blocks = BlockScales<W, TRANSPOSED, SIDE, Rule>;
  using Multiplier = typename Blocks::Multiplier;
  Blocks blocks{rule, lane, scales};
  if (pass.block_cols == 1) {
    Multiplier m[Blocks::COLUMNS];
    blocks.columns(v, m);
    codes([&](int, int j) { return m[Blocks::PAIRS ? j / 2 : j]; });
  } else if (pass.block_rows == 1) {
    Multiplier m[32 / W];
    blocks.rows(v, m);
    codes([&](int i, int) { return m[i]; });
  } else {
    Multiplier m = blocks.square(v);
    codes([&](int, int) { return m; });
  }
}

// Codes and scales of FP8 into the stage: those from `first_row` and `first_col` on in a tile of `cols` columns.
template <int W, bool TRANSPOSED, typename E, typename Place>
__device__ __forceinline__ void stage8(const Place& place, uint32_t lane, Values<W>& v, Stage<TRANSPOSED>& stage,
                                       uint32_t first_row, uint32_t first_col, uint32_t cols) {
  const Encode& job = place.encode();
  if constexpr (TRANSPOSED) {
    const Pass& pass = job.pass[0];
    float tensor = place.held().tensor;
    stage_codes8<W, true, false, E>(v, lane, pass.data[0], pass.data[1], stage.codes[0], stage.codes[1],
                                    [&](int, int) { return tensor; });
  } else if (job.pass[0].ingredients.rule == RULE_TENSOR) {
    const Ingredients& made = job.pass[0].ingredients;
    float tensor = made.observed ? place.held().tensor : *pointer<const float>(made.tensor);
    stage_codes8<W, false, false, E>(v, lane, true, false, stage.codes[0], nullptr, [&](int, int) { return tensor; });
  } else {
    const auto rule = PowerOfTwo<false>::of(job.pass[0].ingredients);
#pragma unroll 1
    for (uint32_t p = 0; p < place.held().passes; ++p) {
      v.stay_in_loop();
      stage_blocks<W, false, 32>(job.pass[p], rule, v, lane, ScaleStage{stage.scales[p], cols, first_row, first_col}, [&](auto m) {
        stage_codes8<W, false, true, E>(v, lane, true, false, stage.codes[p], nullptr, m);
      });
    }
  }
}

// The staged codes of FP8 from (row, col) on; `parts` as in store_lines.
template <int W, bool TRANSPOSED, typename Place>
__device__ __forceinline__ void store_codes8(const Place& place, uint64_t row, uint64_t col,
                                             const Stage<TRANSPOSED>& stage, bool parts = false) {
#pragma unroll 1
  for (uint32_t p = 0; p < place.held().passes; ++p) {
    const Encode& out = place.encode();
    uint32_t vector = out.vector;
    const Pass& pass = out.pass[p];
    if (pass.data[0]) {
      store_lines<RowTile<W, TRANSPOSED, 8>>(pass.data[0], vector & (VECTOR_ROWS_0 << p), row, col, out.rows, out.cols,
                                             false, stage.codes[TRANSPOSED ? 0 : p], parts);
    }
    if constexpr (TRANSPOSED) {
      if (pass.data[1]) {
        store_lines<ColumnTile<W, 8>>(pass.data[1], vector & (VECTOR_COLUMNS_0 << p), col, row, out.cols, out.rows, false,
                                      stage.codes[1]);
      }
    }
  }
}

// The staged E8M0 scales of a tile.
template <typename Place>
__device__ __forceinline__ void store_scales8(const Place& place, uint64_t row, uint64_t col, uint32_t height,
                                              uint32_t width, const Stage<false>& stage) {
#pragma unroll 1
  for (uint32_t p = 0; p < place.held().passes; ++p) {
    const Encode& out = place.encode();
    store_scales<false>(out.pass[p], View{out.rows, out.cols, 0}, row, col, height, width, stage.scales[p]);
  }
}

// FP8 codes of a tile.
template <int W, bool TRANSPOSED, typename E, typename Place>
__device__ __forceinline__ void quantize8(const Place& place, uint32_t lane, Values<W>& v, Stage<TRANSPOSED>& stage) {
  stage8<W, TRANSPOSED, E>(place, lane, v, stage, 0, 0, Tiling<TRANSPOSED>::COLS);
  __syncthreads();
  const uint64_t row = place.row(), col = place.col();
  store_codes8<W>(place, row, col, stage);
  if constexpr (!TRANSPOSED) store_scales8(place, row, col, Tiling<false>::ROWS, Tiling<false>::COLS, stage);
}

// A multiplier of an element of row i and column j of a lane's values.
__device__ __forceinline__ float element_of(float m, int) { return m; }
__device__ __forceinline__ float element_of(uint32_t pair, int j) { return j % 2 ? widen_high(pair) : widen_low(pair); }

// E2M1 codes and block scales of every pass into the stage.
template <int W, uint32_t SIDE, typename Rule, typename Place>
__device__ __forceinline__ void stage4(const Place& place, const Rule& rule, uint32_t lane, Values<W>& v, Stage<true>& stage) {
#pragma unroll 1
  for (uint32_t p = 0; p < place.held().passes; ++p) {
    const Pass& pass = place.encode().pass[p];
    v.stay_in_loop();
    stage_blocks<W, true, SIDE>(pass, rule, v, lane, ScaleStage{stage.scales[p], Tiling<true>::COLS, 0, 0}, [&](auto m) {
      auto element = [&](int i, int j) { return element_of(m(i, j), j); };
      stage_codes4<W>(v, lane, pass.data[0], pass.data[1], stage.codes[0], stage.codes[1], element);
    });
  }
}

// What the compiler knows of the codes of a tile in both orders: nothing, that they are not MXFP4, or that they are.
enum class Known { NOTHING, NO_E8M0, E8M0 };

// NVFP4 or MXFP4 codes of a tile.
template <int W, Known KNOWN, typename Place>
__device__ __forceinline__ void quantize4(const Place& place, uint32_t lane, Values<W>& v, Stage<true>& stage) {
  const Ingredients& made = place.encode().pass[0].ingredients;
  if (KNOWN == Known::NO_E8M0 || (KNOWN == Known::NOTHING && made.rule == RULE_TWO_LEVEL)) {
    stage4<W, 16>(place, TwoLevel::of(place.held().tensor), lane, v, stage);
  } else {
    stage4<W, 32>(place, PowerOfTwo<true>::of(made), lane, v, stage);
  }
  __syncthreads();
#pragma unroll 1
  for (uint32_t p = 0; p < place.held().passes; ++p) {
    const Encode& out = place.encode();
    const uint64_t row = place.row(), col = place.col();
    const View view{out.rows, out.cols, 0};
    uint32_t vector = out.vector;
    const Pass& pass = out.pass[p];
    if (pass.data[0]) {
      store_lines<RowTile<W, true, 4>>(pass.data[0], vector & (VECTOR_ROWS_0 << p), row, col / 2, view.rows, view.cols / 2,
                                       false, stage.codes[0]);
    }
    if (pass.data[1]) {
      store_lines<ColumnTile<W, 4>>(pass.data[1], vector & (VECTOR_COLUMNS_0 << p), col, row / 2, view.cols,
                                    (view.rows + 1) / 2, view.rows % 2, stage.codes[1]);
    }
    store_scales<true>(pass, view, row, col, Tiling<true>::ROWS, Tiling<true>::COLS, stage.scales[p]);
  }
}

// Values as they are, bf16 or f32, row-major.
template <int W, typename Place>
__device__ __forceinline__ void store_plain(const Place& place, uint32_t lane, const Values<W>& v) {
  const Encode& job = place.encode();
  const View view{job.rows, job.cols, job.rows * job.cols};
  const Lane<W> at{lane, place.row() + Tiling<false>::warp_row(), place.col() + Tiling<false>::warp_col()};
  uint64_t row = at.row + at.local_row(), col = at.col + at.local_col();
#pragma unroll
  for (int i = 0; i < 32 / W; ++i) {
#pragma unroll
    for (int j = 0; j < W; j += 4) {
      if (!view.holds(row + i, col + j)) continue;
      uint64_t index = (row + i) * view.cols + col + j;
      bool whole = (job.vector & VECTOR_ROWS_0) && view.holds(row + i, col + j + 3);
      if (job.pass[0].ingredients.element == BF16) {
        uint2 pairs = make_uint2(narrow_pair(v.at(i, j), v.at(i, j + 1)), narrow_pair(v.at(i, j + 2), v.at(i, j + 3)));
        uint16_t* to = pointer<uint16_t>(job.pass[0].data[0]) + index;
        if (whole) {
          store8(to, pairs);
          continue;
        }
        to[0] = uint16_t(pairs.x);
        if (view.holds(row + i, col + j + 1)) to[1] = uint16_t(pairs.x >> 16);
        if (view.holds(row + i, col + j + 2)) to[2] = uint16_t(pairs.y);
        if (view.holds(row + i, col + j + 3)) to[3] = uint16_t(pairs.y >> 16);
      } else {
        float* to = pointer<float>(job.pass[0].data[0]) + index;
        if (whole) {
          store16(to, as_bits(make_float4(v.at(i, j), v.at(i, j + 1), v.at(i, j + 2), v.at(i, j + 3))));
          continue;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          if (view.holds(row + i, col + j + k)) to[k] = v.at(i, j + k);
        }
      }
    }
  }
}

// Encodes a tile from the values of its threads.
template <int W, bool TRANSPOSED, Known KNOWN, typename Place>
__device__ __forceinline__ void quantize(const Place& place, uint32_t lane, Values<W>& v, Stage<TRANSPOSED>& stage) {
  if constexpr (KNOWN == Known::E8M0) return quantize4<W, KNOWN>(place, lane, v, stage);
  switch (place.encode().pass[0].ingredients.element) {
    case E4M3: return quantize8<W, TRANSPOSED, E4m3>(place, lane, v, stage);
    case E5M2: return quantize8<W, TRANSPOSED, E5m2>(place, lane, v, stage);
    default:
      if constexpr (TRANSPOSED) {
        quantize4<W, KNOWN>(place, lane, v, stage);
      } else {
        store_plain<W>(place, lane, v);
      }
  }
}

}  // namespace lowp
