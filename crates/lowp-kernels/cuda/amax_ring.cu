// Amaxes of large matrices of bfloat16 before and after the Hadamard transform, through a ring of tiles.
#include <lowp/amax_tile.cuh>
#include <lowp/ring_transform.cuh>

using namespace lowp;

// Jobs of AMAX_RING.
extern "C" __global__ void __launch_bounds__(THREADS, resident::AMAX_RING)
    lowp_amax_ring(const Tile* __restrict__ tiles, const Amax* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ Ring<RING_STAGES> ring;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Amax& job = jobs[tile.job];
  const uint32_t across = uint32_t(job.tiles_across);
  const uint64_t row = uint64_t(tile.index / across) * TRANSPOSED_ROWS, col = uint64_t(tile.index % across) * RING_COLS;
  const uint32_t steps = uint32_t(min(uint64_t(RING_COLS), job.cols - col) / TRANSPOSED_COLS);
  const ColumnReader pairs;
  uint32_t plain = 0, transformed = 0;
  through_ring(ring, job.source, job.cols, row, col, steps, [&](const uint8_t* values, uint32_t) {
    const TwoColumns v = pairs.read(values);
#pragma unroll
    for (int k = 0; k < 4; ++k) plain = max_pair(plain, max_abs_pairs(v.x[4 * k], v.x[4 * k + 1], v.x[4 * k + 2], v.x[4 * k + 3]));
#pragma unroll
    for (int second = 0; second < 2; ++second) {
      const Run run = transformed_run(v, second);
      uint32_t low = max_abs_pairs(run.x[0], run.x[1], run.x[2], run.x[3]);
      uint32_t high = max_abs_pairs(run.x[4], run.x[5], run.x[6], run.x[7]);
      transformed = max_pair(transformed, max_pair(low, high));
    }
  });
  if (job.tensor) raise_by_pairs(job.tensor, plain);
  raise_by_pairs(job.transformed, transformed);
}
