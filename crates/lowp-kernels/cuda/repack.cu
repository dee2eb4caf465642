// Conversion of a buffer between its Compact, Padded and Swizzled forms; padding is written as zero.
#include <lowp/codec.cuh>
#include <lowp/quantize.cuh>

namespace lowp {

// The position of entry (i, j) of a layout, in entries.
__device__ __forceinline__ uint64_t offset(const Layout& l, uint32_t bits, uint64_t i, uint64_t j) {
  if (l.swizzled) {
    uint64_t tile = i / 128 * (l.padded[1] / 4) + j / 4;
    return tile * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4;
  }
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
  bool turned = f.cols_first != t.cols_first;
  uint64_t at = offset(f, job.bits, (turned ? b : a) / f.tile[0], (turned ? a : b) / f.tile[1]);
  const uint8_t* from = pointer<const uint8_t>(job.from) + at * job.bits / 8;
  if (job.bits == 4) return (*from >> (at % 2 * 4)) & 15;
  uint32_t value = 0;
  for (uint32_t k = 0; k < job.bits / 8u; ++k) value |= uint32_t(from[k]) << (8 * k);
  return value;
}

// 4096 bytes of `to`, entry by entry.
__device__ __forceinline__ void repack_any(const Repack& job, uint32_t index) {
  uint32_t bits = job.bits, size = bits < 8 ? 1 : bits / 8, packed = bits == 4 ? 2 : 1;
  uint64_t first = index * uint64_t(4096), end = min(first + 4096, job.bytes);
  uint8_t* to = pointer<uint8_t>(job.to);
  for (uint64_t b = first + threadIdx.x * size; b < end; b += THREADS * size) {
    uint64_t i, j;
    entry_at(job.to_layout, bits, b / size * packed, i, j);
    uint32_t value = entry(job, i, j);
    if (bits == 4) value |= entry(job, i, j + 1) << 4;
    for (uint32_t k = 0; k < size; ++k) to[b + k] = uint8_t(value >> (8 * k));
  }
}

// 128 x 64 entries of a swizzled buffer: 16 tiles of 512 bytes, in memory one after another.
__device__ __forceinline__ void swizzle(const Repack& job, uint32_t index, uint8_t* shared) {
  constexpr uint32_t PITCH = 80;
  const Layout &f = job.from_layout, &t = job.to_layout;
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t i0 = uint64_t(index / across) * 128, j0 = uint64_t(index % across) * 64;
  uint64_t rows = t.entries[0], cols = t.entries[1], pitch = f.padded[1];
  const uint8_t* from = pointer<const uint8_t>(job.from);
  if (job.path == REPACK_SWIZZLE) {
    for (uint32_t e = threadIdx.x; e < 128 * 4; e += THREADS) {
      uint32_t i = e / 4, j = e % 4 * 16;
      uint8_t* to = shared + i * PITCH + j;
      const uint8_t* at = from + (i0 + i) * pitch + j0 + j;
      if (job.vector && i0 + i < rows && j0 + j + 16 <= cols) {
        *reinterpret_cast<uint4*>(to) = load16(at);
      } else {
        for (uint32_t k = 0; k < 16; ++k) to[k] = i0 + i < rows && j0 + j + k < cols ? at[k] : 0;
      }
    }
  } else {
    // Rows of `from` are columns here: four of them at a time make the words of a tile.
    for (uint32_t e = threadIdx.x; e < 16 * 32; e += THREADS) {
      uint32_t j = e / 32 * 4, i = e % 32 * 4;
      uint32_t in[4], out[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const uint8_t* at = from + (j0 + j + k) * pitch + i0 + i;
        in[k] = 0;
        if (j0 + j + k >= cols) continue;
        if (job.vector && i0 + i + 4 <= rows) {
          in[k] = __ldcs(reinterpret_cast<const uint32_t*>(at));
        } else {
#pragma unroll
          for (int b = 0; b < 4; ++b) {
            if (i0 + i + b < rows) in[k] |= uint32_t(at[b]) << (8 * b);
          }
        }
      }
      turn_bytes(in, out);
#pragma unroll
      for (int b = 0; b < 4; ++b) *reinterpret_cast<uint32_t*>(shared + (i + b) * PITCH + j) = out[b];
    }
  }
  __syncthreads();
  uint8_t* to = pointer<uint8_t>(job.to) + (i0 / 128 * (t.padded[1] / 4) + j0 / 4) * 512;
  uint32_t tiles = uint32_t(min(uint64_t(16), (t.padded[1] - j0) / 4));
  for (uint32_t e = threadIdx.x; e < tiles * 32; e += THREADS) {
    const uint8_t* line = shared + e % 32 * PITCH + e / 32 * 4;
    uint4 value;
    value.x = *reinterpret_cast<const uint32_t*>(line);
    value.y = *reinterpret_cast<const uint32_t*>(line + 32 * PITCH);
    value.z = *reinterpret_cast<const uint32_t*>(line + 64 * PITCH);
    value.w = *reinterpret_cast<const uint32_t*>(line + 96 * PITCH);
    store16(to + e * 16, value);
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_repack(const Tile* __restrict__ tiles, const Repack* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ alignas(16) uint8_t shared[128 * 80];
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Repack& job = jobs[tile.job];
  if (job.path == REPACK_GENERIC) {
    repack_any(job, tile.index);
  } else {
    swizzle(job, tile.index, shared);
  }
}
