// Codes of optimizer states in fp8, and stochastic rounding (numerics 23): the device's form of lowp_format's state_block.rs,
// codec/e4m3.rs, codec/ue4m4.rs and codec/bf16.rs, bit for bit.
//
// A code below the smallest normal value S has the distances of the binade that begins there. On the bits of a binary32 above that
// binade's, both forms of a magnitude a are lines that meet at S: (bits of a) - (exponent below S) and (bits of a + S) - (exponent of
// S). The larger one is the one that counts.
#pragma once
#include <lowp/codec.cuh>

namespace lowp {

// A state in E4M3 rounds by the exclusive or of both halves of the random word, one in UE4M4 by the lower half, a master by the upper one.

// Means of gradients.
struct StateE4m3 {
  // fl(1 / 448).
  static __device__ __forceinline__ float factor() { return __uint_as_float(0x3B124925u); }

  // What is known of a block with this scale: its reciprocal.
  struct Block {
    float inverse;
    static __device__ __forceinline__ Block of(uint32_t scale) {
      return {__uint_as_float(max((254u - scale) << 23, 0x00400000u))};
    }
  };

  // The code of a value, in the highest byte; the others are any. A NaN gives that of the largest value.
  static __device__ __forceinline__ uint32_t encode(float x, Block block, uint32_t random) {
    float scaled = __fmul_rn(x, block.inverse);
    float a = fminf(fabsf(scaled), 448.0f);
    int below = __float_as_int(__fadd_rn(a, __uint_as_float(121u << 23)));
    uint32_t magnitude = uint32_t(max(__float_as_int(a) + (1 << 23), below));
    // With them, the exponent is subtracted.
    uint32_t bits = (random & 0xFFFFu) ^ random >> 16 ^ (0u - (121u << 23)) >> 4;
    return (magnitude + (bits << 4)) << 4 | (__float_as_uint(scaled) & 0x80000000u);
  }
  static constexpr uint32_t NAN_CODE = 0x7Fu;
  // Four codes without their scale; a NaN is any.
  static __device__ __forceinline__ float4 decode(uint32_t codes) { return E4m3::decode_four(codes); }
};

// Means of squares: what is not zero gives no code of zero.
struct StateUe4m4 {
  // fl(1 / 1.9375).
  static __device__ __forceinline__ float factor() { return __uint_as_float(0x3F042108u); }

  // The largest value times the scale, the smallest one, and the smallest normal one: what a value is compared with, which is not scaled.
  struct Block {
    uint32_t normal;
    float largest, smallest;
    static __device__ __forceinline__ Block of(uint32_t scale) {
      uint32_t bits = scale << 23;
      return {bits - (14u << 23), __uint_as_float(bits + (15u << 19)), __uint_as_float(bits - (18u << 23))};
    }
  };

