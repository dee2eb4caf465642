// Updates of masters and states as they are stored: states in fp8, masters in bf16 or in two halves, and any other dtypes beside them
// (numerics 23).
//
// A block of states is 32 consecutive elements of the job, from a multiple of 32 on. The host gives such jobs matrices and tiles whose
// columns are a multiple of 32, or runs of elements: so the eight lanes of a row of a warp's tile have one block.
#pragma once
#include <lowp/philox.cuh>
#include <lowp/rule/adam_four.cuh>
#include <lowp/rule/others.cuh>
#include <lowp/state_code.cuh>

namespace lowp {

// The random words of the elements of a job.
struct RandomWords {
  const StoredUpdate& job;
  Philox philox;

  static __device__ __forceinline__ RandomWords of(const Step* step, const StoredUpdate& job) {
    return {job, {job.seed, job.stream + (step->random_step << 32)}};
  }
  // Where element `e` of the job lies in the flattened matrix.
  __device__ __forceinline__ uint64_t place(uint64_t e) const {
    uint64_t at = job.first + e;
    if (job.tile_cols == 0) return at;
    uint64_t line = at / job.tile_cols, col = at % job.tile_cols, tile = line / job.tile_rows;
    uint64_t row = tile / job.tiles_across * job.tile_rows + line % job.tile_rows;
    return (row * job.tiles_across + tile % job.tiles_across) * job.tile_cols + col;
  }
  __device__ __forceinline__ uint32_t one(uint64_t e) const {
    uint64_t at = place(e);
    return word(philox.block(at / 4), int(at % 4));
  }
};

// Philox with the keys of its rounds in shared memory: registers are for values, and it would take an addition to make each key again.
struct SharedPhilox {
  uint32_t keys;  // where those of the warp are
  uint64_t stream;

  static __device__ __forceinline__ SharedPhilox of(const Philox& philox) {
    constexpr uint32_t WORDS = 20;  // two of each round
    __shared__ __align__(16) uint32_t all[THREADS / 32][WORDS];
    uint32_t* mine = all[threadIdx.x / 32];
    uint32_t at = threadIdx.x % 32;
    __syncwarp();  // no lane reads the keys of the tile before any more
    if (at < WORDS) {
      mine[at] = at % 2 ? uint32_t(philox.seed >> 32) + at / 2 * 0xBB67AE85u : uint32_t(philox.seed) + at / 2 * 0x9E3779B9u;
    }
    __syncwarp();
    return {uint32_t(__cvta_generic_to_shared(mine)), philox.stream};
  }
  __device__ __forceinline__ uint4 block(uint64_t index) const {
    uint4 c = make_uint4(uint32_t(index), uint32_t(index >> 32), uint32_t(stream), uint32_t(stream >> 32));
#pragma unroll
    for (int rounds = 0; rounds < 10; rounds += 2) {
      uint4 k;
      // Volatile: read where they are needed, and not kept.
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(k.x), "=r"(k.y), "=r"(k.z), "=r"(k.w) : "r"(keys + rounds * 8));
      c = round(round(c, k.x, k.y), k.z, k.w);
    }
    return c;
  }
  static __device__ __forceinline__ uint4 round(uint4 c, uint32_t k0, uint32_t k1) {
    uint32_t a_low = c.x * 0xD2511F53u, a_high = __umulhi(c.x, 0xD2511F53u);
    uint32_t b_low = c.z * 0xCD9E8D57u, b_high = __umulhi(c.z, 0xCD9E8D57u);
    return make_uint4(b_high ^ c.y ^ k0, b_low, a_high ^ c.w ^ k1, a_low);
  }
};

// How the values of a tile are stored, where the compiler knows.
template <Stored MASTER, Stored STATES, bool HALF_GRAD>
struct KnownStates {
  static constexpr int AHEAD = 2;
  static constexpr bool HALVES = MASTER == STORED_BF16_PLUS_16;
  static __device__ __forceinline__ constexpr uint8_t master() { return MASTER; }
  static __device__ __forceinline__ constexpr uint8_t first() { return STATES; }
  static __device__ __forceinline__ constexpr uint8_t second() { return STATES; }
  static __device__ __forceinline__ constexpr uint8_t grad() { return HALF_GRAD ? STORED_BF16 : STORED_F32; }
};

