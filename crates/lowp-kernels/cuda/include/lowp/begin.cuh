// What a tile of an encode does first: the scales and amaxes of the tensor or its lines.
#pragma once
#include <lowp/scale_rule.cuh>

namespace lowp {

// Scales and amaxes of the tensor or its lines. Not inlined: one tile of a tensor does it.
__device__ __noinline__ void outers_apart(const Encode& job) { store_all_outers(job.outer, job.rows, job.cols); }

__device__ __forceinline__ bool empty(const Encode& job) { return job.rows == 0 || job.cols == 0 || job.passes == 0; }

// What launches of tensors without scales of lines do first: whether there is anything to encode.
__device__ __forceinline__ bool begin(const Encode& job, uint32_t index) {
  if (index == 0) outers_apart(job);
  return !empty(job);
}

// The same where lines may have scales: each tile writes its own.
__device__ __forceinline__ bool begin_lines(const Encode& job, uint32_t index) {
  if (empty(job)) {
    if (index == 0) outers_apart(job);
    return false;
  }
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * job.tile_rows, col = uint64_t(index % across) * job.tile_cols;
  store_outers(job.outer, job.rows, job.cols, row, col, job.tile_rows, job.tile_cols);
  return true;
}

}  // namespace lowp
