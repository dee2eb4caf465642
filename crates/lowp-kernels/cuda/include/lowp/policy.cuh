// What differs between architectures, all of it: the conversions that are instructions, and the blocks of threads that a multiprocessor
// is to hold at a time, which bounds the registers of a thread.
#pragma once

// FP8 from Ada on.
#if __CUDA_ARCH__ >= 890
#define LOWP_FP8_CVT 1
#else
#define LOWP_FP8_CVT 0
#endif
// E2M1 and E8M0 in the families of Blackwell, of which the targets of one architecture (sm_100a) are part. PTX for later devices
// is of no family.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) && __CUDA_ARCH_FAMILY_SPECIFIC__ >= 1000
#define LOWP_FP4_CVT 1
#else
#define LOWP_FP4_CVT 0
#endif
// The larger magnitude of two values, or of pairs of bfloat16 (max.xorsign.abs).
#if __CUDA_ARCH__ >= 860
#define LOWP_MAX_MAGNITUDE 1
#else
#define LOWP_MAX_MAGNITUDE 0
#endif

namespace lowp {

// The number of the architecture that is compiled for.
constexpr int on(int sm_80, int sm_90, int sm_100, int sm_120) {
#if __CUDA_ARCH__ >= 1200
  return sm_120;
#elif __CUDA_ARCH__ >= 1000
  return sm_100;
#elif __CUDA_ARCH__ >= 900
  return sm_90;
#else
  return sm_80;
#endif
}

// Blocks of a multiprocessor, by kernel. Those of sm_90 are the fastest on an H200 (`target/gpu-pack/run.sh OUT peers`). No other
// architecture was timed. sm_80 has what Hopper has, or fewer where its code needs more registers. sm_100 and sm_120 have no more than
// Hopper, and so few that a thread keeps at most 64 bytes of registers in memory (`cargo xtask cuda --stats`).
namespace resident {
constexpr int AMAX = on(3, 3, 3, 3);
constexpr int AMAX_RING = on(4, 4, 4, 4);
constexpr int DECODE = on(4, 4, 4, 4);
constexpr int DECODE_BF16 = on(3, 4, 4, 4);
constexpr int ENCODE = on(2, 4, 2, 2);
constexpr int ENCODE_MIXED_BF16 = on(3, 3, 2, 2);
constexpr int ENCODE_MIXED_F32 = on(2, 2, 2, 2);
constexpr int ENCODE_BLOCKS_BF16 = on(3, 3, 2, 2);
constexpr int ENCODE_BLOCKS_F32 = on(2, 2, 2, 2);
constexpr int RING = on(3, 4, 3, 3);
constexpr int RING_F32 = on(3, 4, 3, 2);
constexpr int RING_FP8 = on(3, 3, 3, 3);
constexpr int RING_BLOCKS = on(2, 3, 3, 2);
constexpr int RING_RANDOM = on(3, 3, 2, 2);
constexpr int FLAT_ENCODE = on(4, 4, 2, 2);
constexpr int REPACK = on(6, 6, 6, 6);
constexpr int ROUND = on(2, 2, 2, 2);
constexpr int ROUND_FP8 = on(3, 4, 3, 3);
constexpr int ROUND_FP4 = on(2, 3, 2, 2);
constexpr int SUM_SQUARES = on(3, 3, 3, 3);
constexpr int TRANSPOSE = on(4, 4, 4, 4);
constexpr int UPDATE = on(2, 2, 1, 1);
constexpr int UPDATE_WIDE = on(2, 2, 2, 1);
constexpr int UPDATE_TRANSPOSED = on(2, 2, 1, 1);
constexpr int UPDATE_OTHER = on(1, 2, 1, 1);
}  // namespace resident

// Tiles of a ring that are on their way or in work, as the host has shared memory for them (RING_BYTES, LONG_RING_BYTES and
// WIDE_RING_BYTES): on every architecture those that are the fastest on an H200 (`target/gpu-pack/run.sh OUT peers`).
constexpr int RING_STAGES = 2;
constexpr int LONG_RING_STAGES = 3;
constexpr int WIDE_RING_STAGES = 3;

}  // namespace lowp
