// Updates by all rules of masters in two halves, of which one is the parameter (lowp/stored.cuh).
#include <lowp/stored.cuh>

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, resident::UPDATE_WIDE)
    lowp_update_halves(const Tile* __restrict__ tiles, const StoredUpdate* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  update_halves(tiles, jobs, step, flags);
}
