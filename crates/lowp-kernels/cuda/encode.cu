// Encode: every buffer of any number of matrices, in one launch. The input is read once.
#include <lowp/generic.cuh>
#include <lowp/quantize.cuh>

namespace lowp {

template <int W, bool TURNED>
__device__ __forceinline__ void encode_tiled(const Encode& job, uint32_t index, Stage<TURNED>& stage) {
  using Tile = Tiling<TURNED>;
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * Tile::ROWS, col = uint64_t(index % across) * Tile::COLS;
  View view{job.rows, job.cols, job.rows * job.cols};
  Lane<W> at{threadIdx.x % 32, row + Tile::warp_row(), col + Tile::warp_col()};
  Values<W> v;
  v.load(job.source, job.vector & VECTOR_SOURCE, view, at);
  if (job.via_bf16) v.round();
  if (index == 0 && threadIdx.x == 0) ScaleRule::of(job).store_tensor(job.tensor_scale);
  quantize<W, TURNED>(job, view, row, col, at, v, stage);
}

// One block's tile. With HALF all jobs have bf16 sources and tiled paths.
template <bool HALF, typename Shared>
__device__ __forceinline__ void encode_tile(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs,
                                            const Step* __restrict__ step, uint32_t flags, Shared& shared) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (job.rows == 0 || job.cols == 0 || job.passes == 0) {
    if (tile.index == 0 && threadIdx.x == 0) ScaleRule::of(job).store_tensor(job.tensor_scale);
    return;
  }
  bool half = HALF || job.source_code == BF16;
  if (job.path == PATH_WIDE) {
    if (half) {
      encode_tiled<8, false>(job, tile.index, shared.wide);
    } else if constexpr (!HALF) {
      encode_tiled<4, false>(job, tile.index, shared.wide);
    }
  } else if (HALF || job.path == PATH_TURNED) {
    if (half) {
      encode_tiled<8, true>(job, tile.index, shared.turned);
    } else if constexpr (!HALF) {
      encode_tiled<4, true>(job, tile.index, shared.turned);
    }
  } else if constexpr (!HALF) {
    encode_generic(job, step, tile.index, shared.multipliers);
  }
}

}  // namespace lowp

using namespace lowp;

// Any jobs.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    lowp_encode(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ union {
    Stage<false> wide;
    Stage<true> turned;
    float multipliers[UNIT_BLOCKS];
  } shared;
  encode_tile<false>(tiles, jobs, step, flags, shared);
}

// Jobs whose sources are all bf16 and whose paths are all tiled: a lane holds half the registers, and
// one block more per multiprocessor is worth 3% to 5% (encode bf16 16384 x 16384, H100).
extern "C" __global__ void __launch_bounds__(THREADS, 5)
    lowp_encode_bf16(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  __shared__ union {
    Stage<false> wide;
    Stage<true> turned;
  } shared;
  encode_tile<true>(tiles, jobs, step, flags, shared);
}
