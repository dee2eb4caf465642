// FP8 with f32 scales of blocks of 128 (numerics 8) of bfloat16 through a ring of tiles of 128 x 128. Eight lanes have all of a row
// of a tile, and eight lanes all of a column: blocks of rows and of columns lie within a warp, and need no barrier.
#pragma once
#include <lowp/ring_fp8.cuh>

namespace lowp {

constexpr uint32_t BLOCKS_RING_PITCH = 2 * BLOCKS_SIDE, BLOCKS_RING_TILE = BLOCKS_SIDE * BLOCKS_RING_PITCH;

struct alignas(128) BlocksRing {
  uint8_t bytes[RING_STAGES][BLOCKS_RING_TILE];
  float amaxes[THREADS / 32];  // of a tile, by warp
};
static_assert(sizeof(BlocksRing) == BLOCKS_RING_BYTES);

// Where a row has its chunk of 16 bytes. Chunks are exchanged so that a quarter of a warp that reads a row in runs of 16 values, and
// a warp that reads pairs of columns of rows that are 16 apart, find them in different banks.
__device__ __forceinline__ uint32_t blocks_place(uint32_t row, uint32_t chunk) {
  return row * BLOCKS_RING_PITCH + (chunk ^ chunk / 8 ^ row / 16 % 8) * 16;
}

// What a thread has of a tile: four runs of 16 values of rows that are 4 apart, and 16 rows of two columns and of the two that are 64
// further. A warp has 16 rows, and 8 columns twice.
struct BlocksReader {
  uint32_t runs, pairs;
  static __device__ __forceinline__ uint32_t run_row() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 8; }
  static __device__ __forceinline__ uint32_t run_column() { return threadIdx.x % 8 * 16; }
  static __device__ __forceinline__ uint32_t pair_row() { return threadIdx.x % 8 * 16; }
  static __device__ __forceinline__ uint32_t pair_column() { return threadIdx.x / 8 * 2; }
  __device__ __forceinline__ BlocksReader()
      : runs(kept(blocks_place(run_row(), run_column() / 8))),
        pairs(kept(blocks_place(pair_row(), pair_column() / 8) + pair_column() % 8 * 2)) {}
  // The run of row run_row() + 4 * k.
  __device__ __forceinline__ Run run(const uint8_t* tile, uint32_t k) const {
    const uint8_t* from = tile + k * 4 * BLOCKS_RING_PITCH;
    const uint4 low = *reinterpret_cast<const uint4*>(from + runs), high = *reinterpret_cast<const uint4*>(from + (runs ^ 16));
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
  // The columns from pair_column() + 64 * half on.
  __device__ __forceinline__ TwoColumns columns(const uint8_t* tile, uint32_t half) const {
    const uint8_t* from = tile + (pairs ^ half * (9 * 16));
    TwoColumns v;
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) v.x[i] = *reinterpret_cast<const uint32_t*>(from + i * BLOCKS_RING_PITCH);
    return v;
  }
};

// Calls `work(tile, step)` for each of `steps` tiles from (row, col) of a matrix on, along the columns.
template <typename Work>
__device__ __forceinline__ void through_blocks(BlocksRing& ring, const Encode& job, uint64_t row, uint64_t col, uint32_t steps, Work work) {
  const uint32_t r = threadIdx.x / 16, chunk = threadIdx.x % 16;
  const uint32_t to = kept(uint32_t(__cvta_generic_to_shared(ring.bytes)) + blocks_place(r, chunk));
  const uint64_t from = job.source + 2 * ((row + r) * job.cols + col + chunk * 8), rows_apart = 2 * 16 * job.cols;
  auto start = [&](uint32_t slot, uint32_t step) {
    uint64_t at = from + step * BLOCKS_RING_PITCH;
#pragma unroll
    for (uint32_t k = 0; k < BLOCKS_SIDE / 16; ++k) {
      // Of row 16 k: k more of what row / 16 exchanges chunks by.
      copy16_ring((to ^ k * 16) + k * 16 * BLOCKS_RING_PITCH + slot * BLOCKS_RING_TILE, at);
      at += rows_apart;
    }
  };
  through_stages<RING_STAGES>(steps, start, [&](uint32_t slot, uint32_t step) { work(ring.bytes[slot], step); });
}

