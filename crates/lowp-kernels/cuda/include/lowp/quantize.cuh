// The tiled encode: the values of a block of threads, in registers, become codes and scales of one
// or both orientations. The input is read once. Codes and scales pass through shared memory and
// leave in runs of 16 bytes, with one barrier in between.
//
// Two tilings cover the recipes of the field: 32 x 256 for outputs that are all row-major (FP8 with
// a known scale, MXFP8), and 128 x 64 where an output is transposed (FP8 with a known scale, NVFP4).
// Anything else is done by generic.cuh.
#pragma once
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>
#include <type_traits>

namespace lowp {

// Where the warps of a block lie: side by side, or four down and two across.
template <bool TURNED>
struct Tiling {
  static constexpr uint32_t ROWS = TURNED ? 128 : 32, COLS = TURNED ? 64 : 256;
  static __device__ __forceinline__ uint32_t warp_row() { return TURNED ? threadIdx.x / 32 % 4 * 32 : 0; }
  static __device__ __forceinline__ uint32_t warp_col() {
    return TURNED ? threadIdx.x / 128 * 32 : threadIdx.x / 32 * 32;
  }
};

// The same job, read again: its fields need no registers until then.
__device__ __forceinline__ const Encode& again(const Encode& job) {
  const Encode* at = &job;
  asm volatile("" : "+l"(at));
  return *at;
}

// Codes of a tile of 8 KiB at most, as lines of 16-byte chunks. Chunks are exchanged within a line
// by an exclusive or with a function of the line, which keeps the words that a warp writes at a
// time (a chunk of each of its groups of rows) off each other's banks.
template <int W, bool TURNED, uint32_t BITS>
struct RowTile {
  static constexpr uint32_t LINES = Tiling<TURNED>::ROWS, CHUNKS = Tiling<TURNED>::COLS * BITS / 128;
  static constexpr uint32_t PITCH = BITS == 4 ? 48 : CHUNKS * 16;
  static __device__ __forceinline__ uint32_t chunk(uint32_t line, uint32_t chunk) {
    uint32_t group = CHUNKS == 2 ? line / 8 % 2 : CHUNKS == 4 ? line / (32 / W) % 2 * 2 : line / (32 / W) % 4 * 2;
    return line * PITCH + (chunk ^ group) * 16;
  }
};

template <int W, uint32_t BITS>
struct ColumnTile {
  static constexpr uint32_t LINES = Tiling<true>::COLS, CHUNKS = Tiling<true>::ROWS * BITS / 128;
  static __device__ __forceinline__ uint32_t chunk(uint32_t line, uint32_t chunk) {
    uint32_t group = line / W * (BITS == 8 && W == 8 ? 2 : 1) % CHUNKS;
    return line * CHUNKS * 16 + (chunk ^ group) * 16;
  }
};

template <bool TURNED>
struct alignas(16) Stage {
  uint8_t codes[2][8192];                  // wide: of each pass; turned: row-major and transposed
  uint8_t scales[2][TURNED ? 512 : 1024];  // of each pass
  float multiplier[THREADS / 32];          // of each warp: `tensor_multiplier` of an observed amax
};

// What values are multiplied by under RULE_TENSOR, made of an observed amax before the values take registers.
template <bool TURNED>
__device__ __forceinline__ void prepare(const Encode& job, Stage<TURNED>& stage) {
  if (job.observed && job.rule == RULE_TENSOR) stage.multiplier[threadIdx.x / 32] = tensor_multiplier(job);
  __syncwarp();
}

template <bool OBSERVED, bool TURNED>
__device__ __forceinline__ float multiplier(const Encode& job, const Stage<TURNED>& stage) {
  return OBSERVED && job.observed ? stage.multiplier[threadIdx.x / 32] : *pointer<const float>(job.tensor);
}

// Where the scales of a pass are staged: those of the whole tile, in rows.
struct ScaleStage {
  uint8_t* bytes;
  uint32_t cols;   // of the tile
  uint32_t first;  // column that the codes in work begin at
};

// Writes a staged tile to lines of `pitch` bytes, from (line, byte) on.
template <typename Tile>
__device__ __forceinline__ void store_lines(uint64_t base, bool vector, uint64_t line, uint64_t byte, uint64_t lines,
                                            uint64_t pitch, bool odd, const uint8_t* stage) {
  constexpr uint32_t COUNT = Tile::LINES * Tile::CHUNKS;
  uint64_t corner = base + line * pitch + byte;
  if (vector && line + Tile::LINES <= lines && byte + Tile::CHUNKS * 16 <= pitch) {
#pragma unroll
    for (uint32_t first = 0; first < COUNT; first += THREADS) {
      uint32_t e = first + threadIdx.x, i = e / Tile::CHUNKS, c = e % Tile::CHUNKS;
      store16(pointer<uint8_t>(corner + i * pitch + c * 16), *reinterpret_cast<const uint4*>(stage + Tile::chunk(i, c)));
    }
    return;
  }
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < COUNT; e += THREADS) {
    uint32_t i = e / Tile::CHUNKS, b = e % Tile::CHUNKS * 16;
    if (line + i >= lines || byte + b >= pitch) continue;
    const uint8_t* from = stage + Tile::chunk(i, b / 16);
    uint64_t to = corner + i * pitch + b;
    uint32_t bytes = uint32_t(min(uint64_t(16), pitch - byte - b)), done = 0;
    if (to % 4 == 0) {
#pragma unroll 1
      for (; done + 4 <= bytes; done += 4) *pointer<uint32_t>(to + done) = *reinterpret_cast<const uint32_t*>(from + done);
    }
#pragma unroll 1
    for (; done < bytes; ++done) pointer<uint8_t>(to)[done] = from[done];
    // The high nibble behind an odd number of entries is 0, whatever the multiplier made of it.
    if (odd && byte + b + bytes == pitch) pointer<uint8_t>(to)[bytes - 1] = from[bytes - 1] & 15;
  }
}

