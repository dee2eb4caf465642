// AdamW over any number of parameters, in one launch: each element is updated once, and the new
// master values go on, in registers, to the amax and to the encode of their tile.
#include <lowp/adam.cuh>
#include <lowp/begin.cuh>
#include <lowp/encode.cuh>

namespace lowp {

// Updates the warp's 32 x 32 elements, all inside and aligned; the new master stays in `p`.
template <bool HALF_AVG, bool HALF_SQ, bool HALF_GRAD>
__device__ __forceinline__ void update_tile(const Adamw& job, const Adam& adam, const View& view, const Lane<4>& at,
                                            Values<4>& p) {
  constexpr int BATCH = 2;  // chunks of a thread that are in flight while as many are updated
  constexpr int ROUNDS = 8 / BATCH;
  uint64_t first = (at.row + at.local_row()) * view.cols + at.col + at.local_col();
  uint64_t master = job.master, exp_avg = job.exp_avg, exp_avg_sq = job.exp_avg_sq, grad = job.grad;
  Four<false> ps[2][BATCH];
  Four<HALF_AVG> ms[2][BATCH];
  Four<HALF_SQ> vs[2][BATCH];
  Four<HALF_GRAD> gs[2][BATCH];
  auto load = [&](int round) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      uint64_t e = first + (round * BATCH + i) * view.cols;
      ps[round % 2][i] = Four<false>::load(master, e);
      ms[round % 2][i] = Four<HALF_AVG>::load(exp_avg, e);
      vs[round % 2][i] = Four<HALF_SQ>::load(exp_avg_sq, e);
      gs[round % 2][i] = Four<HALF_GRAD>::load(grad, e);
    }
  };
  load(0);
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    if (round + 1 < ROUNDS) load(round + 1);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      uint64_t e = first + (round * BATCH + i) * view.cols;
      float4 q = ps[round % 2][i].values(), m = ms[round % 2][i].values();
      float4 v = vs[round % 2][i].values(), g = gs[round % 2][i].values();
      adam.update(q.x, m.x, v.x, g.x);
      adam.update(q.y, m.y, v.y, g.y);
      adam.update(q.z, m.z, v.z, g.z);
      adam.update(q.w, m.w, v.w, g.w);
      Four<false>::store(master, e, q);
      Four<HALF_AVG>::store(exp_avg, e, m);
      Four<HALF_SQ>::store(exp_avg_sq, e, v);
      p.set(round * BATCH + i, q);
    }
  }
}

// The same for the dtypes of a job, of which exp_avg_sq is bf16 only if exp_avg is: one branch for a tile, none for an element.
__device__ __forceinline__ void update_tile_of(const Adamw& job, const Adam& adam, const View& view, const Lane<4>& at,
                                               Values<4>& p) {
  const bool half_grad = job.grad_code == BF16;
  if (job.exp_avg_code == BF16) {
    if (job.exp_avg_sq_code == BF16) {
      half_grad ? update_tile<true, true, true>(job, adam, view, at, p) : update_tile<true, true, false>(job, adam, view, at, p);
    } else {
      half_grad ? update_tile<true, false, true>(job, adam, view, at, p) : update_tile<true, false, false>(job, adam, view, at, p);
    }
  } else {
    half_grad ? update_tile<false, false, true>(job, adam, view, at, p) : update_tile<false, false, false>(job, adam, view, at, p);
  }
}

// Stores a value in the dtype of `code`.
__device__ __forceinline__ void store_value(uint64_t base, uint8_t code, uint64_t e, float x) {
  if (code == BF16) {
    pointer<uint16_t>(base)[e] = narrow(x);
  } else {
    pointer<float>(base)[e] = x;
  }
}

// Updates one element and returns the new master value.
__device__ __noinline__ float update_one(const Adamw& job, const Adam& adam, uint64_t e) {
  float* master = pointer<float>(job.master) + e;
  float p = *master;
  float m = load_source(job.exp_avg, job.exp_avg_code, e), v = load_source(job.exp_avg_sq, job.exp_avg_sq_code, e);
  adam.update(p, m, v, load_source(job.grad, job.grad_code, e));
  *master = p;
  store_value(job.exp_avg, job.exp_avg_code, e, m);
  store_value(job.exp_avg_sq, job.exp_avg_sq_code, e, v);
  return p;
}

