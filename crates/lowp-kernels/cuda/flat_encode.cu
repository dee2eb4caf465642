// Encode of a contiguous range of a flattened matrix with agreed amaxes (numerics 11). Only bytes
// that the range touches change, and of its first and last byte only the owned nibble.
#include <lowp/generic.cuh>

namespace lowp {

constexpr uint32_t CHUNK = FLAT_ENCODE_RUN / THREADS;  // elements of a thread; whole bytes of any code

// The rule of the tensor, or of the line of element (row, col).
__device__ __forceinline__ ScaleRule rule_at(const FlatPass& pass, uint64_t row, uint64_t col) {
  return ScaleRule::of(pass.ingredients, outer_entry(pass.ingredients, row, col));
}

// The multiplier of one block.
__device__ __forceinline__ float multiplier(const FlatPass& pass, const ScaleRule& rule, uint64_t block) {
  float amax = pass.amaxes ? fabsf(pointer<const float>(pass.amaxes)[block]) : 0.0f;
  return rule.block(amax).multiplier;
}

__device__ __forceinline__ uint32_t encode_one(const ScaleRule& rule, float x, float m) {
  if (rule.scaled()) x = __fmul_rn(x, m);
  switch (rule.element) {
    case E4M3: return E4m3::one(x);
    case E5M2: return E5m2::one(x);
    case E2M1: return E2m1::one(x);
    case BF16: return narrow(x);
    default: return __float_as_uint(x);
  }
}

// Codes of elements first .. end of the matrix, `first` a multiple of CHUNK or the start.
__device__ __forceinline__ void codes(const FlatEncode& job, const FlatPass& pass, uint64_t first, uint64_t end) {
  const Ingredients& made = pass.ingredients;
  uint32_t bits = code_bits(made.element);
  ScaleRule rule = rule_at(pass, first / job.cols, first % job.cols);
  uint64_t start_byte = job.start * bits / 8;
  uint64_t across = pass.amaxes ? cdiv(job.cols, pass.block_cols) : 1;
  uint64_t seen = ~uint64_t(0), line = ~uint64_t(0);
  float m = 1.0f;
  for (uint64_t e = first; e < end; ++e) {
    uint64_t row = e / job.cols, col = e % job.cols, entry = outer_entry(made, row, col);
    uint64_t block = pass.amaxes ? row / pass.block_rows * across + col / pass.block_cols : 0;
    if (block != seen || entry != line) {
      if (made.extent != EXTENT_TENSOR) rule = ScaleRule::of(made, entry);
      m = multiplier(pass, rule, block);
      seen = block;
      line = entry;
    }
    float x = load_source(job.source, job.source_code, e - job.start);
    if (job.via_bf16) x = round_bf16(x);
    uint32_t code = encode_one(rule, x, m);
    uint8_t* to = pointer<uint8_t>(pass.data) + (e * bits / 8 - start_byte);
    if (bits == 4) {
      *to = e % 2 ? uint8_t((*to & 0x0F) | (code << 4)) : uint8_t((*to & 0xF0) | code);
    } else {
      for (uint32_t b = 0; b < bits / 8; ++b) to[b] = uint8_t(code >> (8 * b));
    }
  }
}

// The scales of a run of blocks, row-major. Consumes their amaxes, which others may still read: the
// magnitudes stay.
__device__ __forceinline__ void scales(const FlatEncode& job, const FlatPass& pass, uint64_t first) {
  uint64_t down = cdiv(job.rows, pass.block_rows), across = cdiv(job.cols, pass.block_cols);
  uint64_t end = min(first + FLAT_ENCODE_RUN, down * across);
  for (uint64_t b = first + threadIdx.x; b < end; b += THREADS) {
    float* amax = pointer<float>(pass.amaxes) + b;
    ScaleRule rule = rule_at(pass, b / across * pass.block_rows, b % across * pass.block_cols);
    uint32_t entry = rule.block(fabsf(*amax)).entry;
    atomicOr(reinterpret_cast<uint32_t*>(amax), 0x80000000u);
    for (int transposed = 0; transposed < 2; ++transposed) {
      uint64_t base = transposed ? pass.scale[1] : pass.scale[0];
      if (base == 0) continue;
      uint64_t at = transposed ? b % across * down + b / across : b;
      if (rule.entry_bytes() == 1) {
        pointer<uint8_t>(base)[at] = uint8_t(entry);
      } else {
        store_f32(base + 4 * at, entry);
      }
    }
  }
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    lowp_flat_encode(const Tile* __restrict__ tiles, const FlatEncode* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const FlatEncode& job = jobs[tile.job];
  if (tile.index == 0) store_all_outers(job.outer, job.rows, job.cols);
  uint64_t index = tile.index;
  if (index < job.data_tiles) {
    uint64_t first = (job.start / FLAT_ENCODE_RUN + index) * FLAT_ENCODE_RUN + threadIdx.x * CHUNK;
    uint64_t end = min(first + CHUNK, job.start + job.len);
    first = max(first, job.start);
    for (uint32_t p = 0; p < job.passes; ++p) {
      if (job.pass[p].data && first < end) codes(job, job.pass[p], first, end);
    }
    return;
  }
  index -= job.data_tiles;
  if (index < job.scale_tiles[0]) return scales(job, job.pass[0], index * FLAT_ENCODE_RUN);
  index -= job.scale_tiles[0];
  if (index < job.scale_tiles[1]) scales(job, job.pass[1], index * FLAT_ENCODE_RUN);
}
