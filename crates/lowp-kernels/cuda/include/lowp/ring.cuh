// Values of bfloat16 on their way: a ring of tiles of 128 x 64 in shared memory, filled by copies that nobody waits for until
// their tile is due. A thread reads them as runs of 16 of a row, or as 16 rows of two columns: blocks of 16 lie within a thread.
#pragma once
#include <lowp/stage.cuh>

namespace lowp {

constexpr uint32_t RING_TILE = TRANSPOSED_ROWS * TRANSPOSED_COLS * 2;

// 16 consecutive values of a row, in pairs.
struct Run {
  uint32_t x[8];
  // The largest magnitude; NaN where there is one.
  __device__ __forceinline__ float amax() const;
};

// 16 rows of two neighbouring columns, a pair of values each.
struct TwoColumns {
  uint32_t x[16];
  // The largest magnitudes of the columns; NaN where there is one.
  __device__ __forceinline__ uint32_t amaxes() const;
};

// The larger magnitudes of pairs of bfloat16, where a NaN wins; signs are any.
__device__ __forceinline__ uint32_t larger_magnitudes(uint32_t a, uint32_t b) {
#if LOWP_MAX_MAGNITUDE
  uint32_t y;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
#else
  return __vmaxu2(a & 0x7FFF7FFFu, b & 0x7FFF7FFFu);
#endif
}

template <int N>
__device__ __forceinline__ uint32_t largest_magnitudes(const uint32_t (&x)[N]) {
  uint32_t a[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) a[i] = larger_magnitudes(x[i], x[i + N / 2]);
#pragma unroll
  for (int n = N / 4; n >= 1; n /= 2) {
#pragma unroll
    for (int i = 0; i < n; ++i) a[i] = larger_magnitudes(a[i], a[i + n]);
  }
  return a[0] & 0x7FFF7FFFu;
}

__device__ __forceinline__ float Run::amax() const {
  // As integers: a NaN is larger than all others.
  uint32_t a = largest_magnitudes(x);
  return __uint_as_float(max(a << 16, a & 0xFFFF0000u));
}

__device__ __forceinline__ uint32_t TwoColumns::amaxes() const { return largest_magnitudes(x); }

// The largest magnitudes among pairs; NaNs lose to all else.
template <int N>
__device__ __forceinline__ uint32_t largest_pairs(const uint32_t (&x)[N]) {
  uint32_t a = max_abs_pairs(x[0], x[1], x[2], x[3]);
#pragma unroll
  for (int k = 4; k < N; k += 4) a = max_pair(a, max_abs_pairs(x[k], x[k + 1], x[k + 2], x[k + 3]));
  return a;
}
// Of what largest_pairs gives; 0 where there are nothing but NaNs.
__device__ __forceinline__ float largest_of(uint32_t pair) { return fmaxf(fmaxf(widen_low(pair), widen_high(pair)), 0.0f); }

// Keeps the compiler from computing a value again where it is used.
__device__ __forceinline__ uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Starts a copy of 16 bytes to an address in shared memory, which reads 256 at a time.
__device__ __forceinline__ void copy16_ring(uint32_t to, uint64_t from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from));
}

// FP8 codes of a run times pairs of powers of two. A product is exact in bfloat16 unless it is subnormal, where every code is 0;
// adding -0 keeps the sign of a zero.
template <typename E, typename At>
__device__ __forceinline__ uint4 codes_by_powers(const Run& v, At m) {
  uint32_t out[4], y[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(y[k]) : "r"(v.x[k]), "r"(m(k)), "r"(0x80008000u));
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    uint32_t a = y[2 * k], b = y[2 * k + 1];
    out[k] = __byte_perm(E::pair(widen_low(a), widen_high(a)), E::pair(widen_low(b), widen_high(b)), 0x5410);
  }
  return make_uint4(out[0], out[1], out[2], out[3]);
}

// Where a row has its chunk of 16 bytes. Chunks are exchanged within a row, which keeps those that a quarter of a warp reads
// at a time off each other's banks: of neighbouring rows, and of rows that are 16 apart.
__device__ __forceinline__ uint32_t ring_place(uint32_t row, uint32_t chunk) {
  return row * 128 + (chunk ^ (row ^ row / 16) % 8) * 16;
}

// STAGES tiles are on their way or in work.
template <int STAGES>
struct alignas(128) Ring {
  uint8_t bytes[STAGES][RING_TILE];
};

// A thread's part in the copies to a ring: a chunk of every 32nd row of a tile of 128 rows of 128 bytes.
struct RingCopies {
  uint32_t to;
  uint64_t from, rows_apart;

