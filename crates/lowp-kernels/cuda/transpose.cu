// Transposes of 4-, 8-, 16- and 32-bit entries (numerics 9). Bytes and nibbles with aligned rows
// take tiles of 128 x 128 bytes: wide loads, byte exchanges within a thread's micro-tile, words
// through shared memory, stores of whole sectors.
#include <lowp/tile.cuh>

namespace lowp {

constexpr uint32_t SIDE = TRANSPOSE_SIDE;

// Any entries, one at a time.
__device__ __forceinline__ void transpose_any(const Transpose& job, uint32_t index, uint32_t* shared) {
  constexpr uint32_t PITCH = SIDE + 1;
  uint32_t tiles = uint32_t(job.tiles_across), bits = job.bits;
  uint64_t i0 = uint64_t(index / tiles) * SIDE, j0 = uint64_t(index % tiles) * SIDE;
  uint32_t outer = uint32_t(min(uint64_t(SIDE), job.outer - i0)), inner = uint32_t(min(uint64_t(SIDE), job.inner - j0));
  for (uint32_t e = threadIdx.x; e < outer * SIDE; e += THREADS) {
    uint32_t i = e / SIDE, j = e % SIDE;
    if (j >= inner) continue;
    const uint8_t* from = pointer<const uint8_t>(job.from) + (i0 + i) * job.from_pitch + (j0 + j) * bits / 8;
    uint32_t entry = *from;
    if (bits == 4) entry = (entry >> (j % 2 * 4)) & 15;
    for (uint32_t b = 1; b < bits / 8; ++b) entry |= uint32_t(from[b]) << (8 * b);
    shared[j * PITCH + i] = entry;
  }
  __syncthreads();
  uint32_t packed = bits == 4 ? 2 : 1, entries = (outer + packed - 1) / packed, step = SIDE / packed;
  for (uint32_t e = threadIdx.x; e < inner * step; e += THREADS) {
    uint32_t j = e / step, i = e % step;
    if (i >= entries) continue;
    uint8_t* to = pointer<uint8_t>(job.to) + (j0 + j) * job.to_pitch + i0 * bits / 8;
    if (bits == 4) {
      uint32_t high = 2 * i + 1 < outer ? shared[j * PITCH + 2 * i + 1] : 0;
      to[i] = uint8_t(shared[j * PITCH + 2 * i] | (high << 4));
    } else {
      uint32_t entry = shared[j * PITCH + i];
      for (uint32_t b = 0; b < bits / 8; ++b) to[i * (bits / 8) + b] = uint8_t(entry >> (8 * b));
    }
  }
}

// 128 x 128 bytes. Thread t loads 16 bytes of each of four rows. The chunks of a line are exchanged
// by an exclusive or with the thread that wrote them, so that no two lanes meet in a bank.
__device__ __forceinline__ void transpose_bytes(const Transpose& job, uint32_t index, uint8_t* shared) {
  constexpr uint32_t TILE = TRANSPOSE_BYTES;
  uint2 tile = grouped(index, uint32_t(cdiv(job.outer, TILE)), uint32_t(job.tiles_across));
  uint64_t i0 = uint64_t(tile.x) * TILE, j0 = uint64_t(tile.y) * TILE;
  uint32_t r = threadIdx.x / 8 * 4, c = threadIdx.x % 8 * 16;
  bool whole = i0 + TILE <= job.outer && j0 + TILE <= job.inner;
  const uint8_t* from = pointer<const uint8_t>(job.from) + (i0 + r) * job.from_pitch + j0 + c;
  uint4 rows[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bool inside = whole || (i0 + r + i < job.outer && j0 + c < job.inner);
    rows[i] = inside ? load16(from + i * job.from_pitch) : make_uint4(0, 0, 0, 0);
  }
  uint32_t at = (r / 16 ^ threadIdx.x % 8) * 16 + r % 16;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t in[4] = {word(rows[0], k), word(rows[1], k), word(rows[2], k), word(rows[3], k)};
    uint32_t out[4];
    transpose_bytes4(in, out);
#pragma unroll
    for (int b = 0; b < 4; ++b) *reinterpret_cast<uint32_t*>(shared + (c + 4 * k + b) * TILE + at) = out[b];
  }
  __syncthreads();
  // Line j = 32 * step + t / 8 of the result.
  uint32_t j = threadIdx.x / 8;
  uint8_t* to = pointer<uint8_t>(job.to) + (j0 + j) * job.to_pitch + i0 + c;
#pragma unroll
  for (uint32_t step = 0; step < 4; ++step, j += 32) {
    if (!whole && (j0 + j >= job.inner || i0 + c >= job.outer)) continue;
    uint32_t chunk = threadIdx.x % 8 ^ j / 16;
    store16(to + step * 32 * job.to_pitch, *reinterpret_cast<const uint4*>(shared + j * TILE + chunk * 16));
  }
}

