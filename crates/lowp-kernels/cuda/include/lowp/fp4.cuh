// E2M1 codes of many values at a time (numerics 1.3), where none is NaN: by the conversion where there is one, else in integers.
#pragma once
#include <lowp/ring.cuh>
#include <lowp/scale_rule.cuh>

namespace lowp {

// The highest bytes of the low values of two pairs, then those of the high ones.
__device__ __forceinline__ uint32_t top_bytes(uint32_t a, uint32_t b) { return __byte_perm(a, b, 0x7351); }
// Of each byte of the result, in the order of `words`, the highest byte of a value of a pair: of the low or the high one.
__device__ __forceinline__ uint32_t top_bytes(uint32_t a, uint32_t b, uint32_t c, uint32_t d, bool high) {
  return __byte_perm(top_bytes(a, b), top_bytes(c, d), high ? 0x7632u : 0x5410u);
}

// Whether codes of a warp must be clamped, one of whose products may be 7 or more: the conversion saturates by itself.
__device__ __forceinline__ bool must_clamp(bool large) { return !LOWP_FP4_CVT && __any_sync(FULL_WARP, large); }

// The sign bits of eight values where their codes have them, from the highest bytes of the even and of the odd ones.
__device__ __forceinline__ uint32_t signs_of_eight(uint32_t even, uint32_t odd) {
  return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}

// Magnitude codes of products, which are below 7 unless CLAMP. The code is the least of three lines, rounded (codec.cuh).
template <bool CLAMP>
__device__ __forceinline__ uint32_t magnitude_line(float x, float m) {
  float y = __fmul_rn(fabsf(x), m);
  if (CLAMP) y = fminf(y, 6.0f);
  const float unit = __uint_as_float(E2m1::UNIT);
  auto bits = [](float r) { return __float_as_uint(r); };
  return __vimin3_u32(bits(fmaf(y, 2.0f, unit)), bits(__fadd_rn(y, unit + 2.0f)), bits(fmaf(y, 0.5f, unit + 4.0f)));
}

// The magnitude codes of eight values, the first in the lowest nibble.
template <bool CLAMP, typename At>
__device__ __forceinline__ uint32_t magnitudes_of_eight(At at, float m) {
  uint32_t codes = 0u - E2m1::UNIT * 0x11111111u;
#pragma unroll
  for (int k = 0; k < 8; ++k) codes += magnitude_line<CLAMP>(at(k), m) << (4 * k);
  return codes;
}

// The codes of four pairs of a row.
template <bool CLAMP>
__device__ __forceinline__ uint32_t codes_of_eight(const uint32_t* x, float m) {
  auto at = [&](int k) { return k % 2 ? widen_high(x[k / 2]) : widen_low(x[k / 2]); };
#if LOWP_FP4_CVT
  return E2m1::eight([&](int k) { return __fmul_rn(at(k), m); });
#else
  uint32_t codes = magnitudes_of_eight<CLAMP>(at, m);
  return codes + signs_of_eight(top_bytes(x[0], x[1], x[2], x[3], false), top_bytes(x[0], x[1], x[2], x[3], true));
#endif
}

// The codes of eight values of binary32.
template <bool CLAMP>
__device__ __forceinline__ uint32_t codes_of_eight(const float* x, float m) {
#if LOWP_FP4_CVT
  return E2m1::eight([&](int k) { return __fmul_rn(x[k], m); });
#else
  auto tops = [&](int k) { return top_bytes(__float_as_uint(x[k]), __float_as_uint(x[k + 2]), __float_as_uint(x[k + 4]), __float_as_uint(x[k + 6]), true); };
  return magnitudes_of_eight<CLAMP>([&](int k) { return x[k]; }, m) + signs_of_eight(tops(0), tops(1));
#endif
}

// The codes of 16 rows of a column: the first or the second of two.
template <bool CLAMP>
__device__ __forceinline__ uint2 codes_of(const TwoColumns& v, bool second, float m) {
  uint32_t codes[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t* x = v.x + 8 * half;
    auto at = [&](int k) { return second ? widen_high(x[k]) : widen_low(x[k]); };
#if LOWP_FP4_CVT
    codes[half] = E2m1::eight([&](int k) { return __fmul_rn(at(k), m); });
#else
    codes[half] = magnitudes_of_eight<CLAMP>(at, m);
    codes[half] += signs_of_eight(top_bytes(x[0], x[2], x[4], x[6], second), top_bytes(x[1], x[3], x[5], x[7], second));
#endif
  }
  return make_uint2(codes[0], codes[1]);
}

// The codes of four pairs of a row, rounded by a random byte each (numerics 7.5). Along each of three lines of codes a magnitude over the step is
// moved by the byte, and cut; the line of the step that the magnitude has is the lowest. Sums are rounded as those of the definition, which are
// these times the step.
__device__ __forceinline__ uint32_t random_codes_of_eight(const uint32_t* x, float m, uint32_t low, uint32_t high) {
  const float unit = __uint_as_float(E2m1::UNIT);
  auto cut = [](float moved, float line) { return __float_as_uint(__fadd_rz(moved, line)); };
  uint32_t codes = 0u - E2m1::UNIT * 0x11111111u;
#pragma unroll
  for (int k = 0; k < 8; ++k) {
    const float y = __fmul_rn(fabsf(k % 2 ? widen_high(x[k / 2]) : widen_low(x[k / 2])), m);
    // 2^15 plus the byte / 256.
    const float random = __fadd_rn(__uint_as_float(__byte_perm(k < 4 ? low : high, 0x47000000u, 0x7650 + k % 4)), -32768.0f);
    const uint32_t line = __vimin3_u32(cut(fmaf(y, 2.0f, random), unit), cut(__fadd_rn(y, random), unit + 2.0f), cut(fmaf(y, 0.5f, random), unit + 4.0f));
    codes += min(line, E2m1::UNIT + 7u) << (4 * k);
  }
  return codes + signs_of_eight(top_bytes(x[0], x[1], x[2], x[3], false), top_bytes(x[0], x[1], x[2], x[3], true));
}

// What pairs of bfloat16 are multiplied by, for each of the three lines: powers of two, whose products are exact. Twice and half of each are normal.
struct PairMultipliers {
  uint32_t twice, once, half;
  // Of the first value of a pair, and of the second.
  static __device__ __forceinline__ PairMultipliers of(float first, float second) {
    const uint32_t once = __byte_perm(__float_as_uint(first), __float_as_uint(second), 0x7632);
    // One more, and one less, in both exponents.
    return {once + 0x00800080u, once, once - 0x00800080u};
  }
};

// Magnitude codes of a pair: in the lowest bits of each half, above which is PAIR_UNIT.
constexpr uint32_t PAIR_UNIT = 0x43404340u;  // 1.5 * 2^7
template <bool CLAMP>
__device__ __forceinline__ uint32_t magnitude_pair(uint32_t x, const PairMultipliers& m) {
  uint32_t a = x & 0x7FFF7FFFu, lines[3];
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(lines[0]) : "r"(a), "r"(m.twice), "r"(PAIR_UNIT));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(lines[1]) : "r"(a), "r"(m.once), "r"(PAIR_UNIT + 0x00020002u));
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(lines[2]) : "r"(a), "r"(m.half), "r"(PAIR_UNIT + 0x00040004u));
  uint32_t r = __vimin3_u16x2(lines[0], lines[1], lines[2]);
  return CLAMP ? __vminu2(r, PAIR_UNIT + 0x00070007u) : r;
}