// Writes the staged scales of a tile of `width` columns in another form than Compact, repeats included; the
// last tiles of a matrix write the padding behind them.
template <bool TURNED>
__device__ __forceinline__ void store_scales_in_form(const Pass& pass, bool turned, uint64_t rows, uint64_t cols, uint64_t row,
                                                     uint64_t col, uint32_t width, const uint8_t* stage) {
  constexpr uint32_t ROWS = Tiling<TURNED>::ROWS;
  const Scales& scales = pass.scale[turned];
  uint32_t h = 31 - __clz(pass.block_rows), w = 31 - __clz(pass.block_cols);
  uint32_t entry_h = 31 - __clz(scales.tile_rows), entry_w = 31 - __clz(scales.tile_cols);
  uint64_t top = row >> entry_h, left = col >> entry_w;
  uint64_t bottom = row + ROWS < rows ? (row + ROWS) >> entry_h : scales.rows;
  uint64_t right = col + width < cols ? (col + width) >> entry_w : scales.cols;
  // What is left of the matrix, in entries.
  uint64_t r_end = ((rows + scales.tile_rows - 1) >> entry_h) - top, c_end = ((cols + scales.tile_cols - 1) >> entry_w) - left;
  uint32_t outer = uint32_t(turned ? right - left : bottom - top), inner = uint32_t(turned ? bottom - top : right - left);
  uint64_t pitch = turned ? scales.rows : scales.cols;
  bool words = ((turned ? top : left) | inner | pitch | scales.to) % 4 == 0;
  uint32_t step = words ? 4 : 1, lines = inner / step;
  // Neighbouring threads write neighbouring words: of a swizzled tile those of entries 32 apart.
  bool swizzle = scales.form == FORM_SWIZZLED;
  uint32_t count = (swizzle ? (outer + 127) / 128 * 128 : outer) * lines;
#pragma unroll 1
  for (uint32_t e = threadIdx.x; e < count; e += THREADS) {
    uint32_t i, j;
    if (swizzle) {
      i = e / (128 * lines) * 128 + e % 4 * 32 + e / 4 % 32;
      j = e / 128 % lines * step;
      if (i >= outer) continue;
    } else {
      i = e / lines;
      j = e % lines * step;
    }
    uint32_t entries = 0;
#pragma unroll 1
    for (uint32_t k = 0; k < step; ++k) {
      uint32_t r = turned ? j + k : i, c = turned ? i : j + k;
      if (r >= r_end || c >= c_end) continue;
      entries |= uint32_t(stage[(r << entry_h >> h) * (width >> w) + (c << entry_w >> w)]) << (8 * k);
    }
    uint64_t to = scales.to + scale_offset(scales, turned, top + (turned ? j : i), left + (turned ? i : j));
    if (words) {
      *pointer<uint32_t>(to) = entries;
    } else {
      *pointer<uint8_t>(to) = uint8_t(entries);
    }
  }
}

