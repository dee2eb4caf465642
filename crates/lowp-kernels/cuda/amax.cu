// Amax of tensors and blocks (numerics 2.2), over whole matrices or flat shards of them.
#include <lowp/hadamard.cuh>
#include <lowp/scale_rule.cuh>
#include <lowp/tile.cuh>

namespace lowp {

// The amax of `count` elements from `first` on: the part of one thread.
__device__ __forceinline__ float flat_amax(const Amax& job, uint64_t first, uint32_t count) {
  float a = 0.0f;
  if (job.vector && count == AMAX_TILE) {
    if (job.source_code == BF16) {
      const uint16_t* from = pointer<const uint16_t>(job.source) + first + threadIdx.x * 8;
      uint4 raw[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) raw[i] = load16(from + i * THREADS * 8);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const uint32_t words[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
#pragma unroll
        for (int j = 0; j < 4; ++j) a = max_abs(max_abs(a, widen_low(words[j])), widen_high(words[j]));
      }
    } else {
      const float* from = pointer<const float>(job.source) + first + threadIdx.x * 4;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float4 raw[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) raw[i] = as_floats(load16(from + (half * 8 + i) * THREADS * 4));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          a = max_abs(max_abs(max_abs(max_abs(a, raw[i].x), raw[i].y), raw[i].z), raw[i].w);
        }
      }
    }
    return a;
  }
  for (uint32_t e = threadIdx.x; e < count; e += THREADS) {
    a = max_abs(a, load_source(job.source, job.source_code, first + e));
  }
  return a;
}

// The side of a block that is as long as the matrix.
constexpr uint32_t WHOLE_SIDE = 0xFFFFFFFFu;

__device__ __forceinline__ float rounded(const Amax& job, float a) { return job.via_bf16 ? round_bf16(a) : a; }

// Whether an element of the block that begins at (row, col) is among those of the job.
__device__ __noinline__ bool touched(const Amax& job, const AmaxBlocks& part, uint64_t row, uint64_t col) {
  uint64_t bottom = min(row + part.rows, job.rows), right = min(col + part.cols, job.cols);
#pragma unroll 1
  for (uint64_t r = row; r < bottom; ++r) {
    if (r * job.cols + col < job.start + job.len && r * job.cols + right > job.start) return true;
  }
  return false;
}

// The same of the part of a line that lies in a warp's tile of 32 x 32 from (row, col) on.
__device__ __noinline__ bool touched_line(const Amax& job, const AmaxBlocks& part, uint64_t row, uint64_t col) {
  AmaxBlocks piece{0, part.rows == 1 ? 1u : 32u, part.rows == 1 ? 32u : 1u};
  return touched(job, piece, row, col);
}

// Raises the blocks of one part that meet the warp's 32 x 32 elements. A block of such a side lies
// within one warp's tile, but a shard may share it with nobody here: the entry is raised, not set.
// Where not all of the elements are the job's, entries of blocks without any stay.
template <int W>
__device__ __forceinline__ void raise_blocks(const Amax& job, const AmaxBlocks& part, const Lane<W>& at,
                                             const Values<W>& v, bool whole) {
  constexpr int N = 32 / W;
  float* out = pointer<float>(part.out);
  uint64_t across = cdiv(job.cols, part.cols);
  auto put = [&](uint32_t row, uint32_t col, float a) {
    uint64_t r = at.row + row, c = at.col + col;
    if (r >= job.rows || c >= job.cols) return;
    // A line that has no element among the job's is not raised; another value than 0 comes of one.
    bool line = part.rows == WHOLE_SIDE || part.cols == WHOLE_SIDE;
    if (whole || (line ? touched_line(job, part, r, c) : touched(job, part, r, c))) {
      raise(out + r / part.rows * across + c / part.cols, rounded(job, a));
    }
  };
  uint32_t lane = at.lane;
  if (part.rows == WHOLE_SIDE || part.cols == WHOLE_SIDE) {
    // Lines: the parts of the warp's tile, each raised.
    float a[2];
    if (part.rows == 1) {
      v.template row_blocks<32>(lane, a);
      put(lane, 0, a[0]);
    } else {
      v.template column_blocks<32>(lane, a);
      put(0, lane % N * W + lane / N, a[0]);
    }
  } else if (part.rows == 1) {
    float a[2];
    if (part.cols == 32) {
      v.template row_blocks<32>(lane, a);
      put(lane, 0, a[0]);
    } else {
      v.template row_blocks<16>(lane, a);
      uint32_t half = lane / (N / 2) % 2, row = lane / N * N + lane % (N / 2) * 2;
      put(row, half * 16, a[0]);
      put(row + 1, half * 16, a[1]);
    }
  } else if (part.cols == 1) {
    float a[2];
    if (part.rows == 32) {
      v.template column_blocks<32>(lane, a);
      put(0, lane % N * W + lane / N, a[0]);
    } else {
      v.template column_blocks<16>(lane, a);
      uint32_t half = lane / 16, col = lane % N * W + lane / N % (W / 2) * 2;
      put(half * 16, col, a[0]);
      put(half * 16, col + 1, a[1]);
    }
  } else {
    float a = all_max(v.maximum(), (N / 2 - 1) | (W / 2 - 1) * N);
    if (part.rows == 32) a = all_max(a, N / 2 | 16);
    if (lane % N % (part.cols / W) == 0 && lane / N % (part.rows / N) == 0) put(at.local_row(), at.local_col(), a);
  }
}

