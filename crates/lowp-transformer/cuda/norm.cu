// Layer norms and norms by the root mean square over rows of bf16, with f32 arithmetic. A thread has eight columns.
#include "octet.cuh"

// `out = x + branch` where there is a branch, and `h = norm(out)`. One block per row. `stats` has the mean and the reciprocal
// standard deviation of each row.
extern "C" __global__ void __launch_bounds__(1024) norm_forward(const bf16* x, const bf16* branch, bf16* out, bf16* h, const float* gamma,
                                        const float* beta, float* stats, int dim, float epsilon) {
    __shared__ float scratch[32];
    const size_t row = blockIdx.x;
    const int col = 8 * threadIdx.x;
    const bool mine = col < dim;
    Octet v = {};
    if (mine) {
        v = load8(x + row * dim + col);
        if (branch != nullptr) {
            const Octet b = load8(branch + row * dim + col);
#pragma unroll
            for (int i = 0; i < 8; ++i) v.v[i] = rounded(v.v[i] + b.v[i]);
            store8(out + row * dim + col, v);
        }
    }
    float mean = 0.0f;
    if (beta != nullptr) {
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += v.v[i];
        mean = block_sum(sum, scratch) / dim;
    }
    float sum = 0.0f;
    if (mine) {
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += (v.v[i] - mean) * (v.v[i] - mean);
    }
    const float inverse = 1.0f / sqrtf(block_sum(sum, scratch) / dim + epsilon);
    if (threadIdx.x == 0) {
        stats[2 * row] = mean;
        stats[2 * row + 1] = inverse;
    }
    if (!mine) return;
    const Octet g = load8(gamma + col);
    Octet b = {};
    if (beta != nullptr) b = load8(beta + col);
#pragma unroll
    for (int i = 0; i < 8; ++i) v.v[i] = (v.v[i] - mean) * inverse * g.v[i] + b.v[i];
    store8(h + row * dim + col, v);
}

// `dx = residual + the gradient of norm_forward for x`, where there is a residual gradient. Block `b` takes rows `b * rows` and
// following, and writes its sums of the gradients of gamma and beta to row `b` of `partial`: gammas, then betas.
extern "C" __global__ void __launch_bounds__(1024) norm_backward(const bf16* dh, const bf16* x, const float* stats, const float* gamma,
                                         const bf16* residual, bf16* dx, float* partial, int tokens, int dim, int rows,
                                         int centered) {
    __shared__ float scratch[64];
    const int col = 8 * threadIdx.x;
    const bool mine = col < dim;
    Octet g = {}, dgamma = {}, dbeta = {};
    if (mine) g = load8(gamma + col);
    const int first = blockIdx.x * rows, last = min(first + rows, tokens);
    for (size_t row = first; row < last; ++row) {
        const float mean = stats[2 * row], inverse = stats[2 * row + 1];
        Octet d = {}, n = {};
        float a = 0.0f, b = 0.0f;
        if (mine) {
            d = load8(dh + row * dim + col);
            n = load8(x + row * dim + col);
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                n.v[i] = (n.v[i] - mean) * inverse;
                dgamma.v[i] += d.v[i] * n.v[i];
                dbeta.v[i] += d.v[i];
                d.v[i] *= g.v[i];
                a += d.v[i];
                b += d.v[i] * n.v[i];
            }
        }
        a = centered ? block_sum(a, scratch) / dim : 0.0f;
        b = block_sum(b, scratch + 32) / dim;
        if (mine) {
            Octet r = {};
            if (residual != nullptr) r = load8(residual + row * dim + col);
#pragma unroll
            for (int i = 0; i < 8; ++i) r.v[i] += inverse * (d.v[i] - a - n.v[i] * b);
            store8(dx + row * dim + col, r);
        }
    }
    if (mine) {
        float* out = partial + size_t(blockIdx.x) * 2 * dim + col;
        store8(out, dgamma);
        store8(out + dim, dbeta);
    }
}

// Sums the rows of `partial` by column, in order: `width` sums to each output, of which the second may be missing.
extern "C" __global__ void column_sums(const float* partial, int rows, int width, float* first, float* second) {
    __shared__ float sums[8][33];
    const int col = 32 * blockIdx.x + threadIdx.x, all = 2 * width;
    float sum = 0.0f;
    if (col < all) {
        for (int row = threadIdx.y; row < rows; row += 8) sum += partial[size_t(row) * all + col];
    }
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || col >= all) return;
    for (int i = 1; i < 8; ++i) sum += sums[i][threadIdx.x];
    if (col < width) {
        first[col] = sum;
    } else if (second != nullptr) {
        second[col - width] = sum;
    }
}
