// Sums of squares in binary64, in the order of the host (SumSquaresJob): square i of a run of 4096 is
// added to sum i % 256; the upper half of the sums is added to the lower half until one is left; so
// are the sums of runs, run by run, and jobs in order. The square of a binary32 is exact in binary64,
// so a fused multiply-add rounds as the sum does.
#include <lowp/fetch.cuh>
#include <lowp/memory.cuh>
#include <lowp/tile.cuh>

namespace lowp {

constexpr uint32_t WARPS = THREADS / 32, OWN = SUM_RUNS / WARPS;  // runs of a warp

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

// A whole run of binary32, aligned.
__device__ __forceinline__ void add_run(uint64_t source, uint64_t first, double (&sums)[8]) {
  constexpr int AHEAD = 4;
  const uint4* from = pointer<const uint4>(source + first * 4) + threadIdx.x % 32 * 2;
#pragma unroll
  for (uint32_t row = 0; row < 16; row += AHEAD) {
    uint4 words[AHEAD][2];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      words[i][0] = load16(from + (row + i) * 64);
      words[i][1] = load16(from + (row + i) * 64 + 1);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        double x = __uint_as_float(word(words[i][j / 4], j % 4));
        sums[j] = fma(x, x, sums[j]);
      }
    }
  }
}

// Values of bfloat16 in binary64 without a conversion: the bits of their magnitudes, moved to where binary64
// has them, are that much smaller than they are, subnormal ones included; a product brings them back. An infinity or a
// NaN becomes 2^128 or more, whose square is too large for a sum of finite squares to go unnoticed.
constexpr double REBIAS = 0x1p896;
constexpr double SUSPECT = 0x1p256;
__device__ __forceinline__ double magnitude_low(uint32_t pair) {
  return __dmul_rn(__hiloint2double(int((pair & 0x7FFFu) << 13), 0), REBIAS);
}
__device__ __forceinline__ double magnitude_high(uint32_t pair) {
  return __dmul_rn(__hiloint2double(int((pair & 0x7FFF0000u) >> 3), 0), REBIAS);
}

// As halve(), in every lane. Lanes that would add what others drop take a half of the sums each.
__device__ __forceinline__ double halve_shared(double (&sums)[8]) {
  uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (int level = 0; level < 3; ++level) {
    int half = 4 >> level;
    uint32_t bit = 16u >> level;
    bool upper = (lane & bit) != 0;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j >= half) break;
      double keep = upper ? sums[j + half] : sums[j], send = upper ? sums[j] : sums[j + half];
      sums[j] = keep + __shfl_xor_sync(FULL_WARP, send, bit);
    }
  }
  double sum = sums[0];
#pragma unroll
  for (uint32_t bit : {2u, 1u, 16u, 8u, 4u}) sum += __shfl_xor_sync(FULL_WARP, sum, bit);
  return sum;
}

// The sums of whole runs of bfloat16, aligned, WARPS runs apart; in every lane.
__device__ __forceinline__ void runs_of_halves(uint64_t source, uint64_t first, double (&totals)[OWN]) {
  constexpr int ROWS = SUM_RUN / 256, AHEAD = 8, ALL = ROWS * OWN;
  const uint4* from = pointer<const uint4>(source + first * 2) + threadIdx.x % 32;
  auto row = [&](int i) { return load16(from + (i / ROWS * WARPS * ROWS + i % ROWS) * 32); };
  double sums[8];
  uint4 words[AHEAD];
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) words[i] = row(i);
#pragma unroll
  for (int i = 0; i < ALL; ++i) {
    if (i % ROWS == 0) {
#pragma unroll
      for (int k = 0; k < 8; ++k) sums[k] = 0.0;
    }
    const uint4 now = words[i % AHEAD];
    if (i + AHEAD < ALL) words[i % AHEAD] = row(i + AHEAD);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      uint32_t pair = word(now, k);
      double low = magnitude_low(pair), high = magnitude_high(pair);
      sums[2 * k] = fma(low, low, sums[2 * k]);
      sums[2 * k + 1] = fma(high, high, sums[2 * k + 1]);
    }
    if (i % ROWS == ROWS - 1) totals[i / ROWS] = halve_shared(sums);
  }
}

