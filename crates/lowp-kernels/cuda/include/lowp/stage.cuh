// Where the tiled encode keeps the codes and scales of a tile in shared memory, and how they leave: in runs
// of 16 bytes where they can.
#pragma once
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// Where the warps of a block lie: side by side, or four down and two across.
template <bool TRANSPOSED>
struct Tiling {
  static constexpr uint32_t ROWS = TRANSPOSED ? TRANSPOSED_ROWS : WIDE_ROWS;
  static constexpr uint32_t COLS = TRANSPOSED ? TRANSPOSED_COLS : WIDE_COLS;
  static __device__ __forceinline__ uint32_t warp_row() { return TRANSPOSED ? threadIdx.x / 32 % 4 * 32 : 0; }
  static __device__ __forceinline__ uint32_t warp_col() {
    return TRANSPOSED ? threadIdx.x / 128 * 32 : threadIdx.x / 32 * 32;
  }
};

// Codes of a tile of 8 KiB at most, as lines of 16-byte chunks. Chunks are exchanged within a line
// by an exclusive or with a function of the line, which keeps the words that a warp writes at a
// time (a chunk of each of its groups of rows) off each other's banks.
template <int W, bool TRANSPOSED, uint32_t BITS>
struct RowTile {
  static constexpr uint32_t LINES = Tiling<TRANSPOSED>::ROWS, CHUNKS = Tiling<TRANSPOSED>::COLS * BITS / 128;
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

// What a warp remembers of its tile.
struct Held {
  uint64_t row, col;
  const Encode* encode;
  float tensor;  // what values are multiplied by under RULE_TENSOR; the amax under RULE_TWO_LEVEL
  // Of a tile that is done in steps of 32 x 256: those that meet the matrix, and from one to the next.
  uint32_t steps, step_down, step_along;
  uint32_t passes, forms;
};

template <bool TRANSPOSED>
struct alignas(16) Stage {
  uint8_t codes[2][8192];                  // wide: of each pass; transposed: row-major and transposed
  uint8_t scales[2][TRANSPOSED ? 512 : 1024];  // of each pass
  Held held[THREADS / 32];                 // of each warp
};

// The encode of a block of threads and where its tile begins, in shared memory: in registers they would be in
// the way of the values. REGISTERS says that there is room for the address of the job, which is quicker.
template <bool TRANSPOSED, bool REGISTERS>
struct Place {
  const Stage<TRANSPOSED>& stage;
  const Encode* planned;