// The same where it does not: a branch for four elements. Whether masters are in two halves it knows.
template <bool IN_HALVES>
struct AnyStates {
  static constexpr int AHEAD = 1;
  static constexpr bool HALVES = IN_HALVES;
  uint8_t of_master, of_first, of_second, of_grad;
  __device__ __forceinline__ uint8_t master() const { return HALVES ? uint8_t(STORED_BF16_PLUS_16) : of_master; }
  __device__ __forceinline__ uint8_t first() const { return of_first; }
  __device__ __forceinline__ uint8_t second() const { return of_second; }
  __device__ __forceinline__ uint8_t grad() const { return of_grad; }
};

// Four stored values as they are in memory, without the scale of codes.
__device__ __forceinline__ uint4 load_four(uint64_t base, uint8_t stored, uint64_t e) {
  uint4 raw = {};
  if (stored == STORED_F32) {
    raw = load16_run(pointer<const float>(base) + e);
  } else if (stored == STORED_BF16) {
    uint2 pairs = load8(pointer<const uint16_t>(base) + e);
    raw.x = pairs.x, raw.y = pairs.y;
  } else {
    raw.x = load4_run(pointer<const uint32_t>(base + e));
  }
  return raw;
}

// Their values, if they are not codes.
__device__ __forceinline__ float4 wide_four(uint4 raw, uint8_t stored) {
  if (stored != STORED_BF16) return as_floats(raw);
  return make_float4(widen_low(raw.x), widen_high(raw.x), widen_low(raw.y), widen_high(raw.y));
}

// Masters, which are values of bf16 already where they are stored so.
struct Masters {
  uint64_t base;

  static __device__ __forceinline__ Masters of(const StoredUpdate& job) { return {job.update.master}; }

  __device__ __forceinline__ uint4 load(uint8_t stored, uint64_t e) const { return load_four(base, stored, e); }
  static __device__ __forceinline__ float4 values(uint4 raw, uint8_t stored) { return wide_four(raw, stored); }
  __device__ __forceinline__ void store(uint8_t stored, uint64_t e, float4 v) const {
    if (stored == STORED_F32) {
      store16(pointer<float>(base) + e, as_bits(v));
    } else {
      uint32_t low = __byte_perm(__float_as_uint(v.x), __float_as_uint(v.y), 0x7632);
      uint32_t high = __byte_perm(__float_as_uint(v.z), __float_as_uint(v.w), 0x7632);
      store8(pointer<uint16_t>(base) + e, make_uint2(low, high));
    }
  }
  // One of them.
  __device__ __forceinline__ float load_one(uint8_t stored, uint64_t e) const {
    return load_source(base, stored == STORED_BF16 ? BF16 : F32, e);
  }
  __device__ __forceinline__ void store_one(uint8_t stored, uint64_t e, float x) const {
    store_value(base, stored == STORED_BF16 ? BF16 : F32, e, x);
  }
};

// The same of masters in two halves.
struct MasterHalves {
  uint64_t parameters, remainders;

  static __device__ __forceinline__ MasterHalves of(const StoredUpdate& job) { return {job.update.master, job.remainder}; }

  // Parameters, then remainders.
  __device__ __forceinline__ uint4 load(uint8_t, uint64_t e) const {
    uint2 upper = load8(pointer<const uint16_t>(parameters) + e), lower = load8(pointer<const uint16_t>(remainders) + e);
    return make_uint4(upper.x, upper.y, lower.x, lower.y);
  }
  static __device__ __forceinline__ float4 values(uint4 raw, uint8_t) {
    MasterPair low{raw.x, raw.z}, high{raw.y, raw.w};
    return make_float4(low.first(), low.second(), high.first(), high.second());
  }
  __device__ __forceinline__ void store(uint8_t, uint64_t e, float4 v) const {
    MasterPair low = MasterPair::split(v.x, v.y), high = MasterPair::split(v.z, v.w);
    store8(pointer<uint16_t>(parameters) + e, make_uint2(low.parameters, high.parameters));
    store8(pointer<uint16_t>(remainders) + e, make_uint2(low.remainders, high.remainders));
  }
  __device__ __forceinline__ float load_one(uint8_t, uint64_t e) const {
    return MasterPair{pointer<const uint16_t>(parameters)[e], pointer<const uint16_t>(remainders)[e]}.first();
  }
  __device__ __forceinline__ void store_one(uint8_t, uint64_t e, float x) const {
    MasterPair one = MasterPair::split(x, 0.0f);
    pointer<uint16_t>(parameters)[e] = uint16_t(one.parameters);
    pointer<uint16_t>(remainders)[e] = uint16_t(one.remainders);
  }
};