// The rule of all blocks of a matrix.
struct BlockRule {
  float largest, epsilon;
  bool pow2;
  static __device__ __forceinline__ BlockRule of(const Ingredients& made) { return {max_finite(made.element), made.epsilon, bool(made.pow2)}; }
  __device__ __forceinline__ Scaled block(float amax) const {
    float scale = tensor_scale(amax, largest, pow2, epsilon);
    return {__float_as_uint(__fdiv_rn(1.0f, scale)), scale};
  }
};

// What the values of four lines are multiplied by, which eight lanes share: the lines of the halves of the first pair, and of the
// second, whose largest magnitudes a lane has among its values. `store(k, entry)` is called by one lane for line k.
template <typename Store>
__device__ __forceinline__ void four_multipliers(const BlockRule& rule, uint32_t first, uint32_t second, float (&m)[4], Store store) {
  const uint32_t lane = threadIdx.x % 32;
  const bool upper = lane & 4;
  uint32_t a = max_pair(upper ? second : first, __shfl_xor_sync(FULL_WARP, upper ? first : second, 4));
  a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 2));
  a = max_pair(a, __shfl_xor_sync(FULL_WARP, a, 1));
  // Two lanes have a line.
  const Scaled block = rule.block(fmaxf(lane & 2 ? widen_high(a) : widen_low(a), 0.0f));
  if (lane % 2 == 0) store(lane % 8 / 2, block.entry);
#pragma unroll
  for (int k = 0; k < 4; ++k) m[k] = __shfl_sync(FULL_WARP, block.multiplier, (lane & 24) + 2 * k);
}

// Blocks of rows, row-major, of columns, transposed, or both; scales of neighbouring lines are neighbours.
template <typename E>
__device__ __forceinline__ void ring_lines128(const Encode& job, uint64_t row, uint64_t col, uint32_t steps, BlocksRing& shared) {
  const Pass &first = job.pass[0], &last = job.pass[job.passes - 1];
  const BlockRule rule = BlockRule::of(first.ingredients);
  const uint64_t pitch = job.cols, lines = job.rows;
  const uint64_t first_row = row + BlocksReader::run_row(), first_column = col + BlocksReader::pair_column();
  const bool rows = first.block_rows == 1, columns = last.block_cols == 1;
  const uint64_t to_rows = first.data[0] + first_row * pitch + col + BlocksReader::run_column();
  const uint64_t to_columns = last.data[1] + first_column * lines + row + BlocksReader::pair_row();
  const uint64_t row_scales = first.scale[1] ? first.scale[1] + 4 * (col / BLOCKS_SIDE * lines + first_row) : 0;
  const uint64_t column_scales = last.scale[0] ? last.scale[0] + 4 * (row / BLOCKS_SIDE * pitch + first_column) : 0;
  const BlocksReader reader;
  through_blocks(shared, job, row, col, steps, [&](const uint8_t* values, uint32_t step) {
    float m[4];
    if (rows) {
      Run v[4];
      uint32_t a[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        v[k] = reader.run(values, k);
        a[k] = largest_pairs(v[k].x);
      }
      // Rows in pairs.
      uint32_t pairs[2];
#pragma unroll
      for (int k = 0; k < 2; ++k) pairs[k] = max_pair(__byte_perm(a[2 * k], a[2 * k + 1], 0x5410), __byte_perm(a[2 * k], a[2 * k + 1], 0x7632));
      four_multipliers(rule, pairs[0], pairs[1], m, [&](uint32_t k, uint32_t entry) {
        if (row_scales) pointer<uint32_t>(row_scales)[step * lines + 4 * k] = entry;
      });
#pragma unroll
      for (int k = 0; k < 4; ++k) store16_part(pointer<uint8_t>(to_rows + k * 4 * pitch + step * BLOCKS_SIDE), codes8<E>(v[k], m[k]));
    }
    if (columns) {
      TwoColumns v[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) v[half] = reader.columns(values, half);
      four_multipliers(rule, largest_pairs(v[0].x), largest_pairs(v[1].x), m, [&](uint32_t k, uint32_t entry) {
        if (column_scales) pointer<uint32_t>(column_scales)[step * BLOCKS_SIDE + k % 2 + k / 2 * 64] = entry;
      });
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        store16_part(pointer<uint8_t>(to_columns + (k % 2 + k / 2 * 64 + step * BLOCKS_SIDE) * lines), codes8<E>(v[k / 2], k % 2, m[k]));
      }
    }
  });
}

