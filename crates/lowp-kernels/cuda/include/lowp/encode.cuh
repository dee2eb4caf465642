// Both ways to encode: tiles of known blocks, and anything else.
#pragma once
#include <lowp/forms.cuh>
#include <lowp/generic.cuh>
#include <lowp/quantize.cuh>

namespace lowp {

// Shared memory of a block of threads: one way at a time.
union EncodeMemory {
  Stage<false> wide;
  Stage<true> transposed;
  float multipliers[UNIT_BLOCKS];
};

}  // namespace lowp
