// Encode: every buffer of any number of matrices, in one launch. The input is read once.
#include <lowp/begin.cuh>
#include <lowp/encode.cuh>
#include <lowp/stream.cuh>

namespace lowp {

template <int W, bool TRANSPOSED, Known KNOWN, typename Place>
__device__ __forceinline__ void encode_tiled(const Place& place, Stage<TRANSPOSED>& stage) {
  using Shape = Tiling<TRANSPOSED>;
  uint32_t lane = threadIdx.x % 32;
  place.hold_tensor(stage);
  Values<W> v;
  {
    const Encode& job = place.encode();
    View view{job.rows, job.cols, job.rows * job.cols};
    const Lane<W> at{lane, place.row() + Shape::warp_row(), place.col() + Shape::warp_col()};
    v.load(job.source, job.vector & VECTOR_SOURCE, view, at);
    if (job.via_bf16) v.round();
  }
  quantize<W, TRANSPOSED, KNOWN>(place, lane, v, stage);
}

// FP8 of bf16 with row-major outputs: 32 x 256 elements at a time, along the columns of a tile, or down its
// rows. The next ones are loaded while codes are stored. Scales are stored at the end, so that their rows
// are whole sectors: where a tile has 1024 columns those of Compact scales, where it has 128 rows those of
// swizzled ones. Sectors written in parts cost 5% of an encode of 16384 x 16384 on an H100.
template <typename E, typename Place>
__device__ __forceinline__ void encode_bf16(const Place& place, Stage<false>& stage) {
  using Step = Tiling<false>;
  // Not kept from step to step: the register is worth 0.1% of an encode.
  auto lane = [] {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread % 32;
  };
  // Where a step begins in the tile.
  auto down = [&](uint32_t step) { return step * place.held().step_down; };
  auto along = [&](uint32_t step) { return step * place.held().step_along; };
  Values<8> v;
  auto load = [&](uint32_t step) {
    const Encode& job = place.encode();
    const View view{job.rows, job.cols, job.rows * job.cols};
    const Lane<8> at{lane(), place.row() + down(step), place.col() + along(step) + Step::warp_col()};
    v.load(job.source, job.vector & VECTOR_SOURCE, view, at);
  };
  load(0);
#pragma unroll 1
  for (uint32_t step = 0;;) {
    stage8<8, false, E>(place, lane(), v, stage, down(step), along(step), place.encode().tile_cols);
    __syncthreads();
    uint32_t next = step + 1;
    auto more = [&] { return next < place.held().steps; };
    if (more()) load(next);
    // Of two streams of codes, lines are written better whole.
    store_codes8<8>(place, place.row() + down(step), place.col() + along(step), stage, place.held().passes == 2);
    if (!more()) break;
    __syncthreads();
    step = next;
  }
  store_scales8(place, place.row(), place.col(), place.encode().tile_rows, place.encode().tile_cols, stage);
}

template <int W, bool TRANSPOSED, Known KNOWN, typename Place>
__device__ __forceinline__ void encode_whole(const Place& place, Stage<TRANSPOSED>& stage) {
  encode_tiled<W, TRANSPOSED, KNOWN>(place, stage);
  store_forms(place, stage);
}

// Not inlined: each has registers of its own.
template <int W, bool TRANSPOSED>
__device__ __noinline__ void encode_apart(const Encode& job, uint32_t index, Stage<TRANSPOSED>& stage) {
  encode_whole<W, TRANSPOSED, Known::NOTHING>(Place<TRANSPOSED, false>::begin(job, index, stage), stage);
}

}  // namespace lowp

using namespace lowp;

