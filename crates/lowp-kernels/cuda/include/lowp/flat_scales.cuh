// The scales of a flat encode, from agreed amaxes: whole arrays, whatever the range. Consumes the amaxes, which others may still
// read: the magnitudes stay.
#pragma once
#include <lowp/flat_codes.cuh>

namespace lowp {

constexpr uint32_t CONSUMED = 0x80000000u;

// The stored scales of the blocks of a pass.
struct FlatScales {
  const FlatPass& pass;
  const uint64_t across;

  __device__ __forceinline__ uint32_t* amax(uint64_t b) const { return pointer<uint32_t>(pass.amaxes) + b; }
  // The scale of block `b`, of the rule of the tensor or that of its line.
  __device__ __forceinline__ uint32_t entry(const ScaleRule& tensor, uint64_t b, uint32_t seen) const {
    const float amax = __uint_as_float(seen & ~CONSUMED);
    if (pass.ingredients.extent == EXTENT_TENSOR) return tensor.block(amax).entry;
    return rule_at(pass, b / across * pass.block_rows, b % across * pass.block_cols).block(amax).entry;
  }
  __device__ __forceinline__ void store(const ScaleRule& tensor, uint64_t base, uint64_t at, uint32_t entry) const {
    if (base == 0) return;
    if (tensor.entry_bytes() == 1) {
      pointer<uint8_t>(base)[at] = uint8_t(entry);
    } else {
      store_f32(base + 4 * at, entry);
    }
  }
};

// Four blocks side by side from `b` on, which are aligned.
__device__ __forceinline__ void scale_four(const FlatScales& scales, const ScaleRule& rule, uint64_t b, uint4 seen) {
  const uint64_t to = scales.pass.scale[0];
  const uint4 found = make_uint4(scales.entry(rule, b, seen.x), scales.entry(rule, b + 1, seen.y), scales.entry(rule, b + 2, seen.z),
                                 scales.entry(rule, b + 3, seen.w));
  *reinterpret_cast<uint4*>(scales.amax(b)) = make_uint4(seen.x | CONSUMED, seen.y | CONSUMED, seen.z | CONSUMED, seen.w | CONSUMED);
  if (to == 0) return;
  if (rule.entry_bytes() == 1) {
    *pointer<uint32_t>(to + b) = __byte_perm(__byte_perm(found.x, found.y, 0x0040), __byte_perm(found.z, found.w, 0x0040), 0x5410);
  } else {
    *pointer<uint4>(to + 4 * b) = found;
  }
}

// A run of blocks, row-major. Not inlined, as what follows: with registers of its own.
__device__ __noinline__ void scale_run(const FlatEncode& job, const FlatPass& pass, const ScaleRule& tensor, uint64_t index) {
  const uint64_t across = cdiv(job.cols, pass.block_cols), blocks = cdiv(job.rows, pass.block_rows) * across;
  const uint64_t first = index * FLAT_ENCODE_RUN, end = min(first + FLAT_ENCODE_RUN, blocks);
  const FlatScales scales{pass, across};
  const bool fours = end == first + FLAT_ENCODE_RUN && pass.amaxes % 16 == 0 && pass.scale[0] % (4 * tensor.entry_bytes()) == 0;
  with_rule(tensor, [&](const ScaleRule& rule) {
    if (fours) {
#pragma unroll 1
      for (uint64_t b = first + threadIdx.x * 4; b < end; b += 2 * THREADS * 4) {
        const uint4 one = *reinterpret_cast<const uint4*>(scales.amax(b));
        const uint4 two = *reinterpret_cast<const uint4*>(scales.amax(b + THREADS * 4));
        scale_four(scales, rule, b, one);
        scale_four(scales, rule, b + THREADS * 4, two);
      }
      return;
    }
#pragma unroll 1
    for (uint64_t b = first + threadIdx.x; b < end; b += THREADS) {
      const uint32_t seen = *scales.amax(b);
      *scales.amax(b) = seen | CONSUMED;
      scales.store(rule, pass.scale[0], b, scales.entry(rule, b, seen));
    }
  });
}

// Tile `index` of FLAT_SCALES_DOWN x THREADS blocks, where scales are stored transposed: each thread has the blocks of a column.
__device__ __noinline__ void scale_tile(const FlatEncode& job, const FlatPass& pass, const ScaleRule& tensor, uint64_t index) {
  constexpr int AT_A_TIME = 8;
  const uint64_t down = cdiv(job.rows, pass.block_rows), across = cdiv(job.cols, pass.block_cols);
  const uint64_t tiles = cdiv(across, THREADS), top = index / tiles * FLAT_SCALES_DOWN, c = index % tiles * THREADS + threadIdx.x;
  if (c >= across) return;
  const FlatScales scales{pass, across};
  const uint64_t column = pass.scale[1] + c * down;
  const bool whole = top + FLAT_SCALES_DOWN <= down && pass.scale[0] == 0;
  with_rule(tensor, [&](const ScaleRule& rule) {
    // Eight bytes of a column at once.
    if (whole && rule.entry_bytes() == 1 && column % 8 == 0) {
#pragma unroll 1
      for (uint64_t r = top; r < top + FLAT_SCALES_DOWN; r += AT_A_TIME) {
        uint32_t seen[AT_A_TIME], words[2] = {0, 0};
        uint32_t* amax = scales.amax(r * across + c);
#pragma unroll
        for (int k = 0; k < AT_A_TIME; ++k) seen[k] = amax[k * across];
#pragma unroll
        for (int k = 0; k < AT_A_TIME; ++k) {
          amax[k * across] = seen[k] | CONSUMED;
          words[k / 4] |= (scales.entry(rule, (r + k) * across + c, seen[k]) & 0xFF) << (8 * (k % 4));
        }
        *pointer<uint2>(column + r) = make_uint2(words[0], words[1]);
      }
      return;
    }
#pragma unroll 1
    for (uint64_t r = top; r < min(top + FLAT_SCALES_DOWN, down); ++r) {
      const uint64_t at = r * across + c;
      const uint32_t seen = *scales.amax(at), entry = scales.entry(rule, at, seen);
      *scales.amax(at) = seen | CONSUMED;
      scales.store(rule, pass.scale[0], at, entry);
      scales.store(rule, pass.scale[1], c * down + r, entry);
    }
  });
}

}  // namespace lowp