template <bool HALVES>
using MastersOf = std::conditional_t<HALVES, MasterHalves, Masters>;

// A state of a warp's tile. Lane k of the eight lanes of a row has the scales of their row k, before and after.
template <class Code>
struct StateTile {
  uint64_t base, scales;  // addresses of the first code, and of the lane's scale
  uint32_t entry;         // the scale before the update
  float before;           // its value
  uint32_t after;         // the scale after it

  __device__ __forceinline__ StateTile(const Update& job, int which, uint8_t stored, const View& view, const Lane<4>& at)
      : base(job.states[which]), scales(0), entry(0), before(0.0f), after(0) {
    if (stored == STORED_FP8) {
      uint64_t block = ((at.row + at.local_row() + at.lane % 8) * view.cols + at.col) / STATE_BLOCK;
      scales = base + job.len + block;
      entry = *pointer<const uint8_t>(scales);
    }
  }
  // Once everything is on its way.
  __device__ __forceinline__ void begin(uint8_t stored) {
    if (stored == STORED_FP8) before = E8m0::decode(entry);
  }
  // Four values of row `i` of the lane are those of `unscaled` times `scale`.
  __device__ __forceinline__ float4 unscaled(uint4 raw, uint8_t stored) const {
    return stored == STORED_FP8 ? Code::decode(raw.x) : wide_four(raw, stored);
  }
  __device__ __forceinline__ float scale(uint8_t stored, uint32_t lane, int i) const {
    return stored == STORED_FP8 ? __shfl_sync(FULL_WARP, before, (lane & 24) | i) : 1.0f;
  }
  // Stores the values of row `i`; `scale` is the new one of their block.
  __device__ __forceinline__ void store(uint8_t stored, uint32_t lane, int i, uint64_t e, float4 v, uint32_t scale, uint4 random) {
    if (stored == STORED_F32) {
      store16(pointer<float>(base) + e, as_bits(v));
    } else if (stored == STORED_BF16) {
      store8(pointer<uint16_t>(base) + e, make_uint2(narrow_pair(v.x, v.y), narrow_pair(v.z, v.w)));
    } else {
      if (lane % 8 == i) after = scale;
      store4(pointer<uint32_t>(base + e), encode_four<Code>(v, scale, random));
    }
  }
  __device__ __forceinline__ void store_scales(uint8_t stored) const {
    if (stored == STORED_FP8) *pointer<uint8_t>(scales) = uint8_t(after);
  }
};

__device__ __forceinline__ float4 times(float4 v, float scale) {
  return make_float4(__fmul_rn(v.x, scale), __fmul_rn(v.y, scale), __fmul_rn(v.z, scale), __fmul_rn(v.w, scale));
}

// Four elements by a rule; `v` is not scaled.
template <class R>
struct EachOfFour {
  R rule;
  // Returns the amaxes of both states; one of NaNs alone is a NaN.
  __device__ __forceinline__ float2 update(float4& p, float4& m, float4& v, float scale, float4 g) const {
    v = times(v, scale);
    rule.update(p.x, m.x, v.x, g.x);
    rule.update(p.y, m.y, v.y, g.y);
    rule.update(p.z, m.z, v.z, g.z);
    rule.update(p.w, m.w, v.w, g.w);
    auto amax = [](float4 x) { return max_abs(max_abs(max_abs(fabsf(x.x), x.y), x.z), x.w); };
    return make_float2(amax(m), amax(v));
  }
};
template <class R>
__device__ __forceinline__ EachOfFour<R> four_of(const R& rule) { return {rule}; }
__device__ __forceinline__ AdamFour four_of(const Adam& adam) { return AdamFour::of(adam); }

// The scales of the blocks of both states, one in each half, of the amaxes of a lane: the scale of a maximum is the maximum of scales.
__device__ __forceinline__ uint32_t block_scales(float2 amax) {
  // Where all are NaNs it is zero.
  uint32_t both = state_scale<StateE4m3>(fmaxf(amax.x, 0.0f)) | state_scale<StateUe4m4>(fmaxf(amax.y, 0.0f)) << 16;
#pragma unroll
  for (int bit = 1; bit < 8; bit *= 2) both = __vmaxu2(both, __shfl_xor_sync(FULL_WARP, both, bit));
  return both;
}