// One tile of the part of a matrix that the elements cover; returns the thread's amax.
template <int W>
__device__ __forceinline__ float tile_amax(const Amax& job, uint32_t index) {
  uint32_t tiles = uint32_t(job.tiles_across);
  uint64_t row = job.first_row + uint64_t(index / tiles) * AMAX_ROWS, col = uint64_t(index % tiles) * AMAX_COLS;
  uint64_t end = job.start + job.len;
  Lane<W> at{threadIdx.x % 32, row, col + threadIdx.x / 32 * 32};
  // Element 0 of the matrix, if it were in memory.
  uint64_t base = job.source - job.start * (W == 8 ? 2 : 4);
  Values<W> v;
  bool inside = at.row + 32 <= job.rows && at.col + 32 <= job.cols && at.row * job.cols + at.col >= job.start;
  inside = inside && (at.row + 31) * job.cols + at.col + 32 <= end;
  if (inside) {
    v.load(base, job.vector, View{job.rows, job.cols, end}, at);
  } else {
    v.gather([&](uint32_t row, uint32_t col) {
      uint64_t r = at.row + row, c = at.col + col, e = r * job.cols + c;
      bool mine = r < job.rows && c < job.cols && e >= job.start && e < end;
      return mine ? load_source(job.source, W == 8 ? BF16 : F32, e - job.start) : 0.0f;
    }, at);
  }
  for (int p = 0; p < 2; ++p) {
    if (job.blocks[p].out) raise_blocks<W>(job, job.blocks[p], at, v, inside);
  }
  if (job.hadamard) {
    if (job.via_bf16) v.round();
    transform<W>(v, at.lane, at.row, job.rows);
  }
  return job.tensor ? v.maximum() : 0.0f;
}

// A run of elements whose blocks are raised one element at a time.
__device__ __forceinline__ float generic_amax(const Amax& job, uint64_t first, uint32_t count) {
  float all = 0.0f;
  for (uint32_t e = threadIdx.x; e < count; e += THREADS) {
    float a = max_abs(0.0f, load_source(job.source, job.source_code, first + e));
    uint64_t row = (job.start + first + e) / job.cols, col = (job.start + first + e) % job.cols;
    for (int p = 0; p < 2; ++p) {
      const AmaxBlocks& part = job.blocks[p];
      if (part.out) {
        raise(pointer<float>(part.out) + row / part.rows * cdiv(job.cols, part.cols) + col / part.cols, rounded(job, a));
      }
    }
    all = fmaxf(all, a);
  }
  return all;
}

}  // namespace lowp

using namespace lowp;

extern "C" __global__ void __launch_bounds__(THREADS, 2)
    lowp_amax(const Tile* __restrict__ tiles, const Amax* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Amax& job = jobs[tile.job];
  float a;
  if (job.path == AMAX_FLAT) {
    uint64_t first = tile.index * AMAX_TILE;
    a = flat_amax(job, first, uint32_t(min(AMAX_TILE, job.len - first)));
  } else if (job.path == AMAX_TILES) {
    a = job.source_code == BF16 ? tile_amax<8>(job, tile.index) : tile_amax<4>(job, tile.index);
  } else {
    uint64_t first = tile.index * AMAX_RUN;
    a = generic_amax(job, first, uint32_t(min(AMAX_RUN, job.len - first)));
  }
  if (job.tensor) {
    a = block_max(a);
    if (threadIdx.x == 0) raise(pointer<float>(job.tensor), rounded(job, a));
  }
}
