// Conversion of a buffer between its Compact, Padded and Swizzled forms; padding is written as zero.
#include <lowp/codec.cuh>
#include <lowp/fetch.cuh>
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

// 128 x COLS entries of a swizzled buffer: tiles of 512 bytes, in memory one after another. In one of them, chunk r of
// 16 bytes has four entries of each of rows r, r + 32, r + 64 and r + 96.
constexpr uint32_t SIDE = REPACK_SIDE, WARPS = THREADS / 32;

// What the paths below know of their tile.
template <uint32_t COLS>
struct Area {
  uint64_t i0, j0, rows, cols, pitch;
  const uint8_t* from;
  uint8_t* to;     // of the first tile of 512 bytes
  uint32_t tiles;  // of them, from there on in a row
  static __device__ __forceinline__ Area of(const Repack& job, uint32_t index) {
    const Layout& t = job.to_layout;
    uint32_t across = uint32_t(job.tiles_across);
    Area a;
    a.i0 = uint64_t(index / across) * SIDE, a.j0 = uint64_t(index % across) * COLS;
    a.rows = t.entries[0], a.cols = t.entries[1], a.pitch = job.from_layout.padded[1];
    a.from = pointer<const uint8_t>(job.from);
    a.to = pointer<uint8_t>(job.to) + (index / across * (t.padded[1] / 4) + a.j0 / 4) * 512;
    a.tiles = uint32_t(min(uint64_t(COLS / 4), (t.padded[1] - a.j0) / 4));
    return a;
  }
};

// Where chunk c of 16 bytes of a line of 128 lies in shared memory: eight lines in a row, or eight chunks, meet no bank twice.
__device__ __forceinline__ uint32_t chunk_at(uint32_t line, uint32_t c) { return line * SIDE + (c ^ line % 8) * 16; }

// Bytes at .. at + 128 of lines line .. line + 128 of `from`, which has `lines` of `end` bytes; zeros outside.
__device__ __forceinline__ void load_lines(const uint8_t* from, uint64_t pitch, bool vector, uint64_t line, uint64_t lines,
                                           uint64_t at, uint64_t end, uint8_t* shared) {
  uint32_t r = threadIdx.x / 8, c = threadIdx.x % 8;
  at += c * 16;
#pragma unroll
  for (uint32_t k = 0; k < SIDE / 32; ++k) {
    bool inside = line + r + 32 * k < lines && at < end;
    uint32_t bytes = inside ? uint32_t(min(uint64_t(16), end - at)) : 0;
    const uint8_t* here = inside ? from + (line + r + 32 * k) * pitch + at : from;
    uint8_t* to = shared + chunk_at(r + 32 * k, c);
    if (vector) {
      copy16(to, here, bytes);
    } else {
#pragma unroll 1
      for (uint32_t b = 0; b < 16; ++b) to[b] = b < bytes ? here[b] : 0;
    }
  }
  wait_copies();
}

// Sixteen columns of four rows are a chunk of each of four tiles.
__device__ __forceinline__ void swizzle(const Repack& job, uint32_t index, uint8_t* shared) {
  const auto a = Area<SIDE>::of(job, index);
  load_lines(a.from, a.pitch, job.vector, a.i0, a.rows, a.j0, a.cols, shared);
  uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint4 rows[4];
#pragma unroll
  for (int q = 0; q < 4; ++q) rows[q] = *reinterpret_cast<const uint4*>(shared + chunk_at(lane + 32 * q, warp));
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t tile = warp * 4 + k;
    if (tile >= a.tiles) continue;
    store16(a.to + tile * 512 + lane * 16, make_uint4(word(rows[0], k), word(rows[1], k), word(rows[2], k), word(rows[3], k)));
  }
}

