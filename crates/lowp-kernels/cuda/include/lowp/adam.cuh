// One element of AdamW (numerics 12.2): the fused multiply-adds are written out, nothing else
// contracts, and both quotients and the root are correctly rounded.
#pragma once
#include <lowp/memory.cuh>

namespace lowp {

struct Adam {
  float lr, beta1, beta2, eps, weight_decay, correction1, correction2;
  float rest1, rest2;  // fl(1 - beta)
  float grad_scale;
  bool l2;

  static __device__ __forceinline__ Adam of(const Step* step, uint32_t group, bool l2) {
    const AdamGroup g = reinterpret_cast<const AdamGroup*>(step + 1)[group];
    return {g.lr, g.beta1, g.beta2, g.eps, g.weight_decay, g.correction1, g.correction2, __fadd_rn(1.0f, -g.beta1),
            __fadd_rn(1.0f, -g.beta2), step->grad_scale, l2};
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

// Four stored values, as they are in memory: 16 bytes of binary32 or 8 of bfloat16.
template <bool HALF>
struct Four;

template <>
struct Four<false> {
  uint4 raw;
  static __device__ __forceinline__ Four load(uint64_t base, uint64_t index) {
    return {load16_run(pointer<const float>(base) + index)};
  }
  __device__ __forceinline__ float4 values() const { return as_floats(raw); }
  static __device__ __forceinline__ void store(uint64_t base, uint64_t index, float4 v) {
    store16(pointer<float>(base) + index, as_bits(v));
  }
};

template <>
struct Four<true> {
  uint2 raw;
  static __device__ __forceinline__ Four load(uint64_t base, uint64_t index) {
    return {load8(pointer<const uint16_t>(base) + index)};
  }
  __device__ __forceinline__ float4 values() const {
    return make_float4(widen_low(raw.x), widen_high(raw.x), widen_low(raw.y), widen_high(raw.y));
  }
  static __device__ __forceinline__ void store(uint64_t base, uint64_t index, float4 v) {
    store8(pointer<uint16_t>(base) + index, make_uint2(narrow_pair(v.x, v.y), narrow_pair(v.z, v.w)));
  }
};

}  // namespace lowp
