// The random Hadamard transform of columns that a thread has whole groups of (hadamard.cuh).
#pragma once
#include <lowp/hadamard.cuh>
#include <lowp/ring.cuh>

namespace lowp {

// One of two columns as a run down its rows, transformed and rounded.
__device__ __forceinline__ Run transformed_run(const TwoColumns& v, bool second) {
  auto at = [&](uint32_t i) { return second ? widen_high(v.x[i]) : widen_low(v.x[i]); };
  float x[16];
  // Products of bfloat16 and a quarter are exact, so that the first sums are rounded as those of the products.
#pragma unroll
  for (uint32_t i = 0; i < 16; i += 2) {
    float a = signed_quarter(at(i), i), b = at(i + 1), quarter = signed_quarter(1.0f, i + 1);
    x[i] = fmaf(b, quarter, a);
    x[i + 1] = fmaf(b, -quarter, a);
  }
  butterflies<2>(x);
  Run run;
#pragma unroll
  for (int k = 0; k < 8; ++k) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(run.x[k]) : "f"(x[2 * k + 1]), "f"(x[2 * k]));
  return run;
}

}  // namespace lowp
