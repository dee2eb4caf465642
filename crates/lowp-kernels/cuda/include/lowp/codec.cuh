// Element formats: the device's form of lowp_format::codec, bit for bit (numerics 1).
//
// Hardware conversions are used where there are some (policy.cuh): their bits are the same. `cargo xtask cuda --stats` looks for the
// instructions in what is compiled.
#pragma once
#include <lowp/jobs.cuh>
#include <lowp/policy.cuh>

namespace lowp {

// Eight-bit codes of a word as binary32, but for NaNs, whose sign and payload are any.
#if LOWP_FP8_CVT
#define LOWP_DECODE_PAIRS(name)                                                                      \
  __device__ __forceinline__ float4 decode_##name(uint32_t codes) {                                  \
    float4 v;                                                                                        \
    asm("{ .reg .b32 l, h; .reg .b16 a, b, c, d, e, f;\n\t"                                          \
        "mov.b32 {a, b}, %4;\n\t"                                                                    \
        "cvt.rn.f16x2." #name "x2 l, a;\n\t"                                                         \
        "cvt.rn.f16x2." #name "x2 h, b;\n\t"                                                         \
        "mov.b32 {c, d}, l;\n\t"                                                                     \
        "mov.b32 {e, f}, h;\n\t"                                                                     \
        "cvt.f32.f16 %0, c;\n\t"                                                                     \
        "cvt.f32.f16 %1, d;\n\t"                                                                     \
        "cvt.f32.f16 %2, e;\n\t"                                                                     \
        "cvt.f32.f16 %3, f; }"                                                                       \
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)                                                 \
        : "r"(codes));                                                                               \
    return v;                                                                                        \
  }
LOWP_DECODE_PAIRS(e4m3)
LOWP_DECODE_PAIRS(e5m2)
#undef LOWP_DECODE_PAIRS
#endif

// E4M3 (numerics 1.2): to nearest even, saturating; NaN gives 0x7F.
struct E4m3 {
  static __device__ __forceinline__ uint32_t one(float x) {
#if LOWP_FP8_CVT
    return pair(x, 0.0f) & 0xFF;
#else
    uint32_t bits = __float_as_uint(x), abs = bits & 0x7FFFFFFFu;
    // Subnormal codes have a fixed step of 2^-9, the unit in the last place of 2^14.
    uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(abs), __uint_as_float(0x46800000u))) - 0x46800000u;
    uint32_t normal = ((abs + 0x7FFFFu + ((abs >> 20) & 1)) >> 20) - ((127u - 7u) << 3);
    uint32_t code = abs < 0x3C800000u ? small : normal;
    code = (abs >= 0x43E00000u ? 0x7Eu : code) | ((bits >> 24) & 0x80u);
    return abs > 0x7F800000u ? 0x7Fu : code;
#endif
  }
  // Two codes, the first in the low byte.
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
#if LOWP_FP8_CVT
    uint16_t codes;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return one(low) | (one(high) << 8);
#endif
  }
  static __device__ __forceinline__ float decode(uint32_t code) {
    uint32_t magnitude = code & 0x7Fu;
    uint32_t value = __float_as_uint(__fmul_rn(__uint_as_float(magnitude << 20), __uint_as_float((127u + 120u) << 23)));
    value = magnitude == 0x7Fu ? 0x7FC00000u : value;
    return __uint_as_float(value | ((code & 0x80u) << 24));
  }
  // Four codes; a NaN is that of decode() or another.
  static __device__ __forceinline__ float4 decode_four(uint32_t codes) {
#if LOWP_FP8_CVT
    return decode_e4m3(codes);
#else
    return make_float4(decode(codes & 0xFF), decode(codes >> 8 & 0xFF), decode(codes >> 16 & 0xFF), decode(codes >> 24));
#endif
  }
};

