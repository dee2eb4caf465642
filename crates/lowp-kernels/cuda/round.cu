// Rounding: what a decode of an encode gives, without codes in memory.
#include <lowp/begin.cuh>
#include <lowp/round.cuh>
#include <lowp/round_fp4.cuh>

using namespace lowp;

extern __shared__ __align__(128) uint8_t round_memory[];

namespace {

template <typename Memory>
__device__ __forceinline__ Memory& memory() {
  return *reinterpret_cast<Memory*>(round_memory);
}

__device__ __forceinline__ void round_fp8(const Round& job, uint32_t index) {
  auto& shared = memory<RoundRing>();
  job.encode.pass[0].ingredients.element == E4M3 ? round_wide<E4m3>(job, index, shared) : round_wide<E5m2>(job, index, shared);
}

}  // namespace

// MXFP8 with scales of blocks of 32 of a row, of a column, or both.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ROUND_FP8)
    lowp_round_e8m0_fp8(const Tile* __restrict__ tiles, const Round* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Round& job = jobs[tile.job];
  if (begin(job.encode, tile.index)) round_fp8(job, tile.index);
}

// NVFP4 with scales of blocks of 16 of a row, of a column, or both.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ROUND_FP4)
    lowp_round_two_level(const Tile* __restrict__ tiles, const Round* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Round& job = jobs[tile.job];
  if (begin(job.encode, tile.index)) round_fp4<false>(job, tile.index, step, memory<RoundFp4Memory<2>>());
}

// The same rounded stochastically.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ROUND_FP4)
    lowp_round_two_level_random(const Tile* __restrict__ tiles, const Round* __restrict__ jobs, const Step* __restrict__ step,
                                uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Round& job = jobs[tile.job];
  if (begin(job.encode, tile.index)) round_fp4<true>(job, tile.index, step, memory<RoundFp4Memory<3>>());
}

// Any of them.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ROUND)
    lowp_round(const Tile* __restrict__ tiles, const Round* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Round& job = jobs[tile.job];
  if (!begin(job.encode, tile.index)) return;
  if (job.encode.pass[0].ingredients.element != E2M1) return round_fp8(job, tile.index);
  job.encode.stochastic ? round_fp4<true>(job, tile.index, step, memory<RoundFp4Memory<3>>())
                        : round_fp4<false>(job, tile.index, step, memory<RoundFp4Memory<2>>());
}