// Updates a rectangle element by element; returns the thread's amax of the new master.
__device__ __forceinline__ float update_any(const Adamw& job, const Adam& adam, const View& view, uint64_t row,
                                            uint64_t col, uint32_t rows, uint32_t cols) {
  float a = 0.0f;
  for (uint64_t e = threadIdx.x; e < uint64_t(rows) * cols; e += THREADS) {
    uint64_t r = row + e / cols, c = col + e % cols;
    if (view.holds(r, c)) a = max_abs(a, update_one(job, adam, r * view.cols + c));
  }
  return a;
}

// Raises the amaxes of the lines of a warp's 32 x 32 new masters.
__device__ __forceinline__ void raise_lines(const Adamw& job, const View& view, const Lane<4>& at, const Values<4>& v) {
  auto rounded = [&](float a) { return job.encode.via_bf16 ? round_bf16(a) : a; };
  float a[2];
  if (job.lines[0]) {
    v.row_blocks<32>(at.lane, a);
    uint64_t row = at.row + at.lane;
    if (row < view.rows && at.col < view.cols) raise(pointer<float>(job.lines[0]) + row, rounded(a[0]));
  }
  if (job.lines[1]) {
    v.column_blocks<32>(at.lane, a);
    uint64_t col = at.col + at.lane % 8 * 4 + at.lane / 8;
    if (at.row < view.rows && col < view.cols) raise(pointer<float>(job.lines[1]) + col, rounded(a[0]));
  }
}

// The same of a rectangle whose masters were updated by this block of threads; read again.
__device__ __noinline__ void raise_lines_apart(const Adamw& job, uint64_t row, uint64_t col, uint32_t rows, uint32_t cols) {
  __syncthreads();
  View view{job.encode.rows, job.encode.cols, job.len};
  for (uint32_t tile = threadIdx.x / 32; tile < (rows + 31) / 32 * ((cols + 31) / 32); tile += THREADS / 32) {
    uint32_t across = (cols + 31) / 32;
    Lane<4> at{threadIdx.x % 32, row + tile / across * 32, col + tile % across * 32};
    Values<4> v;
    v.gather([&](uint32_t r, uint32_t c) {
      bool mine = tile / across * 32 + r < rows && tile % across * 32 + c < cols && view.holds(at.row + r, at.col + c);
      return mine ? pointer<const float>(job.master)[(at.row + r) * view.cols + at.col + c] : 0.0f;
    }, at);
    raise_lines(job, view, at, v);
  }
}

// Updates a tile and encodes it; returns the thread's amax of the new master. LINES says that lines may have amaxes.
template <bool TRANSPOSED, bool LINES, Known KNOWN>
__device__ __forceinline__ float adamw_tiled(const Adamw& job, const Adam& adam, const View& view, uint32_t index,
                                             Stage<TRANSPOSED>& stage) {
  using Shape = Tiling<TRANSPOSED>;
  const Encode& encode = job.encode;
  uint32_t across = uint32_t(encode.tiles_across);
  uint64_t row = uint64_t(index / across) * Shape::ROWS, col = uint64_t(index % across) * Shape::COLS;
  Lane<4> at{threadIdx.x % 32, row + Shape::warp_row(), col + Shape::warp_col()};
  const auto place = Place<TRANSPOSED, false>::begin(encode, index, stage);
  bool vector = encode.vector & VECTOR_SOURCE;
  Values<4> v;
  float a = 0.0f;
  if (vector && view.holds_all(row, col, Shape::ROWS, Shape::COLS)) {
    update_tile_of(job, adam, view, at, v);
    if (job.amax) a = v.maximum();
    if (LINES && (job.lines[0] | job.lines[1])) raise_lines(job, view, at, v);
    if (encode.passes == 0) return a;
  } else {
    a = update_any(job, adam, view, row, col, Shape::ROWS, Shape::COLS);
    if (LINES && (job.lines[0] | job.lines[1])) raise_lines_apart(job, row, col, Shape::ROWS, Shape::COLS);
    if (encode.passes == 0) return a;
    __syncthreads();
    v.load(job.master, false, view, at);
  }
  place.hold_tensor(stage);
  if (encode.via_bf16) v.round();
  quantize<4, TRANSPOSED, KNOWN>(place, at.lane, v, stage);
  return a;
}

