// Values of bfloat16 on their way: a ring of tiles of 128 x 64 in shared memory, filled by copies that nobody waits for until
// their tile is due.
#pragma once
#include <lowp/stage.cuh>

namespace lowp {

// Steps of a tile that are on their way or in work.
constexpr int STAGES = 3;

struct alignas(128) Ring {
  uint8_t bytes[STAGES][TRANSPOSED_ROWS * TRANSPOSED_COLS * 2];

  // Starts the copy of the tile whose first value is at `from`, of a matrix of `cols` columns. Chunks of 16 bytes are exchanged
  // within a row, which keeps those that a quarter of a warp reads at a time off each other's banks.
  __device__ __forceinline__ void fetch(uint32_t slot, const uint16_t* from, uint64_t cols) {
    uint32_t to = uint32_t(__cvta_generic_to_shared(bytes[slot]));
#pragma unroll
    for (uint32_t k = 0; k < TRANSPOSED_ROWS * 8 / THREADS; ++k) {
      uint32_t e = k * THREADS + threadIdx.x, row = e / 8, chunk = e % 8;
      asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to + row * 128 + (chunk ^ row % 8) * 16),
                   "l"(from + row * cols + chunk * 8));
    }
  }
  static __device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;"); }
  // Waits until all but the latest `LEFT` groups are there, for this thread's copies.
  template <int LEFT>
  static __device__ __forceinline__ void wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
  }

  // The values of a warp in the tile of `slot`.
  __device__ __forceinline__ void read(uint32_t slot, uint32_t lane, Values<8>& v) const {
    uint32_t first = Tiling<true>::warp_row() + lane / 4 * 4, chunk = Tiling<true>::warp_col() / 8 + lane % 4;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint4 raw = *reinterpret_cast<const uint4*>(bytes[slot] + (first + i) * 128 + (chunk ^ (first + i) % 8) * 16);
      v.x[i][0] = raw.x;
      v.x[i][1] = raw.y;
      v.x[i][2] = raw.z;
      v.x[i][3] = raw.w;
    }
  }
};

struct RingMemory {
  Ring ring;
  Stage<true> stage;
};
static_assert(sizeof(RingMemory) == RING_BYTES);

}  // namespace lowp
