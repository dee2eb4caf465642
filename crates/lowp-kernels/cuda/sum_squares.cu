// Sums of squares in binary64, in the order of the host: lane l of 32 adds the squares of elements
// l, l + 32, ... of a chunk of 4096; the upper half of the lanes is added to the lower half until
// one is left; chunks are added in order, and jobs are. The square of a binary32 is exact in
// binary64, so a fused multiply-add rounds as the sum does.
#include <lowp/memory.cuh>
#include <lowp/tile.cuh>

namespace lowp {

constexpr uint64_t CHUNK = 4096;
constexpr uint32_t WARPS = 4;  // chunks of a tile

struct Sum {
  double sum;
  uint64_t odd;
  __device__ __forceinline__ void add(float x) {
    double wide = x;
    sum = fma(wide, wide, sum);
    odd += (__float_as_uint(x) & 0x7F800000u) == 0x7F800000u;
  }
};

__device__ __forceinline__ Sum chunk_sum(const SumSquares& job, uint64_t chunk, uint32_t lane) {
  uint64_t first = chunk * CHUNK;
  uint32_t count = uint32_t(min(CHUNK, job.len - first));
  Sum s{0.0, 0};
  uint32_t e = lane;
  for (; e + 7 * 32 < count; e += 8 * 32) {
    float x[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = load_source(job.source, job.source_code, first + e + i * 32);
#pragma unroll
    for (int i = 0; i < 8; ++i) s.add(x[i]);
  }
  for (; e < count; e += 32) s.add(load_source(job.source, job.source_code, first + e));
#pragma unroll
  for (uint32_t half = 16; half > 0; half /= 2) {
    s.sum += __shfl_down_sync(FULL_WARP, s.sum, half);
    s.odd += __shfl_down_sync(FULL_WARP, s.odd, half);
  }
  return s;
}

// The chunks of one job, in order from 0, by one warp: lanes read, every lane adds.
__device__ __forceinline__ Sum job_sum(const SumSquares& job, uint32_t lane) {
  volatile ChunkSum* chunks = pointer<volatile ChunkSum>(job.chunks);
  uint64_t count = cdiv(job.len, CHUNK);
  Sum total{0.0, 0};
  for (uint64_t first = 0; first < count; first += 32) {
    uint64_t at = first + lane;
    double sum = at < count ? chunks[at].sum : 0.0;
    uint64_t odd = at < count ? chunks[at].odd : 0;
    uint32_t here = uint32_t(min(uint64_t(32), count - first));
    for (uint32_t i = 0; i < here; ++i) {
      total.sum += __shfl_sync(FULL_WARP, sum, i);
      total.odd += __shfl_sync(FULL_WARP, odd, i);
    }
  }
  return total;
}

// Adds the totals of all jobs to their outputs, in order, by one thread.
__device__ __forceinline__ void finish(const SumSquares* jobs, uint64_t count, SumTotal* totals) {
  for (uint64_t j = 0; j < count;) {
    uint64_t out = jobs[j].out;
    uint64_t* to = pointer<uint64_t>(out);
    double sum = __longlong_as_double(static_cast<long long>(to[0]));
    uint64_t odd = to[1];
    for (; j < count && jobs[j].out == out; ++j) {
      volatile SumTotal* total = totals + j;
      sum += total->sum;
      odd += total->odd;
      total->sum = 0.0;
      total->odd = 0;
      total->done = 0;
    }
    to[0] = static_cast<uint64_t>(__double_as_longlong(sum));
    to[1] = odd;
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    lowp_sum_squares(const Tile* __restrict__ tiles, const SumSquares* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  __shared__ bool last;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const SumSquares& job = jobs[tile.job];
  uint32_t lane = threadIdx.x % 32;
  uint64_t chunk = uint64_t(tile.index) * WARPS + threadIdx.x / 32;
  if (chunk * CHUNK < job.len) {
    Sum s = chunk_sum(job, chunk, lane);
    if (lane == 0) pointer<ChunkSum>(job.chunks)[chunk] = {s.sum, s.odd};
  }
  // The last block of a job sees the chunks of all others.
  SumTotal* totals = pointer<SumTotal>(job.totals);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    auto* done = reinterpret_cast<unsigned long long*>(&totals[tile.job].done);
    last = atomicAdd(done, 1ull) + 1 == job.tiles;
    __threadfence();
  }
  __syncthreads();
  if (!last || threadIdx.x >= 32) return;
  Sum total = job_sum(job, lane);
  if (lane != 0) return;
  totals[tile.job].sum = total.sum;
  totals[tile.job].odd = total.odd;
  // The last job sees the totals of all others.
  __threadfence();
  auto* state = pointer<unsigned long long>(job.state);
  if (atomicAdd(state, 1ull) + 1 != job.jobs) return;
  __threadfence();
  finish(jobs, job.jobs, totals);
  *state = 0;
}