// Writes the staged scales of a tile of `width` columns, in whole rows of either order. Block sides are
// powers of two.
template <bool TURNED>
__device__ __forceinline__ void store_scales(const Pass& pass, const View& view, uint64_t row, uint64_t col,
                                             uint32_t width, const uint8_t* stage) {
  if (pass.block_rows == 0) return;
  uint32_t h = 31 - __clz(pass.block_rows), w = 31 - __clz(pass.block_cols);
  uint32_t down = Tiling<TURNED>::ROWS >> h, across = width >> w;
  if (threadIdx.x >= down * across) return;
  uint64_t rows = (view.rows + pass.block_rows - 1) >> h, cols = (view.cols + pass.block_cols - 1) >> w;
  uint64_t top = row >> h, left = col >> w;
  // What is left of the matrix, in blocks.
  uint32_t r_end = uint32_t(min(uint64_t(down), rows - top)), c_end = uint32_t(min(uint64_t(across), cols - left));
  uint32_t down_bits = 31 - __clz(down), across_bits = 31 - __clz(across);
  bool whole = r_end == down && c_end == across;
  if (uint64_t to = pass.scale[0].to; to != 0 && pass.scale[0].form == FORM_COMPACT) {
    // A row of scales has at least four.
    uint32_t shift = whole && (to | cols) % 4 == 0 ? 2 : 0;
    for (uint32_t e = threadIdx.x << shift; e < down * across; e += THREADS << shift) {
      uint32_t r = e >> across_bits, c = e & (across - 1);
      uint64_t at = to + (top + r) * cols + left + c;
      if (shift != 0) {
        *pointer<uint32_t>(at) = *reinterpret_cast<const uint32_t*>(stage + e);
      } else if (r < r_end && c < c_end) {
        *pointer<uint8_t>(at) = stage[e];
      }
    }
  }
  if constexpr (TURNED) {
    if (uint64_t to = pass.scale[1].to; to != 0 && pass.scale[1].form == FORM_COMPACT) {
      // So has a column.
      uint32_t shift = whole && (to | rows) % 4 == 0 ? 2 : 0;
      for (uint32_t e = threadIdx.x << shift; e < down * across; e += THREADS << shift) {
        uint32_t r = e & (down - 1), c = e >> down_bits;
        uint64_t at = to + (left + c) * rows + top + r;
        const uint8_t* from = stage + (r << across_bits) + c;
        if (shift != 0) {
          uint32_t low = from[0] | from[across] << 8, high = from[2 * across] | from[3 * across] << 8;
          *pointer<uint32_t>(at) = low | high << 16;
        } else if (r < r_end && c < c_end) {
          *pointer<uint8_t>(at) = *from;
        }
      }
    }
  }
}

