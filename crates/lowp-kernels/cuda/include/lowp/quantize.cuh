// The tiled encode: the values of a block of threads, in registers, become codes and scales of one
// or both orientations. The input is read once; transposed codes pass through shared memory.
#pragma once
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// A block's tile: its warps' tiles lie side by side, or two across and four down where an output is
// transposed, so that a transposed row of 128 codes fills whole sectors.
template <bool TURNED>
struct Tiling {
  static constexpr uint32_t ROWS = TURNED ? 128 : 32, COLS = TURNED ? 64 : 256;
  // Bytes of a row of the transposed tile in shared memory; the padding keeps 16-byte reads aligned.
  static constexpr uint32_t PITCH = ROWS + 16;
  static constexpr uint32_t STAGED = 512;  // scales of a tile, at most

  static __device__ __forceinline__ uint32_t warp_row() { return TURNED ? threadIdx.x / 32 % 4 * 32 : 0; }
  static __device__ __forceinline__ uint32_t warp_col() {
    return TURNED ? threadIdx.x / 128 * 32 : threadIdx.x / 32 * 32;
  }
};

template <bool TURNED>
struct Stage {
  uint32_t scales[2][Tiling<TURNED>::STAGED];
  alignas(16) uint8_t turned[TURNED ? Tiling<true>::COLS * Tiling<true>::PITCH : 16];
};

__device__ __forceinline__ void store_entry(uint64_t base, uint64_t index, uint32_t entry, uint32_t bytes) {
  if (bytes == 1) {
    pointer<uint8_t>(base)[index] = uint8_t(entry);
  } else {
    store_f32(base + 4 * index, entry);
  }
}

// Four words of four bytes, transposed: byte r of out[c] is byte c of in[r].
__device__ __forceinline__ void turn_bytes(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  uint32_t a = __byte_perm(in[0], in[1], 0x5140), b = __byte_perm(in[2], in[3], 0x5140);
  uint32_t c = __byte_perm(in[0], in[1], 0x7362), d = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(a, b, 0x5410);
  out[1] = __byte_perm(a, b, 0x7632);
  out[2] = __byte_perm(c, d, 0x5410);
  out[3] = __byte_perm(c, d, 0x7632);
}

// Which block of a tile a lane's scale belongs to, staged for whole rows of stores.
template <int W, bool TURNED>
struct Quantizer {
  static constexpr int N = 32 / W;
  using Tile = Tiling<TURNED>;

  const ScaleRule& rule;
  const View& view;
  Lane<W> at;
  uint32_t* stage;  // of this pass

  // Stages the scale of the block that holds element (row, col) of the warp's tile.
  __device__ __forceinline__ void put(uint32_t row, uint32_t col, uint32_t height, uint32_t width, uint32_t entry) const {
    uint32_t r = (Tile::warp_row() + row) / height, c = (Tile::warp_col() + col) / width;
    stage[r * (Tile::COLS / width) + c] = entry;
  }