// Updates the warp's 32 x 32 elements, all inside and aligned, by one rule; the new master stays in `p`.
template <class Types, class R>
__device__ __forceinline__ void update_stored_tile(const Update& job, const Types& types, const R& rule, const RandomWords& words,
                                                   const View& view, const Lane<4>& at, Values<4>& p) {
  constexpr int AHEAD = Types::AHEAD;  // rows of a thread that are on their way while one is updated
  const SharedPhilox philox = SharedPhilox::of(words.philox);
  using StoredMasters = MastersOf<Types::HALVES>;
  const auto masters = StoredMasters::of(words.job);
  const uint64_t grad = job.grad, from = (at.row + at.local_row()) * view.cols + at.col + at.local_col();
  StateTile<StateE4m3> first(job, 0, R::STATES > 0 ? types.first() : STORED_F32, view, at);
  StateTile<StateUe4m4> second(job, 1, R::STATES > 1 ? types.second() : STORED_F32, view, at);
  uint4 ps[8], ms[8], vs[8], gs[8];
  auto load = [&](int i) {
    uint64_t e = from + i * view.cols;
    ps[i] = masters.load(types.master(), e);
    if constexpr (R::STATES > 0) ms[i] = load_four(first.base, types.first(), e);
    if constexpr (R::STATES > 1) vs[i] = load_four(second.base, types.second(), e);
    gs[i] = load_four(grad, types.grad(), e);
  };
#pragma unroll
  for (int i = 0; i < AHEAD; ++i) load(i);
  const auto four = four_of(rule);
  // Lane k of a row has the counter of the first of the 32 elements of row k, which follow each other in the matrix.
  const uint64_t counter = words.place((at.row + at.local_row() + at.lane % 8) * view.cols + at.col) / 4;
  first.begin(R::STATES > 0 ? types.first() : STORED_F32);
  second.begin(R::STATES > 1 ? types.second() : STORED_F32);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (i + AHEAD < 8) load(i + AHEAD);
    uint64_t e = from + i * view.cols;
    float4 q = StoredMasters::values(ps[i], types.master()), m = {}, v = {};
    float square_scale = 1.0f;
    if constexpr (R::STATES > 0) m = times(first.unscaled(ms[i], types.first()), first.scale(types.first(), at.lane, i));
    if constexpr (R::STATES > 1) {
      v = second.unscaled(vs[i], types.second());
      square_scale = second.scale(types.second(), at.lane, i);
    }
    float4 g = wide_four(gs[i], types.grad());
    const float2 amax = four.update(q, m, v, square_scale, g);
    const bool fp8 = R::STATES > 0 && (types.first() == STORED_FP8 || types.second() == STORED_FP8);
    uint4 random = {};
    if (!Types::HALVES || fp8) random = philox.block(__shfl_sync(FULL_WARP, counter, (at.lane & 24) | i) + at.lane % 8);
    if (types.master() == STORED_BF16) q = round_masters(q, random);
    masters.store(types.master(), e, q);
    uint32_t scales = 0;
    if (fp8) scales = block_scales(amax);
    if constexpr (R::STATES > 0) first.store(types.first(), at.lane, i, e, m, scales & 0xFFFFu, random);
    if constexpr (R::STATES > 1) second.store(types.second(), at.lane, i, e, v, scales >> 16, random);
    p.set(i, q);
  }
  if constexpr (R::STATES > 0) first.store_scales(types.first());
  if constexpr (R::STATES > 1) second.store_scales(types.second());
}

// One value of a state; `scale` is the address of the scale of its block.
template <class Code>
__device__ __forceinline__ float load_state(uint64_t base, uint8_t stored, uint64_t scale, uint64_t e) {
  if (stored != STORED_FP8) return load_source(base, stored == STORED_BF16 ? BF16 : F32, e);
  return __fmul_rn(Code::decode(*pointer<const uint8_t>(base + e)).x, E8m0::decode(*pointer<const uint8_t>(scale)));
}