// Exchanges words among lanes 8 apart: word k of lane q of four becomes word q of lane k.
__device__ __forceinline__ void exchange4(uint32_t (&w)[4], uint32_t q) {
#pragma unroll
  for (int bit = 1; bit < 4; bit *= 2) {
    bool upper = (q & bit) != 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (k & bit) continue;
      uint32_t send = upper ? w[k] : w[k + bit];
      uint32_t got = __shfl_xor_sync(FULL_WARP, send, bit * 8);
      w[k] = upper ? got : w[k];
      w[k + bit] = upper ? w[k + bit] : got;
    }
  }
}

// With the axes exchanged, four lines are a tile: a lane has four neighbouring entries of each.
__device__ __forceinline__ void swizzle_transposed(const Repack& job, uint32_t index, uint8_t* shared) {
  const auto a = Area<SIDE>::of(job, index);
  load_lines(a.from, a.pitch, job.vector, a.j0, a.cols, a.i0, a.rows, shared);
  uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < 4; ++t) {
    uint32_t tile = warp * 4 + t, in[4], w[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) in[k] = *reinterpret_cast<const uint32_t*>(shared + chunk_at(tile * 4 + k, lane / 4) + lane % 4 * 4);
    transpose_bytes4(in, w);
    exchange4(w, lane / 8);
    if (tile >= a.tiles) continue;
    store16(a.to + tile * 512 + (lane % 8 * 4 + lane / 8) * 16, make_uint4(w[0], w[1], w[2], w[3]));
  }
}

// Where at least sixteen outer entries in a row share an entry of `from`: half of a warp's tile has
// sixteen bytes, one per lane, and all of its lanes store them.
__device__ __forceinline__ void swizzle_spread(const Repack& job, uint32_t index) {
  constexpr int TILES = REPACK_SPREAD_COLS / 4 / WARPS;  // of a warp
  const auto a = Area<REPACK_SPREAD_COLS>::of(job, index);
  uint32_t lane = threadIdx.x % 32, first = threadIdx.x / 32 * TILES;
  bool transposed = job.from_layout.cols_first != job.to_layout.cols_first;
  uint64_t i = a.i0 + lane / 16 * 16 + lane % 16 / 4 * 32, at = i >> job.spread, j0 = a.j0 + first * 4 + lane % 4;
  uint64_t step = transposed ? a.pitch * 4 : 4;
  const uint8_t* from = a.from + (transposed ? j0 * a.pitch + at : at * a.pitch + j0);
  uint32_t words[TILES];
#pragma unroll
  for (int k = 0; k < TILES; ++k) {
    words[k] = i < a.rows && j0 + k * 4 < a.cols ? from[k * step] : 0;
  }
  uint8_t* to = a.to + first * 512 + lane * 16;
  uint64_t here = a.i0 + lane;
#pragma unroll
  for (int k = 0; k < TILES; ++k) {
    uint32_t w = words[k] << (lane % 4 * 8);
    w |= __shfl_xor_sync(FULL_WARP, w, 1);
    w |= __shfl_xor_sync(FULL_WARP, w, 2);
    uint32_t out[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      out[q] = __shfl_sync(FULL_WARP, w, lane / 16 * 16 + q * 4);
      if (here + 32 * q >= a.rows) out[q] = 0;
    }
    if (first + k < a.tiles) store16(to + k * 512, make_uint4(out[0], out[1], out[2], out[3]));
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, resident::REPACK)
    lowp_repack(const Tile* __restrict__ tiles, const Repack* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ Fetched<Repack> fetched;
  __shared__ alignas(128) uint8_t lines[SIDE * SIDE];
  fetch(fetched, tiles, jobs, step, flags);
  if (fetched.skip) return;
  const Repack& job = fetched.job();
  uint32_t index = fetched.tile.index;
  switch (job.path) {
    case REPACK_GENERIC: return repack_any(job, index);
    case REPACK_SWIZZLE: return swizzle(job, index, lines);
    case REPACK_SWIZZLE_TRANSPOSED: return swizzle_transposed(job, index, lines);
    default: return swizzle_spread(job, index);
  }
}
