// Staged scales in Padded or Swizzled form, repeats included. The last tiles of a matrix write the padding
// after them.
#pragma once
#include <lowp/stage.cuh>

namespace lowp {

// The entries of one buffer that a tile writes, by physical axes: outer i, inner j.
struct FormTile {
  const Scales& scales;
  uint64_t first_i, first_j;  // its first entry
  uint32_t outer, inner;      // entries, padding included
  uint32_t i_end, j_end;      // those with a value
  const uint8_t* stage;
  uint32_t repeat_i, repeat_j;  // entries that share a scale, as powers of two
  uint32_t pitch_i, pitch_j;    // of scales in the stage

  __device__ __forceinline__ FormTile(const Encode& job, uint64_t row, uint64_t col, const Pass& pass, bool transposed,
                                      const uint8_t* stage)
      : scales(pass.form[transposed]), stage(stage) {
    uint32_t h = 31 - __clz(pass.block_rows), w = 31 - __clz(pass.block_cols);
    uint32_t entry_h = 31 - __clz(scales.tile_rows), entry_w = 31 - __clz(scales.tile_cols);
    uint64_t top = row >> entry_h, left = col >> entry_w;
    bool last_row = row + job.tile_rows >= job.rows, last_col = col + job.tile_cols >= job.cols;
    uint32_t down = uint32_t(last_row ? scales.rows - top : job.tile_rows >> entry_h);
    uint32_t across = uint32_t(last_col ? scales.cols - left : job.tile_cols >> entry_w);
    uint32_t r_end = last_row ? uint32_t(((job.rows + scales.tile_rows - 1) >> entry_h) - top) : down;
    uint32_t c_end = last_col ? uint32_t(((job.cols + scales.tile_cols - 1) >> entry_w) - left) : across;
    uint32_t pitch = job.tile_cols >> w;
    first_i = transposed ? left : top, first_j = transposed ? top : left;
    outer = transposed ? across : down, inner = transposed ? down : across;
    i_end = transposed ? c_end : r_end, j_end = transposed ? r_end : c_end;
    repeat_i = transposed ? w - entry_w : h - entry_h, repeat_j = transposed ? h - entry_h : w - entry_w;
    pitch_i = transposed ? 1 : pitch, pitch_j = transposed ? pitch : 1;
  }

  // Entry (i, j); 0 for padding.
  __device__ __forceinline__ uint32_t at(uint32_t i, uint32_t j) const {
    return i < i_end && j < j_end ? stage[(i >> repeat_i) * pitch_i + (j >> repeat_j) * pitch_j] : 0;
  }

