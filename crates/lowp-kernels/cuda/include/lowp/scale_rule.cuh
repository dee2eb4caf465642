// Scale rules: how an amax becomes a stored scale and a multiplier (lowp_format::scale_rule, numerics 4 to 8).
#pragma once
#include <lowp/codec.cuh>
#include <lowp/memory.cuh>

namespace lowp {

constexpr uint32_t FLT_MAX_BITS = 0x7F7FFFFFu;

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }
__device__ __forceinline__ float float_max() { return __uint_as_float(FLT_MAX_BITS); }

// fl(max / max(amax, epsilon)); 1 where the amax is 0, infinite or NaN (numerics 5.2).
__device__ __forceinline__ float tensor_scale(float amax, float max, bool pow2, float epsilon) {
  if (amax < epsilon) amax = epsilon;
  float scale = 1.0f;
  if (amax != 0.0f && is_finite(amax)) {
    scale = __fdiv_rn(max, amax);
    if (!is_finite(scale)) scale = float_max();
  }
  return pow2 ? __uint_as_float(__float_as_uint(scale) & 0xFF800000u) : scale;
}

// S_enc of numerics 7.1; `largest` is 6 times the largest block scale.
__device__ __forceinline__ float two_level_encode_scale(float amax, float largest) {
  if (amax == 0.0f) return 1.0f;
  if (amax != amax) amax = 1.0f;
  float scale = fminf(__fdiv_rn(largest, amax), float_max());
  return scale == 0.0f ? 1.0f : scale;
}

// The factor that decodes the elements of a two-level block (numerics 7.4).
__device__ __forceinline__ float two_level_decode_factor(uint32_t entry, float amax, float reciprocal) {
  return __fmul_rn(__fmul_rn(E4m3::decode(entry), amax), reciprocal);
}

// fl(1 / largest).
__device__ __forceinline__ float largest_reciprocal(float largest) {
  return __uint_as_float(largest == 2688.0f ? 0x39C30C31u : 0x3A2AAAABu);
}

__device__ __forceinline__ bool two_level(uint8_t rule) { return rule == RULE_TWO_LEVEL || rule == RULE_FOUR_OVER_SIX; }

// The entry of the tensor or line that holds element (row, col).
__device__ __forceinline__ uint64_t outer_entry(const Ingredients& made, uint64_t row, uint64_t col) {
  return made.extent == EXTENT_ROWS ? row : made.extent == EXTENT_COLUMNS ? col : 0;
}

// The magnitude of an amax, consumed or not (job.rs, TensorInput); an encode scale that is known as it stands.
__device__ __forceinline__ float tensor_amax(const Ingredients& made, uint64_t entry) {
  float x = pointer<const float>(made.tensor)[entry];
  return made.observed || two_level(made.rule) ? fabsf(x) : x;
}

// What values are multiplied by under RULE_TENSOR.
__device__ __forceinline__ float tensor_multiplier(const Ingredients& made, uint64_t entry) {
  float x = tensor_amax(made, entry);
  return made.observed ? tensor_scale(x, max_finite(made.element), made.pow2, made.epsilon) : x;
}

// The same, or the amax of two-level rules; 1 where there is neither.
__device__ __forceinline__ float tensor_value(const Ingredients& made, uint64_t entry) {
  if (made.tensor == 0) return 1.0f;
  return made.rule == RULE_TENSOR ? tensor_multiplier(made, entry) : tensor_amax(made, entry);
}

// A stored scale and what the values of its block are multiplied by.
struct Scaled {
  uint32_t entry;
  float multiplier;
};

// The exponent of an amax whose bits were moved by `half` (numerics 6.3 and 19).
__device__ __forceinline__ uint32_t e8m0_exponent(float amax, uint32_t half, int emax) {
  uint32_t bits = __float_as_uint(amax);
  int exponent = int((bits + half) >> 23);
  return bits >= 0x7F800000u ? 0xFFu : uint32_t(max(exponent - emax, 0));
}

// The product; a NaN is that of the operand that is one, as on the host, not the canonical one.
__device__ __forceinline__ float scaled(float x, float factor) {
  float y = __fmul_rn(x, factor);
  if (y == y) return y;
  uint32_t sign = 0x80000000u;
  if (x != x) {
    sign &= __float_as_uint(x);
  } else if (factor != factor) {
    sign &= __float_as_uint(factor);
  }
  return __uint_as_float(0x7FC00000u | sign);
}

