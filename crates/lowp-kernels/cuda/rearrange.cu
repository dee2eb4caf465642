// Copies runs of bytes in another order: each copy is a job, in the order of its runs.
#include <lowp/memory.cuh>
#include <lowp/tile.cuh>

using namespace lowp;

template <typename T>
__device__ void rearrange(const Rearrange& job, uint64_t first, uint64_t end) {
  for (uint64_t b = first + threadIdx.x * sizeof(T); b < end; b += THREADS * sizeof(T)) {
    const uint64_t run = b / job.bytes, at = b % job.bytes;
    const uint64_t inner = run % job.counts[2], rest = run / job.counts[2];
    const uint64_t middle = rest % job.counts[1], outer = rest / job.counts[1];
    const uint64_t from = outer * job.from_pitch[0] + middle * job.from_pitch[1] + inner * job.from_pitch[2];
    const uint64_t to = outer * job.to_pitch[0] + middle * job.to_pitch[1] + inner * job.to_pitch[2];
    *pointer<T>(job.to + to + at) = *pointer<const T>(job.from + from + at);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_rearrange(const Tile* __restrict__ tiles, const Rearrange* __restrict__ jobs, const Step* __restrict__ step,
                   uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Rearrange& job = jobs[tile.job];
  const uint64_t all = job.counts[0] * job.counts[1] * job.counts[2] * job.bytes;
  const uint64_t first = tile.index * REARRANGE_TILE, end = min(first + REARRANGE_TILE, all);
  switch (job.vector) {
    case 16: rearrange<uint4>(job, first, end); break;
    case 8: rearrange<uint2>(job, first, end); break;
    case 4: rearrange<uint32_t>(job, first, end); break;
    default: rearrange<uint8_t>(job, first, end);
  }
}
