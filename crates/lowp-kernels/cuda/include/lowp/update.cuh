// Updates of any number of parameters by the rules of optimizers, in one launch: each element is updated once, and the new master
// values go on, in registers, to the amax and to the encode of their tile.
//
// What is written here for a rule R is compiled once for each set of kernels: AdamW with Adam with L2 (adamw.cu), all other rules
// (update.cu), and all rules where values are rounded by random bits (update_stored.cu, lowp/stored.cuh). So there are five kernels of each
// of the first two and three of the third, thirteen whatever the number of rules. A set of rules has
//   R::of(step, job)                        its scalars,
//   update_tile_of(job, r, view, at, p)     the tile of a warp by the rule and the dtypes of the job,
//   update_one_of(job, r, e)                one element.
// The third set has only the second of these: its kernels make its rules, and update_any and update_apart of its own update tiles that are not whole.
#pragma once
#include <lowp/begin.cuh>
#include <lowp/encode.cuh>
#include <lowp/memory.cuh>

namespace lowp {

// The scalars of the group of a job.
__device__ __forceinline__ GroupScalars group_of(const Step* step, const Update& job) {
  return reinterpret_cast<const GroupScalars*>(step + 1)[job.group];
}

// Four stored values, as they are in memory: 16 bytes of binary32 or 8 of bfloat16.
template <bool HALF>
struct Four;

template <>
struct Four<false> {
  uint4 raw;
  static __device__ __forceinline__ Four load(uint64_t base, uint64_t index) {
    return {load16_run(pointer<const float>(base) + index)};
  }
  __device__ __forceinline__ float4 values() const { return as_floats(raw); }
  static __device__ __forceinline__ void store(uint64_t base, uint64_t index, float4 v) {
    store16(pointer<float>(base) + index, as_bits(v));
  }
};

template <>
struct Four<true> {
  uint2 raw;
  static __device__ __forceinline__ Four load(uint64_t base, uint64_t index) {
    return {load8(pointer<const uint16_t>(base) + index)};
  }
  __device__ __forceinline__ float4 values() const {
    return make_float4(widen_low(raw.x), widen_high(raw.x), widen_low(raw.y), widen_high(raw.y));
  }
  static __device__ __forceinline__ void store(uint64_t base, uint64_t index, float4 v) {
    store8(pointer<uint16_t>(base) + index, make_uint2(narrow_pair(v.x, v.y), narrow_pair(v.z, v.w)));
  }
};

// Updates the warp's 32 x 32 elements, all inside and aligned, by one rule; the new master stays in `p`. States that the rule does not
// have are not touched.
template <bool HALF_FIRST, bool HALF_SECOND, bool HALF_GRAD, class R>
__device__ __forceinline__ void update_tile(const Update& job, const R& rule, const View& view, const Lane<4>& at, Values<4>& p) {
  constexpr int BATCH = 2;  // chunks of a thread that are in flight while as many are updated
  constexpr int ROUNDS = 8 / BATCH;
  uint64_t from = (at.row + at.local_row()) * view.cols + at.col + at.local_col();
  uint64_t master = job.master, first = job.states[0], second = job.states[1], grad = job.grad;
  Four<false> ps[2][BATCH];
  Four<HALF_FIRST> ms[2][BATCH];
  Four<HALF_SECOND> vs[2][BATCH];
  Four<HALF_GRAD> gs[2][BATCH];
  auto load = [&](int round) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      uint64_t e = from + (round * BATCH + i) * view.cols;
      ps[round % 2][i] = Four<false>::load(master, e);
      if constexpr (R::STATES > 0) ms[round % 2][i] = Four<HALF_FIRST>::load(first, e);
      if constexpr (R::STATES > 1) vs[round % 2][i] = Four<HALF_SECOND>::load(second, e);
      gs[round % 2][i] = Four<HALF_GRAD>::load(grad, e);
    }
  };
  load(0);
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    if (round + 1 < ROUNDS) load(round + 1);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      uint64_t e = from + (round * BATCH + i) * view.cols;
      float4 q = ps[round % 2][i].values(), m = {}, v = {};
      if constexpr (R::STATES > 0) m = ms[round % 2][i].values();
      if constexpr (R::STATES > 1) v = vs[round % 2][i].values();
      float4 g = gs[round % 2][i].values();
      rule.update(q.x, m.x, v.x, g.x);
      rule.update(q.y, m.y, v.y, g.y);
      rule.update(q.z, m.z, v.z, g.z);
      rule.update(q.w, m.w, v.w, g.w);
      Four<false>::store(master, e, q);
      if constexpr (R::STATES > 0) Four<HALF_FIRST>::store(first, e, m);
      if constexpr (R::STATES > 1) Four<HALF_SECOND>::store(second, e, v);
      p.set(round * BATCH + i, q);
    }
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