  static __device__ __forceinline__ uint32_t encode(float x, Block block, uint32_t random) {
    float a = fminf(fabsf(x), block.largest);
    if (x != 0.0f) a = fmaxf(a, block.smallest);
    int below = __float_as_int(__fadd_rn(a, __uint_as_float(block.normal)));
    uint32_t magnitude = uint32_t(max(__float_as_int(a) + (1 << 23), below));
    // The exponent is subtracted last.
    return (magnitude + ((random & 0xFFFFu) << 3)) * 32 - block.normal * 32;
  }
  static constexpr uint32_t NAN_CODE = 0xFFu;  // that of the largest value
  static __device__ __forceinline__ float4 decode(uint32_t codes) {
    // Exponent and mantissa of a binary16, whose bias is the same.
    uint32_t low = __byte_perm(codes, 0, 0x4140) << 6, high = __byte_perm(codes, 0, 0x4342) << 6;
    float4 v;
    asm("{ .reg .b16 a, b, c, d;\n\t"
        "mov.b32 {a, b}, %4;\n\t"
        "mov.b32 {c, d}, %5;\n\t"
        "cvt.f32.f16 %0, a;\n\t"
        "cvt.f32.f16 %1, b;\n\t"
        "cvt.f32.f16 %2, c;\n\t"
        "cvt.f32.f16 %3, d; }"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
        : "r"(low), "r"(high));
    return v;
  }
};

// Whether one of four values is a NaN: a branch that is rare.
__device__ __forceinline__ bool any_nan(float4 v) {
  uint32_t found;
  asm("{ .reg .pred p;\n\t"
      "setp.nan.f32 p, %1, %2;\n\t"
      "setp.nan.or.f32 p, %3, %4, p;\n\t"
      "selp.u32 %0, 1, 0, p; }"
      : "=r"(found)
      : "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w));
  return found != 0;
}

// Four codes of one block.
template <class Code>
__device__ __forceinline__ uint32_t encode_four(float4 v, uint32_t scale, uint4 random) {
  const auto block = Code::Block::of(scale);
  uint32_t low = __byte_perm(Code::encode(v.x, block, random.x), Code::encode(v.y, block, random.y), 0x73);
  uint32_t high = __byte_perm(Code::encode(v.z, block, random.z), Code::encode(v.w, block, random.w), 0x73);
  uint32_t codes = __byte_perm(low, high, 0x5410);
  if constexpr (Code::NAN_CODE != 0xFFu) {
    if (any_nan(v)) {
      if (v.x != v.x) codes = (codes & 0xFFFFFF00u) | Code::NAN_CODE;
      if (v.y != v.y) codes = (codes & 0xFFFF00FFu) | Code::NAN_CODE << 8;
      if (v.z != v.z) codes = (codes & 0xFF00FFFFu) | Code::NAN_CODE << 16;
      if (v.w != v.w) codes = (codes & 0x00FFFFFFu) | Code::NAN_CODE << 24;
    }
  }
  return codes;
}

// The scale of a block whose amax is `amax`, which is no NaN: the smallest power of two by which that is in the range of the code, from 2^-103
// on. What is subnormal has that one.
template <class Code>
__device__ __forceinline__ uint32_t state_scale(float amax) {
  uint32_t ceil = (__float_as_uint(__fmul_rn(amax, Code::factor())) + 0x7FFFFFu) >> 23;
  return min(max(ceil, 24u), 254u);
}

// Masters in two halves (numerics 23.5; codec/remainder.rs): two parameters and two remainders, in the order of memory.
struct MasterPair {
  uint32_t parameters, remainders;

  static __device__ __forceinline__ uint32_t kept(float x) { return x != x ? 0x7FC00000u : __float_as_uint(x); }
  static __device__ __forceinline__ MasterPair split(float x, float y) {
    uint32_t a = kept(x), b = kept(y);
    return {__byte_perm(a + 0x8000u, b + 0x8000u, 0x7632), __byte_perm(a, b, 0x5410)};
  }
  static __device__ __forceinline__ float join(uint32_t alone, int32_t remainder) {
    float sum = __uint_as_float(alone + uint32_t(remainder));
    return sum != sum ? __uint_as_float(alone) : sum;
  }
  __device__ __forceinline__ float first() const { return join(parameters << 16, int32_t(remainders << 16) >> 16); }
  __device__ __forceinline__ float second() const { return join(parameters & 0xFFFF0000u, int32_t(remainders) >> 16); }
};

// Rounds a master to bfloat16, as a binary32: a magnitude moves up by the upper half of the random word, and then down.
__device__ __forceinline__ float round_master(float x, uint32_t random) {
  uint32_t bits = __float_as_uint(x);
  // Infinities stay.
  uint32_t rounded = x != x ? bits | 0x400000u : bits + (random >> 16);
  return __uint_as_float(rounded & 0xFFFF0000u);
}

// Four of them.
__device__ __forceinline__ float4 round_masters(float4 v, uint4 random) {
  if (any_nan(v)) {
    return make_float4(round_master(v.x, random.x), round_master(v.y, random.y), round_master(v.z, random.z), round_master(v.w, random.w));
  }
  auto rounded = [](float x, uint32_t bits) { return __uint_as_float((__float_as_uint(x) + (bits >> 16)) & 0xFFFF0000u); };
  return make_float4(rounded(v.x, random.x), rounded(v.y, random.y), rounded(v.z, random.z), rounded(v.w, random.w));
}

}  // namespace lowp
