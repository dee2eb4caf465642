// Decode to bf16.
#include <lowp/decode.cuh>

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, resident::DECODE_BF16)
    lowp_decode_bf16(const Tile* __restrict__ tiles, const Decode* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  decode_one<ToBf16>(tiles, jobs, step, flags);
}