// Stores one value, where it is `inside`; the lanes of a warp have the values of a block, and all of them call it.
template <class Code>
__device__ __forceinline__ void store_state(uint64_t base, uint8_t stored, uint64_t scale, uint64_t e, bool inside, float x,
                                            uint32_t random) {
  if (stored != STORED_FP8) {
    if (inside) store_value(base, stored == STORED_BF16 ? BF16 : F32, e, x);
    return;
  }
  uint32_t entry = state_scale<Code>(all_max(inside ? max_abs(0.0f, x) : 0.0f, 31));
  if (!inside) return;
  uint32_t code = x != x ? Code::NAN_CODE : Code::encode(x, Code::Block::of(entry), random) >> 24;
  *pointer<uint8_t>(base + e) = uint8_t(code);
  if (e % STATE_BLOCK == 0) *pointer<uint8_t>(scale) = uint8_t(entry);
}

// Updates a rectangle, a warp 32 elements of a row at a time: where a state is in fp8, a block of it. Returns the thread's amax of the new
// master.
template <bool HALVES, class R>
__device__ __noinline__ float update_stored_any(const StoredUpdate& stored, const R& rule, const RandomWords& words, const View& view,
                                                uint64_t row, uint64_t col, uint32_t rows, uint32_t cols) {
  const Update& job = stored.update;
  const auto masters = MastersOf<HALVES>::of(stored);
  const uint32_t lane = threadIdx.x % 32, across = (cols + 31) / 32;
  float a = 0.0f;
  for (uint64_t b = threadIdx.x / 32; b < uint64_t(rows) * across; b += THREADS / 32) {
    uint32_t along = uint32_t(b % across) * 32 + lane;
    uint64_t r = row + b / across, c = col + along, e = r * view.cols + c;
    bool inside = along < cols && view.holds(r, c);
    uint64_t first = job.states[0] + job.len + e / STATE_BLOCK, second = job.states[1] + job.len + e / STATE_BLOCK;
    float p = 0.0f, m = 0.0f, v = 0.0f;
    uint32_t random = 0;
    if (inside) {
      p = masters.load_one(stored.master, e);
      if constexpr (R::STATES > 0) m = load_state<StateE4m3>(job.states[0], stored.states[0], first, e);
      if constexpr (R::STATES > 1) v = load_state<StateUe4m4>(job.states[1], stored.states[1], second, e);
      rule.update(p, m, v, load_source(job.grad, job.grad_code, e));
      random = words.one(e);
      if (stored.master == STORED_BF16) p = round_master(p, random);
      masters.store_one(stored.master, e, p);
      a = max_abs(a, p);
    }
    if constexpr (R::STATES > 0) store_state<StateE4m3>(job.states[0], stored.states[0], first, e, inside, m, random);
    if constexpr (R::STATES > 1) store_state<StateUe4m4>(job.states[1], stored.states[1], second, e, inside, v, random);
  }
  return a;
}

// The rules of all jobs of lowp_update_stored_*: which one a job has is a branch for a tile.
struct StoredRules {
  const Step* step;
  const StoredUpdate& job;

  // Calls `with` with the rule of the job.
  template <class F>
  __device__ __forceinline__ auto visit(F with) const {
    const Update& update = job.update;
    if (update.rule == UPDATE_ADAMW || update.rule == UPDATE_ADAM_L2) return with(Adam::of(step, update));
    return OtherRules::of(step, update).visit(update, with);
  }
};

template <>
constexpr bool HALF_MASTERS<StoredRules> = true;

// Adam with both states in fp8 has code of its own, for every dtype of the master and the gradient.
__device__ __forceinline__ void update_tile_of(const Update& job, const StoredRules& rules, const View& view, const Lane<4>& at,
                                               Values<4>& p) {
  const StoredUpdate& stored = rules.job;
  const RandomWords words = RandomWords::of(rules.step, stored);
  const uint8_t grad = job.grad_code == BF16 ? STORED_BF16 : STORED_F32;
  rules.visit([&](auto rule) {
    auto by = [&](auto types) { update_stored_tile(job, types, rule, words, view, at, p); };
    if constexpr (decltype(rule)::STATES == 2) {
      if (stored.states[0] == STORED_FP8 && stored.states[1] == STORED_FP8) {
        if (stored.master == STORED_BF16) {
          grad == STORED_BF16 ? by(KnownStates<STORED_BF16, STORED_FP8, true>{}) : by(KnownStates<STORED_BF16, STORED_FP8, false>{});
        } else {
          grad == STORED_BF16 ? by(KnownStates<STORED_F32, STORED_FP8, true>{}) : by(KnownStates<STORED_F32, STORED_FP8, false>{});
        }
        return;
      }
    }
    by(AnyStates<false>{stored.master, stored.states[0], stored.states[1], grad});
  });
}

