// Stochastic gradient descent (numerics 12.10): the fused multiply-adds are written out, nothing else contracts.
#pragma once
#include <lowp/rule/scalars.cuh>

namespace lowp {

struct Sgd {
  static constexpr int STATES = 0;
  RuleScalars s;

  // Updates p by a gradient.
  __device__ __forceinline__ void update(float& p, float&, float&, float g) const {
    g = fmaf(s.weight_decay, p, __fmul_rn(g, s.grad_scale));
    p = fmaf(-s.lr, g, p);
  }
};

template <bool NESTEROV>
struct SgdMomentum {
  static constexpr int STATES = 1;  // momentum_buffer
  RuleScalars s;

  // Updates p and m by a gradient.
  __device__ __forceinline__ void update(float& p, float& m, float&, float g) const {
    g = fmaf(s.weight_decay, p, __fmul_rn(g, s.grad_scale));
    m = fmaf(s.beta1, m, g);
    p = fmaf(-s.lr, NESTEROV ? fmaf(s.beta1, m, g) : m, p);
  }
};

}  // namespace lowp
