// Codes of single elements of a flat encode (numerics 11): any ingredients, blocks and bounds.
#pragma once
#include <lowp/scale_rule.cuh>

namespace lowp {

// The rule of the tensor, or of the line of element (row, col).
__device__ __forceinline__ ScaleRule rule_at(const FlatPass& pass, uint64_t row, uint64_t col) {
  return ScaleRule::of(pass.ingredients, outer_entry(pass.ingredients, row, col));
}

// Calls `f` with a rule whose kind the compiler knows.
template <typename F>
__device__ __forceinline__ void with_rule(ScaleRule rule, F f) {
  switch (rule.rule) {
    case RULE_E8M0_TE: rule.rule = RULE_E8M0_TE; return f(rule);
    case RULE_E8M0_FLOOR: rule.rule = RULE_E8M0_FLOOR; return f(rule);
    case RULE_TWO_LEVEL: rule.rule = RULE_TWO_LEVEL; return f(rule);
    case RULE_BLOCK_F32: rule.rule = RULE_BLOCK_F32; return f(rule);
    default: return f(rule);
  }
}

__device__ __forceinline__ uint32_t encode_one(const ScaleRule& rule, float x, float m) {
  if (rule.scaled()) x = __fmul_rn(x, m);
  switch (rule.element) {
    case E4M3: return E4m3::one(x);
    case E5M2: return E5m2::one(x);
    case E2M1: return E2m1::one(x);
    case BF16: return narrow(x);
    default: return __float_as_uint(x);
  }
}

// Codes of elements first .. end of the matrix. No other thread has nibbles of the same bytes.
__device__ __noinline__ void flat_codes(const FlatEncode& job, const FlatPass& pass, uint64_t first, uint64_t end) {
  const Ingredients& made = pass.ingredients;
  uint32_t bits = code_bits(made.element);
  ScaleRule rule = rule_at(pass, first / job.cols, first % job.cols);
  uint64_t start_byte = job.start * bits / 8;
  uint64_t across = pass.amaxes ? cdiv(job.cols, pass.block_cols) : 1;
  uint64_t seen = ~uint64_t(0), line = ~uint64_t(0);
  float m = 1.0f;
  for (uint64_t e = first; e < end; ++e) {
    uint64_t row = e / job.cols, col = e % job.cols, entry = outer_entry(made, row, col);
    uint64_t block = pass.amaxes ? row / pass.block_rows * across + col / pass.block_cols : 0;
    if (block != seen || entry != line) {
      if (made.extent != EXTENT_TENSOR) rule = ScaleRule::of(made, entry);
      m = rule.block(pass.amaxes ? fabsf(pointer<const float>(pass.amaxes)[block]) : 0.0f).multiplier;
      seen = block;
      line = entry;
    }
    float x = load_source(job.source, job.source_code, e - job.start);
    if (job.via_bf16) x = round_bf16(x);
    uint32_t code = encode_one(rule, x, m);
    uint8_t* to = pointer<uint8_t>(pass.data) + (e * bits / 8 - start_byte);
    if (bits == 4) {
      *to = e % 2 ? uint8_t((*to & 0x0F) | (code << 4)) : uint8_t((*to & 0xF0) | code);
    } else {
      for (uint32_t b = 0; b < bits / 8; ++b) to[b] = uint8_t(code >> (8 * b));
    }
  }
}

}  // namespace lowp
