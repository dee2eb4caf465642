// Flat encodes a tile at a time: a warp has FLAT_WARP_ROWS x FLAT_WARP_COLS elements, and each lane four columns of them. A multiplier
// is made once for 16 rows, or for a block of a row.
#pragma once
#include <lowp/flat_codes.cuh>
#include <lowp/tile.cuh>

namespace lowp {

struct FlatMemory {
  ScaleRule rules[2];  // of the tensor, by pass
  // The multipliers of a warp, by pass: lane by lane, four each.
  float4 multipliers[THREADS / 32][2][32];
};

struct FlatTile {
  static constexpr int ROWS = 4;  // at a time
  const FlatEncode& job;
  FlatMemory& shared;
  uint64_t col;  // of the lane's first element
  uint64_t end;  // of the range
  uint32_t lane;

  __device__ __forceinline__ uint64_t element(uint64_t r) const { return r * job.cols + col; }
  // Whether the lane's four elements of row `r` are all of the range.
  __device__ __forceinline__ bool holds(uint64_t r) const {
    uint64_t e = element(r);
    return r < job.rows && col + 4 <= job.cols && e >= job.start && e + 4 <= end;
  }

  // Lanes of a warp's row that share a block of FLAT_BY_ROW.
  static __device__ __forceinline__ uint32_t sharing(const FlatPass& pass) {
    return pass.block_cols == 16 ? 4 : pass.block_cols == 32 ? 8 : 32;
  }
  // Where the k-th multiplier of the lane comes from, for the 16 rows from `top` on: four rows of a block that it shares, or its
  // own columns.
  __device__ __forceinline__ uint64_t row_of(const FlatPass& pass, uint64_t top, int k) const {
    uint64_t r = pass.walk == FLAT_BY_ROW ? top + lane % sharing(pass) % 4 * 4 + k : top;
    return min(r, job.rows - 1);
  }
  __device__ __forceinline__ uint64_t col_of(const FlatPass& pass, int k) const {
    uint64_t c = pass.walk == FLAT_BY_ROW ? col - lane % sharing(pass) * 4 : pass.walk == FLAT_BY_COLUMN ? col + k : col;
    return min(c, job.cols - 1);
  }
  static __device__ __forceinline__ uint32_t shift_of(uint32_t side) { return side == 0 ? 0 : __ffs(side) - 1; }

  __device__ __forceinline__ float4* multipliers(uint32_t p) const { return shared.multipliers[threadIdx.x / 32][p]; }

  // The agreed amaxes of the blocks that the lane makes multipliers for.
  __device__ __forceinline__ float4 amaxes(const FlatPass& pass, uint64_t top) const {
    const float* from = pointer<const float>(pass.amaxes);
    const uint32_t down = shift_of(pass.block_rows), right = shift_of(pass.block_cols);
    const uint64_t across = (job.cols + pass.block_cols - 1) >> right;
    auto amax = [&](int k) {
      return pass.data && pass.amaxes ? fabsf(from[(row_of(pass, top, k) >> down) * across + (col_of(pass, k) >> right)]) : 0.0f;
    };
    return make_float4(amax(0), amax(1), amax(2), amax(3));
  }
  // The multipliers of a pass, of the amaxes that are in their places.
  __device__ __forceinline__ void scale(const FlatPass& pass, uint32_t p, uint64_t top) const {
    const float4 a = multipliers(p)[lane];
    float4 m = a;
    if (pass.ingredients.extent == EXTENT_TENSOR) {
      with_rule(shared.rules[p], [&](const ScaleRule& rule) {
        m.x = rule.block(a.x).multiplier;
        if (pass.walk == FLAT_ONE) {
          m = make_float4(m.x, m.x, m.x, m.x);
        } else {
          m = make_float4(m.x, rule.block(a.y).multiplier, rule.block(a.z).multiplier, rule.block(a.w).multiplier);
        }
      });
    } else {
      auto of = [&](int k, float amax) { return rule_at(pass, row_of(pass, top, k), col_of(pass, k)).block(amax).multiplier; };
      m = make_float4(of(0, a.x), of(1, a.y), of(2, a.z), of(3, a.w));
    }
    multipliers(p)[lane] = m;
  }

  // Whether the lane has all of row `r` to itself; of a whole tile it does.
  template <bool WHOLE>
  __device__ __forceinline__ bool mine(uint64_t r) const {
    return WHOLE || holds(r);
  }

  // What the lane's elements of row i of ROWS are multiplied by.
  template <bool BY_ROW>
  static __device__ __forceinline__ float4 of_row(const float4& m, int i) {
    if (!BY_ROW) return m;
    float one = i == 0 ? m.x : i == 1 ? m.y : i == 2 ? m.z : m.w;
    return make_float4(one, one, one, one);
  }

