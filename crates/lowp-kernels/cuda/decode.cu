// Decode to f32, and in its general path to bf16.
#include <lowp/decode.cuh>

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, resident::DECODE)
    lowp_decode(const Tile* __restrict__ tiles, const Decode* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  decode_one<ToF32>(tiles, jobs, step, flags);
}