// The scale arithmetic of one tensor, or of one of its lines.
struct ScaleRule {
  uint8_t rule, element;
  bool pow2;
  float epsilon;
  float tensor;  // encode scale or amax
  float factor;  // TWO_LEVEL: fl(S_enc * fl(1/6)); FOUR_OVER_SIX: S_enc; E8M0: fl(1 / max)
  float decode;  // TWO_LEVEL: fl(1 / S_enc)

  static __device__ __forceinline__ ScaleRule of(const Ingredients& made, uint64_t entry) {
    ScaleRule r;
    r.rule = made.rule;
    r.element = made.element;
    r.pow2 = made.pow2;
    r.epsilon = made.epsilon;
    r.tensor = tensor_value(made, entry);
    r.factor = max_reciprocal(r.element);
    r.decode = 1.0f;
    if (two_level(r.rule)) {
      float scale = two_level_encode_scale(r.tensor, made.largest);
      r.factor = r.rule == RULE_TWO_LEVEL ? __fmul_rn(scale, __uint_as_float(0x3E2AAAABu)) : scale;
      r.decode = __fdiv_rn(1.0f, scale);
    }
    return r;
  }

  __device__ __forceinline__ bool scaled() const { return rule != RULE_NONE; }
  // Bytes of a stored block scale.
  __device__ __forceinline__ uint32_t entry_bytes() const { return rule == RULE_BLOCK_F32 ? 4 : 1; }

  // What the values of a two-level block are multiplied by.
  __device__ __forceinline__ float two_level_multiplier(uint32_t entry) const {
    return fminf(__fdiv_rn(1.0f, __fmul_rn(E4m3::decode(entry), decode)), float_max());
  }

  // The scale of a block. Without block scales: what all values are multiplied by.
  __device__ __forceinline__ Scaled block(float amax) const {
    switch (rule) {
      case RULE_E8M0_TE: {
        uint32_t entry = E8m0::ceil(__fmul_rn(amax, factor));
        return {entry, E8m0::inverse(entry)};
      }
      case RULE_E8M0_FLOOR:
      case RULE_E8M0_EVEN: {
        uint32_t half = rule == RULE_E8M0_EVEN ? half_step(element) : 0;
        uint32_t entry = e8m0_exponent(amax, half, max_exponent(element));
        return {entry, E8m0::inverse(entry)};
      }
      case RULE_TWO_LEVEL: {
        uint32_t entry = E4m3::one(fminf(__fmul_rn(amax, factor), float_max()));
        return {entry, two_level_multiplier(entry)};
      }
      case RULE_BLOCK_F32: {
        float scale = tensor_scale(amax, max_finite(element), pow2, epsilon);
        return {__float_as_uint(__fdiv_rn(1.0f, scale)), scale};
      }
      case RULE_TENSOR: return {0, tensor};
      default: return {0, 1.0f};
    }
  }

  // The scales that four over six chooses between (numerics 20.1): for 6, then for 4.
  __device__ __forceinline__ void candidates(float amax, uint32_t (&entries)[2]) const {
    float base = __fmul_rn(__fdiv_rn(amax, 6.0f), factor);
    entries[0] = E4m3::one(fminf(base, 448.0f));
    entries[1] = E4m3::one(fminf(__fmul_rn(base, 1.5f), 448.0f));
  }
};

// What value `x` adds to the error of a candidate of four over six.
struct ChoiceError {
  float multiplier, decoded, amax, largest;
  bool squares;
  __device__ __forceinline__ float of(float x) const {
    float value = E2m1::decode(E2m1::one(__fmul_rn(x, multiplier)));
    float error = __fsub_rn(__fdiv_rn(__fmul_rn(__fmul_rn(value, decoded), amax), largest), x);
    return squares ? __fmul_rn(error, error) : fabsf(error);
  }
};

// Writes the entries first .. end of what there is one of for the tensor or each line, and marks what was observed as
// consumed. Others may still read the entries: their magnitudes stay.
__device__ __forceinline__ void store_outer(const Outer& outer, uint64_t first, uint64_t end, uint64_t thread, uint64_t threads) {
  const Ingredients& made = outer.ingredients;
  if (made.tensor == 0) return;
  for (uint64_t e = first + thread; e < end; e += threads) {
    if (outer.to) {
      float x = made.rule == RULE_TENSOR ? __fdiv_rn(1.0f, tensor_multiplier(made, e)) : tensor_amax(made, e);
      store_f32(outer.to + 4 * e, __float_as_uint(x));
    }
    if (made.observed) atomicOr(pointer<uint32_t>(made.tensor) + e, 0x80000000u);
  }
}

