// Encode of a contiguous range of a flattened matrix with agreed amaxes (numerics 11). Only bytes
// that the range touches change, and of its first and last byte only the owned nibble.
#include <lowp/flat_scales.cuh>
#include <lowp/flat_tile.cuh>

namespace lowp {

// Run `index` of the range, of any ingredients.
__device__ __noinline__ void encode_flat_run(const FlatEncode& job, uint64_t index) {
  constexpr uint32_t CHUNK = 8;  // elements that a thread does at a time; whole bytes of any code
  const uint64_t begin = (job.start / FLAT_ENCODE_RUN + index) * FLAT_ENCODE_RUN, stop = job.start + job.len;
#pragma unroll 1
  for (uint32_t p = 0; p < job.passes; ++p) {
    if (job.pass[p].data == 0) continue;
#pragma unroll 1
    for (uint32_t at = threadIdx.x * CHUNK; at < FLAT_ENCODE_RUN; at += THREADS * CHUNK) {
      const uint64_t first = max(begin + at, job.start), end = min(begin + at + CHUNK, stop);
      if (first < end) flat_codes(job, job.pass[p], first, end);
    }
  }
}

// Tile `index` of `total`, among which `first` of one kind are spread evenly.
struct Turn {
  bool is_first;
  uint64_t index;  // of its kind
  static __device__ __forceinline__ Turn of(uint64_t index, uint64_t first, uint64_t total) {
    uint64_t before = index * first / total, behind = (index + 1) * first / total;
    return {behind > before, behind > before ? before : index - before};
  }
};

// Scales and amaxes of the tensor or its lines: a part of them by each tile.
__device__ __forceinline__ void store_flat_outers(const FlatEncode& job, uint64_t index, uint64_t tiles) {
#pragma unroll 1
  for (int o = 0; o < 2; ++o) {
    uint8_t extent = job.outer[o].ingredients.extent;
    uint64_t entries = extent == EXTENT_ROWS ? job.rows : extent == EXTENT_COLUMNS ? job.cols : 1;
    store_outer(job.outer[o], 0, entries, index * THREADS + threadIdx.x, tiles * THREADS);
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, resident::FLAT_ENCODE)
    lowp_flat_encode(const Tile* __restrict__ tiles, const FlatEncode* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  __shared__ FlatMemory shared;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const FlatEncode& job = jobs[tile.job];
  const uint64_t scales = job.scale_tiles[0] + job.scale_tiles[1], total = job.data_tiles + scales;
  // What follows may mark them as consumed, which changes no magnitude.
  if (total != 0 && threadIdx.x < job.passes) shared.rules[threadIdx.x] = ScaleRule::of(job.pass[threadIdx.x].ingredients, 0);
  store_flat_outers(job, tile.index, max(total, uint64_t(1)));
  __syncthreads();
  if (total == 0) return;
  // Scales beside the elements that they are of: their amaxes are in the cache.
  const Turn turn = Turn::of(tile.index, job.data_tiles, total);
  if (turn.is_first) {
    if (!job.tiled) return encode_flat_run(job, turn.index);
    return job.source_code == BF16 ? encode_flat_tile<true>(job, turn.index, shared) : encode_flat_tile<false>(job, turn.index, shared);
  }
  const Turn pass = Turn::of(turn.index, job.scale_tiles[0], scales);
  const int p = pass.is_first ? 0 : 1;
  if (job.pass[p].scale[1]) {
    scale_tile(job, job.pass[p], shared.rules[p], pass.index);
  } else {
    scale_run(job, job.pass[p], shared.rules[p], pass.index);
  }
}
