// Encode: every buffer of any number of matrices, in one launch. The input is read once.
#include <lowp/generic.cuh>
#include <lowp/quantize.cuh>

namespace lowp {

// With FP8 all elements are, and the tensor scale is written elsewhere.
template <int W, bool TURNED, bool FP8 = false>
__device__ __forceinline__ void encode_tiled(const Encode& job, uint32_t index, Stage<TURNED>& stage) {
  using Tile = Tiling<TURNED>;
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * Tile::ROWS, col = uint64_t(index % across) * Tile::COLS;
  View view{job.rows, job.cols, job.rows * job.cols};
  Lane<W> at{threadIdx.x % 32, row + Tile::warp_row(), col + Tile::warp_col()};
  Values<W> v;
  v.load(job.source, job.vector & VECTOR_SOURCE, view, at);
  if (job.via_bf16) v.round();
  if constexpr (FP8) {
    if (job.element == E4M3) {
      quantize8<W, TURNED, E4m3>(job, row, col, at.lane, v, stage);
    } else {
      quantize8<W, TURNED, E5m2>(job, row, col, at.lane, v, stage);
    }
  } else {
    if (index == 0 && threadIdx.x == 0) ScaleRule::of(job).store_tensor(job.tensor_scale);
    quantize<W, TURNED>(job, view, row, col, at, v, stage);
  }
}

// Blocks of a multiprocessor, as many as no register is spilled for.
#if __CUDA_ARCH__ == 900
constexpr int BLOCKS = 4, BLOCKS_BF16 = 5;
#else
constexpr int BLOCKS = 2, BLOCKS_BF16 = 2;
#endif

// Writes the tensor scale of a job, by one thread of its first tile. The table is read again, so that
// nothing of this needs a register while a tile is encoded.
__device__ __forceinline__ void store_tensor(const Tile* tiles, const Encode* jobs) {
  const Tile* tile = tiles + blockIdx.x;
  asm volatile("" : "+l"(tile));
  if (tile->index == 0 && threadIdx.x == 0) {
    const Encode& job = again(jobs[tile->job]);
    ScaleRule::of(job).store_tensor(job.tensor_scale);
  }
}

__device__ __forceinline__ bool empty(const Encode& job) { return job.rows == 0 || job.cols == 0 || job.passes == 0; }

}  // namespace lowp

using namespace lowp;

// Any jobs.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    lowp_encode(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ union {
    Stage<false> wide;
    Stage<true> turned;
    float multipliers[UNIT_BLOCKS];
  } shared;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  bool half = job.source_code == BF16;
  if (empty(job)) {
    store_tensor(tiles, jobs);
  } else if (job.path == PATH_WIDE) {
    half ? encode_tiled<8, false>(job, tile.index, shared.wide) : encode_tiled<4, false>(job, tile.index, shared.wide);
  } else if (job.path == PATH_TURNED) {
    half ? encode_tiled<8, true>(job, tile.index, shared.turned) : encode_tiled<4, true>(job, tile.index, shared.turned);
  } else {
    encode_generic(job, step, tile.index, shared.multipliers);
  }
}

// Jobs whose sources are all bf16 and whose outputs are all FP8 and row-major (MXFP8): a lane needs
// fewer registers.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_BF16)
    lowp_encode_bf16(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  __shared__ Stage<false> stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (!empty(job)) encode_tiled<8, false, true>(job, tile.index, stage);
  store_tensor(tiles, jobs);
}