// The same of all scales of tile `index` that have such a form. Not inlined, and called when a tile is done:
// Compact scales should not pay for its registers.
template <bool TURNED>
__device__ __noinline__ void store_forms(const Encode& job, uint32_t index, const Stage<TURNED>& stage) {
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * Tiling<TURNED>::ROWS, col = uint64_t(index % across) * job.tile_cols;
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes * 2u; ++p) {
    const Pass& pass = job.pass[p / 2];
    const Scales& scales = pass.scale[p % 2];
    if (scales.to == 0 || scales.form == FORM_COMPACT) continue;
    store_scales_in_form<TURNED>(pass, p % 2, job.rows, job.cols, row, col, job.tile_cols, stage.scales[p / 2]);
  }
}

// Block scales of a warp's tile: staged, and as multipliers of each lane's rows, columns or all of
// its elements. `SIDE` is the side of the blocks.
template <int W, bool TURNED, uint32_t SIDE, typename Rule>
struct BlockScales {
  static constexpr int N = 32 / W;
  // Powers of two are kept as pairs of bfloat16: one row's twice, those of neighbouring columns.
  static constexpr bool PAIRS = SIDE == 32;
  static constexpr int COLUMNS = PAIRS ? W / 2 : W;
  using Multiplier = std::conditional_t<PAIRS, uint32_t, float>;
  using Tile = Tiling<TURNED>;

  const Rule& rule;
  uint32_t lane;
  ScaleStage stage;

  __device__ __forceinline__ float put(uint32_t row, uint32_t col, uint32_t height, uint32_t width, float amax) const {
    Scaled s = rule.block(amax);
    uint32_t r = (Tile::warp_row() + row) / height, c = (stage.first + Tile::warp_col() + col) / width;
    stage.bytes[r * (stage.cols / width) + c] = uint8_t(s.entry);
    return s.multiplier;
  }

  static __device__ __forceinline__ uint32_t twice(float m) { return __byte_perm(__float_as_uint(m), 0, 0x3232); }

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
template <int W, bool TURNED, bool POWERS, typename E, typename Multiplier>
__device__ __forceinline__ void stage_codes8(const Values<W>& v, uint32_t lane, bool rows, bool columns, uint8_t* row_stage,
                                             uint8_t* column_stage, Multiplier m) {
  constexpr int N = 32 / W;
  uint32_t row = Tiling<TURNED>::warp_row() + lane / N * N, col = Tiling<TURNED>::warp_col() + lane % N * W;
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
      uint8_t* to = row_stage + RowTile<W, TURNED, 8>::chunk(row + i, col / 16) + col % 16;
      if constexpr (W == 8) {
        *reinterpret_cast<uint2*>(to) = make_uint2(codes[i][0], codes[i][1]);
      } else {
        *reinterpret_cast<uint32_t*>(to) = codes[i][0];
      }
    }
  }
  if constexpr (TURNED) {
    if (columns) {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
#pragma unroll
        for (int j = 0; j < W; j += 4) {
          const uint32_t in[4] = {codes[i][j / 4], codes[i + 1][j / 4], codes[i + 2][j / 4], codes[i + 3][j / 4]};
          uint32_t out[4];
          turn_bytes(in, out);
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

// Codes of 4 bits into the staged tiles.
template <int W, typename Multiplier>
__device__ __forceinline__ void stage_codes4(const Values<W>& v, uint32_t lane, bool rows, bool columns, uint8_t* row_stage,
                                             uint8_t* column_stage, Multiplier m) {
  constexpr int N = 32 / W;
  uint32_t row = Tiling<true>::warp_row() + lane / N * N, col = Tiling<true>::warp_col() + lane % N * W;
  uint32_t turned[W];
#pragma unroll
  for (int j = 0; j < W; ++j) turned[j] = 0;
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
        turned[j + k] += two[k] << (4 * i);
      }
    }
    if (rows) {
      uint8_t* to = row_stage + RowTile<W, true, 4>::chunk(row + i, col / 32) + col % 32 / 2;
      if constexpr (W == 8) {
        *reinterpret_cast<uint32_t*>(to) = codes;
      } else {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(codes);
      }
    }
  }
  if (columns) {
#pragma unroll
    for (int j = 0; j < W; ++j) {
      uint8_t* to = column_stage + ColumnTile<W, 4>::chunk(col + j, row / 32) + row % 32 / 2;
      if constexpr (N == 8) {
        *reinterpret_cast<uint32_t*>(to) = turned[j];
      } else {
        *reinterpret_cast<uint16_t*>(to) = uint16_t(turned[j]);
      }
    }
  }
}