// Updates one element by one rule and returns the new master value.
template <class R>
__device__ __noinline__ float update_one(const Update& job, const R& rule, uint64_t e) {
  float* master = pointer<float>(job.master) + e;
  float p = *master, m = 0.0f, v = 0.0f;
  if constexpr (R::STATES > 0) m = load_source(job.states[0], job.state_codes[0], e);
  if constexpr (R::STATES > 1) v = load_source(job.states[1], job.state_codes[1], e);
  rule.update(p, m, v, load_source(job.grad, job.grad_code, e));
  *master = p;
  if constexpr (R::STATES > 0) store_value(job.states[0], job.state_codes[0], e, m);
  if constexpr (R::STATES > 1) store_value(job.states[1], job.state_codes[1], e, v);
  return p;
}

// Updates a rectangle element by element; returns the thread's amax of the new master.
template <class R>
__device__ __forceinline__ float update_any(const Update& job, const R& rules, const View& view, uint64_t row,
                                            uint64_t col, uint32_t rows, uint32_t cols) {
  float a = 0.0f;
  for (uint64_t e = threadIdx.x; e < uint64_t(rows) * cols; e += THREADS) {
    uint64_t r = row + e / cols, c = col + e % cols;
    if (view.holds(r, c)) a = max_abs(a, update_one_of(job, rules, r * view.cols + c));
  }
  return a;
}

// Whether masters of jobs by R may be bf16; those of adamw.cu and update.cu are f32.
template <class R>
constexpr bool HALF_MASTERS = false;

// The master of element `e`.
template <bool HALF>
__device__ __forceinline__ float master_at(const Update& job, uint64_t e) {
  if constexpr (HALF) return load_source(job.master, job.encode.source_code, e);
  return pointer<const float>(job.master)[e];
}

// Raises the amaxes of the lines of a warp's 32 x 32 new masters.
__device__ __forceinline__ void raise_lines(const Update& job, const View& view, const Lane<4>& at, const Values<4>& v) {
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
template <bool HALF>
__device__ __noinline__ void raise_lines_apart(const Update& job, uint64_t row, uint64_t col, uint32_t rows, uint32_t cols) {
  __syncthreads();
  View view{job.encode.rows, job.encode.cols, job.len};
  for (uint32_t tile = threadIdx.x / 32; tile < (rows + 31) / 32 * ((cols + 31) / 32); tile += THREADS / 32) {
    uint32_t across = (cols + 31) / 32;
    Lane<4> at{threadIdx.x % 32, row + tile / across * 32, col + tile % across * 32};
    Values<4> v;
    v.gather([&](uint32_t r, uint32_t c) {
      bool mine = tile / across * 32 + r < rows && tile % across * 32 + c < cols && view.holds(at.row + r, at.col + c);
      return mine ? master_at<HALF>(job, (at.row + r) * view.cols + at.col + c) : 0.0f;
    }, at);
    raise_lines(job, view, at, v);
  }
}

// Updates a tile and encodes it; returns the thread's amax of the new master. LINES says that lines may have amaxes.
template <bool TRANSPOSED, bool LINES, Known KNOWN, class R>
__device__ __forceinline__ float update_tiled(const Update& job, const R& rules, const View& view, uint32_t index,
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
    update_tile_of(job, rules, view, at, v);
    if (job.amax) a = v.maximum();
    if (LINES && (job.lines[0] | job.lines[1])) raise_lines(job, view, at, v);
    if (encode.passes == 0) return a;
  } else {
    a = update_any(job, rules, view, row, col, Shape::ROWS, Shape::COLS);
    if (LINES && (job.lines[0] | job.lines[1])) raise_lines_apart<HALF_MASTERS<R>>(job, row, col, Shape::ROWS, Shape::COLS);
    if (encode.passes == 0) return a;
    __syncthreads();
    if constexpr (HALF_MASTERS<R>) {
      v.gather([&](uint32_t r, uint32_t c) {
        return view.holds(at.row + r, at.col + c) ? master_at<true>(job, (at.row + r) * view.cols + at.col + c) : 0.0f;
      }, at);
    } else {
      v.load(job.master, false, view, at);
    }
  }
  place.hold_tensor(stage);
  if (encode.via_bf16) v.round();
  quantize<4, TRANSPOSED, KNOWN>(place, at.lane, v, stage);
  return a;
}

