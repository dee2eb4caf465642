// What causal attention needs around its products: the order of heads, rotary positions, and the softmax.
#include "octet.cuh"

// Turns the pair (x[i], x[i + half]) of a head by the angle of its position.
__device__ __forceinline__ void turn(Octet& low, Octet& high, const float2* angles, float sign) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float c = angles[i].x, s = sign * angles[i].y, a = low.v[i], b = high.v[i];
        low.v[i] = a * c - b * s;
        high.v[i] = b * c + a * s;
    }
}

// Copies a head's rows between rows of tokens, `[tokens, stride]` with head `h` at column `h * dim`, and heads,
// `[sequence, head, position, dim]`; with `angles`, `[seq, dim / 2]` of cosine and sine, each pair is turned on the way (back
// to tokens: the other way). To heads, each head of `tokens` goes to `groups` heads, one after another; back, they are added up.
// A thread has two octets, half a head apart.
extern "C" __global__ void split_heads(const bf16* tokens, bf16* heads, const float2* angles, int stride, int count,
                                       int groups, int seq, int dim, size_t threads) {
    size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= threads) return;
    const int half = dim / 2, octets = half / 8;
    const int col = 8 * (at % octets);
    at /= octets;
    const int head = at % count;
    const size_t token = at / count;
    const size_t sequence = token / seq, position = token % seq;
    const bf16* from = tokens + token * stride + head * dim + col;
    Octet low = load8(from), high = load8(from + half);
    if (angles != nullptr) turn(low, high, angles + position * half + col, 1.0f);
    for (int g = 0; g < groups; ++g) {
        bf16* to = heads + ((sequence * count * groups + head * groups + g) * seq + position) * dim + col;
        store8(to, low);
        store8(to + half, high);
    }
}

extern "C" __global__ void merge_heads(const bf16* heads, bf16* tokens, const float2* angles, int stride, int count,
                                       int groups, int seq, int dim, size_t threads) {
    size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= threads) return;
    const int half = dim / 2, octets = half / 8;
    const int col = 8 * (at % octets);
    at /= octets;
    const int head = at % count;
    const size_t token = at / count;
    const size_t sequence = token / seq, position = token % seq;
    Octet low = {}, high = {};
    for (int g = 0; g < groups; ++g) {
        const bf16* from = heads + ((sequence * count * groups + head * groups + g) * seq + position) * dim + col;
        const Octet a = load8(from), b = load8(from + half);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            low.v[i] += a.v[i];
            high.v[i] += b.v[i];
        }
    }
    if (angles != nullptr) turn(low, high, angles + position * half + col, -1.0f);
    bf16* to = tokens + token * stride + head * dim + col;
    store8(to, low);
    store8(to + half, high);
}

// Softmax of rows of scores, `[matrix, seq, seq]`, of which row `i` sees columns 0 to `i`; the others become 0. One block per
// row.
extern "C" __global__ void softmax_forward(const float* scores, bf16* p, int seq) {
    __shared__ float scratch[64];
    const size_t row = blockIdx.x;
    const int seen = row % seq + 1;
    scores += row * seq;
    p += row * seq;
    float most = -INFINITY;
    for (int i = threadIdx.x; i < seen; i += blockDim.x) most = fmaxf(most, scores[i]);
    most = block_max(most, scratch);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < seen; i += blockDim.x) sum += __expf(scores[i] - most);
    const float inverse = 1.0f / block_sum(sum, scratch + 32);
    for (int i = threadIdx.x; i < seq; i += blockDim.x) {
        p[i] = __float2bfloat16_rn(i < seen ? __expf(scores[i] - most) * inverse : 0.0f);
    }
}

// `ds = scale * p * (dp - sum(p * dp))`, the gradient of scaled scores.
extern "C" __global__ void softmax_backward(const bf16* p, const float* dp, bf16* ds, int seq, float scale) {
    __shared__ float scratch[32];
    const size_t row = blockIdx.x;
    const int seen = row % seq + 1;
    p += row * seq;
    dp += row * seq;
    ds += row * seq;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < seen; i += blockDim.x) sum += __bfloat162float(p[i]) * dp[i];
    sum = block_sum(sum, scratch);
    for (int i = threadIdx.x; i < seq; i += blockDim.x) {
        ds[i] = __float2bfloat16_rn(i < seen ? scale * __bfloat162float(p[i]) * (dp[i] - sum) : 0.0f);
    }
}

// Turns the heads of rows in place, or with `sign` -1 back. A thread has two octets, half a head apart.
extern "C" __global__ void rotate(bf16* tokens, const float2* angles, int count, int seq, int dim, float sign, size_t threads) {
    size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (at >= threads) return;
    const int half = dim / 2, octets = half / 8;
    const int col = 8 * (at % octets);
    at /= octets;
    const int head = at % count;
    const size_t token = at / count;
    bf16* x = tokens + (token * count + head) * dim + col;
    Octet low = load8(x), high = load8(x + half);
    turn(low, high, angles + (token % seq) * half + col, sign);
    store8(x, low);
    store8(x + half, high);
}