// E5M2 (numerics 1.2).
struct E5m2 {
  static __device__ __forceinline__ uint32_t one(float x) {
#if LOWP_FP8_CVT
    return pair(x, 0.0f) & 0xFF;
#else
    uint32_t bits = __float_as_uint(x), abs = bits & 0x7FFFFFFFu;
    // Subnormal codes have a fixed step of 2^-16, the unit in the last place of 2^7.
    uint32_t small = __float_as_uint(__fadd_rn(__uint_as_float(abs), __uint_as_float(0x43000000u))) - 0x43000000u;
    uint32_t normal = ((abs + 0xFFFFFu + ((abs >> 21) & 1)) >> 21) - ((127u - 15u) << 2);
    uint32_t code = abs < 0x38800000u ? small : normal;
    code = (abs >= 0x47600000u ? 0x7Bu : code) | ((bits >> 24) & 0x80u);
    return abs > 0x7F800000u ? 0x7Fu : code;
#endif
  }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
#if LOWP_FP8_CVT
    uint16_t codes;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return one(low) | (one(high) << 8);
#endif
  }
  static __device__ __forceinline__ float decode(uint32_t code) {
    uint32_t magnitude = code & 0x7Fu;
    uint32_t value = __float_as_uint(__fmul_rn(__uint_as_float(magnitude << 21), __uint_as_float((127u + 112u) << 23)));
    value = magnitude == 0x7Cu ? 0x7F800000u : value;
    value = magnitude > 0x7Cu ? 0x7FC00000u : value;
    return __uint_as_float(value | ((code & 0x80u) << 24));
  }
  // Four codes; a NaN is that of decode() or another.
  static __device__ __forceinline__ float4 decode_four(uint32_t codes) {
#if LOWP_FP8_CVT
    return decode_e5m2(codes);
#else
    return make_float4(decode(codes & 0xFF), decode(codes >> 8 & 0xFF), decode(codes >> 16 & 0xFF), decode(codes >> 24));
#endif
  }
};

// E2M1 (numerics 1.3).
struct E2m1 {
  // 1.5 * 2^23.
  static constexpr uint32_t UNIT = 0x4B400000u;
  // The magnitude code is the concave, piecewise linear min(2a, a + 2, a/2 + 4, 7) rounded to an
  // integer, ties to even. Each line is one rounding: the sum with 1.5 * 2^23, whose unit in the
  // last place is 1, leaves the integer in the low bits, and rounding commutes with the minimum.
  // A NaN loses every minimum but the last: 7. A product's NaN is positive, so its sign is too.
  static __device__ __forceinline__ uint32_t magnitude(float x) {
    const float unit = __uint_as_float(UNIT);
    float a = fabsf(x);
    // Of positive values, as of integers, whose minimum of three is one instruction on Hopper.
    auto bits = [](float r) { return __float_as_uint(r); };
    uint32_t r = __vimin3_u32(bits(fmaf(a, 2.0f, unit)), bits(__fadd_rn(a, unit + 2.0f)), bits(fmaf(a, 0.5f, unit + 4.0f)));
    return min(r, UNIT + 7u);
  }
  static __device__ __forceinline__ uint32_t one(float x) {
    // Of the four bits that are left of x, the sign is the highest.
    return (magnitude(x) & 7u) | ((__float_as_uint(x) >> 28) & ~7u);
  }
  // Two codes, the first in the low nibble.
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
#if LOWP_FP4_CVT
    uint32_t codes;
    asm("{ .reg .b8 c; cvt.rn.satfinite.e2m1x2.f32 c, %1, %2; cvt.u32.u8 %0, c; }"
        : "=r"(codes) : "f"(high), "f"(low));
    return codes;
#else
    return one(low) | (one(high) << 4);
#endif
  }
  // The codes of x(0) to x(7), the first in the lowest nibble. Magnitudes are added up with what UNIT leaves of each, which
  // is the same for all; signs come from the highest bytes, those of the even values at once, and those of the odd ones.
  template <typename At>
  static __device__ __forceinline__ uint32_t eight(At x) {
#if LOWP_FP4_CVT
    uint32_t codes;
    asm("{ .reg .b8 a, b, c, d;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 a, %2, %1;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 c, %6, %5;\n\t"
        "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7;\n\t"
        "mov.b32 %0, {a, b, c, d}; }"
        : "=r"(codes)
        : "f"(x(0)), "f"(x(1)), "f"(x(2)), "f"(x(3)), "f"(x(4)), "f"(x(5)), "f"(x(6)), "f"(x(7)));
    return codes;
#else
    uint32_t codes = 0u - UNIT * 0x11111111u;
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      uint32_t bits[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float y = x(2 * k + odd);
        codes += magnitude(y) << (4 * (2 * k + odd));
        bits[k] = __float_as_uint(y);
      }
      uint32_t top = __byte_perm(__byte_perm(bits[0], bits[1], 0x0073), __byte_perm(bits[2], bits[3], 0x0073), 0x5410);
      codes += odd ? top & 0x80808080u : top >> 4 & 0x08080808u;
      // Four values at a time, so that registers suffice.
      asm volatile("" : "+r"(codes));
    }
    return codes;