  // Tile `index` of `job`.
  static __device__ __forceinline__ Place begin(const Encode& job, uint32_t index, Stage<TRANSPOSED>& stage) {
    Held& held = stage.held[threadIdx.x / 32];
    uint32_t across = uint32_t(job.tiles_across);
    uint64_t row = uint64_t(index / across) * job.tile_rows, col = uint64_t(index % across) * job.tile_cols;
    held.row = row;
    held.col = col;
    held.encode = &job;
    held.passes = job.passes;
    held.forms = job.forms;
    if (!TRANSPOSED) {
      using Step = Tiling<false>;
      bool tall = job.tile_rows > Step::ROWS;
      held.step_down = tall ? Step::ROWS : 0;
      held.step_along = tall ? 0 : Step::COLS;
      held.steps = tall ? uint32_t((min(uint64_t(job.tile_rows), job.rows - row) + Step::ROWS - 1) / Step::ROWS)
                        : uint32_t((min(uint64_t(job.tile_cols), job.cols - col) + Step::COLS - 1) / Step::COLS);
    }
    __syncwarp();
    return {stage, &job};
  }
  // What is known of the tensor. An encode reads it before the values: it is there when they are.
  __device__ __forceinline__ void hold_tensor(Stage<TRANSPOSED>& stage) const {
    const Ingredients& made = encode().pass[0].ingredients;
    if (made.tensor) stage.held[threadIdx.x / 32].tensor = tensor_value(made, 0);
    __syncwarp();
  }
  // Volatile: read where it is needed, and not kept.
  __device__ __forceinline__ const volatile Held& held() const { return stage.held[threadIdx.x / 32]; }
  __device__ __forceinline__ const Encode& encode() const {
    if constexpr (!REGISTERS) return *held().encode;
    // Its fields are read again.
    const Encode* at = planned;
    asm volatile("" : "+l"(at));
    return *at;
  }
  __device__ __forceinline__ uint64_t row() const { return held().row; }
  __device__ __forceinline__ uint64_t col() const { return held().col; }
};

// Where the scales of a pass are staged: those of the whole tile, in rows.
struct ScaleStage {
  uint8_t* bytes;
  uint32_t cols;                  // of the tile
  uint32_t first_row, first_col;  // of the codes in work
};

// Writes a staged tile to lines of `pitch` bytes, from (line, byte) on. `parts` says that the cache should wait for the rest of
// each line of memory.
template <typename Tile>
__device__ __forceinline__ void store_lines(uint64_t base, bool vector, uint64_t line, uint64_t byte, uint64_t lines,
                                            uint64_t pitch, bool partial, const uint8_t* stage, bool parts = false) {
  constexpr uint32_t COUNT = Tile::LINES * Tile::CHUNKS;
  uint64_t corner = base + line * pitch + byte;
  if (vector && line + Tile::LINES <= lines && byte + Tile::CHUNKS * 16 <= pitch) {
#pragma unroll
    for (uint32_t first = 0; first < COUNT; first += THREADS) {
      uint32_t e = first + threadIdx.x, i = e / Tile::CHUNKS, c = e % Tile::CHUNKS;
      const uint4 chunk = *reinterpret_cast<const uint4*>(stage + Tile::chunk(i, c));
      uint8_t* to = pointer<uint8_t>(corner + i * pitch + c * 16);
      parts ? store16_part(to, chunk) : store16(to, chunk);
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
    // The high nibble after an odd number of entries is 0, whatever the multiplier made of it.
    if (partial && byte + b + bytes == pitch) pointer<uint8_t>(to)[bytes - 1] = from[bytes - 1] & 15;
  }
}

// Writes the staged Compact scales of a tile of `height` x `width` elements, in whole rows of either order; they are staged as those
// of a tile of `staged_width`. Block sides are powers of two.
template <bool TRANSPOSED>
__device__ __forceinline__ void store_scales(const Pass& pass, const View& view, uint64_t row, uint64_t col, uint32_t height,
                                             uint32_t width, const uint8_t* stage, uint32_t staged_width) {
  if (pass.block_rows == 0) return;
  uint32_t h = 31 - __clz(pass.block_rows), w = 31 - __clz(pass.block_cols);
  uint32_t down = height >> h, across = width >> w;
  if (threadIdx.x >= down * across) return;
  uint64_t rows = (view.rows + pass.block_rows - 1) >> h, cols = (view.cols + pass.block_cols - 1) >> w;
  uint64_t top = row >> h, left = col >> w;
  // What is left of the matrix, in blocks.
  uint32_t r_end = uint32_t(min(uint64_t(down), rows - top)), c_end = uint32_t(min(uint64_t(across), cols - left));
  uint32_t down_bits = 31 - __clz(down), across_bits = 31 - __clz(across), pitch = staged_width >> w;
  bool whole = r_end == down && c_end == across;
  if (uint64_t to = pass.scale[0]; to != 0) {
    // Four at a time, where a row has as many.
    uint32_t shift = whole && across >= 4 && (to | cols) % 4 == 0 ? 2 : 0;
    for (uint32_t e = threadIdx.x << shift; e < down * across; e += THREADS << shift) {
      uint32_t r = e >> across_bits, c = e & (across - 1);
      uint64_t at = to + (top + r) * cols + left + c;
      if (shift != 0) {
        *pointer<uint32_t>(at) = *reinterpret_cast<const uint32_t*>(stage + r * pitch + c);
      } else if (r < r_end && c < c_end) {
        *pointer<uint8_t>(at) = stage[r * pitch + c];
      }
    }
  }
  if constexpr (TRANSPOSED) {
    if (uint64_t to = pass.scale[1]; to != 0) {
      uint32_t shift = whole && down >= 4 && (to | rows) % 4 == 0 ? 2 : 0;
      for (uint32_t e = threadIdx.x << shift; e < down * across; e += THREADS << shift) {
        uint32_t r = e & (down - 1), c = e >> down_bits;
        uint64_t at = to + (left + c) * rows + top + r;
        const uint8_t* from = stage + r * pitch + c;
        if (shift != 0) {
          uint32_t low = from[0] | from[pitch] << 8, high = from[2 * pitch] | from[3 * pitch] << 8;
          *pointer<uint32_t>(at) = low | high << 16;
        } else if (r < r_end && c < c_end) {
          *pointer<uint8_t>(at) = *from;
        }
      }
    }
  }
}

// The same of a tile that is staged as it is.
template <bool TRANSPOSED>
__device__ __forceinline__ void store_scales(const Pass& pass, const View& view, uint64_t row, uint64_t col, uint32_t height,
                                             uint32_t width, const uint8_t* stage) {
  store_scales<TRANSPOSED>(pass, view, row, col, height, width, stage, width);
}

}  // namespace lowp
