// The arithmetic of activations, in f32, over eight values of bf16 at a time.
#pragma once
#include "octet.cuh"

// GELU by the hyperbolic tangent, which is a sigmoid.
constexpr float SLOPE = 1.595769f, CUBIC = 0.044715f;

__device__ __forceinline__ Octet gelu(const Octet& x) {
    Octet y;
#pragma unroll
    for (int i = 0; i < 8; ++i) y.v[i] = x.v[i] * sigmoid(SLOPE * x.v[i] * (1.0f + CUBIC * x.v[i] * x.v[i]));
    return y;
}

__device__ __forceinline__ Octet gelu_gradient(const Octet& x, const Octet& dy) {
    Octet dx;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float v = x.v[i], s = sigmoid(SLOPE * v * (1.0f + CUBIC * v * v));
        dx.v[i] = dy.v[i] * (s + v * s * (1.0f - s) * SLOPE * (1.0f + 3.0f * CUBIC * v * v));
    }
    return dx;
}

__device__ __forceinline__ Octet swiglu(const Octet& gate, const Octet& up) {
    Octet y;
#pragma unroll
    for (int i = 0; i < 8; ++i) y.v[i] = gate.v[i] * sigmoid(gate.v[i]) * up.v[i];
    return y;
}

// The gradients of gate and up.
__device__ __forceinline__ void swiglu_gradients(const Octet& gate, const Octet& up, const Octet& dy, Octet (&made)[2]) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float x = gate.v[i], s = sigmoid(x);
        made[0].v[i] = dy.v[i] * up.v[i] * (s + x * s * (1.0f - s));
        made[1].v[i] = dy.v[i] * x * s;
    }
}
