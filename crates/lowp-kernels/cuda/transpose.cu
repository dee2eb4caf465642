// Transposes of 4-, 8-, 16- and 32-bit entries (numerics 9). Bytes and nibbles with aligned rows take tiles of 128 rows of 256
// bytes through shared memory: a thread exchanges the bytes of words of sixteen or 32 rows and stores 16 bytes at a time.
#include <lowp/fetch.cuh>
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

// A tile of 128 lines of 256 bytes in shared memory, seen as groups of HEIGHT lines. Chunks of 16 bytes are exchanged by an
// exclusive or with the group, so that those of groups that are read together lie in other banks.
template <uint32_t HEIGHT>
struct Lines {
  static constexpr uint32_t ROWS = TRANSPOSE_ROWS, CHUNKS = TRANSPOSE_ROW_BYTES / 16, GROUPS = ROWS / HEIGHT, BESIDE = 8 / GROUPS;
  static_assert(GROUPS <= 8, "a lane per group");

  static __device__ __forceinline__ uint32_t at(uint32_t line, uint32_t chunk) {
    return line * CHUNKS * 16 + (chunk ^ line / HEIGHT * BESIDE) * 16;
  }

  // From line i0 and byte j0 on; zeros outside.
  static __device__ __forceinline__ void load(const Transpose& job, uint64_t i0, uint64_t j0, uint8_t* shared) {
    constexpr uint32_t STEP = THREADS / CHUNKS;
    uint32_t r = threadIdx.x / CHUNKS, c = threadIdx.x % CHUNKS;
    const uint8_t* base = pointer<const uint8_t>(job.from);
    const uint8_t* from = base + (i0 + r) * job.from_pitch + j0 + c * 16;
    bool inner = j0 + c * 16 < job.from_pitch;
#pragma unroll
    for (uint32_t k = 0; k < ROWS / STEP; ++k) {
      bool inside = inner && i0 + r + k * STEP < job.outer;
      copy16(shared + at(r + k * STEP, c), inside ? from + k * STEP * job.from_pitch : base, inside ? 16 : 0);
    }
    wait_copies();
  }

  // Calls part(group, chunk, word of the chunk) for a thread's parts of the tile. A warp has BESIDE neighbouring chunks.
  template <typename Part>
  static __device__ __forceinline__ void each(Part part) {
    uint32_t lane = threadIdx.x % 32, chunk = threadIdx.x / 32 * BESIDE + lane / GROUPS / 4;
#pragma unroll
    for (uint32_t c = 0; c < CHUNKS; c += THREADS / 32 * BESIDE) part(lane % GROUPS, chunk + c, lane / GROUPS % 4);
  }
};

// The first line and the first byte in it of a tile. Tiles below each other follow each other: they complete the lines of the result.
__device__ __forceinline__ ulonglong2 tile_start(const Transpose& job, uint32_t index) {
  uint32_t down = uint32_t(cdiv(job.outer, TRANSPOSE_ROWS));
  return make_ulonglong2(uint64_t(index % down) * TRANSPOSE_ROWS, uint64_t(index / down) * TRANSPOSE_ROW_BYTES);
}

// A part is 16 rows of a word of four columns.
__device__ __forceinline__ void transpose_bytes(const Transpose& job, uint32_t index, uint8_t* shared) {
  using Tile = Lines<16>;
  const auto [i0, j0] = tile_start(job, index);
  Tile::load(job, i0, j0, shared);
  Tile::each([&](uint32_t group, uint32_t chunk, uint32_t in) {
    uint32_t out[4][4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      uint32_t rows[4], columns[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) rows[k] = *reinterpret_cast<const uint32_t*>(shared + Tile::at(group * 16 + 4 * s + k, chunk) + in * 4);
      transpose_bytes4(rows, columns);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[k][s] = columns[k];
    }
    uint64_t j = j0 + chunk * 16 + in * 4, i = i0 + group * 16;
    if (i >= job.to_pitch) return;
    uint8_t* to = pointer<uint8_t>(job.to) + j * job.to_pitch + i;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (j + k < job.inner) store16_part(to + k * job.to_pitch, make_uint4(out[k][0], out[k][1], out[k][2], out[k][3]));
    }
  });
}

// A part is 32 rows of a word of eight columns: nibbles of row pairs are exchanged, then bytes of pairs.
__device__ __forceinline__ void transpose_nibbles(const Transpose& job, uint32_t index, uint8_t* shared) {
  using Tile = Lines<32>;
  const auto [i0, j0] = tile_start(job, index);
  Tile::load(job, i0, j0, shared);
  Tile::each([&](uint32_t group, uint32_t chunk, uint32_t in) {
    uint32_t out[8][4];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      uint32_t low[4], high[4];
#pragma unroll
      for (int q = 0; q < 4; ++q) {
        uint32_t line = group * 32 + 8 * s + 2 * q;
        uint32_t a = *reinterpret_cast<const uint32_t*>(shared + Tile::at(line, chunk) + in * 4);
        uint32_t b = *reinterpret_cast<const uint32_t*>(shared + Tile::at(line + 1, chunk) + in * 4);
        low[q] = (a & 0x0F0F0F0Fu) | ((b & 0x0F0F0F0Fu) << 4);
        high[q] = ((a >> 4) & 0x0F0F0F0Fu) | (b & 0xF0F0F0F0u);
      }
      uint32_t even[4], odd[4];
      transpose_bytes4(low, even);
      transpose_bytes4(high, odd);
#pragma unroll
      for (int k = 0; k < 4; ++k) out[2 * k][s] = even[k], out[2 * k + 1][s] = odd[k];
    }
    uint64_t j = 2 * j0 + chunk * 32 + in * 8, at = i0 / 2 + group * 16;
    if (at >= job.to_pitch) return;
    uint8_t* to = pointer<uint8_t>(job.to) + j * job.to_pitch + at;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (j + k < job.inner) store16_part(to + k * job.to_pitch, make_uint4(out[k][0], out[k][1], out[k][2], out[k][3]));
    }
  });
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, resident::TRANSPOSE)
    lowp_transpose(const Tile* __restrict__ tiles, const Transpose* __restrict__ jobs, const Step* __restrict__ step,
                   uint32_t flags) {
  __shared__ Fetched<Transpose> fetched;
  __shared__ union {
    uint32_t entries[SIDE * (SIDE + 1)];
    alignas(128) uint8_t lines[TRANSPOSE_ROWS * TRANSPOSE_ROW_BYTES];
  } shared;
  fetch(fetched, tiles, jobs, step, flags);
  if (fetched.skip) return;
  const Transpose& job = fetched.job();
  uint32_t index = fetched.tile.index;
  if (!job.vector) {
    transpose_any(job, index, shared.entries);
  } else if (job.bits == 8) {
    transpose_bytes(job, index, shared.lines);
  } else {
    transpose_nibbles(job, index, shared.lines);
  }
}
