// What eight codes decode to in bfloat16, in pairs (numerics 5.3, 6.4 and 7.4).
#pragma once
#include <lowp/scale_rule.cuh>

namespace lowp {

// Whether pairs of bfloat16 have a NaN or an infinity among them: a product with 0 is NaN.
__device__ __forceinline__ bool any_special(const uint32_t (&y)[4]) {
  uint32_t any = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(any) : "r"(y[k]), "r"(0u));
  return (any & 0x7FFF7FFFu) != 0;
}

// FP8 codes under pairs of powers of two; whether there are NaNs among them, whose bits are any, or infinities.
template <typename E>
__device__ __forceinline__ bool decoded_pairs(const uint2& codes, const uint4& f, uint32_t (&y)[4]) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const float4 x = E::decode_four(k ? codes.y : codes.x);
    const uint32_t low = word(f, 2 * k), high = word(f, 2 * k + 1);
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[2 * k]) : "f"(__fmul_rn(x.y, widen_high(low))), "f"(__fmul_rn(x.x, widen_low(low))));
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y[2 * k + 1]) : "f"(__fmul_rn(x.w, widen_high(high))), "f"(__fmul_rn(x.z, widen_low(high))));
  }
  return any_special(y);
}

// The same of any codes.
template <typename E>
__device__ __forceinline__ uint4 decoded_fp8(const uint2& codes, const uint4& f) {
  uint32_t y[4];
  if (decoded_pairs<E>(codes, f, y)) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint32_t two = (k < 2 ? codes.x : codes.y) >> (k % 2 * 16), pair = word(f, k);
      y[k] = narrow_pair(scaled(E::decode(two & 0xFF), widen_low(pair)), scaled(E::decode(two >> 8 & 0xFF), widen_high(pair)));
    }
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

// The same of codes of which an encode made all NaNs: they have no sign.
template <typename E>
__device__ __forceinline__ uint4 decoded_again(const uint2& codes, const uint4& f) {
  uint32_t y[4];
  if (decoded_pairs<E>(codes, f, y)) {
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if ((y[k] & 0x7FFFu) > 0x7F80u) y[k] = (y[k] & 0xFFFF0000u) | 0x7FC0u;
      if ((y[k] & 0x7FFF0000u) > 0x7F800000u) y[k] = (y[k] & 0xFFFFu) | 0x7FC00000u;
    }
  }
  return make_uint4(y[0], y[1], y[2], y[3]);
}

// E2M1 codes under one factor: their eight magnitudes, among which codes choose by bytes.
struct DecodedFp4 {
  float factor;
  uint32_t low[2], high[2];

  static __device__ __forceinline__ DecodedFp4 of(float factor) {
    auto two = [&](float low, float high) {
      uint32_t pair;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(__fmul_rn(high, factor)), "f"(__fmul_rn(low, factor)));
      return pair;
    };
    const uint32_t a = two(0.0f, 0.5f), b = two(1.0f, 1.5f), c = two(2.0f, 3.0f), d = two(4.0f, 6.0f);
    return {factor,
            {__byte_perm(a, b, 0x6420), __byte_perm(c, d, 0x6420)},
            {__byte_perm(a, b, 0x7531), __byte_perm(c, d, 0x7531)}};
  }
  // Of eight codes, the first in the lowest nibble. The factor is finite, and may be negative.
  __device__ __forceinline__ uint4 values(uint32_t codes) const {
    uint32_t y[4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const uint32_t four = codes >> (16 * k);
      const uint32_t lows = __byte_perm(low[0], low[1], four & 0x7777u), highs = __byte_perm(high[0], high[1], four & 0x7777u);
      y[2 * k] = __byte_perm(lows, highs, 0x5140) ^ ((four & 0x8u) << 12 | (four & 0x80u) << 24);
      y[2 * k + 1] = __byte_perm(lows, highs, 0x7362) ^ ((four & 0x800u) << 4 | (four & 0x8000u) << 16);
    }
    return make_uint4(y[0], y[1], y[2], y[3]);
  }
  // The same of any factor.
  __device__ __forceinline__ uint4 any_values(uint32_t codes) const {
    if (is_finite(factor)) return values(codes);
    auto two = [&](int k) {
      return narrow_pair(scaled(E2m1::decode(codes >> (8 * k) & 15), factor), scaled(E2m1::decode(codes >> (8 * k + 4) & 15), factor));
    };
    return make_uint4(two(0), two(1), two(2), two(3));
  }
};

}  // namespace lowp
