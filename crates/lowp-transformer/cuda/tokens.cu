// Both ends of a language model: the embedding of tokens, and the cross entropy of logits.
#include "octet.cuh"

// Row `t` of `x` is the row of `table` of its token, and with `positions` that of its position. A thread has eight columns.
extern "C" __global__ void embedding_forward(const int* ids, const float* table, const float* positions, bf16* x, int seq,
                                             int dim, size_t threads) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= threads) return;
    const int octets = dim / 8, col = 8 * (at % octets);
    const size_t token = at / octets;
    Octet v = load8(table + size_t(ids[token]) * dim + col);
    if (positions != nullptr) {
        const Octet p = load8(positions + (token % seq) * dim + col);
#pragma unroll
        for (int i = 0; i < 8; ++i) v.v[i] += p.v[i];
    }
    store8(x + token * dim + col, v);
}

// Sums rows of `dx` in the order of `order`: row `r` of `out` gets rows `order[starts[r]]` to `order[starts[r + 1] - 1]`, on top
// of that row of `plus` if there is one. One warp per row and 256 columns.
extern "C" __global__ void sum_rows(const bf16* dx, const int* starts, const int* order, const float* plus, float* out, int dim) {
    const int col = 8 * (32 * blockIdx.y + threadIdx.x);
    if (col >= dim) return;
    Octet sum = {};
    const int last = starts[blockIdx.x + 1];
#pragma unroll 4
    for (int at = starts[blockIdx.x]; at < last; ++at) {
        const Octet v = load8(dx + size_t(order[at]) * dim + col);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.v[i] += v.v[i];
    }
    const size_t at = size_t(blockIdx.x) * dim + col;
    if (plus != nullptr) {
        const Octet p = load8(plus + at);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum.v[i] += p.v[i];
    }
    store8(out + at, sum);
}

// The loss of each row of logits, and its gradient: `(softmax - one at the target) * scale`, with that of `z_loss` times the
// squared logarithm of the softmax's sum. One block per row, whose logits are read twice: a thread sums relative to the largest that it
// has seen. Without `gradients` only losses. A target below 0 adds nothing to either.
extern "C" __global__ void cross_entropy(const float* logits, const int* targets, float* losses, bf16* gradients, int vocab,
                                         float scale, float z_loss) {
    __shared__ float scratch[64];
    const size_t row = blockIdx.x;
    const int target = targets[row], step = 8 * blockDim.x;
    if (target < 0) {
        if (threadIdx.x == 0) losses[row] = 0.0f;
        if (gradients == nullptr) return;
        for (int i = 8 * threadIdx.x; i < vocab; i += step) store8(gradients + row * vocab + i, Octet{});
        return;
    }
    float most = -INFINITY, sum = 0.0f;
#pragma unroll 2
    for (int i = 8 * threadIdx.x; i < vocab; i += step) {
        const Octet x = load8(logits + row * vocab + i);
        float largest = x.v[0];
#pragma unroll
        for (int k = 1; k < 8; ++k) largest = fmaxf(largest, x.v[k]);
        if (largest > most) {
            // The sum is 0 as long as nothing was seen.
            sum *= __expf(most - largest);
            most = largest;
        }
        // Of logits that are all minus infinity nothing is added.
        const float base = most == -INFINITY ? 0.0f : most;
#pragma unroll
        for (int k = 0; k < 8; ++k) sum += __expf(x.v[k] - base);
    }
    const float own = most;
    most = block_max(own, scratch);
    sum = block_sum(own == -INFINITY ? sum : sum * __expf(own - most), scratch + 32);
    if (threadIdx.x == 0) losses[row] = logf(sum) - (logits[row * vocab + target] - most);
    if (gradients == nullptr) return;
    const float factor = scale * (1.0f + 2.0f * z_loss * (logf(sum) + most)) / sum;
#pragma unroll 2
    for (int i = 8 * threadIdx.x; i < vocab; i += step) {
        Octet x = load8(logits + row * vocab + i);
#pragma unroll
        for (int k = 0; k < 8; ++k) x.v[k] = __expf(x.v[k] - most) * factor - (i + k == target ? scale : 0.0f);
        store8(gradients + row * vocab + i, x);
    }
}

// `total[0] += scale * sum(losses)`, in a fixed order. One block.
extern "C" __global__ void add_losses(const float* losses, int tokens, float scale, float* total) {
    __shared__ double sums[256];
    double sum = 0.0;
    for (int i = threadIdx.x; i < tokens; i += 256) sum += losses[i];
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (int i = 1; i < 256; ++i) sum += sums[i];
    total[0] += float(sum * scale);
}
