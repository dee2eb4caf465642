// What a thread block does: its tile and its job, read by one warp into shared memory. The loads that
// do not depend on each other are under way together, so a block waits for memory twice before its own loads.
#pragma once
#include <lowp/jobs.cuh>

namespace lowp {

template <typename Job>
struct Fetched {
  static_assert(sizeof(Job) % 8 == 0 && sizeof(Job) / 8 <= 32, "a word per lane");
  uint64_t words[sizeof(Job) / 8];
  Tile tile;
  uint32_t skip;
  __device__ __forceinline__ const Job& job() const { return *reinterpret_cast<const Job*>(words); }
};

// Every thread of a block calls it, once. Not to be run where `skip` is not 0.
template <typename Job>
__device__ __forceinline__ void fetch(Fetched<Job>& into, const Tile* tiles, const Job* jobs, const Step* step, uint32_t flags) {
  if (threadIdx.x < 32) {
    uint32_t skip = (flags & FLAG_HONOR_SKIP) ? step->skip : 0;
    Tile tile = tiles[blockIdx.x];
    const uint64_t* from = reinterpret_cast<const uint64_t*>(jobs + tile.job);
    if (threadIdx.x < sizeof(Job) / 8) into.words[threadIdx.x] = __ldg(from + threadIdx.x);
    if (threadIdx.x == 0) {
      into.tile = tile;
      into.skip = skip;
    }
  }
  __syncthreads();
}

// Copies up to 16 bytes to as many in shared memory without a register; the rest is zero. Memory is read 256 bytes at a time:
// neighbours come to the cache for the tiles beside.
__device__ __forceinline__ void copy16(void* to, const void* from, uint32_t bytes) {
  uint32_t at = uint32_t(__cvta_generic_to_shared(to));
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes) : "memory");
}
// Waits for the copies of all threads of the block.
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
}

}  // namespace lowp
