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

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    lowp_encode(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ union {
    Stage<false> wide;
    Stage<true> turned;
    float multipliers[UNIT_BLOCKS];
  } shared;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  bool wide_source = job.source_code == BF16;
  if (job.rows == 0 || job.cols == 0 || job.passes == 0) {
    if (tile.index == 0 && threadIdx.x == 0) ScaleRule::of(job).store_tensor(job.tensor_scale);
  } else if (job.path == PATH_WIDE) {
    wide_source ? encode_tiled<8, false>(job, tile.index, shared.wide) : encode_tiled<4, false>(job, tile.index, shared.wide);
  } else if (job.path == PATH_TURNED) {
    wide_source ? encode_tiled<8, true>(job, tile.index, shared.turned) : encode_tiled<4, true>(job, tile.index, shared.turned);
  } else {
    encode_generic(job, step, tile.index, shared.multipliers);
  }
}
