// Staged scales in Padded or Swizzled form, repeats included. The last tiles of a matrix write the padding
// behind them.
#pragma once
#include <lowp/stage.cuh>

namespace lowp {

// The scales of one buffer that a tile writes.
struct FormTile {
  const Scales& scales;
  bool turned;
  const uint8_t* stage;
  uint32_t h, w;              // sides of a block, as powers of two
  uint32_t entry_h, entry_w;  // of an entry
  uint32_t pitch;             // blocks of a row of the stage
  uint64_t top, left;         // its first entry
  uint32_t down, across;      // entries, padding included
  uint64_t r_end, c_end;      // entries of the matrix, from there

  __device__ __forceinline__ FormTile(const Encode& job, uint64_t row, uint64_t col, const Pass& pass, bool turned, const uint8_t* stage)
      : scales(pass.form[turned]), turned(turned), stage(stage) {
    h = 31 - __clz(pass.block_rows), w = 31 - __clz(pass.block_cols);
    entry_h = 31 - __clz(scales.tile_rows), entry_w = 31 - __clz(scales.tile_cols);
    pitch = job.tile_cols >> w;
    top = row >> entry_h, left = col >> entry_w;
    down = uint32_t((row + job.tile_rows < job.rows ? (row + job.tile_rows) >> entry_h : scales.rows) - top);
    across = uint32_t((col + job.tile_cols < job.cols ? (col + job.tile_cols) >> entry_w : scales.cols) - left);
    r_end = ((job.rows + scales.tile_rows - 1) >> entry_h) - top;
    c_end = ((job.cols + scales.tile_cols - 1) >> entry_w) - left;
  }

  // The entry at (r, c) of the tile; 0 for padding.
  __device__ __forceinline__ uint32_t entry(uint32_t r, uint32_t c) const {
    if (r >= r_end || c >= c_end) return 0;
    return stage[(r << entry_h >> h) * pitch + (c << entry_w >> w)];
  }
  // The same by physical axes, outer first.
  __device__ __forceinline__ uint32_t at(uint32_t i, uint32_t j) const { return turned ? entry(j, i) : entry(i, j); }

  __device__ __forceinline__ void padded() const {
    for (uint32_t e = threadIdx.x; e < down * across; e += THREADS) {
      uint32_t r = e / across, c = e % across;
      pointer<uint8_t>(scales.to)[scale_offset(scales, turned, top + r, left + c)] = uint8_t(entry(r, c));
    }
  }

  // A lane writes the sixteen bytes that lie together: entries 32 apart along the outer axis, four
  // along the inner one. Warps begin with tile `first`.
  __device__ __forceinline__ void swizzled(uint32_t first) const {
    uint32_t outer = turned ? across : down, inner = turned ? down : across;
    uint64_t o = turned ? left : top, n = turned ? top : left, pitch = turned ? scales.rows : scales.cols;
    uint32_t o0 = uint32_t(o % 128), n0 = uint32_t(n % 4);
    uint32_t tiles_in = (n0 + inner + 3) / 4, tiles_out = (o0 + outer + 127) / 128;
    uint32_t lane = threadIdx.x % 32;
    for (uint32_t tile = (threadIdx.x / 32 + first) % (THREADS / 32); tile < tiles_in * tiles_out; tile += THREADS / 32) {
      uint32_t big = tile / tiles_in, small = tile % tiles_in;
      // Of the first entry of the lane, in the tile.
      int i0 = int(big * 128 + lane) - int(o0), j0 = int(small * 4) - int(n0);
      bool whole = j0 >= 0 && j0 + 4 <= int(inner);
      uint32_t words[4];
      uint32_t owned = 0;
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        int i = i0 + 32 * q;
        bool mine = i >= 0 && i < int(outer);
        owned |= uint32_t(mine) << q;
        words[q] = 0;
        if (!mine) continue;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          int j = j0 + k;
          if (j >= 0 && j < int(inner)) words[q] |= at(i, j) << (8 * k);
        }
      }
      uint64_t to = scales.to + ((o / 128 + big) * (pitch / 4) + n / 4 + small) * 512 + lane * 16;
      if (whole && owned == 15 && to % 16 == 0) {
        *pointer<uint4>(to) = make_uint4(words[0], words[1], words[2], words[3]);
        continue;
      }
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        if (!(owned >> q & 1)) continue;
        if (whole && to % 4 == 0) {
          *pointer<uint32_t>(to + 4 * q) = words[q];
          continue;
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          int j = j0 + k;
          if (j >= 0 && j < int(inner)) pointer<uint8_t>(to)[4 * q + k] = uint8_t(words[q] >> (8 * k));
        }
      }
    }
  }
};

// All scales of a tile that have another form than Compact, when the tile is done.
template <bool TURNED>
__device__ __forceinline__ void store_forms(const Place<TURNED>& place, const Stage<TURNED>& stage) {
  const Encode& job = place.encode();
  if (!job.forms) return;
  uint32_t first = 0;
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes * 2u; ++p) {
    const Pass& pass = job.pass[p / 2];
    const Scales& scales = pass.form[p % 2];
    if (scales.to == 0) continue;
    const FormTile tile(job, place.row(), place.col(), pass, p % 2, stage.scales[p / 2]);
    if (scales.swizzled) {
      // Other warps do the tiles of the next buffer.
      tile.swizzled(first);
      first += THREADS / 64;
    } else {
      tile.padded();
    }
  }
}

// The same, not inlined: with registers of its own.
template <bool TURNED>
__device__ __noinline__ void forms_apart(const Stage<TURNED>& stage) {
  store_forms(Place<TURNED>{stage}, stage);
}

}  // namespace lowp