// Any jobs.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ENCODE)
    lowp_encode(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ EncodeMemory shared;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (!begin_lines(job, tile.index)) return;
  bool half = job.source_code == BF16;
  if (job.path == PATH_WIDE) {
    half ? encode_apart<8, false>(job, tile.index, shared.wide) : encode_apart<4, false>(job, tile.index, shared.wide);
  } else if (job.path == PATH_TRANSPOSED) {
    half ? encode_apart<8, true>(job, tile.index, shared.transposed)
         : encode_apart<4, true>(job, tile.index, shared.transposed);
  } else if (job.path == PATH_MIXED) {
    half ? mixed_apart<8>(job, step, tile.index, shared.mixed) : mixed_apart<4>(job, step, tile.index, shared.mixed);
  } else if (job.path == PATH_BLOCKS) {
    half ? blocks_apart<8>(job, tile.index, shared.blocks) : blocks_apart<4>(job, tile.index, shared.blocks);
  } else {
    encode_generic(job, step, tile.index, shared.multipliers);
  }
}

// Launches of one kind of jobs, each with the registers that it needs and no more.

// FP8 of bf16 with row-major outputs, and no scale of an observed amax (MXFP8).
extern "C" __global__ void __launch_bounds__(THREADS, resident::ENCODE)
    lowp_encode_wide_bf16(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                          uint32_t flags) {
  __shared__ Stage<false> stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (!begin(jobs[tile.job], tile.index)) return;
  const auto place = Place<false, true>::begin(jobs[tile.job], tile.index, stage);
  place.encode().pass[0].ingredients.element == E4M3 ? encode_bf16<E4m3>(place, stage) : encode_bf16<E5m2>(place, stage);
  store_forms(place, stage);
}

// MXFP4 of PATH_TRANSPOSED from binary32.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ENCODE)
    lowp_encode_e8m0_fp4_f32(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                          uint32_t flags) {
  __shared__ Stage<true> stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (!begin(jobs[tile.job], tile.index)) return;
  encode_whole<4, true, Known::E8M0>(Place<true, false>::begin(jobs[tile.job], tile.index, stage), stage);
}

// Jobs of PATH_TRANSPOSED from bf16.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ENCODE)
    lowp_encode_transposed_bf16(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs,
                                const Step* __restrict__ step, uint32_t flags) {
  __shared__ Stage<true> stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (!begin(jobs[tile.job], tile.index)) return;
  encode_whole<8, true, Known::NO_E8M0>(Place<true, true>::begin(jobs[tile.job], tile.index, stage), stage);
}

// Other jobs of PATH_TRANSPOSED, from binary32.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ENCODE)
    lowp_encode_transposed_f32(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs,
                               const Step* __restrict__ step, uint32_t flags) {
  __shared__ Stage<true> stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (!begin(jobs[tile.job], tile.index)) return;
  encode_whole<4, true, Known::NO_E8M0>(Place<true, false>::begin(jobs[tile.job], tile.index, stage), stage);
}

// Jobs of PATH_MIXED from bf16.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ENCODE_MIXED_BF16)
    lowp_encode_mixed_bf16(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                           uint32_t flags) {
  __shared__ MixedStage stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin_lines(jobs[tile.job], tile.index)) encode_mixed_source<8>(jobs[tile.job], step, tile.index, stage);
}

// The same from binary32.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ENCODE_MIXED_F32)
    lowp_encode_mixed_f32(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                          uint32_t flags) {
  __shared__ MixedStage stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin_lines(jobs[tile.job], tile.index)) encode_mixed_source<4>(jobs[tile.job], step, tile.index, stage);
}

// Jobs of PATH_BLOCKS from bf16.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ENCODE_BLOCKS_BF16)
    lowp_encode_blocks_bf16(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                            uint32_t flags) {
  __shared__ BlocksStage stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) encode_blocks<8>(jobs[tile.job], tile.index, stage);
}

// The same from binary32.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ENCODE_BLOCKS_F32)
    lowp_encode_blocks_f32(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                           uint32_t flags) {
  __shared__ BlocksStage stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) encode_blocks<4>(jobs[tile.job], tile.index, stage);
}

// Row-major FP8 in the order of memory, from bf16.
extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_encode_stream_bf16(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                            uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) encode_stream<true>(jobs[tile.job], tile.index);
}

// The same from binary32.
extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_encode_stream_f32(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                           uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  if (begin(jobs[tile.job], tile.index)) encode_stream<false>(jobs[tile.job], tile.index);
}