  // Codes of ROWS rows from `top` on, which go to `to` and every `pitch` bytes.
  template <bool WHOLE, bool BY_ROW, typename E>
  __device__ __forceinline__ void codes8(uint64_t to, uint64_t pitch, bool aligned, uint64_t top, const float4 (&x)[ROWS],
                                         const float4& m) const {
#pragma unroll
    for (int i = 0; i < ROWS; ++i, to += pitch) {
      const float4 n = of_row<BY_ROW>(m, i);
      uint32_t codes = __byte_perm(E::pair(__fmul_rn(x[i].x, n.x), __fmul_rn(x[i].y, n.y)),
                                   E::pair(__fmul_rn(x[i].z, n.z), __fmul_rn(x[i].w, n.w)), 0x5410);
      if (!mine<WHOLE>(top + i)) continue;
      uint8_t* at = pointer<uint8_t>(to);
      if (aligned) {
        __stcs(reinterpret_cast<uint32_t*>(at), codes);
      } else {
#pragma unroll
        for (int b = 0; b < 4; ++b) at[b] = uint8_t(codes >> (8 * b));
      }
    }
  }

  template <bool WHOLE, bool BY_ROW>
  __device__ __forceinline__ void codes4(uint64_t to, uint64_t pitch, bool aligned, uint64_t top, const float4 (&x)[ROWS],
                                         const float4& m) const {
#pragma unroll
    for (int i = 0; i < ROWS; i += 2) {
      const float4 n = of_row<BY_ROW>(m, i), o = of_row<BY_ROW>(m, i + 1), a = x[i], b = x[i + 1];
      const float scaled[8] = {__fmul_rn(a.x, n.x), __fmul_rn(a.y, n.y), __fmul_rn(a.z, n.z), __fmul_rn(a.w, n.w),
                               __fmul_rn(b.x, o.x), __fmul_rn(b.y, o.y), __fmul_rn(b.z, o.z), __fmul_rn(b.w, o.w)};
      uint32_t codes = E2m1::eight([&](int k) { return scaled[k]; });
#pragma unroll
      for (int h = 0; h < 2; ++h, to += pitch) {
        if (!mine<WHOLE>(top + i + h)) continue;
        uint8_t* at = pointer<uint8_t>(to);
        uint16_t half = uint16_t(codes >> (16 * h));
        if (aligned) {
          __stcs(reinterpret_cast<uint16_t*>(at), half);
        } else {
          at[0] = uint8_t(half);
          at[1] = uint8_t(half >> 8);
        }
      }
    }
  }

  // Values as they are; their stores are aligned.
  template <bool WHOLE>
  __device__ __forceinline__ void plain(uint64_t to, uint64_t pitch, bool half, uint64_t top, const float4 (&x)[ROWS]) const {
#pragma unroll
    for (int i = 0; i < ROWS; ++i, to += pitch) {
      if (!mine<WHOLE>(top + i)) continue;
      if (half) {
        store8(pointer<uint8_t>(to), make_uint2(narrow_pair(x[i].x, x[i].y), narrow_pair(x[i].z, x[i].w)));
      } else {
        store16(pointer<uint8_t>(to), as_bits(x[i]));
      }
    }
  }

  template <bool WHOLE, bool BY_ROW>
  __device__ __forceinline__ void codes(uint8_t element, uint64_t to, uint64_t pitch, bool aligned, uint64_t top,
                                        const float4 (&x)[ROWS], const float4& m) const {
    switch (element) {
      case E4M3: return codes8<WHOLE, BY_ROW, E4m3>(to, pitch, aligned, top, x, m);
      case E5M2: return codes8<WHOLE, BY_ROW, E5m2>(to, pitch, aligned, top, x, m);
      default: return codes4<WHOLE, BY_ROW>(to, pitch, aligned, top, x, m);
    }
  }

  // Where a pass goes, kept in registers.
  struct Output {
    uint64_t to;  // element 0 of the matrix, if it were in memory
    uint8_t element, walk, aligned, bits;
    static __device__ __forceinline__ Output of(const FlatEncode& job, const FlatPass& pass) {
      const uint8_t element = pass.ingredients.element, bits = uint8_t(code_bits(element));
      return {pass.data == 0 ? 0 : pass.data - job.start * bits / 8, element, pass.walk, pass.aligned, bits};
    }
  };

  // Codes of the rows from `top` on, row `begin` of 16.
  template <bool WHOLE>
  __device__ __forceinline__ void store(const Output& output, uint32_t p, uint64_t top, uint32_t begin, const float4 (&x)[ROWS]) const {
    if (output.to == 0) return;
    const uint64_t to = output.to + element(top) * output.bits / 8, pitch = job.cols * output.bits / 8;
    if (output.walk == FLAT_PLAIN) {
      plain<WHOLE>(to, pitch, output.bits == 16, top, x);
    } else if (output.walk == FLAT_BY_ROW) {
      const float4 m = multipliers(p)[lane - lane % sharing(job.pass[p]) + begin / 4];
      codes<WHOLE, true>(output.element, to, pitch, output.aligned, top, x, m);
    } else {
      codes<WHOLE, false>(output.element, to, pitch, output.aligned, top, x, multipliers(p)[lane]);
    }
  }