// Writes the sum of a run of a job, and how many of its values are not finite; by one warp.
__device__ __forceinline__ void run_sum(const SumSquares& job, uint64_t run) {
  uint32_t lane = threadIdx.x % 32;
  uint64_t first = run * SUM_RUN, count = min(SUM_RUN, job.len - first);
  double sums[8] = {0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0};
  if (job.vector && count == SUM_RUN && job.source_code != BF16) {
    add_run(job.source, first, sums);
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

// Writes the sums of a warp's runs of a job.
__device__ __forceinline__ void run_sums(const SumSquares& job, uint64_t run) {
  bool fast = job.vector && job.source_code == BF16 && (run + (OWN - 1) * WARPS + 1) * SUM_RUN <= job.len;
  double sums[OWN];
  if (fast) runs_of_halves(job.source, run * SUM_RUN, sums);
#pragma unroll
  for (uint32_t k = 0; k < OWN; ++k, run += WARPS) {
    if (fast && sums[k] < SUSPECT) {
      if (threadIdx.x % 32 == 0) pointer<RunSum>(job.runs)[run] = {sums[k], 0};
    } else if (run * SUM_RUN < job.len) {
      run_sum(job, run);
    }
  }
}

// The sum of up to 4096 sums of runs, in thread 0; by a block of threads, each with a sum of 256.
__device__ __forceinline__ RunSum sum_of_runs(const volatile RunSum* runs, uint32_t count) {
  __shared__ double shared[THREADS];
  __shared__ unsigned long long others;
  static_assert(THREADS == 256, "a thread per sum");
  constexpr uint32_t ROWS = SUM_RUN / THREADS;
  uint32_t t = threadIdx.x;
  double values[ROWS];
  uint64_t non_finite = 0;
#pragma unroll
  for (uint32_t row = 0; row < ROWS; ++row) {
    uint32_t i = row * THREADS + t;
    values[row] = i < count ? runs[i].sum : 0.0;
    non_finite += i < count ? runs[i].non_finite : 0;
  }
  double sum = 0.0;
#pragma unroll
  for (uint32_t row = 0; row < ROWS; ++row) sum += values[row];
  if (t == 0) others = 0;
  shared[t] = sum;
  __syncthreads();
  if (non_finite) atomicAdd(&others, static_cast<unsigned long long>(non_finite));
  // Warp 0 reads sums lane + 32 k: the upper half is added to the lower, k first.
  if (t < 32) {
    double sums[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) sums[k] = shared[t + 32 * k];
#pragma unroll
    for (int half = 4; half > 0; half /= 2) {
#pragma unroll
      for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    sum = sums[0];
#pragma unroll
    for (uint32_t half = 16; half > 0; half /= 2) sum += __shfl_down_sync(FULL_WARP, sum, half);
  }
  __syncthreads();
  RunSum total = {sum, others};
  __syncthreads();
  return total;
}

// Whether this block is the last of `count` that come here; every thread of it sees what the others wrote.
__device__ __forceinline__ bool last_of(unsigned long long* arrived, uint64_t count) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(arrived, 1ull) + 1 == count;
    __threadfence();
  }
  __syncthreads();
  return last;
}

// Adds up what the blocks of a job have left, level by level; the last block of each group of runs does its group, the
// last of these the rest. True in the block that ends with the sum of the job, which is in thread 0.
__device__ __forceinline__ bool job_sum(const SumSquares& job, uint32_t index, SumTotal& done, RunSum& total) {
  RunSum* level = pointer<RunSum>(job.runs);
  uint64_t count = cdiv(job.len, SUM_RUN), groups = cdiv(count, SUM_RUN);
  auto* finished = reinterpret_cast<unsigned long long*>(&done.done);
  if (count > SUM_RUN) {
    // The entry that the group's sum is for counts its blocks until then.
    constexpr uint64_t BLOCKS = SUM_RUN / SUM_RUNS;
    uint64_t group = index / BLOCKS;
    RunSum* own = level + count + group;
    auto* arrived = reinterpret_cast<unsigned long long*>(&own->non_finite);
    if (!last_of(arrived, min(BLOCKS, job.tiles - group * BLOCKS))) return false;
    RunSum sum = sum_of_runs(level + group * SUM_RUN, uint32_t(min(SUM_RUN, count - group * SUM_RUN)));
    if (threadIdx.x == 0) *own = sum;
    if (!last_of(finished, groups)) return false;
    level += count;
    count = groups;
  } else if (!last_of(finished, job.tiles)) {
    return false;
  }
  RunSum* first = level;
  uint64_t entries = groups > 1 ? groups : 0;
  while (count > 1) {
    groups = cdiv(count, SUM_RUN);
    for (uint64_t group = 0; group < groups; ++group) {
      RunSum sum = sum_of_runs(level + group * SUM_RUN, uint32_t(min(SUM_RUN, count - group * SUM_RUN)));
      if (threadIdx.x == 0) level[count + group] = sum;
    }
    __syncthreads();
    level += count;
    count = groups;
  }
  if (threadIdx.x == 0) {
    const volatile RunSum* last = level;
    total = {count ? last->sum : 0.0, count ? last->non_finite : 0};
  }
  __syncthreads();
  for (uint64_t i = threadIdx.x; i < entries; i += THREADS) first[i].non_finite = 0;
  return true;
}

// Adds the totals of all jobs to their outputs, in order, by a block: a thread reads a job, and the first of those with
// the same output adds them up. The first NaN stays.
__device__ __forceinline__ void finish(const SumSquares* jobs, uint64_t count, volatile SumTotal* totals) {
  __shared__ uint64_t outs[THREADS], others[THREADS];
  __shared__ double sums[THREADS];
  uint32_t t = threadIdx.x;
  for (uint64_t first = 0; first < count; first += THREADS) {
    uint32_t here = uint32_t(min(uint64_t(THREADS), count - first));
    if (t < here) {
      volatile SumTotal& total = totals[first + t];
      outs[t] = jobs[first + t].out, sums[t] = total.sum, others[t] = total.non_finite;
      total.sum = 0.0, total.non_finite = 0, total.done = 0;
    }
    __syncthreads();
    bool adds = t < here;
    for (uint32_t i = t; adds && i > 0; --i) adds = outs[i - 1] != outs[t];
    if (adds) {
      uint64_t out = outs[t], non_finite = load_u64(out + 8);
      double sum = __longlong_as_double(static_cast<long long>(load_u64(out)));
      bool number = sum == sum;
#pragma unroll 8
      for (uint32_t i = t; i < here; ++i) {
        double x = sums[i];
        bool same = outs[i] == out;
        if (same && number) sum += x;
        if (same) non_finite += others[i];
        number &= !same || x == x;
      }
      store_u64(out, static_cast<uint64_t>(__double_as_longlong(sum)));
      store_u64(out + 8, non_finite);
    }
    __syncthreads();
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, resident::SUM_SQUARES)
    lowp_sum_squares(const Tile* __restrict__ tiles, const SumSquares* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  __shared__ Fetched<SumSquares> fetched;
  fetch(fetched, tiles, jobs, step, flags);
  if (fetched.skip) return;
  const SumSquares& job = fetched.job();
  const Tile tile = fetched.tile;
  run_sums(job, uint64_t(tile.index) * SUM_RUNS + threadIdx.x / 32);
  SumTotal* totals = pointer<SumTotal>(job.totals);
  RunSum total;
  if (!job_sum(job, tile.index, totals[tile.job], total)) return;
  if (threadIdx.x == 0) {
    totals[tile.job].sum = total.sum;
    totals[tile.job].non_finite = total.non_finite;
  }
  // The last job sees the totals of all others.
  auto* state = pointer<unsigned long long>(job.state);
  if (!last_of(state, job.jobs)) return;
  if (threadIdx.x == 0) *state = 0;
  finish(jobs, job.jobs, totals);
}
