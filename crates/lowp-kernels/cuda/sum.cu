// Sums of vectors, and their conversion from dtype to dtype: into[i] = round(into[i] + from[i]), or round(from[i]).
#include <lowp/eight.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// A whole tile, aligned.
template <bool FROM_HALF, bool INTO_HALF, bool ADD>
__device__ __forceinline__ void tile_of(const Sum& job, uint64_t first) {
  // As many loads in flight as registers allow: the kernel waits for memory only.
  constexpr int AHEAD = 2, STEP = THREADS * 8;
  static_assert(SUM_TILE % (AHEAD * STEP) == 0, "tiles are whole steps");
  first += threadIdx.x * 8;
#pragma unroll 1
  for (uint32_t i = 0; i < SUM_TILE; i += AHEAD * STEP) {
    Eight<FROM_HALF> from[AHEAD];
    Eight<INTO_HALF> into[AHEAD];
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      from[a].load(job.from, first + i + a * STEP);
      if constexpr (ADD) into[a].load(job.into, first + i + a * STEP);
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) {
      if constexpr (!ADD && FROM_HALF == INTO_HALF) {
        from[a].store(job.into, first + i + a * STEP);
      } else {
        float x[8];
        from[a].values(x);
        if constexpr (ADD) {
          float sums[8];
          into[a].values(sums);
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] = __fadd_rn(sums[j], x[j]);
        }
        into[a].set(x);
        into[a].store(job.into, first + i + a * STEP);
      }
    }
  }
}

template <bool FROM_HALF, bool INTO_HALF>
__device__ __forceinline__ void tile_of(const Sum& job, uint64_t first) {
  job.convert ? tile_of<FROM_HALF, INTO_HALF, false>(job, first) : tile_of<FROM_HALF, INTO_HALF, true>(job, first);
}

// One value at a time, at any address.
__device__ __forceinline__ void one(const Sum& job, uint64_t i) {
  bool narrows = job.into_code == BF16;
  if (job.convert && narrows && job.from_code == BF16) {
    pointer<uint16_t>(job.into)[i] = pointer<const uint16_t>(job.from)[i];
    return;
  }
  float x = load_source(job.from, job.from_code, i);
  if (!job.convert) x = __fadd_rn(load_source(job.into, job.into_code, i), x);
  if (narrows) {
    pointer<uint16_t>(job.into)[i] = narrow(x);
  } else {
    pointer<float>(job.into)[i] = x;
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_sum(const Tile* __restrict__ tiles, const Sum* __restrict__ jobs, const Step* __restrict__ step,
             uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Sum job = jobs[tile.job];
  uint64_t first = tile.index * SUM_TILE, end = min(first + SUM_TILE, job.len);
  if (!job.vector || end - first < SUM_TILE) {
    for (uint64_t i = first + threadIdx.x; i < end; i += THREADS) one(job, i);
  } else if (job.from_code == BF16) {
    job.into_code == BF16 ? tile_of<true, true>(job, first) : tile_of<true, false>(job, first);
  } else {
    job.into_code == BF16 ? tile_of<false, true>(job, first) : tile_of<false, false>(job, first);
  }
}