  // Of tiles from the address `first` on, of a matrix whose rows are `pitch` bytes apart.
  __device__ __forceinline__ RingCopies(const void* ring, uint64_t first, uint64_t pitch) {
    uint32_t r = threadIdx.x / 8, chunk = threadIdx.x % 8;
    to = kept(uint32_t(__cvta_generic_to_shared(ring)) + ring_place(r, chunk));
    from = first + r * pitch + chunk * 16;
    rows_apart = 32 * pitch;
  }
  __device__ __forceinline__ void start(uint32_t slot, uint32_t step) const {
    uint64_t at = from + step * (2 * TRANSPOSED_COLS);
#pragma unroll
    for (uint32_t k = 0; k < TRANSPOSED_ROWS / 32; ++k) {
      // Of row 32 k: two more of what row / 16 exchanges chunks by.
      uint32_t there = (to ^ k * 32) + k * 32 * 128 + slot * RING_TILE;
      copy16_ring(there, at);
      at += rows_apart;
    }
  }
};

// Two runs of a thread, eight rows apart. A warp has those of 16 rows.
struct RunReader {
  uint32_t at;
  static __device__ __forceinline__ uint32_t row(uint32_t which) {
    return threadIdx.x / 32 * 16 + which * 8 + threadIdx.x % 32 / 4;
  }
  static __device__ __forceinline__ uint32_t column() { return threadIdx.x % 4 * 16; }
  __device__ __forceinline__ RunReader() : at(kept(ring_place(row(0), column() / 8))) {}
  __device__ __forceinline__ Run read(const uint8_t* tile, uint32_t which) const {
    const uint8_t* from = tile + which * 8 * 128;
    uint4 low = *reinterpret_cast<const uint4*>(from + at), high = *reinterpret_cast<const uint4*>(from + (at ^ 16));
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  }
};

// 16 rows of two columns of a thread. Eight threads have the columns, a warp eight of them.
struct ColumnReader {
  uint32_t at;
  static __device__ __forceinline__ uint32_t row() { return threadIdx.x % 8 * 16; }
  static __device__ __forceinline__ uint32_t column() { return threadIdx.x / 8 * 2; }
  __device__ __forceinline__ ColumnReader() : at(kept(ring_place(row(), column() / 8) + column() % 8 * 2)) {}
  __device__ __forceinline__ TwoColumns read(const uint8_t* tile) const {
    TwoColumns v;
#pragma unroll
    for (uint32_t i = 0; i < 16; ++i) v.x[i] = *reinterpret_cast<const uint32_t*>(tile + (at ^ i % 8 * 16) + i * 128);
    return v;
  }
};

// Four rows of eight columns of a thread, as Tiling<true> has them.
struct TileReader {
  uint32_t at;
  static __device__ __forceinline__ uint32_t row() { return Tiling<true>::warp_row() + threadIdx.x % 32 / 4 * 4; }
  static __device__ __forceinline__ uint32_t column() { return Tiling<true>::warp_col() + threadIdx.x % 4 * 8; }
  __device__ __forceinline__ TileReader() : at(kept(ring_place(row(), column() / 8))) {}
  __device__ __forceinline__ void read(const uint8_t* tile, uint32_t (&x)[4][4]) const {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      uint4 raw = *reinterpret_cast<const uint4*>(tile + (at ^ i * 16) + i * 128);
      x[i][0] = raw.x;
      x[i][1] = raw.y;
      x[i][2] = raw.z;
      x[i][3] = raw.w;
    }
  }
};

// Calls `start(slot, step)`, which starts the copies of a tile to a slot of a ring, and `work(slot, step)` for each of `steps` tiles. The next
// ones are on their way. All threads have finished a tile before any begins the next but one.
template <int STAGES, typename Start, typename Work>
__device__ __forceinline__ void through_stages(uint32_t steps, Start start, Work work) {
  auto fetch = [&](uint32_t slot, uint32_t step) {
    if (step < steps) start(slot, step);
    // Steps that there are not are empty groups.
    asm volatile("cp.async.commit_group;");
  };
#pragma unroll
  for (int s = 0; s < STAGES - 1; ++s) fetch(s, s);
  uint32_t slot = 0;
#pragma unroll 1
  for (uint32_t s = 0; s < steps; ++s) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    // All threads' copies of this tile are there, and all have read the one before.
    __syncthreads();
    fetch(slot == 0 ? STAGES - 1 : slot - 1, s + STAGES - 1);
    work(slot, s);
    slot = slot == STAGES - 1 ? 0 : slot + 1;
  }
}

// Calls `work(tile, step)` for each tile of 128 rows of 128 bytes from the address `first` on, `steps` of them along rows that are `pitch` bytes apart.
template <int STAGES, typename Work>
__device__ __forceinline__ void through_ring(Ring<STAGES>& ring, uint64_t first, uint64_t pitch, uint32_t steps, Work work) {
  const RingCopies copies(ring.bytes, first, pitch);
  auto start = [&](uint32_t slot, uint32_t step) { copies.start(slot, step); };
  through_stages<STAGES>(steps, start, [&](uint32_t slot, uint32_t step) { work(ring.bytes[slot], step); });
}

// The same from (row, col) of a matrix of bfloat16 on.
template <int STAGES, typename Work>
__device__ __forceinline__ void through_ring(Ring<STAGES>& ring, uint64_t source, uint64_t cols, uint64_t row, uint64_t col,
                                             uint32_t steps, Work work) {
  through_ring(ring, source + 2 * (row * cols + col), 2 * cols, steps, work);
}

}  // namespace lowp
