// Philox4x32-10 (Salmon et al., SC 2011): lowp_format::Philox.
#pragma once
#include <cstdint>

namespace lowp {

struct Philox {
  uint64_t seed, stream;

  // The four words of a counter block.
  __device__ __forceinline__ uint4 block(uint64_t index) const {
    uint4 c = make_uint4(uint32_t(index), uint32_t(index >> 32), uint32_t(stream), uint32_t(stream >> 32));
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
#pragma unroll
    for (int round = 0; round < 10; ++round) {
      uint32_t a_low = c.x * 0xD2511F53u, a_high = __umulhi(c.x, 0xD2511F53u);
      uint32_t b_low = c.z * 0xCD9E8D57u, b_high = __umulhi(c.z, 0xCD9E8D57u);
      c = make_uint4(b_high ^ c.y ^ k0, b_low, a_high ^ c.w ^ k1, a_low);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    return c;
  }

  // The random byte of element `index`: 16 elements share a counter block.
  __device__ __forceinline__ uint32_t byte(uint64_t index) const {
    uint4 words = block(index / 16);
    uint32_t which = uint32_t(index / 4 % 4);
    uint32_t word = which == 0 ? words.x : which == 1 ? words.y : which == 2 ? words.z : words.w;
    return (word >> (8 * uint32_t(index % 4))) & 0xFF;
  }
};

}  // namespace lowp