  // Entry by entry.
  __device__ __forceinline__ void store(bool transposed) const {
    for (uint32_t e = threadIdx.x; e < outer * inner; e += THREADS) {
      uint32_t i = e / inner, j = e % inner;
      uint64_t row = transposed ? first_j + j : first_i + i, col = transposed ? first_i + i : first_j + j;
      pointer<uint8_t>(scales.to)[scale_offset(scales, transposed, row, col)] = uint8_t(at(i, j));
    }
  }
};

// Every entry of the scale of one block in another form than Compact, and the padding after the last blocks: by one thread.
template <typename Store>
__device__ __forceinline__ void spread(const Encode& job, const Pass& pass, int transposed, uint64_t block_row, uint64_t block_col,
                                       uint32_t entry, Store store) {
  const Scales& to = pass.form[transposed];
  uint64_t rows = cdiv(job.rows, to.tile_rows), cols = cdiv(job.cols, to.tile_cols);
  uint64_t times_rows = pass.block_rows / to.tile_rows, times_cols = pass.block_cols / to.tile_cols;
  uint64_t top = block_row * times_rows, left = block_col * times_cols;
  uint64_t bottom = top + times_rows < rows ? top + times_rows : to.rows;
  uint64_t right = left + times_cols < cols ? left + times_cols : to.cols;
  for (uint64_t r = top; r < bottom; ++r) {
    for (uint64_t c = left; c < right; ++c) store(scale_offset(to, transposed, r, c), r < rows && c < cols ? entry : 0);
  }
}

// The swizzled scales of a tile of 128 x COLS elements within the matrix, of blocks of side SIDE: a thread
// writes words of four inner entries, neighbours write neighbouring ones. In a tile of 128 x 4 entries those
// are 32 apart along the outer axis.
template <uint32_t COLS, uint32_t SIDE>
__device__ __forceinline__ void store_swizzled(const Pass& pass, uint64_t row, uint64_t col, const uint8_t* stage) {
  constexpr uint32_t WORDS = 128 * COLS / (4 * SIDE);  // of either order
  static_assert(COLS % 128 == 0 || COLS == 64, "whole tiles, or halves");
#pragma unroll
  for (uint32_t x = threadIdx.x; x < 2 * WORDS; x += THREADS) {
    bool transposed = x >= WORDS;
    uint32_t e = x % WORDS;
    const Scales& scales = pass.form[transposed];
    if (scales.to == 0) continue;
    uint32_t word, at;
    uint64_t tile;
    if (!transposed) {
      uint32_t i = e % 4 * 32 + e % 128 / 4, j = e / 128 * 4;
      uint32_t line = pass.block_rows == 1 ? i : i / SIDE;
      word = *reinterpret_cast<const uint32_t*>(stage + line * (COLS / SIDE) + j);
      tile = row / 128 * (scales.cols / 4) + col / (4 * SIDE) + e / 128;
      at = e % 128;
    } else {
      // Of a tile whose outer entries are columns; with 64 columns, of one half of two such tiles.
      constexpr uint32_t SPAN = COLS < 128 ? COLS : 128, QUARTERS = SPAN / 32;
      uint32_t part = e / SPAN, half = COLS < 128 ? uint32_t(col / 64 % 2) * 2 : 0;
      uint32_t q = e % QUARTERS, i = e % SPAN / QUARTERS;
      uint32_t j = COLS < 128 ? part : 0, outer = (COLS < 128 ? 0 : part * 128) + q * 32 + i;
      bool repeated = pass.block_cols != 1;
      uint32_t pitch = repeated ? COLS / SIDE : COLS;
      const uint8_t* from = stage + j * 4 * pitch + (repeated ? outer / SIDE : outer);
      uint32_t low = from[0] | from[pitch] << 8, high = from[2 * pitch] | from[3 * pitch] << 8;
      word = low | high << 16;
      tile = (col / 128 + (COLS < 128 ? 0 : part)) * (scales.rows / 4) + row / (4 * SIDE) + j;
      at = i * 4 + half + q;
    }
    *pointer<uint32_t>(scales.to + tile * 512 + at * 4) = word;
  }
}

// All scales of a tile that have another form than Compact, when the tile is done.
template <bool TRANSPOSED, typename Place>
__device__ __forceinline__ void store_forms(const Place& place, const Stage<TRANSPOSED>& stage) {
  constexpr uint32_t COLS = Tiling<TRANSPOSED>::COLS, SIDE = TRANSPOSED ? 16 : 32;
  if (place.held().forms == FORMS_NONE) return;
  const Encode& job = place.encode();
  const uint64_t row = place.row(), col = place.col();
  // Nothing but values: padding follows the last of an odd number of halves.
  bool whole = row + 128 <= job.rows && col + COLS <= job.cols && (COLS >= 128 || col + COLS < job.cols || job.cols % 128 == 0);
  bool fast = whole && job.tile_rows == 128 && job.tile_cols == COLS && job.forms == FORMS_SWIZZLED;
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) {
    const Pass& pass = job.pass[p];
    if (fast) {
      store_swizzled<COLS, SIDE>(pass, row, col, stage.scales[p]);
      continue;
    }
#pragma unroll 1
    for (int transposed = 0; transposed < 2; ++transposed) {
      if (pass.form[transposed].to) FormTile(job, row, col, pass, transposed, stage.scales[p]).store(transposed);
    }
  }
}

// The same, not inlined: with registers of its own.
template <bool TRANSPOSED>
__device__ __noinline__ void forms_apart(const Stage<TRANSPOSED>& stage) {
  store_forms(Place<TRANSPOSED, false>{stage, nullptr}, stage);
}

}  // namespace lowp