// Updates a tile of the paths whose encode reads the new masters again, while they are in cache; returns the thread's amax.
template <class R>
__device__ __forceinline__ float update_apart(const Update& job, const R& rules, const View& view, uint64_t row, uint64_t col,
                                             uint32_t rows, uint32_t cols) {
  bool vector = job.encode.vector & VECTOR_SOURCE;
  float a = 0.0f;
  // The warps of a block cover a whole tile of TRANSPOSED_ROWS x TRANSPOSED_COLS.
  if (vector && rows == TRANSPOSED_ROWS && cols % TRANSPOSED_COLS == 0 && view.holds_all(row, col, rows, cols)) {
#pragma unroll 1
    for (uint32_t left = 0; left < cols; left += TRANSPOSED_COLS) {
      Lane<4> at{threadIdx.x % 32, row + Tiling<true>::warp_row(), col + left + Tiling<true>::warp_col()};
      Values<4> v;
      update_tile_of(job, rules, view, at, v);
      if (job.amax) a = fmaxf(a, v.maximum());
    }
  } else {
    a = update_any(job, rules, view, row, col, rows, cols);
  }
  if (job.lines[0] | job.lines[1]) raise_lines_apart<HALF_MASTERS<R>>(job, row, col, rows, cols);
  __syncthreads();
  return a;
}

// Brings the job of a later block to the cache, where jobs are small and many: those of a run lie in memory since the last.
// About as many blocks later as a device has in work at a time.
template <class Job>
__device__ __forceinline__ void prefetch_job(const Tile* tiles, const Job* jobs) {
  constexpr uint32_t LATER = 264, LINE = 128;
  static_assert(sizeof(Job) % LINE == 0);
  uint32_t later = blockIdx.x + LATER;
  if (threadIdx.x >= sizeof(Job) / LINE || later >= gridDim.x) return;
  const uint8_t* from = reinterpret_cast<const uint8_t*>(jobs + tiles[later].job) + threadIdx.x * LINE;
  asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
}

// The matrix of a job, or its run of elements as one.
__device__ __forceinline__ View view_of(const Update& job) {
  const Encode& encode = job.encode;
  return encode.path == PATH_FLAT ? View{cdiv(job.len, FLAT_COLS), FLAT_COLS, job.len} : View{encode.rows, encode.cols, job.len};
}

// A tile of PATH_WIDE (or PATH_FLAT), or of PATH_TRANSPOSED.
template <bool TRANSPOSED, bool LINES, Known KNOWN, class R>
__device__ __forceinline__ float update_whole(const Update& job, const R& rules, uint32_t index, Stage<TRANSPOSED>& stage) {
  float a = update_tiled<TRANSPOSED, LINES, KNOWN>(job, rules, view_of(job), index, stage);
  if (job.encode.forms) forms_apart(stage);
  return a;
}

