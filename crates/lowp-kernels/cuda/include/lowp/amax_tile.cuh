// Amaxes of a tile of AMAX_ROWS x AMAX_COLS elements: of the tensor, and of blocks of sides 1, 16, 32, 128 and of lines. Warps
// reduce 32 x 32 elements at a time in registers; the entries of a tile meet in shared memory, and each is raised once.
#pragma once
#include <lowp/hadamard.cuh>
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// The side of a block that is as long as the matrix.
constexpr uint32_t WHOLE_SIDE = 0xFFFFFFFFu;

// The most entries of one part: of blocks of sixteen elements.
constexpr uint32_t AMAX_ENTRIES = AMAX_ROWS * AMAX_COLS / 16;

struct AmaxMemory {
  // Amaxes of blocks, row-major; below 0 where no element was seen.
  int entries[2][AMAX_ENTRIES];
};

__device__ __forceinline__ float rounded(const Amax& job, float a) { return job.via_bf16 ? round_bf16(a) : a; }

// Raises an amax of values of bfloat16 by the largest magnitude among the pairs of all threads, each of which calls it; NaNs lose to all else.
__device__ __forceinline__ void raise_by_pairs(uint64_t entry, uint32_t most) {
  __syncthreads();
  const float a = block_max(fmaxf(fmaxf(widen_low(most), widen_high(most)), 0.0f));
  if (threadIdx.x == 0) raise(pointer<float>(entry), a);
}

// The blocks of one part that a tile has. Sides are powers of two, or whole.
struct TileBlocks {
  int* entries;
  uint32_t rows, cols, down_shift, across_shift, across;

  static __device__ __forceinline__ uint32_t shift_of(uint32_t side) { return side == WHOLE_SIDE ? 31 : __ffs(side) - 1; }
  static __device__ __forceinline__ TileBlocks of(const AmaxBlocks& part, int* entries) {
    uint32_t across_shift = shift_of(part.cols);
    return {entries, part.rows, part.cols, shift_of(part.rows), across_shift, max(AMAX_COLS >> across_shift, 1u)};
  }
  __device__ __forceinline__ uint32_t count() const { return max(AMAX_ROWS >> down_shift, 1u) * across; }
  // The entry of the element at (row, col) of the tile.
  __device__ __forceinline__ int* at(uint32_t row, uint32_t col) const {
    return entries + (row >> down_shift) * across + (col >> across_shift);
  }
  // Of a block that other warps do not have, and of one that they may have.
  __device__ __forceinline__ void set(uint32_t row, uint32_t col, float a) const { *at(row, col) = __float_as_int(a); }
  __device__ __forceinline__ void meet(uint32_t row, uint32_t col, float a) const { atomicMax(at(row, col), __float_as_int(a)); }

  // The blocks of a warp's 32 x 32 elements from (row, col) of the tile on.
  template <int W>
  __device__ __forceinline__ void take(const Values<W>& v, uint32_t lane, uint32_t row, uint32_t col) const {
    constexpr int N = 32 / W;
    float a[2];
    if (rows == 1) {
      if (cols == 16) {
        v.template row_blocks<16>(lane, a);
        uint32_t half = lane / (N / 2) % 2 * 16, first = lane / N * N + lane % (N / 2) * 2;
        set(row + first, col + half, a[0]);
        set(row + first + 1, col + half, a[1]);
      } else {
        v.template row_blocks<32>(lane, a);
        cols == 32 ? set(row + lane, col, a[0]) : meet(row + lane, col, a[0]);
      }
    } else if (cols == 1) {
      if (rows == 16) {
        v.template column_blocks<16>(lane, a);
        uint32_t half = lane / 16 * 16, first = lane % N * W + lane / N % (W / 2) * 2;
        set(row + half, col + first, a[0]);
        set(row + half, col + first + 1, a[1]);
      } else {
        v.template column_blocks<32>(lane, a);
        uint32_t first = lane % N * W + lane / N;
        rows == 32 ? set(row, col + first, a[0]) : meet(row, col + first, a[0]);
      }
    } else if (cols == 16) {
      float one = all_max(v.maximum(), (N / 2 - 1) | (W / 2 - 1) * N);
      if (lane % N % (16 / W) == 0 && lane / N % (16 / N) == 0) set(row + lane / N * N, col + lane % N * W, one);
    } else {
      float one = all_max(v.maximum(), 31);
      if (lane == 0) meet(row, col, one);
    }
  }
};

// Elements of a warp's tile that are not all the job's, one at a time; returns their amax.
__device__ __noinline__ float edge_amax(const Amax& job, AmaxMemory& shared, uint64_t row, uint64_t col, uint32_t tile_row,
                                        uint32_t tile_col) {
  uint32_t lane = threadIdx.x % 32;
  float all = 0.0f;
  if (col + lane >= job.cols) return all;
#pragma unroll 1
  for (uint32_t i = 0; i < 32 && row + i < job.rows; ++i) {
    uint64_t e = (row + i) * job.cols + col + lane;
    if (e < job.start || e >= job.start + job.len) continue;
    float a = max_abs(0.0f, load_source(job.source, job.source_code, e - job.start));
    for (int p = 0; p < 2; ++p) {
      if (job.blocks[p].out) TileBlocks::of(job.blocks[p], shared.entries[p]).meet(tile_row + i, tile_col + lane, a);
    }
    all = fmaxf(all, a);
  }
  return all;
}

