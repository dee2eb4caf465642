// Eight values of a vector, in words of 16 bytes.
#pragma once
#include <lowp/memory.cuh>

namespace lowp {

// Eight values as they lie in memory: 32 bytes of binary32 or 16 of bfloat16.
template <bool HALF>
struct Eight {
  static constexpr int WORDS = HALF ? 1 : 2;
  uint4 words[WORDS];

  static __device__ __forceinline__ uint8_t* at(uint64_t base, uint64_t index) {
    return pointer<uint8_t>(base) + index * (HALF ? 2 : 4);
  }
  __device__ __forceinline__ void load(uint64_t base, uint64_t index) {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) words[w] = load16(at(base, index) + 16 * w);
  }
  __device__ __forceinline__ void store(uint64_t base, uint64_t index) const {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) store16(at(base, index) + 16 * w, words[w]);
  }
  __device__ __forceinline__ void values(float (&x)[8]) const {
#pragma unroll
    for (int w = 0; w < WORDS; ++w) {
      const uint32_t bits[4] = {words[w].x, words[w].y, words[w].z, words[w].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (HALF) {
          x[2 * j] = widen_low(bits[j]);
          x[2 * j + 1] = widen_high(bits[j]);
        } else {
          x[4 * w + j] = __uint_as_float(bits[j]);
        }
      }
    }
  }
  __device__ __forceinline__ void set(const float (&x)[8]) {
    if constexpr (HALF) {
      words[0] = make_uint4(narrow_pair(x[0], x[1]), narrow_pair(x[2], x[3]), narrow_pair(x[4], x[5]),
                            narrow_pair(x[6], x[7]));
    } else {
#pragma unroll
      for (int w = 0; w < WORDS; ++w) {
        words[w] = as_bits(make_float4(x[4 * w], x[4 * w + 1], x[4 * w + 2], x[4 * w + 3]));
      }
    }
  }
};

}  // namespace lowp