// The codes of four pairs: those of their first values in the nibbles of the low half, of the second in the high half.
template <bool CLAMP>
__device__ __forceinline__ uint32_t codes_of_pairs(const uint32_t* x, const PairMultipliers& m) {
  uint32_t codes = 0u - PAIR_UNIT * 0x1111u;
#pragma unroll
  for (int k = 0; k < 4; ++k) codes += magnitude_pair<CLAMP>(x[k], m) << (4 * k);
  return codes + signs_of_eight(top_bytes(x[0], x[2]), top_bytes(x[1], x[3]));
}

// The same in the order of the values.
template <bool CLAMP>
__device__ __forceinline__ uint32_t row_of_pairs(const uint32_t* x, const PairMultipliers& m) {
  uint32_t codes[2];  // a byte each, of two pairs: of their first values, then of the second
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const uint32_t a = x[2 * k], b = x[2 * k + 1];
    codes[k] = magnitude_pair<CLAMP>(a, m) + (magnitude_pair<CLAMP>(b, m) << 8) - PAIR_UNIT * 0x101u + (top_bytes(a, b) >> 4 & 0x08080808u);
  }
  return __byte_perm(codes[0], codes[1], 0x5410) + 16 * __byte_perm(codes[0], codes[1], 0x7632);
}

// Eight nibbles of each of four words, transposed: the half word j of the result has nibble j of each.
__device__ __forceinline__ void transpose_nibbles(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  constexpr uint32_t EVEN = 0x0F0F0F0Fu;
  auto even = [&](uint32_t a, uint32_t b) { return (a & EVEN) | (b << 4 & ~EVEN); };
  auto odd = [&](uint32_t a, uint32_t b) { return (a >> 4 & EVEN) | (b & ~EVEN); };
  uint32_t e0 = even(in[0], in[1]), e1 = even(in[2], in[3]), o0 = odd(in[0], in[1]), o1 = odd(in[2], in[3]);
  // Byte k of e0 and e1 is column 2k; of o0 and o1 column 2k + 1.
  uint32_t e01 = __byte_perm(e0, e1, 0x5140), e23 = __byte_perm(e0, e1, 0x7362);
  uint32_t o01 = __byte_perm(o0, o1, 0x5140), o23 = __byte_perm(o0, o1, 0x7362);
  out[0] = __byte_perm(e01, o01, 0x5410);
  out[1] = __byte_perm(e01, o01, 0x7632);
  out[2] = __byte_perm(e23, o23, 0x5410);
  out[3] = __byte_perm(e23, o23, 0x7632);
}

}  // namespace lowp
