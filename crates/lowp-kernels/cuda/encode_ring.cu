// Encode of large matrices of bfloat16, of whole tiles of 128 x 64 or 32 x 256: several of them side by side, of which the next
// are on their way. Memory answers long streams of reads better than as many loads that the same thread waits for.
#include <lowp/begin.cuh>
#include <lowp/ring_blocks.cuh>
#include <lowp/ring_fp4_fp8.cuh>
#include <lowp/ring_wide.cuh>

using namespace lowp;

extern __shared__ __align__(128) uint8_t ring_memory[];

namespace {

template <int STAGES>
__device__ __forceinline__ RingMemory<STAGES>& memory() {
  return *reinterpret_cast<RingMemory<STAGES>*>(ring_memory);
}

}  // namespace

// FP8 with scales of the tensor, or of its rows and columns.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING_FP8)
    lowp_encode_ring_fp8(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                         uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (!begin_lines(job, tile.index)) return;
  const RingTile part(job, tile.index);
  job.pass[0].ingredients.element == E4M3 ? ring_fp8<E4m3>(part, memory<LONG_RING_STAGES>()) : ring_fp8<E5m2>(part, memory<LONG_RING_STAGES>());
}

// NVFP4 with scales of blocks of 16 of a row, of a column, or both.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING)
    lowp_encode_ring_two_level(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                           uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_fp4<TwoLevelFp4, false, false>(RingTile(jobs[tile.job], tile.index), step, memory<RING_STAGES>());
}

// NVFP4 with scales of blocks of 16 x 16.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING)
    lowp_encode_ring_two_level_square(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                                  uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_square(RingTile(jobs[tile.job], tile.index), step, memory<RING_STAGES>());
}

// NVFP4 of blocks of a row, a column or both, of which columns are transformed.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING)
    lowp_encode_ring_two_level_transformed(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                                       uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_fp4<TwoLevelFp4, true, false>(RingTile(jobs[tile.job], tile.index), step, memory<RING_STAGES>());
}

// The same rounded stochastically; columns may be transformed.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING_RANDOM)
    lowp_encode_ring_two_level_random(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                                  uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_fp4<TwoLevelFp4, true, true>(RingTile(jobs[tile.job], tile.index), step, memory<LONG_RING_STAGES>());
}

// MXFP4 with scales of blocks of 32 of a row, of a column, or both.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING)
    lowp_encode_ring_e8m0_fp4(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                           uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_fp4<E8m0Fp4, false, false>(RingTile(jobs[tile.job], tile.index), step, memory<RING_STAGES>());
}

// MXFP8 with scales of blocks of 32 of a row, of a column, or both, or of 32 x 32.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING)
    lowp_encode_ring_e8m0_fp8(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                           uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (!begin(job, tile.index)) return;
  WideRing& shared = *reinterpret_cast<WideRing*>(ring_memory);
  job.pass[0].ingredients.element == E4M3 ? ring_wide<E4m3>(job, tile.index, shared) : ring_wide<E5m2>(job, tile.index, shared);
}

// NVFP4 of blocks of a row and MXFP8 of blocks of a column.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING)
    lowp_encode_ring_two_level_e8m0(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                                 uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_fp4_fp8<TwoLevelFp4>(RingTile(jobs[tile.job], tile.index), step, memory<RING_STAGES>());
}

// MXFP4 of blocks of a row and MXFP8 of blocks of a column.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING)
    lowp_encode_ring_e8m0_fp4_fp8(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                                  uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) ring_fp4_fp8<E8m0Fp4>(RingTile(jobs[tile.job], tile.index), step, memory<RING_STAGES>());
}

// FP8 with f32 scales of blocks of 128 of a row, of a column, or both, or of 128 x 128.
extern "C" __global__ void __launch_bounds__(THREADS, resident::RING_BLOCKS)
    lowp_encode_ring_blocks(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                            uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (!begin(job, tile.index)) return;
  BlocksRing& shared = *reinterpret_cast<BlocksRing*>(ring_memory);
  job.pass[0].ingredients.element == E4M3 ? ring_blocks<E4m3>(job, tile.index, shared) : ring_blocks<E5m2>(job, tile.index, shared);
}
