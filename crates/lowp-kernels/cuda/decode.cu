// Decode to f32 (numerics 5.3, 6.4 and 7.4): a tile of codes of either orientation goes through
// shared memory and leaves row by row.
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>

namespace lowp {

constexpr uint32_t SIDE = DECODE_SIDE;
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

// The decode scale or the amax of the tensor, or of the line of element (row, col).
__device__ __forceinline__ float outer(const Decode& job, uint64_t row, uint64_t col) {
  const Ingredients& made = job.ingredients;
  return made.tensor ? __uint_as_float(load_f32(made.tensor + 4 * outer_entry(made, row, col))) : 1.0f;
}

// The factor of the block at (r, c) under `tensor`.
__device__ __forceinline__ float block_factor(const Decode& job, float tensor, uint64_t r, uint64_t c) {
  const Ingredients& made = job.ingredients;
  uint64_t line = job.scale_transposed ? c : r, at = job.scale_transposed ? r : c;
  uint64_t base = job.scale + line * job.scale_pitch;
  if (made.rule == RULE_BLOCK_F32) return __uint_as_float(load_f32(base + 4 * at));
  uint32_t entry = pointer<const uint8_t>(base)[at];
  return two_level(made.rule) ? two_level_decode_factor(entry, tensor, largest_reciprocal(made.largest)) : E8m0::decode(entry);
}

// What the code of element (row, col) is multiplied by.
__device__ __forceinline__ float factor(const Decode& job, uint64_t row, uint64_t col) {
  float tensor = outer(job, row, col);
  if (job.ingredients.rule == RULE_TENSOR) return tensor;
  return block_factor(job, tensor, row / job.block_rows, col / job.block_cols);
}

// The product; a NaN is that of the operand that is one, as on the host, not the canonical one.
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

// Four neighbouring codes of a row: as many bits as they take.
template <typename E>
struct Four {
  static __device__ __forceinline__ uint32_t load(uint64_t at) { return __ldcs(pointer<const uint32_t>(at)); }
  static __device__ __forceinline__ uint32_t one(uint32_t codes, int k) { return codes >> (8 * k) & 0xFF; }
};
template <>
struct Four<E2m1> {
  static __device__ __forceinline__ uint32_t load(uint64_t at) { return __ldcs(pointer<const uint16_t>(at)); }
  static __device__ __forceinline__ uint32_t one(uint32_t codes, int k) { return codes >> (4 * k) & 15; }
};

// 64 x 128 elements, row-major: a warp does eight rows, a lane four columns.
template <typename E, uint32_t BITS>
__device__ __forceinline__ void decode_wide(const Decode& job, uint32_t index) {
  constexpr int ROWS = 8;
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * DECODE_SIDE + threadIdx.x / 32 * ROWS;
  uint64_t col = uint64_t(index % across) * DECODE_WIDE_COLS + threadIdx.x % 32 * 4;
  if (row >= job.rows || col >= job.cols) return;
  uint32_t rows = uint32_t(min(uint64_t(ROWS), job.rows - row));
  uint32_t codes[ROWS];
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    codes[i] = i < rows ? Four<E>::load(job.data + (row + i) * job.data_pitch + col * BITS / 8) : 0;
  }
  uint8_t extent = job.ingredients.extent;
  float tensor = outer(job, row, col);
  bool blocks = job.ingredients.rule != RULE_TENSOR;
  uint32_t h = blocks ? 31 - __clz(job.block_rows) : 0, w = blocks ? 31 - __clz(job.block_cols) : 0;
  float* out = pointer<float>(job.out) + row * job.cols + col;
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    if (i >= rows) break;
    if (extent == EXTENT_ROWS) tensor = outer(job, row + i, col);
    float f[4] = {tensor, tensor, tensor, tensor};
    if (extent == EXTENT_COLUMNS) {
      for (int k = 0; k < 4; ++k) f[k] = factor(job, row + i, col + k);
    } else if (blocks) {
      f[0] = f[1] = f[2] = f[3] = block_factor(job, tensor, (row + i) >> h, col >> w);
      // Blocks narrower than a lane's columns.
      for (int k = 1; w < 2 && k < 4; ++k) f[k] = block_factor(job, tensor, (row + i) >> h, (col + k) >> w);
    }
    float4 x = E::decode_four(codes[i]);
    float4 y = make_float4(__fmul_rn(x.x, f[0]), __fmul_rn(x.y, f[1]), __fmul_rn(x.z, f[2]), __fmul_rn(x.w, f[3]));
    float any = y.x + y.y + (y.z + y.w);
    if (any != any) {
      y.x = scaled(E::decode(Four<E>::one(codes[i], 0)), f[0]);
      y.y = scaled(E::decode(Four<E>::one(codes[i], 1)), f[1]);
      y.z = scaled(E::decode(Four<E>::one(codes[i], 2)), f[2]);
      y.w = scaled(E::decode(Four<E>::one(codes[i], 3)), f[3]);
    }
    store16(out + i * job.cols, as_bits(y));
  }
}

// 64 x 64 elements of anything.
__device__ __forceinline__ void decode_any(const Decode& job, uint32_t index, uint32_t* codes) {
  uint32_t across = uint32_t(job.tiles_across);
  uint64_t row = uint64_t(index / across) * SIDE, col = uint64_t(index % across) * SIDE;
  uint32_t rows = uint32_t(min(uint64_t(SIDE), job.rows - row)), cols = uint32_t(min(uint64_t(SIDE), job.cols - col));
  uint32_t bits = code_bits(job.ingredients.element), transposed = job.data_transposed;
  // Physical rows of the tile.
  uint64_t line = transposed ? col : row, at = transposed ? row : col;
  uint32_t lines = transposed ? cols : rows, entries = transposed ? rows : cols;
  for (uint32_t e = threadIdx.x; e < lines * SIDE; e += THREADS) {
    uint32_t i = e / SIDE, j = e % SIDE;
    if (j >= entries) continue;
    const uint8_t* from = pointer<const uint8_t>(job.data) + (line + i) * job.data_pitch + (at + j) * bits / 8;
    uint32_t code = *from;
    if (bits == 4) code = (code >> (j % 2 * 4)) & 15;
    for (uint32_t b = 1; b < bits / 8; ++b) code |= uint32_t(from[b]) << (8 * b);
    codes[transposed ? j * PITCH + i : i * PITCH + j] = code;
  }
  __syncthreads();
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
      x[k] = decode_element(job.ingredients.element, codes[i * PITCH + j + k]);
      if (job.ingredients.rule == RULE_NONE) continue;
      bool each = job.ingredients.extent == EXTENT_COLUMNS;
      uint64_t block = each ? col + j + k : job.block_cols ? (col + j + k) / job.block_cols : 0;
      if (block != seen) f = factor(job, row + i, col + j + k);
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

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS)
    lowp_decode(const Tile* __restrict__ tiles, const Decode* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ uint32_t codes[SIDE * PITCH];
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Decode& job = jobs[tile.job];
  if (job.path == DECODE_GENERIC) return decode_any(job, tile.index, codes);
  switch (job.ingredients.element) {
    case E4M3: return decode_wide<E4m3, 8>(job, tile.index);
    case E5M2: return decode_wide<E5m2, 8>(job, tile.index);
    default: return decode_wide<E2m1, 4>(job, tile.index);
  }
}
