// Amax histories of delayed scaling (numerics 4.2): one warp per tensor.
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// Rolls the history of one tensor, [0, h2, .., h(L-1), last], and returns the next encode scale.
__device__ __forceinline__ float roll(const History& job, float observed, float scale, uint32_t lane) {
  float* history = pointer<float>(job.history);
  float newest = fmaxf(history[0], observed);
  float last = observed != 0.0f ? observed : newest;
  __syncwarp();
  if (last == 0.0f) {
    if (lane == 0) history[0] = newest;
    return scale;
  }
  float amax = last;
  // As many entries at a time as a window usually has: loads wait for each other no more than once.
  constexpr int BATCH = 32;
  for (uint64_t first = 0; first + 1 < job.window; first += 32 * BATCH) {
    float entries[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      uint64_t at = first + 32 * i + lane + 1;
      entries[i] = at < job.window ? history[at] : 0.0f;
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      uint64_t at = first + 32 * i + lane + 1;
      if (!job.most_recent) amax = fmaxf(amax, entries[i]);
      if (at < job.window) history[at - 1] = entries[i];
    }
    __syncwarp();
  }
  if (lane == 0) {
    history[job.window - 1] = last;
    history[0] = 0.0f;
  }
  amax = all_max(amax, 31);
  if (!is_finite(amax) || !(amax > 0.0f)) return scale;
  float next = __fdiv_rn(job.numerator, amax);
  return is_finite(next) ? next : float_max();
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(HISTORY_THREADS)
    lowp_history(const Tile* __restrict__ tiles, const History* __restrict__ jobs, const Step* __restrict__ step,
                 uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const History& job = jobs[tiles[blockIdx.x].job];
  // A consumed entry says that nothing was observed since.
  float entry = *pointer<const float>(job.observed), observed = entry > 0.0f ? entry : 0.0f, scale = *pointer<const float>(job.scale);
  __syncwarp();
  float next = roll(job, observed, scale, threadIdx.x);
  if (threadIdx.x == 0) {
    *pointer<float>(job.observed) = 0.0f;
    *pointer<float>(job.scale) = next;
  }
}
