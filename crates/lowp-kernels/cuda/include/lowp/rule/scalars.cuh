// The scalars of rules other than Adam.
#pragma once
#include <lowp/update.cuh>

namespace lowp {

struct RuleScalars {
  float lr, beta1, beta2, weight_decay;
  float rest1, rest2;  // fl(1 - beta)
  float grad_scale;

  static __device__ __forceinline__ RuleScalars of(const Step* step, const Update& job) {
    const GroupScalars g = group_of(step, job);
    // What is orthogonal already is not scaled.
    const float grad_scale = job.rule == UPDATE_MUON ? 1.0f : step->grad_scale;
    return {g.lr, g.beta1, g.beta2, g.weight_decay, __fadd_rn(1.0f, -g.beta1), __fadd_rn(1.0f, -g.beta2), grad_scale};
  }
};

}  // namespace lowp