// A tile of any other path.
template <class R>
__device__ __forceinline__ float update_other(const Update& job, const Step* step, const R& rules, uint32_t index, EncodeMemory& shared) {
  const Encode& encode = job.encode;
  const View view = view_of(job);
  uint32_t across = uint32_t(encode.tiles_across);
  uint64_t row = uint64_t(index / across) * encode.tile_rows, col = uint64_t(index % across) * encode.tile_cols;
  uint32_t rows = uint32_t(min(uint64_t(encode.tile_rows), view.rows - row));
  uint32_t cols = uint32_t(min(uint64_t(encode.tile_cols), view.cols - col));
  float a = update_apart(job, rules, view, row, col, rows, cols);
  if (HALF_MASTERS<R> && encode.source_code == BF16 && encode.path == PATH_MIXED) {
    mixed_apart<8>(encode, step, index, shared.mixed);
  } else if (HALF_MASTERS<R> && encode.source_code == BF16 && encode.path == PATH_BLOCKS) {
    blocks_apart<8>(encode, index, shared.blocks);
  } else if (encode.path == PATH_MIXED) {
    mixed_apart<4>(encode, step, index, shared.mixed);
  } else if (encode.path == PATH_BLOCKS) {
    blocks_apart<4>(encode, index, shared.blocks);
  } else {
    encode_generic(encode, step, index, shared.multipliers);
  }
  return a;
}

// What follows the tiles: scales of the tensor or its lines, and the amax of the new masters, of which each thread has `a`.
__device__ __forceinline__ void finish(const Update& job, uint32_t index, float a) {
  const Encode& encode = job.encode;
  if (index == 0) outers_apart(encode);
  if (job.amax && job.len != 0) {
    __syncthreads();
    a = block_max(a);
    if (threadIdx.x == 0) raise(pointer<float>(job.amax), encode.via_bf16 ? round_bf16(a) : a);
  }
}

// A block of a launch of any jobs.
template <class R>
__device__ __forceinline__ void update_jobs(const Tile* tiles, const Update* jobs, const Step* step, uint32_t flags,
                                            EncodeMemory& shared) {
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Update& job = jobs[tile.job];
  const R rules = R::of(step, job);
  const uint8_t path = job.encode.path;
  float a = 0.0f;
  if (job.len == 0) {
    // Nothing but scales of the tensor or its lines.
  } else if (path == PATH_WIDE || path == PATH_FLAT) {
    a = update_whole<false, true, Known::NOTHING>(job, rules, tile.index, shared.wide);
  } else if (path == PATH_TRANSPOSED) {
    a = update_whole<true, true, Known::NOTHING>(job, rules, tile.index, shared.transposed);
  } else {
    a = update_other(job, step, rules, tile.index, shared);
  }
  finish(job, tile.index, a);
}

// A block of a launch of jobs of one path without amaxes of lines: PATH_WIDE and PATH_FLAT, or PATH_TRANSPOSED.
template <class R, bool TRANSPOSED, Known KNOWN>
__device__ __forceinline__ void update_path(const Tile* tiles, const Update* jobs, const Step* step, uint32_t flags,
                                            Stage<TRANSPOSED>& stage) {
  prefetch_job(tiles, jobs);
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Update& job = jobs[tile.job];
  const R rules = R::of(step, job);
  finish(job, tile.index, job.len == 0 ? 0.0f : update_whole<TRANSPOSED, false, KNOWN>(job, rules, tile.index, stage));
}

// The same of the other paths.
template <class R>
__device__ __forceinline__ void update_other_paths(const Tile* tiles, const Update* jobs, const Step* step, uint32_t flags,
                                                   EncodeMemory& shared) {
  prefetch_job(tiles, jobs);
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const Update& job = jobs[tile.job];
  const R rules = R::of(step, job);
  finish(job, tile.index, job.len == 0 ? 0.0f : update_other(job, step, rules, tile.index, shared));
}

}  // namespace lowp
