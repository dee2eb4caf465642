// Encodes of binary32 through a ring of tiles of 128 x 32, or of 32 x 128, which have the bytes of those of bfloat16 (ring.cuh, ring_wide.cuh): a
// thread has a run of 16 values of a row, and 16 rows of a column. Blocks of 16 lie within a thread, blocks of 32 within two.
#pragma once
#include <lowp/ring_fp4.cuh>
#include <lowp/ring_fp8.cuh>
#include <lowp/ring_wide.cuh>

namespace lowp {

constexpr uint32_t F32_RING_COLS = TRANSPOSED_COLS / 2, F32_WIDE_COLS = WIDE_COLS / 2;  // of a step

// The larger magnitude, where a NaN wins; the sign is any.
__device__ __forceinline__ float larger_magnitude(float a, float b) {
  float y;
#if LOWP_MAX_MAGNITUDE
  asm("max.NaN.xorsign.abs.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
#else
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(fabsf(a)), "f"(fabsf(b)));
#endif
  return y;
}

// 16 values of a row or of a column.
struct Sixteen {
  float x[16];
  // The largest magnitude; NaN where there is one.
  __device__ __forceinline__ float amax() const { return fabsf(largest_by(larger_magnitude)); }
  // The same, where NaNs lose to all else.
  __device__ __forceinline__ float largest() const {
    return fmaxf(largest_by([](float a, float b) { return fmaxf(fabsf(a), fabsf(b)); }), 0.0f);
  }
  template <typename Larger>
  __device__ __forceinline__ float largest_by(Larger larger) const {
    float a[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) a[i] = larger(x[i], x[i + 8]);
#pragma unroll
    for (int n = 4; n >= 1; n /= 2) {
#pragma unroll
      for (int i = 0; i < n; ++i) a[i] = larger(a[i], a[i + n]);
    }
    return a[0];
  }
  // 16 floats in four chunks of 16 bytes, of which chunk i is at `from ^ i * 16` of `bytes`.
  static __device__ __forceinline__ Sixteen read(const void* bytes, uint32_t from) {
    Sixteen v;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const float4 four = *reinterpret_cast<const float4*>(static_cast<const uint8_t*>(bytes) + (from ^ i * 16));
      v.x[4 * i] = four.x, v.x[4 * i + 1] = four.y, v.x[4 * i + 2] = four.z, v.x[4 * i + 3] = four.w;
    }
    return v;
  }
};

// Their codes of E2M1, times what their block has: of any kind of block.
template <bool CLAMP, typename Kind>
__device__ __forceinline__ uint2 run_codes(const Kind&, const Sixteen& v, float m, Nearest) {
  return make_uint2(codes_of_eight<CLAMP>(v.x, m), codes_of_eight<CLAMP>(v.x + 8, m));
}

// The run of a thread. A warp has those of 16 rows.
struct SixteenOfRow {
  uint32_t at;
  static __device__ __forceinline__ uint32_t row() { return threadIdx.x / 2; }
  static __device__ __forceinline__ uint32_t column() { return threadIdx.x % 2 * 16; }
  __device__ __forceinline__ SixteenOfRow() : at(kept(ring_place(row(), column() / 4))) {}
  __device__ __forceinline__ Sixteen read(const uint8_t* tile) const { return Sixteen::read(tile, at); }
};

// 16 rows of a column of a thread. Eight threads have the column, a warp four columns.
struct SixteenOfColumn {
  uint32_t at;
  static __device__ __forceinline__ uint32_t row() { return threadIdx.x % 8 * 16; }
  static __device__ __forceinline__ uint32_t column() { return threadIdx.x / 8; }
  __device__ __forceinline__ SixteenOfColumn() : at(kept(ring_place(row(), column() / 4) + column() % 4 * 4)) {}
  __device__ __forceinline__ Sixteen read(const uint8_t* tile) const {
    Sixteen v;
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) v.x[i] = *reinterpret_cast<const float*>(tile + (at ^ i % 8 * 16) + i * 128);
    return v;
  }
};

