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

// S_enc of numerics 7.1.
__device__ __forceinline__ float two_level_encode_scale(float amax) {
  if (amax == 0.0f) return 1.0f;
  if (amax != amax) amax = 1.0f;
  float scale = fminf(__fdiv_rn(2688.0f, amax), float_max());
  return scale == 0.0f ? 1.0f : scale;
}

// The factor that decodes the elements of a two-level block (numerics 7.4).
__device__ __forceinline__ float two_level_decode_factor(uint32_t entry, float amax) {
  return __fmul_rn(__fmul_rn(E4m3::decode(entry), amax), __uint_as_float(0x39C30C31u));
}

// The magnitude of an amax, consumed or not (job.rs, TensorInput); an encode scale that is known as it stands.
template <typename Job>
__device__ __forceinline__ float tensor_amax(const Job& job) {
  float x = *pointer<const float>(job.tensor);
  return job.observed || job.rule == RULE_TWO_LEVEL ? fabsf(x) : x;
}

// What values are multiplied by under RULE_TENSOR.
template <typename Job>
__device__ __forceinline__ float tensor_multiplier(const Job& job) {
  float x = tensor_amax(job);
  return job.observed ? tensor_scale(x, max_finite(job.element), job.pow2, job.epsilon) : x;
}

// A stored scale and what the values of its block are multiplied by.
struct Scaled {
  uint32_t entry;
  float multiplier;
};

// The scale arithmetic of one job.
struct ScaleRule {
  uint8_t rule, element;
  bool pow2;
  float epsilon;
  float tensor;  // encode scale or tensor amax
  float factor;  // TWO_LEVEL: fl(S_enc * fl(1/6)); E8M0: fl(1 / max)
  float decode;  // TWO_LEVEL: fl(1 / S_enc)

  template <typename Job>
  static __device__ __forceinline__ ScaleRule of(const Job& job) {
    ScaleRule r;
    r.rule = job.rule;
    r.element = job.element;
    r.pow2 = job.pow2;
    r.epsilon = job.epsilon;
    r.tensor = job.tensor == 0 ? 1.0f : r.rule == RULE_TENSOR ? tensor_multiplier(job) : tensor_amax(job);
    r.factor = max_reciprocal(r.element);
    r.decode = 1.0f;
    if (r.rule == RULE_TWO_LEVEL) {
      float scale = two_level_encode_scale(r.tensor);
      r.factor = __fmul_rn(scale, __uint_as_float(0x3E2AAAABu));
      r.decode = __fdiv_rn(1.0f, scale);
    }
    return r;
  }

  __device__ __forceinline__ bool scaled() const { return rule != RULE_NONE; }
  // Bytes of a stored block scale.
  __device__ __forceinline__ uint32_t entry_bytes() const { return rule == RULE_BLOCK_F32 ? 4 : 1; }

  // The scale of a block. Without block scales: what all values are multiplied by.
  __device__ __forceinline__ Scaled block(float amax) const {
    switch (rule) {
      case RULE_E8M0_TE: {
        uint32_t entry = E8m0::ceil(__fmul_rn(amax, factor));
        return {entry, E8m0::inverse(entry)};
      }
      case RULE_E8M0_FLOOR: {
        uint32_t entry = E8m0::floor(amax, max_exponent(element));
        return {entry, E8m0::inverse(entry)};
      }
      case RULE_TWO_LEVEL: {
        uint32_t entry = E4m3::one(fminf(__fmul_rn(amax, factor), float_max()));
        float multiplier = __fdiv_rn(1.0f, __fmul_rn(E4m3::decode(entry), decode));
        return {entry, fminf(multiplier, float_max())};
      }
      case RULE_BLOCK_F32: {
        float scale = tensor_scale(amax, max_finite(element), pow2, epsilon);
        return {__float_as_uint(__fdiv_rn(1.0f, scale)), scale};
      }
      case RULE_TENSOR: return {0, tensor};
      default: return {0, 1.0f};
    }
  }

};

// Writes the tensor-scale target and marks what was observed as consumed: one thread of a job does. The
// others may still read the entry: its magnitude stays.
template <typename Job>
__device__ __forceinline__ void store_tensor(const Job& job) {
  if (job.tensor_scale) {
    float tensor = job.rule == RULE_TENSOR ? __fdiv_rn(1.0f, tensor_multiplier(job)) : tensor_amax(job);
    store_f32(job.tensor_scale, __float_as_uint(tensor));
  }
  if (job.observed) atomicOr(pointer<uint32_t>(job.tensor), 0x80000000u);
}

// The rules of the tiled paths, each alone: what a lane needs for its blocks.
struct PowerOfTwo {
  float factor;  // fl(1 / max)
  int emax;
  bool floor;
  static __device__ __forceinline__ PowerOfTwo of(const Encode& job) {
    return {max_reciprocal(job.element), max_exponent(job.element), job.rule == RULE_E8M0_FLOOR};
  }
  __device__ __forceinline__ Scaled block(float amax) const {
    uint32_t entry = floor ? E8m0::floor(amax, emax) : E8m0::ceil(__fmul_rn(amax, factor));
    return {entry, E8m0::inverse(entry)};
  }
};

struct TwoLevel {
  float factor, decode;
  static __device__ __forceinline__ TwoLevel of(float amax) {
    float scale = two_level_encode_scale(amax);
    return {__fmul_rn(scale, __uint_as_float(0x3E2AAAABu)), __fdiv_rn(1.0f, scale)};
  }
  __device__ __forceinline__ Scaled block(float amax) const {
    uint32_t entry = E4m3::one(fminf(__fmul_rn(amax, factor), float_max()));
    return {entry, fminf(__fdiv_rn(1.0f, __fmul_rn(E4m3::decode(entry), decode)), float_max())};
  }
};

// Raises an amax entry (numerics 2.2). Maxima of non-negative floats are maxima of their bits; an
// entry that holds a NaN loses.
__device__ __forceinline__ void raise(float* entry, float amax) {
  int bits = __float_as_int(amax);
  int* at = reinterpret_cast<int*>(entry);
  int seen = *reinterpret_cast<volatile int*>(at);
  // Most blocks of a large tensor stop here, which keeps them off one address.
  if (seen >= bits && seen <= 0x7F800000) return;
  if (atomicMax(at, bits) <= 0x7F800000) return;
  do {
    seen = *reinterpret_cast<volatile int*>(at);
    if (seen <= 0x7F800000) break;
  } while (atomicCAS(at, seen, bits) != seen);
  atomicMax(at, bits);
}

}  // namespace lowp
