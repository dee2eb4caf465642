// Sums of squares in binary64, in the order of the host (SumSquaresJob): square i of a run of 4096 is
// added to sum i % 256; the upper half of the sums is added to the lower half until one is left; so
// are the sums of runs, run by run, and jobs in order. The square of a binary32 is exact in binary64,
// so a fused multiply-add rounds as the sum does.
#include <lowp/memory.cuh>
#include <lowp/tile.cuh>

namespace lowp {

static_assert(SUM_RUNS == THREADS / 32, "a warp per run of a tile");

// Sums 8 * lane .. 8 * lane + 8 of 256; returns the sum of all in lane 0.
__device__ __forceinline__ double halve(double (&sums)[8]) {
#pragma unroll
  for (uint32_t half = 16; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[j] += __shfl_down_sync(FULL_WARP, sums[j], half);
  }
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
#pragma unroll
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

// Values in a row of 256 that one lane holds: its bits as they are loaded, in 16-byte words.
template <bool HALF>
struct Eight {
  uint4 words[HALF ? 1 : 2];

  __device__ __forceinline__ void load(uint64_t source, uint64_t first) {
#pragma unroll
    for (int w = 0; w < (HALF ? 1 : 2); ++w) {
      words[w] = load16(pointer<const uint8_t>(source) + first * (HALF ? 2 : 4) + w * 16);
    }
  }
  __device__ __forceinline__ void add_to(double (&sums)[8]) const {
#pragma unroll
    for (int w = 0; w < (HALF ? 1 : 2); ++w) {
      const uint32_t bits[4] = {words[w].x, words[w].y, words[w].z, words[w].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (HALF) {
          double low = widen_low(bits[j]), high = widen_high(bits[j]);
          sums[2 * j] = fma(low, low, sums[2 * j]);
          sums[2 * j + 1] = fma(high, high, sums[2 * j + 1]);
        } else {
          double x = __uint_as_float(bits[j]);
          sums[4 * w + j] = fma(x, x, sums[4 * w + j]);
        }
      }
    }
  }
};

// A whole run, aligned.
template <bool HALF>
__device__ __forceinline__ void add_run(uint64_t source, uint64_t first, double (&sums)[8]) {
  constexpr int AHEAD = HALF ? 8 : 4;
  first += threadIdx.x % 32 * 8;
#pragma unroll
  for (uint32_t row = 0; row < 16; row += AHEAD) {
    Eight<HALF> values[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) values[i].load(source, first + (row + i) * 256);
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) values[i].add_to(sums);
  }
}

// Writes the sum of a run of a job, and how many of its values are not finite; by one warp.
__device__ __forceinline__ void run_sum(const SumSquares& job, uint64_t run) {
  uint32_t lane = threadIdx.x % 32;
  uint64_t first = run * SUM_RUN, count = min(SUM_RUN, job.len - first);
  double sums[8] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  if (job.vector && count == SUM_RUN) {
    job.source_code == BF16 ? add_run<true>(job.source, first, sums) : add_run<false>(job.source, first, sums);
  } else {
#pragma unroll 1
    for (uint32_t row = 0; row < count; row += 256) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        uint32_t i = row + lane * 8 + j;
        double x = i < count ? load_source(job.source, job.source_code, first + i) : 0.0f;
        sums[j] = fma(x, x, sums[j]);
      }
    }
  }
  double sum = __shfl_sync(FULL_WARP, halve(sums), 0);
  uint64_t non_finite = 0;
  // Finite values have a finite sum.
  if (!isfinite(sum)) {
    for (uint32_t i = lane; i < count; i += 32) {
      non_finite += !isfinite(load_source(job.source, job.source_code, first + i));
    }
#pragma unroll
    for (uint32_t half = 16; half > 0; half /= 2) non_finite += __shfl_down_sync(FULL_WARP, non_finite, half);
  }
  if (lane == 0) pointer<RunSum>(job.runs)[run] = {sum, non_finite};
}

// The sum of up to 4096 sums of runs, in lane 0.
__device__ __forceinline__ RunSum sum_of_runs(const volatile RunSum* runs, uint32_t count) {
  uint32_t lane = threadIdx.x % 32;
  double sums[8] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  uint64_t non_finite = 0;
#pragma unroll 2
  for (uint32_t row = 0; row < count; row += 256) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      uint32_t i = row + lane * 8 + j;
      sums[j] += i < count ? runs[i].sum : 0.0;
      non_finite += i < count ? runs[i].non_finite : 0;
    }
  }
