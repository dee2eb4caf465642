// Matrices divided by their norms (numerics 22.3): out[i] = from[i] / max(sqrt(sum), 1e-7).
#include <lowp/eight.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// A NaN stays one.
__device__ __forceinline__ float inverse_norm(uint64_t sum) {
  double norm = __dsqrt_rn(__longlong_as_double(static_cast<long long>(load_u64(sum))));
  return __double2float_rn(__ddiv_rn(1.0, norm < 1e-7 ? 1e-7 : norm));
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_normalize(const Tile* __restrict__ tiles, const Normalize* __restrict__ jobs, const Step* __restrict__ step,
                   uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Normalize job = jobs[tile.job];
  // Root and quotient take long in binary64, so one thread of a block does them.
  __shared__ float shared;
  if (threadIdx.x == 0) shared = inverse_norm(job.sum);
  __syncthreads();
  const float factor = shared;
  uint64_t first = tile.index * MOMENTUM_TILE, end = min(first + MOMENTUM_TILE, job.len);
  if (!job.vector || end - first < MOMENTUM_TILE) {
    for (uint64_t i = first + threadIdx.x; i < end; i += THREADS) {
      pointer<uint16_t>(job.out)[i] = narrow(__fmul_rn(load_source(job.from, BF16, i), factor));
    }
    return;
  }
  static_assert(MOMENTUM_TILE == THREADS * 8, "a thread has eight values");
  uint64_t i = first + threadIdx.x * 8;
  Eight<true> values;
  values.load(job.from, i);
  float x[8];
  values.values(x);
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = __fmul_rn(x[j], factor);
  values.set(x);
  values.store(job.out, i);
}
