// AdamW, and Adam with L2 (numerics 12.2): the fused multiply-adds are written out, nothing else
// contracts, and both quotients and the root are correctly rounded.
#pragma once
#include <lowp/update.cuh>

namespace lowp {

struct Adam {
  static constexpr int STATES = 2;  // exp_avg, exp_avg_sq
  float lr, beta1, beta2, eps, weight_decay, correction1, correction2;
  float rest1, rest2;  // fl(1 - beta)
  float grad_scale;
  bool l2;

  static __device__ __forceinline__ Adam of(const Step* step, const Update& job) {
    const GroupScalars g = group_of(step, job);
    return {g.lr, g.beta1, g.beta2, g.eps, g.weight_decay, g.correction1, g.correction2, __fadd_rn(1.0f, -g.beta1),
            __fadd_rn(1.0f, -g.beta2), step->grad_scale, job.rule == UPDATE_ADAM_L2};
  }

  // Updates p, m and v by a gradient.
  __device__ __forceinline__ void update(float& p, float& m, float& v, float g) const {
    g = __fmul_rn(g, grad_scale);
    if (l2) g = fmaf(weight_decay, p, g);
    m = fmaf(beta1, m, __fmul_rn(rest1, g));
    v = fmaf(beta2, v, __fmul_rn(__fmul_rn(rest2, g), g));
    float d = __fadd_rn(__fsqrt_rn(__fdiv_rn(v, correction2)), eps);
    float u = __fdiv_rn(__fdiv_rn(m, correction1), d);
    if (!l2) u = fmaf(weight_decay, p, u);
    p = fmaf(-lr, u, p);
  }
};

// The tile of a job for the dtypes of its states, of which exp_avg_sq is bf16 only if exp_avg is: one branch for a tile, none for an
// element.
__device__ __forceinline__ void update_tile_of(const Update& job, const Adam& adam, const View& view, const Lane<4>& at,
                                               Values<4>& p) {
  const bool half_grad = job.grad_code == BF16;
  if (job.state_codes[0] == BF16) {
    if (job.state_codes[1] == BF16) {
      half_grad ? update_tile<true, true, true>(job, adam, view, at, p) : update_tile<true, true, false>(job, adam, view, at, p);
    } else {
      half_grad ? update_tile<true, false, true>(job, adam, view, at, p) : update_tile<true, false, false>(job, adam, view, at, p);
    }
  } else {
    half_grad ? update_tile<false, false, true>(job, adam, view, at, p) : update_tile<false, false, false>(job, adam, view, at, p);
  }
}

__device__ __forceinline__ float update_one_of(const Update& job, const Adam& adam, uint64_t e) { return update_one(job, adam, e); }

}  // namespace lowp