  template <bool WHOLE, bool HALF>
  __device__ __forceinline__ void load(uint64_t top, float4 (&x)[ROWS]) const {
    uint64_t from = job.source + (element(top) - job.start) * (HALF ? 2 : 4);
#pragma unroll
    for (int i = 0; i < ROWS; ++i, from += job.cols * (HALF ? 2 : 4)) {
      if (!mine<WHOLE>(top + i)) {
        x[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      } else if (!job.vector) {
        auto at = [&](int j) { return load_source(from, HALF ? BF16 : F32, j); };
        x[i] = make_float4(at(0), at(1), at(2), at(3));
      } else if (HALF) {
        uint2 raw = load8(pointer<const uint16_t>(from));
        x[i] = make_float4(widen_low(raw.x), widen_high(raw.x), widen_low(raw.y), widen_high(raw.y));
      } else {
        x[i] = as_floats(load16_line(pointer<const float>(from)));
      }
    }
  }

  // The multipliers for the 16 rows from `top` on.
  __device__ __forceinline__ void prepare(uint64_t top) const {
    const float4 first = amaxes(job.pass[0], top), second = amaxes(job.pass[1], top);
    __syncwarp();
    multipliers(0)[lane] = first;
    multipliers(1)[lane] = second;
#pragma unroll 1
    for (uint32_t p = 0; p < job.passes; ++p) {
      if (job.pass[p].data) scale(job.pass[p], p, top);
    }
    __syncwarp();
  }

  // The tile from row `row` on. The next rows are loaded before these are stored.
  template <bool WHOLE, bool HALF>
  __device__ __forceinline__ void encode(uint64_t row) const {
    const Output first = Output::of(job, job.pass[0]), second = Output::of(job, job.pass[1]);
    const bool via_bf16 = job.via_bf16;
    float4 x[ROWS];
    load<WHOLE, HALF>(row, x);
#pragma unroll 2
    for (uint32_t begin = 0; begin < FLAT_WARP_ROWS; begin += ROWS) {
      const uint64_t top = row + begin;
      if (begin % 16 == 0) prepare(top);
      float4 next[ROWS];
      if (begin + ROWS < FLAT_WARP_ROWS) {
        load<WHOLE, HALF>(top + ROWS, next);
      } else {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) next[i] = x[i];
      }
      if (via_bf16) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) x[i] = make_float4(round_bf16(x[i].x), round_bf16(x[i].y), round_bf16(x[i].z), round_bf16(x[i].w));
      }
#pragma unroll 1
      for (uint32_t p = 0; p < job.passes; ++p) store<WHOLE>(p == 0 ? first : second, p, top, begin % 16, x);
#pragma unroll
      for (int i = 0; i < ROWS; ++i) x[i] = next[i];
    }
  }

  // Elements of four of which only some are of the range: at its ends, and at the end of a row.
  __device__ __noinline__ void edges(uint64_t top) const {
#pragma unroll 1
    for (uint64_t r = top; r < min(top + FLAT_WARP_ROWS, job.rows); ++r) {
      if (holds(r) || col >= job.cols) continue;
      uint64_t e = element(r), first = max(e, job.start), stop = min(e + min(uint64_t(4), job.cols - col), end);
      if (first >= stop) continue;
#pragma unroll 1
      for (uint32_t p = 0; p < job.passes; ++p) {
        if (job.pass[p].data) flat_codes(job, job.pass[p], first, stop);
      }
    }
  }
};

// Not inlined: with registers of its own.
template <bool HALF>
__device__ __noinline__ void encode_flat_edge(const FlatEncode& job, FlatMemory& shared, uint64_t top, uint64_t left) {
  const uint32_t lane = threadIdx.x % 32;
  const FlatTile tile{job, shared, left + lane * 4, job.start + job.len, lane};
  tile.encode<false, HALF>(top);
  tile.edges(top);
}

// Tile `index`: one of as many warps.
template <bool HALF>
__device__ __forceinline__ void encode_flat_tile(const FlatEncode& job, uint64_t index, FlatMemory& shared) {
  const uint64_t warp = index * (THREADS / 32) + threadIdx.x / 32, end = job.start + job.len;
  const uint32_t lane = threadIdx.x % 32;
  const uint64_t row = job.first_row + warp / job.tiles_across * FLAT_WARP_ROWS, left = warp % job.tiles_across * FLAT_WARP_COLS;
  if (row >= job.rows || row * job.cols >= end) return;
  bool whole = row + FLAT_WARP_ROWS <= job.rows && left + FLAT_WARP_COLS <= job.cols && row * job.cols + left >= job.start;
  whole = whole && (row + FLAT_WARP_ROWS - 1) * job.cols + left + FLAT_WARP_COLS <= end;
  if (whole) {
    FlatTile{job, shared, left + lane * 4, end, lane}.encode<true, HALF>(row);
  } else {
    encode_flat_edge<HALF>(job, shared, row, left);
  }
}

}  // namespace lowp
