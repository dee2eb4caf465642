// The encode of row-major FP8 in the order of memory, whatever the shape: codes of one scale, or with E8M0 scales of 1 x 32
// in rows of whole blocks. Each thread has 16 consecutive values at a time, two threads a block.
#pragma once
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// Sixteen values as they are stored: bfloat16 (HALF) or binary32.
template <bool HALF>
struct Sixteen {
  uint4 raw[HALF ? 2 : 4];

  // Of `count` values that are there; the others are 0.
  __device__ __forceinline__ void load(uint64_t source, uint64_t first, uint32_t count) {
    constexpr uint32_t SIZE = HALF ? 2 : 4, WORDS = sizeof(raw) / 4;
    if (count == 16) {
#pragma unroll
      for (int k = 0; k < int(sizeof(raw) / 16); ++k) raw[k] = load16_line(pointer<const uint4>(source + first * SIZE) + k);
      return;
    }
    uint32_t words[WORDS];
#pragma unroll
    for (uint32_t w = 0; w < WORDS; ++w) {
      words[w] = 0;
      if constexpr (HALF) {
        const uint16_t* from = pointer<const uint16_t>(source) + first;
        if (2 * w < count) words[w] = from[2 * w];
        if (2 * w + 1 < count) words[w] |= uint32_t(from[2 * w + 1]) << 16;
      } else if (w < count) {
        words[w] = (pointer<const uint32_t>(source) + first)[w];
      }
    }
#pragma unroll
    for (int k = 0; k < int(WORDS / 4); ++k) {
      raw[k] = make_uint4(words[4 * k], words[4 * k + 1], words[4 * k + 2], words[4 * k + 3]);
    }
  }

  // The largest magnitude; NaNs lose.
  __device__ __forceinline__ float maximum() const {
    if constexpr (HALF) {
      uint32_t a = max_pair(max_abs_pairs(raw[0].x, raw[0].y, raw[0].z, raw[0].w), max_abs_pairs(raw[1].x, raw[1].y, raw[1].z, raw[1].w));
      return fmaxf(fmaxf(widen_low(a), widen_high(a)), 0.0f);
    } else {
      float a = 0.0f;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float4 v = as_floats(raw[k]);
        a = max_abs(max_abs(max_abs(max_abs(a, v.x), v.y), v.z), v.w);
      }
      return a;
    }
  }

  // Values 2 * pair and the next, times `m`, a power of two under POWER.
  template <bool POWER>
  __device__ __forceinline__ float2 times(int pair, float m) const {
    if constexpr (!HALF) {
      float4 v = as_floats(raw[pair / 2]);
      return pair % 2 ? make_float2(__fmul_rn(v.z, m), __fmul_rn(v.w, m)) : make_float2(__fmul_rn(v.x, m), __fmul_rn(v.y, m));
    } else if constexpr (POWER) {
      // As Values<8>::times.
      uint32_t y;
      asm("fma.rn.bf16x2 %0, %1, %2, %3;"
          : "=r"(y)
          : "r"(word(raw[pair / 4], pair % 4)), "r"(__byte_perm(__float_as_uint(m), 0, 0x3232)), "r"(0x80008000u));
      return make_float2(widen_low(y), widen_high(y));
    } else {
      uint32_t bits = word(raw[pair / 4], pair % 4);
      return make_float2(__fmul_rn(widen_low(bits), m), __fmul_rn(widen_high(bits), m));
    }
  }
};

// Run `index` of STREAM_RUN values. WHOLE says that all of them are there.
template <typename E, bool HALF, bool BLOCKS, bool WHOLE>
__device__ __forceinline__ void encode_run(const Encode& job, uint64_t begin) {
  constexpr int AT_A_TIME = THREADS * 16, ROUNDS = HALF ? 4 : 2;
  const Pass& pass = job.pass[0];
  const uint64_t elements = job.rows * job.cols, end = WHOLE ? begin + STREAM_RUN : min(begin + STREAM_RUN, elements);
  const auto rule = PowerOfTwo<false>::of(pass.ingredients);
  const float tensor = BLOCKS ? 1.0f : tensor_value(pass.ingredients, 0);
#pragma unroll 1
  for (uint32_t turn = 0; turn < STREAM_RUN / (ROUNDS * AT_A_TIME); ++turn) {
    const uint64_t round = begin + turn * (ROUNDS * AT_A_TIME) + threadIdx.x * 16;
    Sixteen<HALF> v[ROUNDS];
    auto count = [&](uint64_t first) { return WHOLE ? 16u : first < end ? uint32_t(min(uint64_t(16), end - first)) : 0u; };
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) v[r].load(job.source, round + r * AT_A_TIME, count(round + r * AT_A_TIME));
#pragma unroll
    for (int r = 0; r < ROUNDS; ++r) {
      const uint64_t first = round + r * AT_A_TIME;
      float m = tensor;
      if constexpr (BLOCKS) {
        float a = v[r].maximum();
        Scaled s = rule.block(fmaxf(a, __shfl_xor_sync(FULL_WARP, a, 1)), 0, 0);
        m = s.multiplier;
        if constexpr (WHOLE) {
          // The entries of eight threads are a word.
          uint32_t entries = s.entry | __shfl_down_sync(FULL_WARP, s.entry, 2) << 8;
          entries |= __shfl_down_sync(FULL_WARP, entries, 4) << 16;
          if (threadIdx.x % 8 == 0) *pointer<uint32_t>(pass.scale[0] + first / 32) = entries;
        } else if (threadIdx.x % 2 == 0 && first < end) {
          *pointer<uint8_t>(pass.scale[0] + first / 32) = uint8_t(s.entry);
        }
      }
      uint32_t codes[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        float2 low = v[r].template times<BLOCKS>(2 * k, m), high = v[r].template times<BLOCKS>(2 * k + 1, m);
        codes[k] = __byte_perm(E::pair(low.x, low.y), E::pair(high.x, high.y), 0x5410);
      }
      uint32_t inside = count(first);
      if (inside == 16) {
        store16(pointer<uint8_t>(pass.data[0] + first), make_uint4(codes[0], codes[1], codes[2], codes[3]));
      } else {
#pragma unroll
        for (uint32_t b = 0; b < 16; ++b) {
          if (b < inside) pointer<uint8_t>(pass.data[0] + first)[b] = uint8_t(codes[b / 4] >> (8 * (b % 4)));
        }
      }
    }
  }
}

template <typename E, bool HALF, bool BLOCKS>
__device__ __forceinline__ void encode_stream_of(const Encode& job, uint32_t index) {
  uint64_t begin = index * STREAM_RUN;
  if (begin + STREAM_RUN <= job.rows * job.cols) {
    encode_run<E, HALF, BLOCKS, true>(job, begin);
  } else {
    encode_run<E, HALF, BLOCKS, false>(job, begin);
  }
}

template <bool HALF>
__device__ __forceinline__ void encode_stream(const Encode& job, uint32_t index) {
  const Ingredients& made = job.pass[0].ingredients;
  if (made.element == E4M3) {
    made.rule == RULE_TENSOR ? encode_stream_of<E4m3, HALF, false>(job, index) : encode_stream_of<E4m3, HALF, true>(job, index);
  } else {
    made.rule == RULE_TENSOR ? encode_stream_of<E5m2, HALF, false>(job, index) : encode_stream_of<E5m2, HALF, true>(job, index);
  }
}

}  // namespace lowp
