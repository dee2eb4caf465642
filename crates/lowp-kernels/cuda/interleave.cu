// Interleaves pieces: each is a job, copied to its columns.
#include <lowp/memory.cuh>
#include <lowp/tile.cuh>

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_interleave(const Tile* __restrict__ tiles, const Interleave* __restrict__ jobs, const Step* __restrict__ step,
                    uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Interleave& job = jobs[tile.job];
  uint64_t first = tile.index * INTERLEAVE_TILE, end = min(first + INTERLEAVE_TILE, job.outer * job.width);
  const uint8_t* from = pointer<const uint8_t>(job.from);
  uint8_t* to = pointer<uint8_t>(job.to);
  if (job.vector) {
    for (uint64_t b = first + threadIdx.x * 16; b < end; b += THREADS * 16) {
      const uint64_t row = b / job.width, at = b % job.width;
      store16(to + row * job.pitch + at, load16(from + row * job.from_pitch + at));
    }
  } else {
    for (uint64_t b = first + threadIdx.x; b < end; b += THREADS) {
      const uint64_t row = b / job.width, at = b % job.width;
      to[row * job.pitch + at] = from[row * job.from_pitch + at];
    }
  }
}
