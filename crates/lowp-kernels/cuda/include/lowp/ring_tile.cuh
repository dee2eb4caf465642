// The encode of bfloat16, or of binary32 (ring_f32.cuh), through a ring of tiles (ring.cuh): large matrices of whole tiles of 128 x 64. What a thread reads of a
// tile it turns into whole words of codes, row-major or transposed, that go straight to memory.
#pragma once
#include <lowp/mixed.cuh>
#include <lowp/ring.cuh>

namespace lowp {

template <int STAGES>
struct RingMemory {
  union {
    Ring<STAGES> ring;
    MixedStage mixed;
  };
  union {
    struct {
      uint8_t rows[6144], columns[4096];  // staged codes
    };
    uint8_t random[TRANSPOSED_ROWS * TRANSPOSED_COLS];  // bytes of stochastic rounding
    uint32_t pairs[4][TRANSPOSED_COLS / 2];             // multipliers of columns, in bfloat16
  };
  uint8_t scales[2][2048];            // of rows, and of columns; of a tile of RING_COLS at most
  float multipliers[256];
};
static_assert(sizeof(RingMemory<RING_STAGES>) == RING_BYTES && sizeof(RingMemory<LONG_RING_STAGES>) == LONG_RING_BYTES);

// The part of a matrix that a block of threads encodes.
struct RingTile {
  const Encode& job;
  uint64_t row, col;
  uint32_t width, steps;  // columns of a tile, and those of 64 that the matrix has of them

  __device__ __forceinline__ RingTile(const Encode& job, uint32_t index) : job(job) {
    uint32_t across = uint32_t(job.tiles_across);
    row = uint64_t(index / across) * TRANSPOSED_ROWS;
    width = job.tile_cols;
    col = uint64_t(index % across) * width;
    steps = uint32_t(min(uint64_t(width), job.cols - col) / TRANSPOSED_COLS);
  }
  // The pass that fills an order of data: 0 is row-major, 1 transposed; the last has blocks of columns.
  __device__ __forceinline__ const Pass* filling(int order) const {
    if (job.pass[0].data[order]) return &job.pass[0];
    return job.passes == 2 && job.pass[1].data[order] ? &job.pass[1] : nullptr;
  }
};

// The larger of two amaxes, as integers: a NaN wins.
__device__ __forceinline__ float larger_amax(float a, float b) { return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b))); }

// The whole tile with the arithmetic that knows every value. W as in tile.cuh: 8 of bfloat16, 4 of binary32.
template <int W>
__device__ __noinline__ void ring_carefully(const Encode& job, const Step* step, uint64_t row, uint64_t col, uint32_t steps, MixedStage& stage) {
#pragma unroll 1
  for (uint32_t s = 0; s < steps; ++s) {
    __syncthreads();
    encode_mixed_source<W>(job, step, row, col + s * TRANSPOSED_COLS, stage);
  }
}

}  // namespace lowp