// Codes of FP8 of values times what `m(k)` gives for value k.
template <typename E, typename At>
__device__ __forceinline__ uint4 sixteen_codes8(const Sixteen& v, At m) {
  uint32_t out[4];
  auto at = [&](int k) { return __fmul_rn(v.x[k], m(k)); };
#pragma unroll
  for (int k = 0; k < 4; ++k) out[k] = four_codes<E>(at(4 * k), at(4 * k + 1), at(4 * k + 2), at(4 * k + 3));
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Calls `work(tile, step)` for each step of a tile.
template <int STAGES, typename Work>
__device__ __forceinline__ void through_f32_ring(Ring<STAGES>& ring, const RingTile& tile, Work work) {
  const uint64_t pitch = 4 * tile.job.cols;
  through_ring(ring, tile.job.source + tile.row * pitch + 4 * tile.col, pitch, 2 * tile.steps, work);
}

// FP8 of scales of the tensor, its rows or its columns.
template <typename E, int STAGES>
__device__ __forceinline__ void ring_f32_fp8(const RingTile& tile, RingMemory<STAGES>& shared) {
  const Encode& job = tile.job;
  const Pass *rows = tile.filling(0), *columns = tile.filling(1);
  float of_row = 0.0f;
  if (rows) of_row = tensor_value(rows->ingredients, outer_entry(rows->ingredients, tile.row + SixteenOfRow::row(), 0));
  float* of_columns = shared.multipliers;
  if (columns) {
    uint64_t col = min(tile.col + threadIdx.x, job.cols - 1);
    of_columns[threadIdx.x] = tensor_value(columns->ingredients, outer_entry(columns->ingredients, 0, col));
  }
  const uint64_t lines = job.rows;
  const uint64_t to_rows = rows ? rows->data[0] + (tile.row + SixteenOfRow::row()) * job.cols + tile.col + SixteenOfRow::column() : 0;
  const uint64_t to_columns = columns ? columns->data[1] + (tile.col + SixteenOfColumn::column()) * lines + tile.row + SixteenOfColumn::row() : 0;
  const SixteenOfRow runs;
  const SixteenOfColumn column;
  through_f32_ring(shared.ring, tile, [&](const uint8_t* values, uint32_t s) {
    if (to_rows) store16_part(pointer<uint8_t>(to_rows + s * F32_RING_COLS), sixteen_codes8<E>(runs.read(values), [&](int) { return of_row; }));
    if (to_columns) {
      const float m = of_columns[s * F32_RING_COLS + SixteenOfColumn::column()];
      store16_part(pointer<uint8_t>(to_columns + s * F32_RING_COLS * lines), sixteen_codes8<E>(column.read(values), [&](int) { return m; }));
    }
  });
}

// The codes of two steps of a row as whole sectors: of 16 bytes of each step, the first of two threads takes those of the first step, and the
// other those of the second.
__device__ __forceinline__ uint4 whole_sectors(const uint2& first, const uint2& second) {
  const bool upper = threadIdx.x % 2;
  const uint2 mine = upper ? second : first, sent = upper ? first : second;
  const uint2 got = make_uint2(__shfl_xor_sync(FULL_WARP, sent.x, 1), __shfl_xor_sync(FULL_WARP, sent.y, 1));
  return upper ? make_uint4(got.x, got.y, mine.x, mine.y) : make_uint4(mine.x, mine.y, got.x, got.y);
}

// E2M1 of blocks of a row and MXFP8 of blocks of a column, both row-major.
template <typename Kind, int STAGES>
__device__ __forceinline__ void ring_f32_fp4_fp8(const RingTile& tile, const Step* step, RingMemory<STAGES>& shared) {
  const Encode& job = tile.job;
  const Pass &rows = job.pass[0], &columns = job.pass[1];
  const uint64_t first = (tile.row + SixteenOfRow::row()) * job.cols + tile.col + SixteenOfRow::column();
  // The rows of two steps are stored at once.
  const uint64_t to_rows = rows.data[0] + ((tile.row + SixteenOfRow::row()) * job.cols + tile.col) / 2 + threadIdx.x % 2 * 16;
  const uint64_t to_columns = columns.data[0] + first;
  uint2 before = make_uint2(0, 0);
  const auto rule = PowerOfTwo<false>::of(columns.ingredients);
  const Kind kind = Kind::of(rows.ingredients, shared.multipliers);
  const SixteenOfRow runs;
  const SixteenOfColumn column;
  uint32_t worst = 0;
  through_f32_ring(shared.ring, tile, [&](const uint8_t* values, uint32_t s) {
    float amax = column.read(values).amax();
    amax = larger_amax(amax, __shfl_xor_sync(FULL_WARP, amax, 1));
    worst = max(worst, __float_as_uint(amax));
    const Scaled block = rule.block(amax, 0, 0);
    const uint32_t block_row = SixteenOfColumn::row() / 32;
    // Two threads have a block.
    shared.of_columns[block_row][SixteenOfColumn::column()] = block.multiplier;
    shared.scales[1][block_row * RING_COLS + s * F32_RING_COLS + SixteenOfColumn::column()] = uint8_t(block.entry);
    __syncthreads();
    const Sixteen v = runs.read(values);
    uint2 codes;
    uint32_t entry = ring_run(kind, v, Nearest{}, worst, codes);
    if (s % 2) store16_part(pointer<uint8_t>(to_rows + s / 2 * F32_RING_COLS), whole_sectors(before, codes));
    before = codes;
    shared.scales[0][(SixteenOfRow::row() * RING_COLS + s * F32_RING_COLS + SixteenOfRow::column()) / Kind::SIDE] = uint8_t(entry);
    const Sixteen m = Sixteen::read(shared.of_columns[SixteenOfRow::row() / 32], 4 * SixteenOfRow::column());
    store16_part(pointer<uint8_t>(to_columns + s * F32_RING_COLS), sixteen_codes8<E4m3>(v, [&](int k) { return m.x[k]; }));
  });
  if (__syncthreads_or(worst >= 0x7F800000u)) return ring_carefully<4>(job, step, tile.row, tile.col, tile.steps, shared.mixed);
  const View view{job.rows, job.cols, 0};
  store_scales<true>(rows, view, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[0], RING_COLS);
  store_scales<true>(columns, view, tile.row, tile.col, TRANSPOSED_ROWS, tile.width, shared.scales[1], RING_COLS);
}

// MXFP8 of blocks of a row and of blocks of a column, both row-major, in tiles of 32 x 128.
template <typename E>
__device__ __forceinline__ void ring_f32_wide(const Encode& job, uint32_t index, WideRing& shared) {
  const uint32_t across = uint32_t(job.tiles_across), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint64_t row = uint64_t(index / across) * WIDE_ROWS, col = uint64_t(index % across) * job.tile_cols, pitch = job.cols;
  const uint32_t steps = uint32_t(min(uint64_t(job.tile_cols), job.cols - col) / F32_WIDE_COLS);
  const auto rule = PowerOfTwo<false>::of(job.pass[0].ingredients);

  const uint32_t run_row = threadIdx.x / 8, run_col = threadIdx.x % 8 * 16, run_at = kept(wide_place(run_row, run_col / 4));
  // A half of a warp has the upper rows of 16 columns, the other the lower ones.
  const uint32_t half = lane / 16, column = warp * 16 + lane % 16, column_at = kept(wide_place(half * 16, column / 4) + column % 4 * 4);
  // Multipliers lie as values of the first row do.
  uint8_t* multipliers = reinterpret_cast<uint8_t*>(shared.of_columns);
  const uint32_t multiplier_at = wide_place(0, column / 4) + column % 4 * 4;
  const uint64_t first = (row + run_row) * pitch + col + run_col;
  const uint64_t to_rows = job.pass[0].data[0] + first, to_columns = job.pass[1].data[0] + first;

  through_wide(shared, job.source + 4 * (row * pitch + col), 4 * pitch, steps, [&](const uint8_t* tile, uint32_t s) {
    Sixteen v;
#pragma unroll
    for (int i = 0; i < 16; ++i) v.x[i] = *reinterpret_cast<const float*>(tile + column_at + i * WIDE_RING_PITCH);
    float a = v.largest();
    a = fmaxf(a, __shfl_xor_sync(FULL_WARP, a, 16));
    // Two threads have a block.
    Scaled block = rule.block(a, 0, 0);
    *reinterpret_cast<float*>(multipliers + multiplier_at) = block.multiplier;
    shared.scales[1][s * F32_WIDE_COLS + column] = uint8_t(block.entry);

    v = Sixteen::read(tile, run_at);
    a = v.largest();
    a = fmaxf(a, __shfl_xor_sync(FULL_WARP, a, 1));
    block = rule.block(a, 0, 0);
    shared.scales[0][run_row * (WIDE_RING_COLS / 32) + (s * F32_WIDE_COLS + run_col) / 32] = uint8_t(block.entry);
    store16_part(pointer<uint8_t>(to_rows + s * F32_WIDE_COLS), sixteen_codes8<E>(v, [&](int) { return block.multiplier; }));
    // The multipliers of all columns are there.
    __syncthreads();
    const Sixteen m = Sixteen::read(multipliers, wide_place(0, run_col / 4));
    store16_part(pointer<uint8_t>(to_columns + s * F32_WIDE_COLS), sixteen_codes8<E>(v, [&](int k) { return m.x[k]; }));
  });
  __syncthreads();
  const View view{job.rows, job.cols, 0};
#pragma unroll 1
  for (uint32_t p = 0; p < 2; ++p) {
    store_scales<false>(job.pass[p], view, row, col, WIDE_ROWS, job.tile_cols, shared.scales[p], WIDE_RING_COLS);
  }
}

}  // namespace lowp
