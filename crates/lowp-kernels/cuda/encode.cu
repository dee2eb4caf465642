// Encode: every buffer of any number of matrices, in one launch. The input is read once.
#include <lowp/encode.cuh>

namespace lowp {

template <int W, bool TURNED>
__device__ __forceinline__ void encode_tiled(const Encode& job, uint32_t index, Stage<TURNED>& stage) {
  using Tile = Tiling<TURNED>;
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * Tile::ROWS, col = uint64_t(index % across) * Tile::COLS;
  View view{job.rows, job.cols, job.rows * job.cols};
  Lane<W> at{threadIdx.x % 32, row + Tile::warp_row(), col + Tile::warp_col()};
  prepare(job, stage);
  Values<W> v;
  v.load(job.source, job.vector & VECTOR_SOURCE, view, at);
  if (job.via_bf16) v.round();
  quantize<W, TURNED, true>(job, view, row, col, at, v, stage);
}

// Blocks of a multiprocessor, as many as no register is spilled for.
#if __CUDA_ARCH__ == 900
constexpr int BLOCKS = 3;
#else
constexpr int BLOCKS = 2;
#endif

// What is left when a tile is done: scales in other forms, and the tensor of the job, by one thread of its
// first tile. The table is read again, so that nothing of this needs a register while a tile is encoded.
template <bool TURNED>
__device__ __forceinline__ void forms(const Tile* tiles, const Encode* jobs, const Stage<TURNED>& stage) {
  const Tile* tile = tiles + blockIdx.x;
  asm volatile("" : "+l"(tile));
  const Encode& job = again(jobs[tile->job]);
  if (job.forms) store_forms(job, tile->index, stage);
}

__device__ __forceinline__ bool empty(const Encode& job) { return job.rows == 0 || job.cols == 0 || job.passes == 0; }

// FP8 of bf16 with row-major outputs: 32 rows, 256 columns at a time. The next ones are loaded while codes
// are stored. Scales are stored at the end, so that their rows are whole sectors where a tile has 1024
// columns: sectors written in parts cost 5% of an encode of 16384 x 16384 on an H100.
template <typename E>
__device__ __forceinline__ void encode_bf16(const Encode& planned, uint32_t index, Stage<false>& stage) {
  constexpr uint32_t COLS = Tiling<false>::COLS;
  uint32_t lane = threadIdx.x % 32;
  // Computed again where they are needed: they would take registers from the values.
  auto row = [&] { return uint64_t(index / uint32_t(again(planned).tiles_across)) * 32; };
  auto left = [&] {
    const Encode& job = again(planned);
    return uint64_t(index % uint32_t(job.tiles_across)) * job.tile_cols;
  };
  Values<8> v;
  auto load = [&](uint32_t first) {
    const Encode& job = again(planned);
    const View view{job.rows, job.cols, job.rows * job.cols};
    const Lane<8> at{lane, row(), left() + first + Tiling<false>::warp_col()};
    v.load(job.source, job.vector & VECTOR_SOURCE, view, at);
  };
  load(0);
#pragma unroll 1
  for (uint32_t first = 0;;) {
    stage8<8, false, false, E>(planned, lane, v, stage, first, again(planned).tile_cols);
    __syncthreads();
    uint32_t next = first + COLS;
    bool more = next < again(planned).tile_cols && left() + next < again(planned).cols;
    if (more) load(next);
    store_codes8<8>(planned, row(), left() + first, stage);
    if (!more) break;
    __syncthreads();
    first = next;
  }
  store_scales8(planned, row(), left(), again(planned).tile_cols, stage);
}

}  // namespace lowp

using namespace lowp;

// Any jobs.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    lowp_encode(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ EncodeMemory shared;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (tile.index == 0 && threadIdx.x == 0) settle_tensor(job);
  bool half = job.source_code == BF16;
  if (empty(job)) {
  } else if (job.path == PATH_WIDE) {
    half ? encode_tiled<8, false>(job, tile.index, shared.wide) : encode_tiled<4, false>(job, tile.index, shared.wide);
    forms(tiles, jobs, shared.wide);
  } else if (job.path == PATH_TURNED) {
    half ? encode_tiled<8, true>(job, tile.index, shared.turned) : encode_tiled<4, true>(job, tile.index, shared.turned);
    forms(tiles, jobs, shared.turned);
  } else {
    encode_generic(job, step, tile.index, shared.multipliers);
  }
}

// Jobs whose sources are all bf16 and whose outputs are all FP8 and row-major (MXFP8): a lane needs
// fewer registers.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS)
    lowp_encode_bf16(const Tile* __restrict__ tiles, const Encode* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  __shared__ Stage<false> stage;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Encode& job = jobs[tile.job];
  if (tile.index == 0 && threadIdx.x == 0) settle_tensor(job);
  if (!empty(job)) {
    job.element == E4M3 ? encode_bf16<E4m3>(job, tile.index, stage) : encode_bf16<E5m2>(job, tile.index, stage);
    forms(tiles, jobs, stage);
  }
}