// Raises what the tile from (row, col) on has of one part.
__device__ __forceinline__ void raise_entries(const Amax& job, const AmaxBlocks& part, const TileBlocks& blocks, uint64_t row,
                                              uint64_t col) {
  constexpr int AT_A_TIME = 4;
  float* out = pointer<float>(part.out);
  const uint64_t wide = part.cols == WHOLE_SIDE ? 1 : (job.cols + part.cols - 1) >> blocks.across_shift;
  const uint64_t top = part.rows == WHOLE_SIDE ? 0 : row >> blocks.down_shift;
  const uint64_t left = part.cols == WHOLE_SIDE ? 0 : col >> blocks.across_shift;
  const uint32_t shift = __ffs(blocks.across) - 1, count = blocks.count();
#pragma unroll 1
  for (uint32_t first = threadIdx.x; first < count; first += AT_A_TIME * THREADS) {
    float* to[AT_A_TIME];
    int seen[AT_A_TIME], found[AT_A_TIME];
#pragma unroll
    for (int k = 0; k < AT_A_TIME; ++k) {
      uint32_t entry = first + k * THREADS;
      found[k] = entry < count ? blocks.entries[entry] : -1;
      to[k] = out + (top + (entry >> shift)) * wide + left + (entry & (blocks.across - 1));
      seen[k] = found[k] < 0 ? 0 : seen_amax(to[k]);
    }
#pragma unroll
    for (int k = 0; k < AT_A_TIME; ++k) {
      if (found[k] >= 0) raise_over(to[k], seen[k], rounded(job, __int_as_float(found[k])));
    }
  }
}

// One tile of the part of a matrix that the elements cover; returns the thread's amax.
template <int W>
__device__ __forceinline__ float tile_amax(const Amax& job, uint32_t index, AmaxMemory& shared) {
  const uint32_t across = uint32_t(job.tiles_across), lane = threadIdx.x % 32, tile_col = threadIdx.x / 32 * 32;
  const uint64_t row = job.first_row + uint64_t(index / across) * AMAX_ROWS, col = uint64_t(index % across) * AMAX_COLS;
  const uint64_t end = job.start + job.len;
  // Element 0 of the matrix, if it were in memory.
  const uint64_t base = job.source - job.start * (W == 8 ? 2 : 4);
  for (int p = 0; p < 2; ++p) {
    if (!job.blocks[p].out) continue;
    uint32_t count = TileBlocks::of(job.blocks[p], shared.entries[p]).count();
    for (uint32_t e = threadIdx.x; e < count; e += THREADS) shared.entries[p][e] = -1;
  }
  __syncthreads();
  float a = 0.0f;
#pragma unroll 1
  for (uint32_t down = 0; down < AMAX_ROWS; down += 32) {
    const Lane<W> at{lane, row + down, col + tile_col};
    if (at.row >= job.rows || at.row * job.cols >= end || at.col >= job.cols) break;
    bool inside = at.row + 32 <= job.rows && at.col + 32 <= job.cols && at.row * job.cols + at.col >= job.start;
    inside = inside && (at.row + 31) * job.cols + at.col + 32 <= end;
    if (!inside) {
      a = fmaxf(a, edge_amax(job, shared, at.row, at.col, down, tile_col));
      continue;
    }
    Values<W> v;
    v.load(base, job.vector, View{job.rows, job.cols, end}, at);
#pragma unroll 1
    for (int p = 0; p < 2; ++p) {
      v.stay_in_loop();
      if (job.blocks[p].out) TileBlocks::of(job.blocks[p], shared.entries[p]).take(v, lane, down, tile_col);
    }
    if (job.tensor) a = fmaxf(a, v.maximum());
  }
  __syncthreads();
  for (int p = 0; p < 2; ++p) {
    const AmaxBlocks& part = job.blocks[p];
    if (part.out) raise_entries(job, part, TileBlocks::of(part, shared.entries[p]), row, col);
  }
  return a;
}

// The thread's amaxes of a tile of a whole matrix, before and after the Hadamard transform. Not inlined: with registers of its own.
template <int W>
__device__ __noinline__ float2 transformed_amax(const Amax& job, uint32_t index) {
  const uint32_t across = uint32_t(job.tiles_across);
  const uint64_t row = uint64_t(index / across) * AMAX_ROWS, col = uint64_t(index % across) * AMAX_COLS + threadIdx.x / 32 * 32;
  float2 a = make_float2(0.0f, 0.0f);
#pragma unroll 1
  for (uint32_t down = 0; down < AMAX_ROWS; down += 32) {
    const Lane<W> at{threadIdx.x % 32, row + down, col};
    if (at.row >= job.rows || at.col >= job.cols) break;
    Values<W> v;
    v.load(job.source, job.vector, View{job.rows, job.cols, job.len}, at);
    if (job.via_bf16) v.round();
    if (job.tensor) a.x = fmaxf(a.x, v.maximum());
    transform<W>(v, at.lane, at.row, job.rows);
    a.y = fmaxf(a.y, v.maximum());
  }
  return a;
}

}  // namespace lowp
