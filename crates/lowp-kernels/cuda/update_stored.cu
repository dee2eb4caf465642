// Updates by all rules of states in fp8 and masters in bf16 (lowp/stored.cuh). Jobs of each kernel are launched together.
#include <lowp/stored.cuh>

using namespace lowp;

// Jobs of PATH_WIDE and PATH_FLAT.
extern "C" __global__ void __launch_bounds__(THREADS, resident::UPDATE_WIDE)
    lowp_update_stored_wide(const Tile* __restrict__ tiles, const StoredUpdate* __restrict__ jobs, const Step* __restrict__ step,
                            uint32_t flags) {
  __shared__ Stage<false> stage;
  update_stored(tiles, jobs, step, flags, stage);
}

// Jobs of PATH_TRANSPOSED.
extern "C" __global__ void __launch_bounds__(THREADS, resident::UPDATE_TRANSPOSED)
    lowp_update_stored_transposed(const Tile* __restrict__ tiles, const StoredUpdate* __restrict__ jobs,
                                  const Step* __restrict__ step, uint32_t flags) {
  __shared__ Stage<true> stage;
  update_stored(tiles, jobs, step, flags, stage);
}

// Jobs of the other paths.
extern "C" __global__ void __launch_bounds__(THREADS, resident::UPDATE_OTHER)
    lowp_update_stored_other(const Tile* __restrict__ tiles, const StoredUpdate* __restrict__ jobs, const Step* __restrict__ step,
                             uint32_t flags) {
  __shared__ EncodeMemory shared;
  update_stored_other(tiles, jobs, step, flags, shared);
}