// The same for one tile of a matrix, of height x width elements from (row, col) on: the first tile does that of the tensor,
// those of the first column rows, those of the first row columns.
__device__ __forceinline__ void store_outers(const Outer (&outers)[2], uint64_t rows, uint64_t cols, uint64_t row, uint64_t col,
                                             uint32_t height, uint32_t width) {
#pragma unroll 1
  for (int o = 0; o < 2; ++o) {
    const Outer& outer = outers[o];
    uint8_t extent = outer.ingredients.extent;
    if (extent == EXTENT_TENSOR) {
      if (row == 0 && col == 0 && threadIdx.x == 0) store_outer(outer, 0, 1, 0, 1);
    } else if (extent == EXTENT_ROWS) {
      if (col == 0) store_outer(outer, row, min(row + height, rows), threadIdx.x, THREADS);
    } else if (row == 0) {
      store_outer(outer, col, min(col + width, cols), threadIdx.x, THREADS);
    }
  }
}

// The same where one block of threads does all.
__device__ __forceinline__ void store_all_outers(const Outer (&outers)[2], uint64_t rows, uint64_t cols) {
#pragma unroll 1
  for (int o = 0; o < 2; ++o) {
    uint8_t extent = outers[o].ingredients.extent;
    uint64_t entries = extent == EXTENT_ROWS ? rows : extent == EXTENT_COLUMNS ? cols : 1;
    store_outer(outers[o], 0, entries, threadIdx.x, THREADS);
  }
}

// The rules of the tiled paths, each alone: what a lane needs for its blocks. EVEN says that the rule may be
// RULE_E8M0_EVEN; otherwise nothing of it is compiled.
template <bool EVEN>
struct PowerOfTwo {
  float factor;  // fl(1 / max)
  int emax;
  bool ceil;
  uint32_t half;  // of a step at the end of the fraction, where an exponent is rounded; 0 without EVEN
  static __device__ __forceinline__ PowerOfTwo of(const Ingredients& made) {
    return {max_reciprocal(made.element), max_exponent(made.element), made.rule == RULE_E8M0_TE,
            EVEN && made.rule == RULE_E8M0_EVEN ? half_step(made.element) : 0};
  }
  __device__ __forceinline__ uint32_t entry(float amax) const {
    return ceil ? E8m0::ceil(__fmul_rn(amax, factor)) : e8m0_exponent(amax, EVEN ? half : 0, emax);
  }
  __device__ __forceinline__ Scaled block(float amax, uint32_t, uint32_t) const {
    uint32_t e = entry(amax);
    return {e, E8m0::inverse(e)};
  }
};

struct TwoLevel {
  float factor, decode;
  static __device__ __forceinline__ TwoLevel of(float amax) {
    float scale = two_level_encode_scale(amax, 2688.0f);
    return {__fmul_rn(scale, __uint_as_float(0x3E2AAAABu)), __fdiv_rn(1.0f, scale)};
  }
  // What the values of a block of scale `entry` are multiplied by.
  __device__ __forceinline__ float multiplier(uint32_t entry) const {
    return fminf(__frcp_rn(__fmul_rn(E4m3::decode(entry), decode)), float_max());
  }
  __device__ __forceinline__ Scaled block(float amax, uint32_t, uint32_t) const {
    uint32_t entry = E4m3::one(fminf(__fmul_rn(amax, factor), float_max()));
    return {entry, multiplier(entry)};
  }
};

// What an amax entry holds now.
__device__ __forceinline__ int seen_amax(const float* entry) { return *reinterpret_cast<const volatile int*>(entry); }

// Raises an amax entry that held `seen` (numerics 2.2). Maxima of non-negative floats are maxima of their bits; an entry that
// holds a NaN loses, and no launch writes one.
__device__ __forceinline__ void raise_over(float* entry, int seen, float amax) {
  int bits = __float_as_int(amax);
  int* at = reinterpret_cast<int*>(entry);
  // Most blocks of a large tensor stop here, which keeps them off one address.
  if (seen >= bits && seen <= 0x7F800000) return;
  while (seen > 0x7F800000) {
    int before = atomicCAS(at, seen, bits);
    if (before == seen) return;
    seen = before;
  }
  // Nobody waits for what it returns.
  atomicMax(at, bits);
}

__device__ __forceinline__ void raise(float* entry, float amax) { raise_over(entry, seen_amax(entry), amax); }

}  // namespace lowp
