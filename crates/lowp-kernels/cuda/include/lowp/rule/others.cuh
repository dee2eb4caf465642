// The rules of lowp_update: which one a job has is a branch for a tile, as are the dtypes of its state and its gradient.
#pragma once
#include <lowp/rule/lion.cuh>
#include <lowp/rule/sgd.cuh>

namespace lowp {

struct OtherRules {
  RuleScalars s;

  static __device__ __forceinline__ OtherRules of(const Step* step, const Update& job) { return {RuleScalars::of(step, job)}; }

  // Calls `with` with the rule of a job.
  template <class F>
  __device__ __forceinline__ auto visit(const Update& job, F with) const {
    switch (job.rule) {
      case UPDATE_LION:
        return with(Lion{s});
      case UPDATE_SGD_MOMENTUM:
        return with(SgdMomentum<false>{s});
      case UPDATE_SGD_NESTEROV:
        return with(SgdMomentum<true>{s});
      default:
        return with(Sgd{s});
    }
  }
};

__device__ __forceinline__ void update_tile_of(const Update& job, const OtherRules& rules, const View& view, const Lane<4>& at,
                                               Values<4>& p) {
  const bool half = job.state_codes[0] == BF16, half_grad = job.grad_code == BF16;
  rules.visit(job, [&](auto rule) {
    if constexpr (decltype(rule)::STATES == 0) {
      half_grad ? update_tile<false, false, true>(job, rule, view, at, p) : update_tile<false, false, false>(job, rule, view, at, p);
    } else if (half) {
      half_grad ? update_tile<true, false, true>(job, rule, view, at, p) : update_tile<true, false, false>(job, rule, view, at, p);
    } else {
      half_grad ? update_tile<false, false, true>(job, rule, view, at, p) : update_tile<false, false, false>(job, rule, view, at, p);
    }
  });
}

__device__ __forceinline__ float update_one_of(const Update& job, const OtherRules& rules, uint64_t e) {
  return rules.visit(job, [&](auto rule) { return update_one(job, rule, e); });
}

}  // namespace lowp
