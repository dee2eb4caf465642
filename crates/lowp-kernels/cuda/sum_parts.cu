// Sums of parts in their order: into[i] = parts[0][i] + parts[1][i] + .., or that added to into[i].
#include <lowp/eight.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// Where a part begins.
__device__ __forceinline__ uint64_t part(const SumParts& job, uint64_t number) {
  uint64_t bytes = job.code == BF16 ? 2 : 4;
  return number == job.number ? job.own : job.parts + number * job.len * bytes;
}

// Eight values of every part, aligned.
template <bool HALF>
__device__ __forceinline__ void eight_of(const SumParts& job, uint64_t i) {
  // As many loads in flight as registers allow: the kernel waits for memory only.
  constexpr int AHEAD = 4;
  float sums[8];
  Eight<HALF> first;
  first.load(part(job, 0), i);
  first.values(sums);
  uint64_t next = 1;
#pragma unroll 1
  for (; next + AHEAD <= job.count; next += AHEAD) {
    Eight<HALF> parts[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) parts[a].load(part(job, next + a), i);
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      float x[8];
      parts[a].values(x);
#pragma unroll
      for (int j = 0; j < 8; ++j) sums[j] = __fadd_rn(sums[j], x[j]);
    }
  }
#pragma unroll 1
  for (; next < job.count; ++next) {
    Eight<HALF> last;
    float x[8];
    last.load(part(job, next), i);
    last.values(x);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] = __fadd_rn(sums[j], x[j]);
  }
  Eight<false> into;
  if (job.accumulate) {
    float x[8];
    into.load(job.into, i);
    into.values(x);
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] = __fadd_rn(x[j], sums[j]);
  }
  into.set(sums);
  into.store(job.into, i);
}

// One value of every part, at any address.
__device__ __forceinline__ void one_of(const SumParts& job, uint64_t i) {
  float sum = load_source(part(job, 0), job.code, i);
#pragma unroll 1
  for (uint64_t next = 1; next < job.count; ++next) sum = __fadd_rn(sum, load_source(part(job, next), job.code, i));
  float* into = pointer<float>(job.into) + i;
  *into = job.accumulate ? __fadd_rn(*into, sum) : sum;
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_sum_parts(const Tile* __restrict__ tiles, const SumParts* __restrict__ jobs, const Step* __restrict__ step,
                   uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const SumParts job = jobs[tile.job];
  uint64_t first = tile.index * SUM_PARTS_TILE, end = min(first + SUM_PARTS_TILE, job.len);
  if (!job.vector || end - first < SUM_PARTS_TILE) {
    for (uint64_t i = first + threadIdx.x; i < end; i += THREADS) one_of(job, i);
    return;
  }
  // Small, as a rank of many has little of a bucket: a thread has eight values.
  static_assert(SUM_PARTS_TILE == THREADS * 8, "a tile is one pass");
  uint64_t i = first + threadIdx.x * 8;
  job.code == BF16 ? eight_of<true>(job, i) : eight_of<false>(job, i);
}