  // 1 x 32 and 1 x 16: the multiplier of each of a lane's rows.
  __device__ __forceinline__ void row_scales(const float (&v)[N][W], uint32_t width, float (&m)[N]) const {
    float a[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      a[i] = 0.0f;
#pragma unroll
      for (int j = 0; j < W; ++j) a[i] = max_abs(a[i], v[i][j]);
    }
    uint32_t lane = at.lane, first = lane / N * N;
    if (width == 32) {
      scatter_max<N, N, 1>(a, lane);
      Scaled s = rule.block(a[0]);
      put(lane, 0, 1, 32, s.entry);
#pragma unroll
      for (int i = 0; i < N; ++i) m[i] = __shfl_sync(FULL_WARP, s.multiplier, first + i);
    } else {
      scatter_max<N, N / 2, 1>(a, lane);
      uint32_t half = lane / (N / 2) % 2, row = first + lane % (N / 2) * 2;
      Scaled s = rule.block(a[0]), t = rule.block(a[1]);
      put(row, half * 16, 1, 16, s.entry);
      put(row + 1, half * 16, 1, 16, t.entry);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        m[i] = __shfl_sync(FULL_WARP, i % 2 ? t.multiplier : s.multiplier, first + half * (N / 2) + i / 2);
      }
    }
  }

  // 32 x 1 and 16 x 1: the multiplier of each of a lane's columns.
  __device__ __forceinline__ void column_scales(const float (&v)[N][W], uint32_t height, float (&m)[W]) const {
    float a[W];
#pragma unroll
    for (int j = 0; j < W; ++j) {
      a[j] = 0.0f;
#pragma unroll
      for (int i = 0; i < N; ++i) a[j] = max_abs(a[j], v[i][j]);
    }
    uint32_t lane = at.lane, first = lane % N;
    if (height == 32) {
      scatter_max<W, W, N>(a, lane);
      Scaled s = rule.block(a[0]);
      put(0, first * W + lane / N, 32, 1, s.entry);
#pragma unroll
      for (int j = 0; j < W; ++j) m[j] = __shfl_sync(FULL_WARP, s.multiplier, first + j * N);
    } else {
      scatter_max<W, W / 2, N>(a, lane);
      uint32_t half = lane / 16, col = first * W + lane / N % (W / 2) * 2;
      Scaled s = rule.block(a[0]), t = rule.block(a[1]);
      put(half * 16, col, 16, 1, s.entry);
      put(half * 16, col + 1, 16, 1, t.entry);
#pragma unroll
      for (int j = 0; j < W; ++j) {
        m[j] = __shfl_sync(FULL_WARP, j % 2 ? t.multiplier : s.multiplier, first + N * (half * (W / 2) + j / 2));
      }
    }
  }

  // 32 x 32 and 16 x 16: the multiplier of all of a lane's elements.
  __device__ __forceinline__ float square_scale(const float (&v)[N][W], uint32_t side) const {
    float a = 0.0f;
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < W; ++j) a = max_abs(a, v[i][j]);
    }
    a = all_max(a, (N / 2 - 1) | (W / 2 - 1) * N);
    if (side == 32) a = all_max(a, N / 2 | 16);
    Scaled s = rule.block(a);
    put(at.local_row(), at.local_col(), side, side, s.entry);
    return s.multiplier;
  }

  // The first bytes of a chunk, one by one: what lies before the end of the row.
  template <int WORDS>
  static __device__ __forceinline__ void store_bytes(uint8_t* to, const uint32_t (&words)[WORDS], uint32_t bytes) {
#pragma unroll
    for (int b = 0; b < 4 * WORDS; ++b) {
      if (uint32_t(b) < bytes) to[b] = uint8_t(words[b / 4] >> (b % 4 * 8));
    }
  }

  // Codes of 8 bits.
  template <typename E, typename Multiplier>
  __device__ __forceinline__ void codes8(const Pass& pass, const float (&v)[N][W], bool rows_inside, uint8_t* turned,
                                         Multiplier m) const {
    uint32_t codes[N][W / 4];
#pragma unroll
    for (int i = 0; i < N; ++i) {
#pragma unroll
      for (int j = 0; j < W; j += 4) {
        uint32_t low = E::pair(__fmul_rn(v[i][j], m(i, j)), __fmul_rn(v[i][j + 1], m(i, j + 1)));
        uint32_t high = E::pair(__fmul_rn(v[i][j + 2], m(i, j + 2)), __fmul_rn(v[i][j + 3], m(i, j + 3)));
        codes[i][j / 4] = __byte_perm(low, high, 0x5410);
      }
    }
    if (pass.data[0]) {
      uint64_t row = at.row + at.local_row(), col = at.col + at.local_col();
      uint8_t* to = pointer<uint8_t>(pass.data[0]) + row * view.cols + col;
      if (rows_inside) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (W == 8) {
            store8(to + i * view.cols, make_uint2(codes[i][0], codes[i][1]));
          } else {
            __stcs(reinterpret_cast<uint32_t*>(to + i * view.cols), codes[i][0]);
          }
        }
      } else if (col < view.cols) {
        uint32_t bytes = uint32_t(min(uint64_t(W), view.cols - col));
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (row + i < view.rows) store_bytes(to + i * view.cols, codes[i], bytes);
        }
      }
    }
    if constexpr (TURNED) {
      if (pass.data[1]) {
        uint8_t* to = turned + (Tile::warp_col() + at.local_col()) * Tile::PITCH + Tile::warp_row() + at.local_row();
#pragma unroll
        for (int i = 0; i < N; i += 4) {
#pragma unroll
          for (int j = 0; j < W; j += 4) {
            const uint32_t in[4] = {codes[i][j / 4], codes[i + 1][j / 4], codes[i + 2][j / 4], codes[i + 3][j / 4]};
            uint32_t out[4];
            turn_bytes(in, out);
#pragma unroll
            for (int k = 0; k < 4; ++k) *reinterpret_cast<uint32_t*>(to + (j + k) * Tile::PITCH + i) = out[k];
          }
        }
      }
    }
  }

  // Codes of 4 bits.
  template <typename Multiplier>
  __device__ __forceinline__ void codes4(const Pass& pass, const float (&v)[N][W], bool rows_inside, uint8_t* turned,
                                         Multiplier m) const {
    uint32_t codes[N], columns[W];
#pragma unroll
    for (int j = 0; j < W; ++j) columns[j] = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      codes[i] = 0;
#pragma unroll
      for (int j = 0; j < W; j += 2) {
        uint32_t two = E2m1::pair(__fmul_rn(v[i][j], m(i, j)), __fmul_rn(v[i][j + 1], m(i, j + 1)));
        codes[i] |= two << (4 * j);
        if constexpr (TURNED) {
          columns[j] |= (two & 15u) << (4 * i);
          columns[j + 1] |= (two >> 4) << (4 * i);
        }
      }
    }
    if (pass.data[0]) {
      uint64_t row = at.row + at.local_row(), col = at.col + at.local_col();
      uint64_t pitch = view.cols / 2;
      uint8_t* to = pointer<uint8_t>(pass.data[0]) + row * pitch + col / 2;
      if (rows_inside) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if constexpr (W == 8) {
            __stcs(reinterpret_cast<uint32_t*>(to + i * pitch), codes[i]);
          } else {
            __stcs(reinterpret_cast<unsigned short*>(to + i * pitch), static_cast<unsigned short>(codes[i]));
          }
        }
      } else if (col < view.cols) {
        uint32_t bytes = uint32_t(min(uint64_t(W), view.cols - col)) / 2;
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const uint32_t word[1] = {codes[i]};
          if (row + i < view.rows) store_bytes(to + i * pitch, word, bytes);
        }
      }
    }
    if constexpr (TURNED) {
      if (pass.data[1]) {
        uint32_t row = Tile::warp_row() + at.local_row();
        uint8_t* to = turned + (Tile::warp_col() + at.local_col()) * Tile::PITCH + row / 2;
#pragma unroll
        for (int j = 0; j < W; ++j) {
          if constexpr (N == 8) {
            *reinterpret_cast<uint32_t*>(to + j * Tile::PITCH) = columns[j];
          } else {
            *reinterpret_cast<uint16_t*>(to + j * Tile::PITCH) = uint16_t(columns[j]);
          }
        }
      }
    }
  }

  // Values as they are: bf16 or f32, row-major.
  __device__ __forceinline__ void plain(const Pass& pass, const float (&v)[N][W], bool rows_inside) const {
    uint64_t row = at.row + at.local_row(), col = at.col + at.local_col();
    uint64_t index = row * view.cols + col;
#pragma unroll
    for (int i = 0; i < N; ++i, index += view.cols) {
      uint32_t words[W];
      uint32_t count = W;
      if (rule.element == BF16) {
#pragma unroll
        for (int j = 0; j < W; j += 2) words[j / 2] = narrow_pair(v[i][j], v[i][j + 1]);
        count = W / 2;
      } else {
#pragma unroll
        for (int j = 0; j < W; ++j) words[j] = __float_as_uint(v[i][j]);
      }
      uint8_t* to = pointer<uint8_t>(pass.data[0]) + index * (4 * count / W);
      if (rows_inside) {
        if (count == 2) {
          store8(to, make_uint2(words[0], words[1]));
        } else {
          store16(to, make_uint4(words[0], words[1], words[2], words[3]));
          if constexpr (W == 8) {
            if (count == 8) store16(to + 16, make_uint4(words[4], words[5], words[6], words[7]));
          }
        }
      } else if (row + i < view.rows && col < view.cols) {
        uint32_t entries = uint32_t(min(uint64_t(W), view.cols - col));
        store_bytes(to, words, entries * (4 * count / W));
      }
    }
  }

  template <typename Multiplier>
  __device__ __forceinline__ void codes(const Pass& pass, const float (&v)[N][W], bool rows_inside, uint8_t* turned,
                                        Multiplier m) const {
    switch (rule.element) {
      case E4M3: return codes8<E4m3>(pass, v, rows_inside, turned, m);
      case E5M2: return codes8<E5m2>(pass, v, rows_inside, turned, m);
      default: return codes4(pass, v, rows_inside, turned, m);
    }
  }

  // Scales into the stage, codes to row-major data and to the transposed tile.
  __device__ __forceinline__ void run(const Pass& pass, const float (&v)[N][W], bool rows_inside, uint8_t* turned) const {
    if (!rule.scaled()) {
      if (!TURNED && pass.data[0]) plain(pass, v, rows_inside);
      return;
    }
    if (pass.block_rows > 1 && pass.block_cols == 1) {
      float m[W];
      column_scales(v, pass.block_rows, m);
      codes(pass, v, rows_inside, turned, [&](int, int j) { return m[j]; });
    } else {
      float m[N];
      if (pass.block_rows == 1) {
        row_scales(v, pass.block_cols, m);
      } else {
        float all = pass.block_rows == 0 ? rule.tensor : square_scale(v, pass.block_rows);
#pragma unroll
        for (int i = 0; i < N; ++i) m[i] = all;
      }
      codes(pass, v, rows_inside, turned, [&](int i, int) { return m[i]; });
    }
  }
};