// 256 x 256 nibbles: 256 rows of 128 bytes become as many. Thread t loads 8 bytes of each of eight
// rows, twice; nibbles of row pairs are exchanged, then bytes of pairs. The words of a row are
// exchanged by an exclusive or with the column that wrote them, and half of a warp writes odd rows
// while the other writes even ones, so no two lanes meet in a bank.
__device__ __forceinline__ void transpose_nibbles(const Transpose& job, uint32_t index, uint32_t* shared) {
  constexpr uint32_t TILE = TRANSPOSE_NIBBLES, WORDS = TILE / 8;
  uint2 tile = grouped(index, uint32_t(cdiv(job.outer, TILE)), uint32_t(job.tiles_across));
  uint64_t i0 = uint64_t(tile.x) * TILE, j0 = uint64_t(tile.y) * (TILE / 2);  // rows, bytes
  uint32_t r = threadIdx.x / 16 * 8, c = threadIdx.x % 16 * 8;
  bool whole = i0 + TILE <= job.outer && j0 + TILE / 2 <= job.from_pitch;
  const uint8_t* from = pointer<const uint8_t>(job.from) + (i0 + r) * job.from_pitch + j0 + c;
  uint2 rows[2][8];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      bool inside = whole || (i0 + r + 128 * half + i < job.outer && j0 + c < job.from_pitch);
      rows[half][i] = inside ? load8(from + (128 * half + i) * job.from_pitch) : make_uint2(0, 0);
    }
  }
  uint32_t upper = threadIdx.x / 16 % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    uint32_t at = (r / 8 ^ threadIdx.x % 16) + 16 * half;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      uint32_t low[4], high[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        uint2 first = rows[half][2 * q], second = rows[half][2 * q + 1];
        uint32_t a = k ? first.y : first.x, b = k ? second.y : second.x;
        low[q] = (a & 0x0F0F0F0Fu) | ((b & 0x0F0F0F0Fu) << 4);
        high[q] = ((a >> 4) & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
      }
      uint32_t even[4], odd[4];
      transpose_bytes4(low, even);
      transpose_bytes4(high, odd);
#pragma unroll
      for (int b = 0; b < 4; ++b) {
        // Odd rows have their halves exchanged, so that the two rows of a warp's store differ in bank.
        uint32_t j = 2 * (c + 4 * k + b);
        shared[(j + upper) * WORDS + (at ^ 16 * upper)] = upper ? odd[b] : even[b];
        shared[(j + 1 - upper) * WORDS + (at ^ 16 * (1 - upper))] = upper ? even[b] : odd[b];
      }
    }
  }
  __syncthreads();
  // Row j = 8 * step + t / 32 of the result.
  uint32_t j = threadIdx.x / 32, w = threadIdx.x % 32;
  uint8_t* to = pointer<uint8_t>(job.to) + (2 * j0 + j) * job.to_pitch + i0 / 2 + w * 4;
#pragma unroll 8
  for (uint32_t step = 0; step < 32; ++step) {
    if (!whole && (2 * j0 + 8 * step + j >= job.inner || i0 / 2 + w * 4 >= job.to_pitch)) continue;
    uint32_t at = w ^ step / 2 ^ 16 * (j % 2);
    __stcs(reinterpret_cast<uint32_t*>(to + step * 8 * job.to_pitch), shared[(8 * step + j) * WORDS + at]);
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_transpose(const Tile* __restrict__ tiles, const Transpose* __restrict__ jobs, const Step* __restrict__ step,
                   uint32_t flags) {
  __shared__ union {
    uint32_t entries[TRANSPOSE_NIBBLES * TRANSPOSE_NIBBLES / 8];
    alignas(16) uint8_t bytes[TRANSPOSE_BYTES * TRANSPOSE_BYTES];
  } shared;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Transpose& job = jobs[tile.job];
  if (!job.vector) {
    transpose_any(job, tile.index, shared.entries);
  } else if (job.bits == 8) {
    transpose_bytes(job, tile.index, shared.bytes);
  } else {
    transpose_nibbles(job, tile.index, shared.entries);
  }
}
