// Encode of large matrices of binary32, of whole tiles of 128 x 64 or 32 x 256, through rings of parts of them (lowp/ring_f32.cuh), as
// encode_ring.cu does it of bfloat16.
#include <lowp/begin.cuh>
#include <lowp/ring_f32.cuh>

using namespace lowp;

extern __shared__ __align__(128) uint8_t ring_memory[];

namespace {

template <typename Memory>
__device__ __forceinline__ Memory& memory() {
  return *reinterpret_cast<Memory*>(ring_memory);
}

}  // namespace

// FP8 with scales of rows and columns.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING_FP8)
    lowp_encode_ring_f32_fp8(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                             uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (!begin_lines(job, tile.index)) return;
  const RingTile part(job, tile.index);
  job.pass[0].ingredients.element == E4M3 ? ring_f32_fp8<E4m3>(part, memory<RingMemory<LONG_RING_STAGES>>()) : ring_f32_fp8<E5m2>(part, memory<RingMemory<LONG_RING_STAGES>>());
}

// NVFP4 of blocks of a row and of blocks of a column.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING_F32)
    lowp_encode_ring_f32_two_level(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                                uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_f32_fp4<TwoLevelFp4>(RingTile(jobs[tile.job], tile.index), step, memory<F32Ring>());
}

// MXFP4 of blocks of a row and of blocks of a column.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING_F32)
    lowp_encode_ring_f32_e8m0_fp4(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                               uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_f32_fp4<E8m0Fp4>(RingTile(jobs[tile.job], tile.index), step, memory<F32Ring>());
}

// NVFP4 of blocks of a row and MXFP8 of blocks of a column.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING_F32)
    lowp_encode_ring_f32_two_level_e8m0(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                                        uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_f32_fp4_fp8<TwoLevelFp4>(RingTile(jobs[tile.job], tile.index), step, memory<F32Ring>());
}

// MXFP4 of blocks of a row and MXFP8 of blocks of a column.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING_F32)
    lowp_encode_ring_f32_e8m0_fp4_fp8(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                                      uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_f32_fp4_fp8<E8m0Fp4>(RingTile(jobs[tile.job], tile.index), step, memory<F32Ring>());
}

// MXFP8 of blocks of a row and of blocks of a column.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING_F32_WIDE)
    lowp_encode_ring_f32_e8m0_fp8(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                                  uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (!begin(job, tile.index)) return;
  WideRing& shared = memory<WideRing>();
  job.pass[0].ingredients.element == E4M3 ? ring_f32_wide<E4m3>(job, tile.index, shared) : ring_f32_wide<E5m2>(job, tile.index, shared);
}