// Blocks of 128 x 128, whose codes are the same in both orders.
template <typename E>
__device__ __forceinline__ void ring_square128(const Encode& job, uint64_t row, uint64_t col, uint32_t steps, BlocksRing& shared) {
  const Pass& pass = job.pass[0];
  const BlockRule rule = BlockRule::of(pass.ingredients);
  const uint64_t pitch = job.cols, lines = job.rows, block_row = row / BLOCKS_SIDE, block_col = col / BLOCKS_SIDE;
  const uint64_t to_rows = pass.data[0] ? pass.data[0] + (row + BlocksReader::run_row()) * pitch + col + BlocksReader::run_column() : 0;
  const uint64_t to_columns = pass.data[1] ? pass.data[1] + (col + BlocksReader::pair_column()) * lines + row + BlocksReader::pair_row() : 0;
  const BlocksReader reader;
  through_blocks(shared, job, row, col, steps, [&](const uint8_t* values, uint32_t step) {
    Run v[4];
    uint32_t a[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      v[k] = reader.run(values, k);
      a[k] = largest_pairs(v[k].x);
    }
    // No amax is negative or NaN: the largest has the largest bits.
    uint32_t amax = __float_as_uint(largest_of(max_pair(max_pair(a[0], a[1]), max_pair(a[2], a[3]))));
    amax = __reduce_max_sync(FULL_WARP, amax);
    if (threadIdx.x % 32 == 0) shared.amaxes[threadIdx.x / 32] = __uint_as_float(amax);
    __syncthreads();
    const float4 low = *reinterpret_cast<const float4*>(shared.amaxes), high = *reinterpret_cast<const float4*>(shared.amaxes + 4);
    const float most = fmaxf(fmaxf(fmaxf(low.x, low.y), fmaxf(low.z, low.w)), fmaxf(fmaxf(high.x, high.y), fmaxf(high.z, high.w)));
    const Scaled block = rule.block(most);
    if (threadIdx.x == 0) {
      const uint64_t c = block_col + step;
      if (pass.scale[0]) pointer<uint32_t>(pass.scale[0])[block_row * (pitch / BLOCKS_SIDE) + c] = block.entry;
      if (pass.scale[1]) pointer<uint32_t>(pass.scale[1])[c * (lines / BLOCKS_SIDE) + block_row] = block.entry;
    }
    const float m = block.multiplier;
    if (to_rows) {
#pragma unroll
      for (int k = 0; k < 4; ++k) store16_part(pointer<uint8_t>(to_rows + k * 4 * pitch + step * BLOCKS_SIDE), codes8<E>(v[k], m));
    }
    if (to_columns) {
#pragma unroll
      for (uint32_t half = 0; half < 2; ++half) {
        const TwoColumns columns = reader.columns(values, half);
        const uint64_t to = to_columns + (half * 64 + step * BLOCKS_SIDE) * lines;
        store16_part(pointer<uint8_t>(to), codes8<E>(columns, false, m));
        store16_part(pointer<uint8_t>(to + lines), codes8<E>(columns, true, m));
      }
    }
  });
}

template <typename E>
__device__ __forceinline__ void ring_blocks(const Encode& job, uint32_t index, BlocksRing& shared) {
  const uint32_t across = uint32_t(job.tiles_across);
  const uint64_t row = uint64_t(index / across) * BLOCKS_SIDE, col = uint64_t(index % across) * job.tile_cols;
  const uint32_t steps = uint32_t(min(uint64_t(job.tile_cols), job.cols - col) / BLOCKS_SIDE);
  if (job.pass[0].block_rows == job.pass[0].block_cols) {
    ring_square128<E>(job, row, col, steps, shared);
  } else {
    ring_lines128<E>(job, row, col, steps, shared);
  }
}

}  // namespace lowp
