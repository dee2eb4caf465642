// The scalars of an optimizer step from the sums of squares of all ranks (numerics 12.8). Everything is
// binary64 unless it is rounded to binary32; every operation rounds once.
#include <lowp/memory.cuh>
#include <lowp/tile.cuh>

namespace lowp {

__device__ __forceinline__ double load_f64(uint64_t address) {
  return __longlong_as_double(static_cast<long long>(load_u64(address)));
}
__device__ __forceinline__ uint64_t bits_of(double x) { return static_cast<uint64_t>(__double_as_longlong(x)); }

// One bit pattern for every NaN.
__device__ __forceinline__ uint32_t canonical(float x) { return x == x ? __float_as_uint(x) : 0x7FC00000u; }
__device__ __forceinline__ uint64_t canonical(double x) { return x == x ? bits_of(x) : 0x7FF8000000000000u; }

// The sum over the shards of a replica, in order.
__device__ __forceinline__ double squares(const StepScalars& job, uint64_t replica) {
  // Loads wait for each other no more than once in as many shards.
  constexpr int AHEAD = 8;
  uint64_t part = job.parts + replica * job.shards * GRAD_PART;
  double sum = load_f64(part);
  for (uint64_t first = 1; first < job.shards; first += AHEAD) {
    double sums[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      sums[i] = first + i < job.shards ? load_f64(part + (first + i) * GRAD_PART) : 0.0;
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (first + i < job.shards) sum = __dadd_rn(sum, sums[i]);
    }
  }
  return sum;
}

// A sum of two numbers, the second one what the first one lacks.
struct Pair {
  double high, low;
};

__device__ __forceinline__ Pair product(Pair x, Pair y) {
  double high = __dmul_rn(x.high, y.high);
  double low = __fma_rn(x.high, y.high, -high);
  low = __fma_rn(x.low, y.high, __fma_rn(x.high, y.low, low));
  double sum = __dadd_rn(high, low);
  return {sum, __dsub_rn(low, __dsub_rn(sum, high))};
}

// Numerics 12.1.
__device__ __forceinline__ double power(double base, uint64_t exponent) {
  Pair result{1.0, 0.0};
#pragma unroll 1
  for (int bit = 63 - __clzll(static_cast<long long>(exponent)); bit >= 0; --bit) {
    result = product(result, result);
    if (exponent >> bit & 1) result = product(result, {base, 0.0});
  }
  return result.high;
}

__device__ __forceinline__ uint32_t correction(uint32_t beta, uint64_t step) {
  double rest = __dsub_rn(1.0, power(__uint_as_float(beta), step));
  return canonical(__double2float_rn(rest));
}

// What the threads of a block find out together.
struct Found {
  double own, first;  // squares of the replica whose norm counts, and of replica 0
  unsigned long long non_finite;
  unsigned long long rank, replica;  // the first that differs; NONE: none does
  unsigned long long within;         // the first rank that differs from the first one of its replica
  uint64_t applied, skipped;         // steps before this one
};

constexpr unsigned long long NONE = ~0ull;

// 0, or 1 + the index.
__device__ __forceinline__ uint32_t after(unsigned long long index) {
  return index == NONE ? 0 : uint32_t(min(index, 0xFFFFFFFEull)) + 1;
}

// The header of the scalars, the counts and the report; by one thread.
__device__ __forceinline__ void finish(const StepScalars& job, const Found& found) {
  uint32_t replica = found.non_finite == 0 ? after(found.replica) : 0, rank = after(found.rank), within = after(found.within);
  float grad_scale = __uint_as_float(load_f32(job.options + 8));
  bool skip = load_f32(job.options + 12) != 0;
  uint32_t max_norm = load_f32(job.options + 16);
  double norm = __dmul_rn(__dsqrt_rn(found.own), double(fabsf(grad_scale)));
  double factor = __ddiv_rn(double(__uint_as_float(max_norm)), __dadd_rn(norm, 1e-6));
  float clip = factor < 1.0 ? __double2float_rn(factor) : 1.0f;
  bool fits = __dmul_rn(norm, double(clip)) <= double(3.40282346638528859812e38f);
  bool good = found.non_finite == 0 && isfinite(grad_scale) && fits && rank == 0 && replica == 0 && within == 0;
  bool applied = good && !skip;
  uint64_t steps = found.applied + (applied ? 1 : 0), skipped = found.skipped + (good || skip ? 0 : 1);

  store_u64(job.out, load_u64(job.options));
  store_f32(job.out + 8, canonical(__fmul_rn(grad_scale, clip)));
  store_f32(job.out + 12, applied ? 0 : 1);
  store_f32(job.out + 16, max_norm);
  store_f32(job.out + 20, uint32_t(min(job.groups, uint64_t(0xFFFFFFFFu))));
  store_u64(job.out + 24, 0);

  store_u64(job.counts, steps);
  store_u64(job.counts + 8, skipped);

  store_u64(job.report, canonical(norm));
  store_u64(job.report + 8, found.non_finite);
  store_u64(job.report + 16, steps);
  store_u64(job.report + 24, skipped);
  store_f32(job.report + 32, __float_as_uint(clip));
  store_f32(job.report + 36, applied ? 1 : 0);
  store_f32(job.report + 40, rank);
  store_f32(job.report + 44, replica);
  store_u64(job.report + 48, within);
  store_u64(job.report + 56, 0);
}

// The scalars of one parameter group.
__device__ __forceinline__ void group(uint64_t options, uint64_t out, uint64_t step) {
#pragma unroll
  for (uint32_t field = 0; field < 20; field += 4) store_f32(out + field, load_f32(options + field));
  bool corrected = load_f32(options + 28) != 0;
  store_f32(out + 28, corrected ? 1 : 0);
#pragma unroll 1
  for (uint32_t i = 0; i < 8; i += 4) {
    store_f32(out + 20 + i, corrected ? correction(load_f32(options + 4 + i), step) : __float_as_uint(1.0f));
  }
}

}  // namespace lowp