__device__ __forceinline__ float update_any(const Update&, const StoredRules& rules, const View& view, uint64_t row, uint64_t col,
                                            uint32_t rows, uint32_t cols) {
  const RandomWords words = RandomWords::of(rules.step, rules.job);
  return rules.visit([&](auto rule) { return update_stored_any<false>(rules.job, rule, words, view, row, col, rows, cols); });
}

// Not inlined: with registers of its own.
__device__ __noinline__ float update_apart(const Update& job, const StoredRules& rules, const View& view, uint64_t row,
                                           uint64_t col, uint32_t rows, uint32_t cols) {
  return update_apart<StoredRules>(job, rules, view, row, col, rows, cols);
}

// A tile of PATH_WIDE or PATH_FLAT, or of PATH_TRANSPOSED.
template <bool TRANSPOSED>
__device__ __forceinline__ void update_stored(const Tile* tiles, const StoredUpdate* jobs, const Step* step, uint32_t flags,
                                              Stage<TRANSPOSED>& stage) {
  prefetch_job(tiles, jobs);
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const StoredRules rules{step, jobs[tile.job]};
  const Update& job = rules.job.update;
  finish(job, tile.index, job.len == 0 ? 0.0f : update_whole<TRANSPOSED, true, Known::NOTHING>(job, rules, tile.index, stage));
}

// A tile of any other path.
__device__ __forceinline__ void update_stored_other(const Tile* tiles, const StoredUpdate* jobs, const Step* step, uint32_t flags,
                                                    EncodeMemory& shared) {
  prefetch_job(tiles, jobs);
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const StoredRules rules{step, jobs[tile.job]};
  const Update& job = rules.job.update;
  finish(job, tile.index, job.len == 0 ? 0.0f : update_other(job, step, rules, tile.index, shared));
}

// A tile of masters in two halves, which are runs of elements: they have no amaxes and no other codes.
__device__ __forceinline__ void update_halves(const Tile* tiles, const StoredUpdate* jobs, const Step* step, uint32_t flags) {
  using Shape = Tiling<false>;
  prefetch_job(tiles, jobs);
  if ((flags & FLAG_HONOR_SKIP) && step->skip) return;
  const Tile tile = tiles[blockIdx.x];
  const StoredRules rules{step, jobs[tile.job]};
  const StoredUpdate& stored = rules.job;
  const Update& job = stored.update;
  const RandomWords words = RandomWords::of(step, stored);
  const View view = view_of(job);
  const uint64_t row = uint64_t(tile.index) * Shape::ROWS;
  if (!(job.encode.vector & VECTOR_SOURCE) || !view.holds_all(row, 0, Shape::ROWS, Shape::COLS)) {
    rules.visit([&](auto rule) { return update_stored_any<true>(stored, rule, words, view, row, 0, Shape::ROWS, Shape::COLS); });
    return;
  }
  const Lane<4> at{threadIdx.x % 32, row + Shape::warp_row(), Shape::warp_col()};
  const uint8_t grad = job.grad_code == BF16 ? STORED_BF16 : STORED_F32;
  Values<4> p;
  rules.visit([&](auto rule) {
    auto by = [&](auto types) { update_stored_tile(job, types, rule, words, view, at, p); };
    if constexpr (decltype(rule)::STATES == 2) {
      auto both = [&](Stored as) { return stored.states[0] == as && stored.states[1] == as; };
      if (both(STORED_FP8)) {
        grad == STORED_BF16 ? by(KnownStates<STORED_BF16_PLUS_16, STORED_FP8, true>{}) : by(KnownStates<STORED_BF16_PLUS_16, STORED_FP8, false>{});
        return;
      }
      if (both(STORED_F32)) {
        grad == STORED_BF16 ? by(KnownStates<STORED_BF16_PLUS_16, STORED_F32, true>{}) : by(KnownStates<STORED_BF16_PLUS_16, STORED_F32, false>{});
        return;
      }
    }
    by(AnyStates<true>{STORED_BF16_PLUS_16, stored.states[0], stored.states[1], grad});
  });
}

}  // namespace lowp
