// Decode to f32 (numerics 5.3, 6.4 and 7.4): a tile of codes of either orientation goes through
// shared memory and leaves row by row.
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>

namespace lowp {

constexpr uint32_t SIDE = 64;
constexpr uint32_t PITCH = SIDE + 1;

__device__ __forceinline__ float decode_element(uint8_t element, uint32_t code) {
  switch (element) {
    case E4M3: return E4m3::decode(code);
    case E5M2: return E5m2::decode(code);
    case E2M1: return E2m1::decode(code);
    case E8M0: return E8m0::decode(code);
    case BF16: return widen(uint16_t(code));
    default: return __uint_as_float(code);
  }
}

// What the codes of a block are multiplied by.
__device__ __forceinline__ float factor(const Decode& job, float tensor, uint64_t row, uint64_t col) {
  if (job.rule == RULE_TENSOR) return tensor;
  uint64_t r = row / job.block_rows, c = col / job.block_cols;
  uint64_t line = job.scale_transposed ? c : r, at = job.scale_transposed ? r : c;
  uint64_t base = job.scale + line * job.scale_pitch;
  if (job.rule == RULE_BLOCK_F32) return __uint_as_float(load_f32(base + 4 * at));
  uint32_t entry = pointer<const uint8_t>(base)[at];
  return job.rule == RULE_TWO_LEVEL ? two_level_decode_factor(entry, tensor) : E8m0::decode(entry);
}

// The product; a NaN is that of the operand it came from, as on the host, not the canonical one.
__device__ __forceinline__ float scaled(float x, float factor) {
  float y = __fmul_rn(x, factor);
  if (y == y) return y;
  uint32_t sign = 0x80000000u;
  if (x != x) {
    sign &= __float_as_uint(x);
  } else if (factor != factor) {
    sign &= __float_as_uint(factor);
  }
  return __uint_as_float(0x7FC00000u | sign);
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_decode(const Tile* __restrict__ tiles, const Decode* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ uint32_t codes[SIDE * PITCH];
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Decode& job = jobs[tile.job];
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(tile.index / across) * SIDE, col = uint64_t(tile.index % across) * SIDE;
  uint32_t rows = uint32_t(min(uint64_t(SIDE), job.rows - row)), cols = uint32_t(min(uint64_t(SIDE), job.cols - col));
  uint32_t bits = code_bits(job.element), turned = job.data_transposed;
  // Physical rows of the tile.
  uint64_t line = turned ? col : row, at = turned ? row : col;
  uint32_t lines = turned ? cols : rows, entries = turned ? rows : cols;
  for (uint32_t e = threadIdx.x; e < lines * SIDE; e += THREADS) {
    uint32_t i = e / SIDE, j = e % SIDE;
    if (j >= entries) continue;
    const uint8_t* from = pointer<const uint8_t>(job.data) + (line + i) * job.data_pitch + (at + j) * bits / 8;
    uint32_t code = *from;
    if (bits == 4) code = (code >> (j % 2 * 4)) & 15;
    for (uint32_t b = 1; b < bits / 8; ++b) code |= uint32_t(from[b]) << (8 * b);
    codes[turned ? j * PITCH + i : i * PITCH + j] = code;
  }
  __syncthreads();
  float tensor = job.tensor ? __uint_as_float(load_f32(job.tensor)) : 1.0f;
  float* out = pointer<float>(job.out);
  for (uint32_t e = threadIdx.x; e < rows * (SIDE / 4); e += THREADS) {
    uint32_t i = e / (SIDE / 4), j = e % (SIDE / 4) * 4;
    float x[4];
    uint64_t seen = ~uint64_t(0);
    float f = 1.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      x[k] = 0.0f;
      if (j + k >= cols) continue;
      x[k] = decode_element(job.element, codes[i * PITCH + j + k]);
      if (job.rule == RULE_NONE) continue;
      uint64_t block = job.block_cols ? (col + j + k) / job.block_cols : 0;
      if (block != seen) f = factor(job, tensor, row + i, col + j + k);
      seen = block;
      x[k] = scaled(x[k], f);
    }
    float* to = out + (row + i) * job.cols + col + j;
    if (job.vector && j + 4 <= cols) {
      store16(to, as_bits(make_float4(x[0], x[1], x[2], x[3])));
    } else {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (j + k < cols) to[k] = x[k];
      }
    }
  }
}
