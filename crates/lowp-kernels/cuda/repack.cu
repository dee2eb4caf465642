// Conversion of a buffer between its Compact, Padded and Swizzled forms; padding is written as zero.
#include <lowp/codec.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// The position of entry (i, j) of a layout, in entries.
__device__ __forceinline__ uint64_t offset(const Layout& l, uint32_t bits, uint64_t i, uint64_t j) {
  if (l.swizzled) return swizzled(i, j, l.padded[1]);
  uint64_t row = (l.padded[1] * bits + 7) / 8 * 8 / bits;
  return i * row + j;
}

// The entry (i, j) at a position of a layout.
__device__ __forceinline__ void entry_at(const Layout& l, uint32_t bits, uint64_t at, uint64_t& i, uint64_t& j) {
  if (l.swizzled) {
    uint64_t tile = at / 512, across = l.padded[1] / 4;
    uint32_t in = uint32_t(at % 512);
    i = tile / across * 128 + in / 16 + in % 16 / 4 * 32;
    j = tile % across * 4 + in % 4;
    return;
  }
  uint64_t row = (l.padded[1] * bits + 7) / 8 * 8 / bits;
  i = at / row;
  j = at % row;
}

// The entry of `from` that covers the first element of entry (i, j) of `to`; 0 for padding.
__device__ __forceinline__ uint32_t entry(const Repack& job, uint64_t i, uint64_t j) {
  const Layout &f = job.from_layout, &t = job.to_layout;
  if (i >= t.entries[0] || j >= t.entries[1]) return 0;
  uint64_t a = i * t.tile[0], b = j * t.tile[1];
  bool transposed = f.cols_first != t.cols_first;
  uint64_t at = offset(f, job.bits, (transposed ? b : a) / f.tile[0], (transposed ? a : b) / f.tile[1]);
  const uint8_t* from = pointer<const uint8_t>(job.from) + at * job.bits / 8;
  if (job.bits == 4) return (*from >> (at % 2 * 4)) & 15;
  uint32_t value = 0;
  for (uint32_t k = 0; k < job.bits / 8u; ++k) value |= uint32_t(from[k]) << (8 * k);
  return value;
}

// A run of bytes of `to`, entry by entry.
__device__ __forceinline__ void repack_any(const Repack& job, uint32_t index) {
  uint32_t bits = job.bits, size = bits < 8 ? 1 : bits / 8, packed = bits == 4 ? 2 : 1;
  uint64_t first = index * REPACK_RUN, end = min(first + REPACK_RUN, job.bytes);
  uint8_t* to = pointer<uint8_t>(job.to);
  for (uint64_t b = first + threadIdx.x * size; b < end; b += THREADS * size) {
    uint64_t i, j;
    entry_at(job.to_layout, bits, b / size * packed, i, j);
    uint32_t value = entry(job, i, j);
    if (bits == 4) value |= entry(job, i, j + 1) << 4;
    for (uint32_t k = 0; k < size; ++k) to[b + k] = uint8_t(value >> (8 * k));
  }
}

// 128 x 128 entries of a swizzled buffer: 32 tiles of 512 bytes, in memory one after another. Words
// of four entries pass through shared memory, one line per outer entry.
constexpr uint32_t SIDE = REPACK_SIDE, PITCH = SIDE / 4 + 1;

