// The activations of MLPs, over bf16 with f32 arithmetic. A thread has eight values.
#include "octet.cuh"

// GELU by the hyperbolic tangent, which is a sigmoid.
constexpr float SLOPE = 1.595769f, CUBIC = 0.044715f;

extern "C" __global__ void gelu_forward(const bf16* x, bf16* y, size_t octets) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= octets) return;
    Octet v = load8(x + 8 * at);
#pragma unroll
    for (int i = 0; i < 8; ++i) v.v[i] *= sigmoid(SLOPE * v.v[i] * (1.0f + CUBIC * v.v[i] * v.v[i]));
    store8(y + 8 * at, v);
}

// `dx` may be `dy`.
extern "C" __global__ void gelu_backward(const bf16* x, const bf16* dy, bf16* dx, size_t octets) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= octets) return;
    const Octet v = load8(x + 8 * at);
    Octet d = load8(dy + 8 * at);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float x = v.v[i], s = sigmoid(SLOPE * x * (1.0f + CUBIC * x * x));
        d.v[i] *= s + x * s * (1.0f - s) * SLOPE * (1.0f + 3.0f * CUBIC * x * x);
    }
    store8(dx + 8 * at, d);
}

extern "C" __global__ void swiglu_forward(const bf16* gate, const bf16* up, bf16* y, size_t octets) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= octets) return;
    Octet g = load8(gate + 8 * at);
    const Octet u = load8(up + 8 * at);
#pragma unroll
    for (int i = 0; i < 8; ++i) g.v[i] = g.v[i] * sigmoid(g.v[i]) * u.v[i];
    store8(y + 8 * at, g);
}

// `dgate` or `dup` may be `dy`.
extern "C" __global__ void swiglu_backward(const bf16* gate, const bf16* up, const bf16* dy, bf16* dgate, bf16* dup,
                                           size_t octets) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= octets) return;
    Octet g = load8(gate + 8 * at), u = load8(up + 8 * at);
    const Octet d = load8(dy + 8 * at);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float x = g.v[i], s = sigmoid(x);
        g.v[i] = d.v[i] * u.v[i] * (s + x * s * (1.0f - s));
        u.v[i] = d.v[i] * x * s;
    }
    store8(dgate + 8 * at, g);
    store8(dup + 8 * at, u);
}

// f32 to bf16, to nearest even.
extern "C" __global__ void narrow(const float* from, bf16* to, size_t octets) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < octets) store8(to + 8 * at, load8(from + 8 * at));
}

// The factor of a product of two-level codes, and what multiplies what was there: 0, or 1 to add to it.
extern "C" __global__ void two_level_factors(const float* a, const float* b, float reciprocal, float* to) {
    to[0] = a[0] * reciprocal * b[0];
    to[1] = 0.0f;
    to[2] = 1.0f;
}
