// Amax of tensors and blocks (numerics 2.2), over whole matrices or flat shards of them.
#include <lowp/amax_tile.cuh>

namespace lowp {

// The amax of `count` elements from `first` on: the part of one thread.
__device__ __forceinline__ float flat_amax(const Amax& job, uint64_t first, uint32_t count) {
  float a = 0.0f;
  if (job.vector && count == AMAX_TILE) {
    if (job.source_code == BF16) {
      const uint16_t* from = pointer<const uint16_t>(job.source) + first + threadIdx.x * 8;
      uint4 raw[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) raw[i] = load16_again(from + i * THREADS * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) a = max_abs(max_abs(a, widen_low(words[j])), widen_high(words[j]));
      }
    } else {
      const float* from = pointer<const float>(job.source) + first + threadIdx.x * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4 raw[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) raw[i] = as_floats(load16(from + (half * 8 + i) * THREADS * 4));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          a = max_abs(max_abs(max_abs(max_abs(a, raw[i].x), raw[i].y), raw[i].z), raw[i].w);
        }
      }
    }
    return a;
  }
  for (uint32_t e = threadIdx.x; e < count; e += THREADS) {
    a = max_abs(a, load_source(job.source, job.source_code, first + e));
  }
  return a;
}

// A run of elements whose blocks are raised one element at a time.
__device__ __forceinline__ float generic_amax(const Amax& job, uint64_t first, uint32_t count) {
  float all = 0.0f;
  for (uint32_t e = threadIdx.x; e < count; e += THREADS) {
    float a = max_abs(0.0f, load_source(job.source, job.source_code, first + e));
    uint64_t row = (job.start + first + e) / job.cols, col = (job.start + first + e) % job.cols;
    for (int p = 0; p < 2; ++p) {
      const AmaxBlocks& part = job.blocks[p];
      if (!part.out) continue;
      const uint64_t top = part.rows == WHOLE_SIDE ? 0 : row / part.rows;
      const uint64_t wide = part.cols == WHOLE_SIDE ? 1 : cdiv(job.cols, part.cols);
      const uint64_t left = part.cols == WHOLE_SIDE ? 0 : col / part.cols;
      raise(pointer<float>(part.out) + top * wide + left, rounded(job, a));
    }
    all = fmaxf(all, a);
  }
  return all;
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, resident::AMAX)
    lowp_amax(const Tile* __restrict__ tiles, const Amax* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ AmaxMemory shared;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Amax& job = jobs[tile.job];
  float a, transformed = 0.0f;
  if (job.path == AMAX_FLAT) {
    uint64_t first = tile.index * AMAX_TILE;
    a = flat_amax(job, first, uint32_t(min(AMAX_TILE, job.len - first)));
  } else if (job.path == AMAX_TILES) {
    a = job.source_code == BF16 ? tile_amax<8>(job, tile.index, shared) : tile_amax<4>(job, tile.index, shared);
  } else if (job.path == AMAX_TRANSFORMED) {
    const float2 both = job.source_code == BF16 ? transformed_amax<8>(job, tile.index) : transformed_amax<4>(job, tile.index);
    a = both.x;
    transformed = both.y;
  } else {
    uint64_t first = tile.index * AMAX_RUN;
    a = generic_amax(job, first, uint32_t(min(AMAX_RUN, job.len - first)));
  }
  if (job.tensor) {
    a = block_max(a);
    if (threadIdx.x == 0) raise(pointer<float>(job.tensor), rounded(job, a));
    __syncthreads();
  }
  if (job.transformed) {
    transformed = block_max(transformed);
    if (threadIdx.x == 0) raise(pointer<float>(job.transformed), transformed);
  }
}
