// Rounding: what a decode of an encode gives, without codes in memory.
#include <lowp/begin.cuh>
#include <lowp/round.cuh>

using namespace lowp;

extern __shared__ __align__(128) uint8_t round_memory[];

// MXFP8 with scales of blocks of 32 of a row, of a column, or both.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    lowp_round_e8m0_fp8(const Tile* __restrict__ tiles, const Round* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Round& job = jobs[tile.job];
  if (!begin(job.encode, tile.index)) return;
  RoundRing& shared = *reinterpret_cast<RoundRing*>(round_memory);
  job.encode.pass[0].ingredients.element == E4M3 ? round_wide<E4m3>(job, tile.index, shared) : round_wide<E5m2>(job, tile.index, shared);
}