// The staged scales of a tile, in whole rows of either order.
template <bool TURNED>
__device__ __forceinline__ void store_scales(const Pass& pass, const ScaleRule& rule, const View& view, uint64_t row,
                                             uint64_t col, const uint32_t* stage) {
  using Tile = Tiling<TURNED>;
  if (pass.block_rows == 0) return;
  uint32_t down = Tile::ROWS / pass.block_rows, across = Tile::COLS / pass.block_cols;
  uint64_t top = row / pass.block_rows, left = col / pass.block_cols;
  uint64_t rows = cdiv(view.rows, pass.block_rows), cols = cdiv(view.cols, pass.block_cols);
  uint32_t bytes = rule.entry_bytes();
  for (uint32_t e = threadIdx.x; e < down * across; e += THREADS) {
    if (pass.scale[0]) {
      uint32_t r = e / across, c = e % across;
      if (top + r < rows && left + c < cols) store_entry(pass.scale[0], (top + r) * cols + left + c, stage[e], bytes);
    }
    if (TURNED && pass.scale[1]) {
      uint32_t r = e % down, c = e / down;
      if (top + r < rows && left + c < cols) {
        store_entry(pass.scale[1], (left + c) * rows + top + r, stage[r * across + c], bytes);
      }
    }
  }
}