// Sixteen bytes of a line of `from`, zero where there are none.
__device__ __forceinline__ uint4 load_line(const uint8_t* from, bool vector, uint64_t at, uint64_t end) {
  if (vector && at + 16 <= end) return load16(from + at);
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int k = 0; k < 16; ++k) {
    if (at + k < end) words[k / 4] |= uint32_t(from[at + k]) << (k % 4 * 8);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ void swizzle(const Repack& job, uint32_t index, uint32_t* shared) {
  const Layout &f = job.from_layout, &t = job.to_layout;
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t i0 = uint64_t(index / across) * SIDE, j0 = uint64_t(index % across) * SIDE;
  uint64_t rows = t.entries[0], cols = t.entries[1], pitch = f.padded[1];
  const uint8_t* from = pointer<const uint8_t>(job.from);
  bool transposed = job.path == REPACK_SWIZZLE_TRANSPOSED;
  uint4 lines[4];
  // Transposed, a thread's four lines are four neighbouring columns here: the words of a tile.
  uint32_t line = transposed ? threadIdx.x / 8 * 4 : threadIdx.x / 8, at = threadIdx.x % 8 * 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint64_t i = transposed ? j0 + line + k : i0 + line + 32 * k;
    bool inside = i < (transposed ? cols : rows);
    lines[k] = inside ? load_line(from + i * pitch, job.vector, (transposed ? i0 : j0) + at, transposed ? rows : cols)
                      : make_uint4(0, 0, 0, 0);
  }
  if (transposed) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t in[4] = {word(lines[0], k), word(lines[1], k), word(lines[2], k), word(lines[3], k)};
      uint32_t out[4];
      transpose_bytes4(in, out);
      // Lines 16 apart are written together: the exclusive or keeps them off one bank.
#pragma unroll
      for (int b = 0; b < 4; ++b) shared[(at + 4 * k + b) * PITCH + (line / 4 ^ threadIdx.x % 8 * 4)] = out[b];
    }
  } else {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int b = 0; b < 4; ++b) shared[(line + 32 * k) * PITCH + at / 4 + b] = word(lines[k], b);
    }
  }
  __syncthreads();
  uint8_t* to = pointer<uint8_t>(job.to) + (i0 / SIDE * (t.padded[1] / 4) + j0 / 4) * 512;
  uint32_t tiles = uint32_t(min(uint64_t(SIDE / 4), (t.padded[1] - j0) / 4));
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t tile = k * 8 + threadIdx.x / 32, i = threadIdx.x % 32;
    if (tile >= tiles) continue;
    uint32_t words[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      uint32_t l = i + 32 * q;
      words[q] = shared[l * PITCH + (transposed ? tile ^ l / 16 * 4 : tile)];
    }
    store16(to + tile * 512 + i * 16, make_uint4(words[0], words[1], words[2], words[3]));
  }
}

// The same where at least sixteen outer entries in a row share an entry of `from`: half of a warp's
// tile has sixteen bytes, one per lane, and all of its lanes store them.
__device__ __forceinline__ void swizzle_spread(const Repack& job, uint32_t index) {
  constexpr int TILES = SIDE * SIDE / 512 / (THREADS / 32);  // of a warp
  const Layout &f = job.from_layout, &t = job.to_layout;
  uint32_t across = uint32_t(job.tiles_across), lane = threadIdx.x % 32;
  uint64_t i0 = uint64_t(index / across) * SIDE, j0 = uint64_t(index % across) * SIDE;
  uint64_t rows = t.entries[0], cols = t.entries[1], pitch = f.padded[1];
  const uint8_t* from = pointer<const uint8_t>(job.from);
  bool transposed = f.cols_first != t.cols_first;
  uint64_t i = i0 + lane / 16 * 16 + lane % 16 / 4 * 32;
  uint32_t words[TILES];
#pragma unroll
  for (int k = 0; k < TILES; ++k) {
    uint64_t j = j0 + (threadIdx.x / 32 * TILES + k) * 4 + lane % 4, at = i >> job.spread;
    words[k] = i < rows && j < cols ? from[transposed ? j * pitch + at : at * pitch + j] : 0;
  }
  uint8_t* to = pointer<uint8_t>(job.to) + (i0 / SIDE * (t.padded[1] / 4) + j0 / 4) * 512;
  uint32_t tiles = uint32_t(min(uint64_t(SIDE / 4), (t.padded[1] - j0) / 4));
#pragma unroll
  for (int k = 0; k < TILES; ++k) {
    uint32_t w = words[k] << (lane % 4 * 8);
    w |= __shfl_xor_sync(FULL_WARP, w, 1);
    w |= __shfl_xor_sync(FULL_WARP, w, 2);
    uint32_t out[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      out[q] = __shfl_sync(FULL_WARP, w, lane / 16 * 16 + q * 4);
      if (i0 + lane + 32 * q >= rows) out[q] = 0;
    }
    uint32_t tile = threadIdx.x / 32 * TILES + k;
    if (tile < tiles) store16(to + tile * 512 + lane * 16, make_uint4(out[0], out[1], out[2], out[3]));
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_repack(const Tile* __restrict__ tiles, const Repack* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ uint32_t shared[SIDE * PITCH];
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Repack& job = jobs[tile.job];
  switch (job.path) {
    case REPACK_GENERIC: return repack_any(job, tile.index);
    case REPACK_SWIZZLE_SPREAD: return swizzle_spread(job, tile.index);
    default: return swizzle(job, tile.index, shared);
  }
}
