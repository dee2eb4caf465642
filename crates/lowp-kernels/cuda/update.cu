// Updates by the other rules (lowp/update.cuh): a job has one of them.
#include <lowp/rule/others.cuh>

using namespace lowp;

// Any jobs.
extern "C" __global__ void __launch_bounds__(THREADS, resident::UPDATE)
    lowp_update(const Tile* __restrict__ tiles, const Update* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ EncodeMemory shared;
  update_jobs<OtherRules>(tiles, jobs, step, flags, shared);
}

// Launches of one kind of jobs without amaxes of lines, each with the registers that it needs and no more.

// Jobs of PATH_WIDE and PATH_FLAT.
extern "C" __global__ void __launch_bounds__(THREADS, resident::UPDATE_WIDE)
    lowp_update_wide(const Tile* __restrict__ tiles, const Update* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ Stage<false> stage;
  update_path<OtherRules, false, Known::NOTHING>(tiles, jobs, step, flags, stage);
}

// Other jobs of PATH_TRANSPOSED.
extern "C" __global__ void __launch_bounds__(THREADS, resident::UPDATE_TRANSPOSED)
    lowp_update_transposed(const Tile* __restrict__ tiles, const Update* __restrict__ jobs, const Step* __restrict__ step,
                          uint32_t flags) {
  __shared__ Stage<true> stage;
  update_path<OtherRules, true, Known::NO_E8M0>(tiles, jobs, step, flags, stage);
}

// MXFP4 of PATH_TRANSPOSED.
extern "C" __global__ void __launch_bounds__(THREADS, resident::UPDATE_TRANSPOSED)
    lowp_update_e8m0_fp4(const Tile* __restrict__ tiles, const Update* __restrict__ jobs, const Step* __restrict__ step,
                        uint32_t flags) {
  __shared__ Stage<true> stage;
  update_path<OtherRules, true, Known::E8M0>(tiles, jobs, step, flags, stage);
}

// Jobs of the other paths.
extern "C" __global__ void __launch_bounds__(THREADS, resident::UPDATE_OTHER)
    lowp_update_other(const Tile* __restrict__ tiles, const Update* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ EncodeMemory shared;
  update_other_paths<OtherRules>(tiles, jobs, step, flags, shared);
}