// Updates a tile of the paths whose encode reads the new masters again, while they are in cache; returns the thread's amax.
__device__ __forceinline__ float adamw_apart(const Adamw& job, const Adam& adam, const View& view, uint64_t row, uint64_t col,
                                             uint32_t rows, uint32_t cols) {
  bool vector = job.encode.vector & VECTOR_SOURCE;
  float a = 0.0f;
  // The warps of a block cover a whole tile of TRANSPOSED_ROWS x TRANSPOSED_COLS.
  if (vector && rows == TRANSPOSED_ROWS && cols % TRANSPOSED_COLS == 0 && view.holds_all(row, col, rows, cols)) {
#pragma unroll 1
    for (uint32_t left = 0; left < cols; left += TRANSPOSED_COLS) {
      Lane<4> at{threadIdx.x % 32, row + Tiling<true>::warp_row(), col + left + Tiling<true>::warp_col()};
      Values<4> v;
      update_tile_of(job, adam, view, at, v);
      if (job.amax) a = fmaxf(a, v.maximum());
    }
  } else {
    a = update_any(job, adam, view, row, col, rows, cols);
  }
  if (job.lines[0] | job.lines[1]) raise_lines_apart(job, row, col, rows, cols);
  __syncthreads();
  return a;
}

// Brings the job of a later block to the cache, where jobs are small and many: those of a run lie in memory since the last.
// About as many blocks later as a device has in work at a time.
__device__ __forceinline__ void prefetch_job(const Tile* tiles, const Adamw* jobs) {
  constexpr uint32_t LATER = 264, LINE = 128;
  static_assert(sizeof(Adamw) % LINE == 0);
  uint32_t later = blockIdx.x + LATER;
  if (threadIdx.x >= sizeof(Adamw) / LINE || later >= gridDim.x) return;
  const uint8_t* from = reinterpret_cast<const uint8_t*>(jobs + tiles[later].job) + threadIdx.x * LINE;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// The matrix of a job, or its run of elements as one.
__device__ __forceinline__ View view_of(const Adamw& job) {
  const Encode& encode = job.encode;
  return encode.path == PATH_FLAT ? View{cdiv(job.len, FLAT_COLS), FLAT_COLS, job.len} : View{encode.rows, encode.cols, job.len};
}

// A tile of PATH_WIDE (or PATH_FLAT), or of PATH_TRANSPOSED.
template <bool TRANSPOSED, bool LINES, Known KNOWN>
__device__ __forceinline__ float adamw_whole(const Adamw& job, const Adam& adam, uint32_t index, Stage<TRANSPOSED>& stage) {
  float a = adamw_tiled<TRANSPOSED, LINES, KNOWN>(job, adam, view_of(job), index, stage);
  if (job.encode.forms) forms_apart(stage);
  return a;
}

// A tile of any other path.
__device__ __forceinline__ float adamw_other(const Adamw& job, const Step* step, const Adam& adam, uint32_t index, EncodeMemory& shared) {
  const Encode& encode = job.encode;
  const View view = view_of(job);
  uint32_t across = uint32_t(encode.tiles_across);
  uint64_t row = uint64_t(index / across) * encode.tile_rows, col = uint64_t(index % across) * encode.tile_cols;
  uint32_t rows = uint32_t(min(uint64_t(encode.tile_rows), view.rows - row));
  uint32_t cols = uint32_t(min(uint64_t(encode.tile_cols), view.cols - col));
  float a = adamw_apart(job, adam, view, row, col, rows, cols);
  if (encode.path == PATH_MIXED) {
    mixed_apart<4>(encode, step, index, shared.mixed);
  } else if (encode.path == PATH_BLOCKS) {
    blocks_apart<4>(encode, index, shared.blocks);
  } else {
    encode_generic(encode, step, index, shared.multipliers);
  }
  return a;
}

// What follows the tiles: scales of the tensor or its lines, and the amax of the new masters, of which each thread has `a`.
__device__ __forceinline__ void finish(const Adamw& job, uint32_t index, float a) {
  const Encode& encode = job.encode;
  if (index == 0) outers_apart(encode);
  if (job.amax && job.len != 0) {
    __syncthreads();
    a = block_max(a);
    if (threadIdx.x == 0) raise(pointer<float>(job.amax), encode.via_bf16 ? round_bf16(a) : a);
  }
}

}  // namespace lowp

