// The activations of MLPs. A thread has eight values.
#include "activation.cuh"

extern "C" __global__ void gelu_forward(const bf16* x, bf16* y, size_t octets) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < octets) store8(y + 8 * at, gelu(load8(x + 8 * at)));
}

// `dx` may be `dy`.
extern "C" __global__ void gelu_backward(const bf16* x, const bf16* dy, bf16* dx, size_t octets) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < octets) store8(dx + 8 * at, gelu_gradient(load8(x + 8 * at), load8(dy + 8 * at)));
}

extern "C" __global__ void swiglu_forward(const bf16* gate, const bf16* up, bf16* y, size_t octets) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at < octets) store8(y + 8 * at, swiglu(load8(gate + 8 * at), load8(up + 8 * at)));
}

// `dgate` or `dup` may be `dy`.
extern "C" __global__ void swiglu_backward(const bf16* gate, const bf16* up, const bf16* dy, bf16* dgate, bf16* dup,
                                           size_t octets) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= octets) return;
    Octet made[2];
    swiglu_gradients(load8(gate + 8 * at), load8(up + 8 * at), load8(dy + 8 * at), made);
    store8(dgate + 8 * at, made[0]);
    store8(dup + 8 * at, made[1]);
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