using namespace lowp;

// `flags` and `step` are not looked at: what makes scalars does not follow those of its own run.
extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_step_scalars(const Tile* __restrict__ tiles, const StepScalars* __restrict__ jobs, const Step* __restrict__,
                      uint32_t) {
  __shared__ Found found;
  const StepScalars job = jobs[tiles[blockIdx.x].job];
  if (threadIdx.x == 0) {
    found.non_finite = 0, found.rank = NONE, found.replica = NONE, found.within = NONE;
    found.applied = load_u64(job.counts), found.skipped = load_u64(job.counts + 8);
  }
  // In another warp each, so that none waits for the other.
  if (threadIdx.x == 32) found.first = squares(job, 0);
  if (threadIdx.x == 64) found.own = squares(job, job.replica);
  __syncthreads();
  uint64_t consensus = load_u64(job.parts + 16);
  unsigned long long non_finite = 0, rank = NONE, replica = NONE, within = NONE;
  for (uint64_t i = threadIdx.x; i < job.ranks; i += THREADS) {
    uint64_t part = job.parts + i * GRAD_PART;
    non_finite += load_u64(part + 8);
    if (rank == NONE && load_u64(part + 16) != consensus) rank = i;
    uint64_t first = job.parts + (i - i % job.shards) * GRAD_PART;
    if (within == NONE && load_u64(part + 24) != load_u64(first + 24)) within = i;
  }
  for (uint64_t i = threadIdx.x; i < job.ranks / job.shards && replica == NONE; i += THREADS) {
    if (bits_of(squares(job, i)) != bits_of(found.first)) replica = i;
  }
  atomicAdd(&found.non_finite, non_finite);
  atomicMin(&found.rank, rank);
  atomicMin(&found.replica, replica);
  atomicMin(&found.within, within);
  __syncthreads();
  if (threadIdx.x == 0) finish(job, found);
  for (uint64_t i = threadIdx.x; i < job.groups; i += THREADS) {
    uint64_t offset = STEP_HEADER + i * STEP_GROUP;
    group(job.options + offset, job.out + offset, found.applied + 1);
  }
}
