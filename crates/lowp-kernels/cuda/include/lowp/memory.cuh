// Typed access to the addresses of a job: 16-byte vectors where they are aligned, bytes where nothing
// is known.
#pragma once
#include <lowp/jobs.cuh>
#include <lowp/policy.cuh>

namespace lowp {

template <typename T>
__device__ __forceinline__ T* pointer(uint64_t address) {
  return reinterpret_cast<T*>(address);
}

// The value of bfloat16 bits, exactly.
__device__ __forceinline__ float widen(uint16_t bits) { return __uint_as_float(uint32_t(bits) << 16); }
__device__ __forceinline__ float widen_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float widen_high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000u); }

// The bfloat16 of a power of two, twice.
__device__ __forceinline__ uint32_t twice(float power) { return __byte_perm(__float_as_uint(power), 0, 0x3232); }

// The bfloat16 bits of two values, the first in the low half: to nearest even; a NaN keeps its sign
// and payload, as on the host, where the conversion instruction would make it canonical.
__device__ __forceinline__ uint32_t narrow_pair(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  if (low != low) pair = (pair & 0xFFFF0000u) | (__float_as_uint(low) >> 16) | 0x40u;
  if (high != high) pair = (pair & 0xFFFFu) | (__float_as_uint(high) & 0xFFFF0000u) | 0x400000u;
  return pair;
}
__device__ __forceinline__ uint16_t narrow(float x) { return uint16_t(narrow_pair(x, 0.0f)); }
__device__ __forceinline__ float round_bf16(float x) { return widen(narrow(x)); }

// 16-byte accesses that pass through the caches once: nothing here is read twice.
__device__ __forceinline__ uint4 load16(const void* at) { return __ldcs(static_cast<const uint4*>(at)); }
// The same where a block of threads reads whole runs of 256 bytes, which memory may bring at once.
__device__ __forceinline__ uint4 load16_run(const void* at) {
  uint4 v;
  asm("ld.global.cs.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
__device__ __forceinline__ uint32_t load4_run(const void* at) {
  uint32_t v;
  asm("ld.global.cs.L2::256B.u32 %0, [%1];" : "=r"(v) : "l"(at));
  return v;
}
// The same of what the next launch reads again: it stays in the cache as long as there is room.
__device__ __forceinline__ uint4 load16_again(const void* at) {
  uint4 v;
  asm("ld.global.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
// The same where the whole line of 128 bytes is read: memory may bring it at once.
__device__ __forceinline__ uint4 load16_line(const void* at) {
  uint4 v;
  asm("ld.global.cs.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}
__device__ __forceinline__ uint2 load8(const void* at) { return __ldcs(static_cast<const uint2*>(at)); }
__device__ __forceinline__ void store16(void* at, uint4 value) { __stcs(static_cast<uint4*>(at), value); }
__device__ __forceinline__ void store8(void* at, uint2 value) { __stcs(static_cast<uint2*>(at), value); }
__device__ __forceinline__ void store4(void* at, uint32_t value) { __stcs(static_cast<uint32_t*>(at), value); }

// The same of parts of lines of 128 bytes, of which others write the rest: the cache keeps them until they are whole.
__device__ __forceinline__ void store16_part(void* at, uint4 value) { *static_cast<uint4*>(at) = value; }
__device__ __forceinline__ void store8_part(void* at, uint2 value) { *static_cast<uint2*>(at) = value; }

__device__ __forceinline__ float4 as_floats(uint4 raw) {
  return make_float4(__uint_as_float(raw.x), __uint_as_float(raw.y), __uint_as_float(raw.z), __uint_as_float(raw.w));
}
__device__ __forceinline__ uint4 as_bits(float4 v) {
  return make_uint4(__float_as_uint(v.x), __float_as_uint(v.y), __float_as_uint(v.z), __float_as_uint(v.w));
}

// Word i of four.
__device__ __forceinline__ uint32_t word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// One source value.
__device__ __forceinline__ float load_source(uint64_t source, uint8_t code, uint64_t index) {
  return code == BF16 ? widen(pointer<const uint16_t>(source)[index]) : pointer<const float>(source)[index];
}

// A little-endian binary32 at any address.
__device__ __forceinline__ void store_f32(uint64_t address, uint32_t bits) {
  if (address % 4 == 0) {
    *pointer<uint32_t>(address) = bits;
  } else {
    for (int i = 0; i < 4; ++i) pointer<uint8_t>(address)[i] = uint8_t(bits >> (8 * i));
  }
}
__device__ __forceinline__ uint32_t load_f32(uint64_t address) {
  if (address % 4 == 0) return *pointer<const uint32_t>(address);
  uint32_t bits = 0;
  for (int i = 0; i < 4; ++i) bits |= uint32_t(pointer<const uint8_t>(address)[i]) << (8 * i);
  return bits;
}

// Eight bytes at any address.
__device__ __forceinline__ void store_u64(uint64_t address, uint64_t bits) {
  store_f32(address, uint32_t(bits));
  store_f32(address + 4, uint32_t(bits >> 32));
}
__device__ __forceinline__ uint64_t load_u64(uint64_t address) {
  return load_f32(address) | uint64_t(load_f32(address + 4)) << 32;
}

__device__ __forceinline__ uint64_t cdiv(uint64_t a, uint64_t b) { return (a + b - 1) / b; }

// The position of entry (i, j) among tiles of 128 x 4, of which `inner` entries lie side by side.
__device__ __forceinline__ uint64_t swizzled(uint64_t i, uint64_t j, uint64_t inner) {
  return (i / 128 * (inner / 4) + j / 4) * 512 + i % 32 * 16 + i % 128 / 32 * 4 + j % 4;
}

// The position of the entry at (row, col) of Padded or Swizzled scales.
__device__ __forceinline__ uint64_t scale_offset(const Scales& scales, bool transposed, uint64_t row, uint64_t col) {
  uint64_t i = transposed ? col : row, j = transposed ? row : col, inner = transposed ? scales.rows : scales.cols;
  return scales.swizzled ? swizzled(i, j, inner) : i * inner + j;
}

}  // namespace lowp
