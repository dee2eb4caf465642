// Eight bf16 values, loaded and stored as 16 bytes.
#pragma once
#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

struct Octet {
    float v[8];
};

// Eight values as they are stored.
__device__ __forceinline__ uint4 words8(const bf16* from) { return *reinterpret_cast<const uint4*>(from); }

__device__ __forceinline__ Octet widened(const uint4& words) {
    const unsigned w[4] = {words.x, words.y, words.z, words.w};
    Octet out;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        out.v[2 * i] = __uint_as_float(w[i] << 16);
        out.v[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
    return out;
}

__device__ __forceinline__ Octet load8(const bf16* from) { return widened(words8(from)); }

__device__ __forceinline__ Octet load8(const float* from) {
    const float4 a = reinterpret_cast<const float4*>(from)[0];
    const float4 b = reinterpret_cast<const float4*>(from)[1];
    return Octet{{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ __forceinline__ unsigned pair(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&both);
}

__device__ __forceinline__ uint4 narrowed(const Octet& x) {
    return make_uint4(pair(x.v[0], x.v[1]), pair(x.v[2], x.v[3]), pair(x.v[4], x.v[5]), pair(x.v[6], x.v[7]));
}

__device__ __forceinline__ void store8(bf16* to, const Octet& x) { *reinterpret_cast<uint4*>(to) = narrowed(x); }

__device__ __forceinline__ void store8(float* to, const Octet& x) {
    reinterpret_cast<float4*>(to)[0] = make_float4(x.v[0], x.v[1], x.v[2], x.v[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(x.v[4], x.v[5], x.v[6], x.v[7]);
}

// What a value becomes when it is stored as bf16.
__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// The sum over a block of whole warps, the same on every thread; in a fixed order. `scratch` has 32 entries.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    const int warps = blockDim.x / 32;
    if (warps == 1) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < warps ? scratch[threadIdx.x % 32] : 0.0f;
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

__device__ __forceinline__ float block_max(float x, float* scratch) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    const int warps = blockDim.x / 32;
    if (warps == 1) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = threadIdx.x % 32 < warps ? scratch[threadIdx.x % 32] : scratch[0];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, lane));
    return x;
}