#endif
  }
  // Two codes, apart.
  static __device__ __forceinline__ void each(float low, float high, uint32_t (&codes)[2]) {
#if LOWP_FP4_CVT
    uint32_t two = pair(low, high);
    codes[0] = two & 15u;
    codes[1] = two >> 4;
#else
    codes[0] = one(low);
    codes[1] = one(high);
#endif
  }
  static __device__ __forceinline__ float step(float a) { return a >= 4.0f ? 2.0f : a >= 2.0f ? 1.0f : 0.5f; }
  // Rounded by eight random bits (numerics 7.5).
  static __device__ __forceinline__ uint32_t stochastic(float x, uint32_t random) {
    float a = fabsf(x);
    float moved = fmaf(float(random), __fmul_rn(step(a), 1.0f / 256.0f), a);
    float grid = step(moved);
    // Quotients by a power of two are exact, and so are these products.
    float inverse = grid == 2.0f ? 0.5f : grid == 1.0f ? 1.0f : 2.0f;
    float magnitude = fminf(__fmul_rn(floorf(__fmul_rn(moved, inverse)), grid), 6.0f);
    return x != x ? 7u : one(magnitude) | ((__float_as_uint(x) >> 28) & 8u);
  }
  static __device__ __forceinline__ float decode(uint32_t code) {
    float magnitude = __fmul_rn(__uint_as_float((code & 7u) << 22), __uint_as_float((127u + 126u) << 23));
    return __uint_as_float(__float_as_uint(magnitude) | ((code & 8u) << 28));
  }
  static __device__ __forceinline__ float4 decode_four(uint32_t codes) {
    return make_float4(decode(codes & 15), decode(codes >> 4 & 15), decode(codes >> 8 & 15), decode(codes >> 12 & 15));
  }
};

// E8M0 (numerics 1.4).
struct E8m0 {
  static __device__ __forceinline__ uint32_t ceil(float v) {
#if LOWP_FP4_CVT
    uint16_t codes;
    asm("cvt.rp.satfinite.ue8m0x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(0.0f), "f"(v));
    return codes;
#else
    uint32_t bits = __float_as_uint(v) & 0x7FFFFFFFu;
    // A subnormal above 2^-127 needs exponent 1; at or below it, 0 is enough.
    uint32_t code = (bits + (bits < 0x00800000u ? 0x3FFFFFu : 0x7FFFFFu)) >> 23;
    return bits > 0x7F800000u ? 0xFFu : min(code, 0xFEu);
#endif
  }
  static __device__ __forceinline__ float decode(uint32_t code) {
    return __uint_as_float(code == 0xFF ? 0x7FC00000u : code == 0 ? 0x00400000u : code << 23);
  }
  static __device__ __forceinline__ float inverse(uint32_t code) {
    return code == 0xFF ? __uint_as_float(0x7FC00000u) : decode(254 - code);
  }
};

// Bits of one entry.
__device__ __forceinline__ uint32_t code_bits(uint8_t code) {
  return code == E2M1 ? 4 : code == BF16 ? 16 : code == F32 ? 32 : 8;
}

// Bytes of `entries` consecutive entries.
__device__ __forceinline__ uint64_t code_bytes(uint8_t code, uint64_t entries) {
  return (entries * code_bits(code) + 7) / 8;
}

__device__ __forceinline__ float max_finite(uint8_t code) {
  switch (code) {
    case E4M3: return 448.0f;
    case E5M2: return 57344.0f;
    case E2M1: return 6.0f;
    case E8M0: return __uint_as_float(0x7F000000u);
    case BF16: return __uint_as_float(0x7F7F0000u);
    default: return __uint_as_float(0x7F7FFFFFu);
  }
}

// fl(1 / max_finite).
__device__ __forceinline__ float max_reciprocal(uint8_t code) {
  return code == E4M3 ? __uint_as_float(0x3B124925u) : code == E5M2 ? __uint_as_float(0x37924925u) : __uint_as_float(0x3E2AAAABu);
}

// Half of a step at the end of the fraction of an element, in bits of binary32.
__device__ __forceinline__ uint32_t half_step(uint8_t code) {
  return code == E4M3 ? 1u << 19 : code == E5M2 ? 1u << 20 : 1u << 21;
}

__device__ __forceinline__ int max_exponent(uint8_t code) { return code == E4M3 ? 8 : code == E5M2 ? 15 : 2; }

}  // namespace lowp