using namespace lowp;

// Any jobs.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ADAMW)
    lowp_adamw(const Tile* __restrict__ tiles, const Adamw* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ EncodeMemory shared;
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Adamw& job = jobs[tile.job];
  const Adam adam = Adam::of(step, job.group, job.l2);
  const uint8_t path = job.encode.path;
  float a = 0.0f;
  if (job.len == 0) {
    // Nothing but scales of the tensor or its lines.
  } else if (path == PATH_WIDE || path == PATH_FLAT) {
    a = adamw_whole<false, true, Known::NOTHING>(job, adam, tile.index, shared.wide);
  } else if (path == PATH_TRANSPOSED) {
    a = adamw_whole<true, true, Known::NOTHING>(job, adam, tile.index, shared.transposed);
  } else {
    a = adamw_other(job, step, adam, tile.index, shared);
  }
  finish(job, tile.index, a);
}

// Launches of one kind of jobs without amaxes of lines, each with the registers that it needs and no more.

// Jobs of PATH_WIDE and PATH_FLAT.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ADAMW_WIDE)
    lowp_adamw_wide(const Tile* __restrict__ tiles, const Adamw* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ Stage<false> stage;
  prefetch_job(tiles, jobs);
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Adamw& job = jobs[tile.job];
  const Adam adam = Adam::of(step, job.group, job.l2);
  finish(job, tile.index, job.len == 0 ? 0.0f : adamw_whole<false, false, Known::NOTHING>(job, adam, tile.index, stage));
}

// Other jobs of PATH_TRANSPOSED.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ADAMW_TRANSPOSED)
    lowp_adamw_transposed(const Tile* __restrict__ tiles, const Adamw* __restrict__ jobs, const Step* __restrict__ step,
                          uint32_t flags) {
  __shared__ Stage<true> stage;
  prefetch_job(tiles, jobs);
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Adamw& job = jobs[tile.job];
  const Adam adam = Adam::of(step, job.group, job.l2);
  finish(job, tile.index, job.len == 0 ? 0.0f : adamw_whole<true, false, Known::NO_E8M0>(job, adam, tile.index, stage));
}

// MXFP4 of PATH_TRANSPOSED.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ADAMW_TRANSPOSED)
    lowp_adamw_e8m0_fp4(const Tile* __restrict__ tiles, const Adamw* __restrict__ jobs, const Step* __restrict__ step,
                     uint32_t flags) {
  __shared__ Stage<true> stage;
  prefetch_job(tiles, jobs);
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Adamw& job = jobs[tile.job];
  const Adam adam = Adam::of(step, job.group, job.l2);
  finish(job, tile.index, job.len == 0 ? 0.0f : adamw_whole<true, false, Known::E8M0>(job, adam, tile.index, stage));
}

// Jobs of the other paths.
extern "C" __global__ void __launch_bounds__(THREADS, resident::ADAMW_OTHER)
    lowp_adamw_other(const Tile* __restrict__ tiles, const Adamw* __restrict__ jobs, const Step* __restrict__ step, uint32_t flags) {
  __shared__ EncodeMemory shared;
  prefetch_job(tiles, jobs);
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Adamw& job = jobs[tile.job];
  const Adam adam = Adam::of(step, job.group, job.l2);
  finish(job, tile.index, job.len == 0 ? 0.0f : adamw_other(job, step, adam, tile.index, shared));
}
