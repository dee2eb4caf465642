// Lion (numerics 12.9): the fused multiply-adds are written out, nothing else contracts.
#pragma once
#include <lowp/rule/scalars.cuh>

namespace lowp {

struct Lion {
  static constexpr int STATES = 1;  // exp_avg
  RuleScalars s;

  // Updates p and m by a gradient.
  __device__ __forceinline__ void update(float& p, float& m, float&, float g) const {
    g = __fmul_rn(g, s.grad_scale);
    float u = fmaf(s.beta1, m, __fmul_rn(s.rest1, g));
    u = u > 0.0f ? 1.0f : u < 0.0f ? -1.0f : u;  // zeros and NaN stay
    m = fmaf(s.beta2, m, __fmul_rn(s.rest2, g));
    u = fmaf(s.weight_decay, p, u);
    p = fmaf(-s.lr, u, p);
  }
};

}  // namespace lowp
