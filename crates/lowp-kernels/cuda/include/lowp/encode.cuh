// Every way to encode: tiles of known blocks, of any ingredients by orientation, and anything else.
#pragma once
#include <lowp/blocks.cuh>
#include <lowp/forms.cuh>
#include <lowp/generic.cuh>
#include <lowp/mixed.cuh>
#include <lowp/quantize.cuh>

namespace lowp {

// Shared memory of a block of threads: one way at a time.
union EncodeMemory {
  Stage<false> wide;
  Stage<true> transposed;
  MixedStage mixed;
  BlocksStage blocks;
  float multipliers[UNIT_BLOCKS];
};

}  // namespace lowp