#pragma unroll
  for (uint32_t half = 16; half > 0; half /= 2) non_finite += __shfl_down_sync(FULL_WARP, non_finite, half);
  return {halve(sums), non_finite};
}

// Level by level, behind one another in memory, until one sum is left; by a block of threads. The
// result is in thread 0.
__device__ __forceinline__ RunSum job_sum(const SumSquares& job) {
  RunSum* level = pointer<RunSum>(job.runs);
  uint64_t count = cdiv(job.len, SUM_RUN);
  while (count > 1) {
    uint64_t groups = cdiv(count, SUM_RUN);
    for (uint64_t group = threadIdx.x / 32; group < groups; group += SUM_RUNS) {
      RunSum sum = sum_of_runs(level + group * SUM_RUN, uint32_t(min(SUM_RUN, count - group * SUM_RUN)));
      if (threadIdx.x % 32 == 0) level[count + group] = sum;
    }
    __syncthreads();
    level += count;
    count = groups;
  }
  RunSum total{0.0, 0};
  if (threadIdx.x == 0 && count == 1) {
    const volatile RunSum* last = level;
    total = {last->sum, last->non_finite};
  }
  return total;
}

// Adds the totals of all jobs to their outputs, in order, by one warp: its lanes read, each adds.
__device__ __forceinline__ void finish(const SumSquares* jobs, uint64_t count, volatile SumTotal* totals) {
  uint32_t lane = threadIdx.x % 32;
  uint64_t out = 0, non_finite = 0;
  double sum = 0.0;
  auto store = [&] {
    if (lane != 0 || out == 0) return;
    store_u64(out, static_cast<uint64_t>(__double_as_longlong(sum)));
    store_u64(out + 8, non_finite);
  };
  for (uint64_t first = 0; first < count; first += 32) {
    uint64_t own_out = 0, own_non_finite = 0;
    double own_sum = 0.0;
    if (first + lane < count) {
      volatile SumTotal& total = totals[first + lane];
      own_out = jobs[first + lane].out, own_sum = total.sum, own_non_finite = total.non_finite;
      total.sum = 0.0, total.non_finite = 0, total.done = 0;
    }
    uint32_t here = uint32_t(min(uint64_t(32), count - first));
    for (uint32_t i = 0; i < here; ++i) {
      uint64_t to = __shfl_sync(FULL_WARP, own_out, i);
      if (to != out) {
        store();
        __syncwarp();
        out = to;
        sum = __longlong_as_double(static_cast<long long>(load_u64(out)));
        non_finite = load_u64(out + 8);
      }
      sum += __shfl_sync(FULL_WARP, own_sum, i);
      non_finite += __shfl_sync(FULL_WARP, own_non_finite, i);
    }
  }
  store();
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_sum_squares(const Tile* __restrict__ tiles, const SumSquares* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  __shared__ bool last_block, last_job;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const SumSquares& job = jobs[tile.job];
  uint64_t run = uint64_t(tile.index) * SUM_RUNS + threadIdx.x / 32;
  if (run * SUM_RUN < job.len) run_sum(job, run);
  // The last block of a job sees the runs of all others.
  SumTotal* totals = pointer<SumTotal>(job.totals);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    auto* done = reinterpret_cast<unsigned long long*>(&totals[tile.job].done);
    last_block = atomicAdd(done, 1ull) + 1 == job.tiles;
    __threadfence();
  }
  __syncthreads();
  if (!last_block) return;
  RunSum total = job_sum(job);
  if (threadIdx.x == 0) {
    totals[tile.job].sum = total.sum;
    totals[tile.job].non_finite = total.non_finite;
    // The last job sees the totals of all others.
    __threadfence();
    auto* state = pointer<unsigned long long>(job.state);
    last_job = atomicAdd(state, 1ull) + 1 == job.jobs;
    if (last_job) *state = 0;
    __threadfence();
  }
  __syncthreads();
  if (last_job && threadIdx.x < 32) finish(jobs, job.jobs, totals);
}
