// The momentum of a gradient (numerics 22.1): m = mu m + g, and g + mu m in bf16.
#include <lowp/eight.cuh>
#include <lowp/tile.cuh>

namespace lowp {

struct Nesterov {
  float mu, grad_scale;

  // Updates m by a gradient, and returns what is orthogonalised.
  __device__ __forceinline__ float update(float& m, float g) const {
    g = __fmul_rn(g, grad_scale);
    m = fmaf(mu, m, g);
    return fmaf(mu, m, g);
  }
};

// Eight values, aligned.
template <bool HALF>
__device__ __forceinline__ void eight_of(const Momentum& job, const Nesterov& step, uint64_t i) {
  Eight<HALF> grad;
  Eight<false> momentum;
  Eight<true> out;
  grad.load(job.grad, i);
  momentum.load(job.momentum, i);
  float g[8], m[8], x[8];
  grad.values(g);
  momentum.values(m);
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] = step.update(m[j], g[j]);
  momentum.set(m);
  momentum.store(job.momentum, i);
  out.set(x);
  out.store(job.out, i);
}

// One value, at any address.
__device__ __forceinline__ void one_of(const Momentum& job, const Nesterov& step, uint64_t i) {
  float m = pointer<const float>(job.momentum)[i];
  float x = step.update(m, load_source(job.grad, job.grad_code, i));
  pointer<float>(job.momentum)[i] = m;
  pointer<uint16_t>(job.out)[i] = narrow(x);
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_momentum(const Tile* __restrict__ tiles, const Momentum* __restrict__ jobs, const Step* __restrict__ step,
                  uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Momentum job = jobs[tile.job];
  const GroupScalars group = reinterpret_cast<const GroupScalars*>(step + 1)[job.group];
  const Nesterov update{group.beta1, step->grad_scale};
  uint64_t first = tile.index * MOMENTUM_TILE, end = min(first + MOMENTUM_TILE, job.len);
  if (!job.vector || end - first < MOMENTUM_TILE) {
    for (uint64_t i = first + threadIdx.x; i < end; i += THREADS) one_of(job, update, i);
    return;
  }
  static_assert(MOMENTUM_TILE == THREADS * 8, "a thread has eight values");
  uint64_t i = first + threadIdx.x * 8;
  job.grad_code == BF16 ? eight_of<true>(job, update, i) : eight_of<false>(job, update, i);
}