// Codes and scales of one pass into the stage, with what each element is multiplied by.
template <int W, bool TURNED, uint32_t SIDE, typename Rule, typename Codes>
__device__ __forceinline__ void stage_blocks(const Pass& pass, const Rule& rule, const Values<W>& v, uint32_t lane,
                                             const ScaleStage& scales, Codes codes) {
  using Blocks = BlockScales<W, TURNED, SIDE, Rule>;
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

// Codes and scales of FP8 into the stage: those of 256 columns from `first` on in a tile of `cols`.
// OBSERVED says that a scale may be made of an observed amax.
template <int W, bool TURNED, bool OBSERVED, typename E>
__device__ __forceinline__ void stage8(const Encode& planned, uint32_t lane, Values<W>& v, Stage<TURNED>& stage,
                                       uint32_t first, uint32_t cols) {
  const Encode& job = again(planned);
  if constexpr (TURNED) {
    const Pass& pass = job.pass[0];
    float tensor = multiplier<OBSERVED>(job, stage);
    stage_codes8<W, true, false, E>(v, lane, pass.data[0], pass.data[1], stage.codes[0], stage.codes[1],
                                    [&](int, int) { return tensor; });
  } else if (job.rule == RULE_TENSOR) {
    float tensor = multiplier<OBSERVED>(job, stage);
    stage_codes8<W, false, false, E>(v, lane, true, false, stage.codes[0], nullptr, [&](int, int) { return tensor; });
  } else {
    PowerOfTwo rule = PowerOfTwo::of(job);
#pragma unroll 1
    for (uint32_t p = 0; p < job.passes; ++p) {
      v.pin();
      stage_blocks<W, false, 32>(job.pass[p], rule, v, lane, ScaleStage{stage.scales[p], cols, first}, [&](auto m) {
        stage_codes8<W, false, true, E>(v, lane, true, false, stage.codes[p], nullptr, m);
      });
    }
  }
}

// The staged codes of FP8 from (row, col) on.
template <int W, bool TURNED>
__device__ __forceinline__ void store_codes8(const Encode& planned, uint64_t row, uint64_t col, const Stage<TURNED>& stage) {
#pragma unroll 1
  for (uint32_t p = 0; p < again(planned).passes; ++p) {
    const Encode& out = again(planned);
    uint32_t vector = out.vector;
    const Pass& pass = out.pass[p];
    if (pass.data[0]) {
      store_lines<RowTile<W, TURNED, 8>>(pass.data[0], vector & (VECTOR_ROWS_0 << p), row, col, out.rows, out.cols, false,
                                         stage.codes[TURNED ? 0 : p]);
    }
    if constexpr (TURNED) {
      if (pass.data[1]) {
        store_lines<ColumnTile<W, 8>>(pass.data[1], vector & (VECTOR_COLUMNS_0 << p), col, row, out.cols, out.rows, false,
                                      stage.codes[1]);
      }
    }
  }
}

// The staged E8M0 scales of a tile of `width` columns.
__device__ __forceinline__ void store_scales8(const Encode& planned, uint64_t row, uint64_t col, uint32_t width,
                                              const Stage<false>& stage) {
#pragma unroll 1
  for (uint32_t p = 0; p < again(planned).passes; ++p) {
    const Encode& out = again(planned);
    store_scales<false>(out.pass[p], View{out.rows, out.cols, 0}, row, col, width, stage.scales[p]);
  }
}

// FP8 codes of a tile.
template <int W, bool TURNED, bool OBSERVED, typename E>
__device__ __forceinline__ void quantize8(const Encode& planned, uint64_t row, uint64_t col, uint32_t lane,
                                          Values<W>& v, Stage<TURNED>& stage) {
  stage8<W, TURNED, OBSERVED, E>(planned, lane, v, stage, 0, Tiling<TURNED>::COLS);
  __syncthreads();
  store_codes8<W>(planned, row, col, stage);
  if constexpr (!TURNED) store_scales8(planned, row, col, Tiling<false>::COLS, stage);
}

// NVFP4 codes of a tile.
template <int W>
__device__ __forceinline__ void quantize4(const Encode& planned, uint64_t row, uint64_t col, uint32_t lane,
                                          Values<W>& v, Stage<true>& stage) {
  const Encode& job = again(planned);
  TwoLevel rule = TwoLevel::of(job);
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) {
    const Pass& pass = job.pass[p];
    v.pin();
    stage_blocks<W, true, 16>(pass, rule, v, lane, ScaleStage{stage.scales[p], Tiling<true>::COLS, 0}, [&](auto m) {
      stage_codes4<W>(v, lane, pass.data[0], pass.data[1], stage.codes[0], stage.codes[1], m);
    });
  }
  __syncthreads();
  const Encode& out = again(planned);
  const View view{out.rows, out.cols, 0};
  uint32_t vector = out.vector;
  for (uint32_t p = 0; p < out.passes; ++p) {
    const Pass& pass = out.pass[p];
    if (pass.data[0]) {
      store_lines<RowTile<W, true, 4>>(pass.data[0], vector & (VECTOR_ROWS_0 << p), row, col / 2, view.rows, view.cols / 2,
                                       false, stage.codes[0]);
    }
    if (pass.data[1]) {
      store_lines<ColumnTile<W, 4>>(pass.data[1], vector & (VECTOR_COLUMNS_0 << p), col, row / 2, view.cols,
                                    (view.rows + 1) / 2, view.rows % 2, stage.codes[1]);
    }
    store_scales<true>(pass, view, row, col, Tiling<true>::COLS, stage.scales[p]);
  }
}