// The transposed tile, in runs of 16 bytes.
__device__ __forceinline__ void store_turned(const Pass& pass, uint32_t bits, bool vector, const View& view, uint64_t row,
                                             uint64_t col, const uint8_t* turned) {
  using Tile = Tiling<true>;
  uint32_t chunks = Tile::ROWS * bits / 8 / 16;
  uint64_t pitch = (view.rows * bits + 7) / 8, first = row * bits / 8;
  for (uint32_t e = threadIdx.x; e < Tile::COLS * chunks; e += THREADS) {
    uint32_t c = e / chunks, b = e % chunks * 16;
    if (col + c >= view.cols || first + b >= pitch) continue;
    uint8_t* to = pointer<uint8_t>(pass.data[1]) + (col + c) * pitch + first + b;
    uint4 chunk = *reinterpret_cast<const uint4*>(turned + c * Tile::PITCH + b);
    if (vector && first + b + 16 <= pitch) {
      store16(to, chunk);
      continue;
    }
    // The high nibble behind an odd number of rows is 0, whatever the multiplier made of it.
    const uint8_t* from = turned + c * Tile::PITCH + b;
    uint32_t bytes = uint32_t(min(uint64_t(16), pitch - first - b));
    for (uint32_t i = 0; i < bytes; ++i) {
      bool odd = bits == 4 && view.rows % 2 == 1 && first + b + i + 1 == pitch;
      to[i] = odd ? from[i] & 15 : from[i];
    }
  }
}

// Encodes the tile at (row, col) from the values of its threads.
template <int W, bool TURNED>
__device__ __forceinline__ void quantize(const Encode& job, const ScaleRule& rule, const View& view, uint64_t row,
                                         uint64_t col, const Lane<W>& at, const float (&v)[32 / W][W],
                                         Stage<TURNED>& stage) {
  bool inside = view.holds_all(at.row, at.col, 32, 32);
  uint32_t passes = job.passes, vector = job.vector;
#pragma unroll 1
  for (uint32_t p = 0; p < passes; ++p) {
    const Pass pass = job.pass[p];
    if (TURNED && p > 0) __syncthreads();
    Quantizer<W, TURNED> quantizer{rule, view, at, stage.scales[p]};
    quantizer.run(pass, v, inside && (vector & (VECTOR_ROWS_0 << p)), stage.turned);
    if constexpr (TURNED) {
      __syncthreads();
      if (pass.data[1]) {
        uint32_t bits = rule.element == E2M1 ? 4 : 8;
        store_turned(pass, bits, vector & (VECTOR_COLUMNS_0 << p), view, row, col, stage.turned);
      }
      store_scales<TURNED>(pass, rule, view, row, col, stage.scales[p]);
    }
  }
  if constexpr (!TURNED) {
    __syncthreads();
    for (uint32_t p = 0; p < passes; ++p) store_scales<TURNED>(job.pass[p], rule, view, row, col, stage.scales[p]);
  }
}

}  // namespace lowp
