// Adam of four elements at a time (numerics 12.2), for kernels that have much else to compute.
//
// A quotient and a root of the compiler check their operands, each with a branch. Here one check is for four elements: where moments are
// zero or far from the ends of binary32, the same instructions round all of them correctly.
#pragma once
#include <lowp/rule/adam.cuh>

namespace lowp {

struct AdamFour {
  static constexpr int STATES = Adam::STATES;
  Adam adam;
  float reciprocal1, reciprocal2;  // of the corrections
  bool usual;                      // scalars of the group are far from the ends, too
  bool settled;                    // both corrections are 1

  static __device__ __forceinline__ float reciprocal(float d) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return fmaf(r, fmaf(-d, r, 1.0f), r);
  }
  // x / d to nearest even; the sign of a zero stays.
  static __device__ __forceinline__ float quotient(float x, float d, float reciprocal) {
    float q = __fmul_rn(x, reciprocal);
    return fmaf(-fmaf(d, q, -x), reciprocal, q);
  }
  // The root of zero, of a normal number, or of a negative one, which has none.
  static __device__ __forceinline__ float root(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(__uint_as_float(max(__float_as_uint(x), 27u << 23))));
    float s = __fmul_rn(x, y);
    return fmaf(fmaf(-s, s, x), __fmul_rn(y, 0.5f), s);
  }

  static __device__ __forceinline__ AdamFour of(const Adam& adam) {
    auto within = [](float x, float least, float most) { return x >= least && x <= most; };
    bool usual = within(adam.correction1, 0x1p-24f, 1.0f) && within(adam.correction2, 0x1p-24f, 1.0f) &&
                 within(adam.eps, 0x1p-60f, 1.0f) && adam.beta2 >= 0.0f && adam.rest2 >= 0.0f;
    bool settled = adam.correction1 == 1.0f && adam.correction2 == 1.0f;
    return {adam, reciprocal(adam.correction1), reciprocal(adam.correction2), usual, settled};
  }

  // `v` is not scaled: a power of two by which its values are exact, from 2^-103 on, is in place with beta2. Returns the amaxes of both
  // moments; one of NaNs alone is a NaN.
  __device__ __forceinline__ float2 update(float4& p, float4& m, float4& v, float scale, float4 g) const {
    const float beta2 = __fmul_rn(adam.beta2, scale);
    float* ps[4] = {&p.x, &p.y, &p.z, &p.w};
    float* ms[4] = {&m.x, &m.y, &m.z, &m.w};
    float* vs[4] = {&v.x, &v.y, &v.z, &v.w};
    const float gs[4] = {g.x, g.y, g.z, g.w};
    // Of magnitudes, as bits: the smallest that is not zero, less one, and the largest.
    uint32_t least_m = 0xFFFFFFFFu, least_v = 0xFFFFFFFFu;
    float most_m, most_v;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x = __fmul_rn(gs[i], adam.grad_scale);
      if (adam.l2) x = fmaf(adam.weight_decay, *ps[i], x);
      *ms[i] = fmaf(adam.beta1, *ms[i], __fmul_rn(adam.rest1, x));
      *vs[i] = fmaf(beta2, *vs[i], __fmul_rn(__fmul_rn(adam.rest2, x), x));
      least_m = min(least_m, (__float_as_uint(*ms[i]) << 1) - 1u);
      least_v = min(least_v, __float_as_uint(*vs[i]) - 1u);
      most_m = i == 0 ? fabsf(*ms[i]) : max_abs(most_m, *ms[i]);
      most_v = i == 0 ? fabsf(*vs[i]) : max_abs(most_v, *vs[i]);
    }
    float u[4];
    // From 2^-60 and 2^-99 on, up to 2^30 and 2^60.
    if (usual && least_m >= (67u << 24) - 1u && least_v >= (28u << 23) - 1u && most_m <= 0x1p30f && most_v <= 0x1p60f) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float mean = settled ? *ms[i] : quotient(*ms[i], adam.correction1, reciprocal1);
        float square = settled ? *vs[i] : quotient(*vs[i], adam.correction2, reciprocal2);
        float d = __fadd_rn(root(square), adam.eps);
        u[i] = quotient(mean, d, reciprocal(d));
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float d = __fadd_rn(__fsqrt_rn(__fdiv_rn(*vs[i], adam.correction2)), adam.eps);
        u[i] = __fdiv_rn(__fdiv_rn(*ms[i], adam.correction1), d);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float x = adam.l2 ? u[i] : fmaf(adam.weight_decay, *ps[i], u[i]);
      *ps[i] = fmaf(-adam.lr, x, *ps[i]);
    }
    return make_float2(most_m, most_v);
  }
};

}  // namespace lowp