// Values as they are, bf16 or f32, row-major.
template <int W>
__device__ __forceinline__ void store_plain(const Encode& job, const View& view, const Lane<W>& at, const Values<W>& v) {
  uint64_t row = at.row + at.local_row(), col = at.col + at.local_col();
#pragma unroll
  for (int i = 0; i < 32 / W; ++i) {
#pragma unroll
    for (int j = 0; j < W; j += 4) {
      if (!view.holds(row + i, col + j)) continue;
      uint64_t index = (row + i) * view.cols + col + j;
      bool whole = (job.vector & VECTOR_ROWS_0) && view.holds(row + i, col + j + 3);
      if (job.element == BF16) {
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

// Encodes the tile at (row, col) from the values of its threads.
template <int W, bool TURNED, bool OBSERVED>
__device__ __forceinline__ void quantize(const Encode& job, const View& view, uint64_t row, uint64_t col, const Lane<W>& at,
                                         Values<W>& v, Stage<TURNED>& stage) {
  switch (job.element) {
    case E4M3: return quantize8<W, TURNED, OBSERVED, E4m3>(job, row, col, at.lane, v, stage);
    case E5M2: return quantize8<W, TURNED, OBSERVED, E5m2>(job, row, col, at.lane, v, stage);
    default:
      if constexpr (TURNED) {
        quantize4<W>(job, row, col, at.lane, v, stage);
      } else {
        store_plain<W>(job, view, at, v);
      }
  }
}

}  // namespace lowp
