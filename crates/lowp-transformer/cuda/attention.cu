// What causal attention needs around its products: the order of heads, their norms, rotary positions, and the softmax.
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

// The sum over the `lanes` neighbouring threads that have a head, a power of two up to 32.
__device__ __forceinline__ float head_sum(float x, int lanes) {
    for (int lane = lanes / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(~0u, x, lane);
    return x;
}

__device__ __forceinline__ float reciprocal_rms(const Octet& low, const Octet& high, int lanes, int dim, float epsilon) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += low.v[i] * low.v[i] + high.v[i] * high.v[i];
    return 1.0f / sqrtf(head_sum(sum, lanes) / dim + epsilon);
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

// What cuDNN adds to the scores of each token, `[token, seq]`: nothing from the first position that it sees on, and what leaves no
// probability before it. One block per token.
extern "C" __global__ void document_mask(const int* first_seen, bf16* mask, int seq) {
    const size_t token = blockIdx.x;
    for (int i = threadIdx.x; i < seq; i += blockDim.x) {
        mask[token * seq + i] = __float2bfloat16_rn(i < first_seen[token] ? -1e30f : 0.0f);
    }
}

// Softmax of rows of scores, `[sequence, head, seq, seq]`, of which row `i` sees the last `window` of columns 0 to `i`, and with
// `first_seen` none before that of its token; the others become 0. One block per row.
extern "C" __global__ void softmax_forward(const float* scores, bf16* p, const int* first_seen, int seq, int heads, int window) {
    __shared__ float scratch[64];
    const size_t row = blockIdx.x;
    const int end = row % seq + 1;
    int first = max(end - window, 0);
    if (first_seen != nullptr) first = max(first, first_seen[row / seq / heads * seq + end - 1]);
    scores += row * seq;
    p += row * seq;
    float most = -INFINITY;
    for (int i = first + threadIdx.x; i < end; i += blockDim.x) most = fmaxf(most, scores[i]);
    most = block_max(most, scratch);
    float sum = 0.0f;
    for (int i = first + threadIdx.x; i < end; i += blockDim.x) sum += __expf(scores[i] - most);
    const float inverse = 1.0f / block_sum(sum, scratch + 32);
    for (int i = threadIdx.x; i < seq; i += blockDim.x) {
        p[i] = __float2bfloat16_rn(i >= first && i < end ? __expf(scores[i] - most) * inverse : 0.0f);
    }
}

// `ds = scale * p * (dp - sum(p * dp))`, the gradient of scaled scores: 0 where a row does not see.
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

// Norms of heads by the root mean square, and their turns: `y` is each head of `x`, which fill their rows, over its root mean square and
// times gamma, turned by the position of its token. A head has `lanes` threads, each with two octets, half a head apart, or none.
extern "C" __global__ void norm_heads(const bf16* x, bf16* y, const float* gamma, const float2* angles, int count, int seq,
                                      int dim, int lanes, float epsilon, size_t heads) {
    const size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x, head = at / lanes;
    const int half = dim / 2, col = 8 * (at % lanes);
    const bool mine = head < heads && col < half;
    Octet low = {}, high = {};
    if (mine) {
        low = load8(x + head * dim + col);
        high = load8(x + head * dim + col + half);
    }
    const float inverse = reciprocal_rms(low, high, lanes, dim, epsilon);
    if (!mine) return;
    const Octet a = load8(gamma + col), b = load8(gamma + col + half);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        low.v[i] *= inverse * a.v[i];
        high.v[i] *= inverse * b.v[i];
    }
    turn(low, high, angles + head / count % seq * half + col, 1.0f);
    store8(y + head * dim + col, low);
    store8(y + head * dim + col + half, high);
}

// From the gradient `dy` of norm_heads for its result to that for `x`, in place. Block `b` takes heads `b * rows` and following, and
// writes its sum of the gradients of gamma to row `b` of `partial`.
extern "C" __global__ void __launch_bounds__(256) norm_heads_backward(const bf16* x, bf16* dy, const float* gamma, const float2* angles,
                                        float* partial, int count, int seq, int dim, int lanes, int rows, float epsilon,
                                        size_t heads) {
    __shared__ float sums[16 * 256];
    const int groups = blockDim.x / lanes, group = threadIdx.x / lanes;
    const int half = dim / 2, col = 8 * (threadIdx.x % lanes);
    const bool columns = col < half;
    Octet a = {}, b = {}, da = {}, db = {};
    if (columns) {
        a = load8(gamma + col);
        b = load8(gamma + col + half);
    }
    const size_t first = size_t(blockIdx.x) * rows, last = first + rows < heads ? first + rows : heads;
    for (size_t next = first; next < last; next += groups) {
        const size_t head = next + group;
        const bool mine = head < last && columns;
        Octet low = {}, high = {}, dlow = {}, dhigh = {};
        if (mine) {
            low = load8(x + head * dim + col);
            high = load8(x + head * dim + col + half);
            dlow = load8(dy + head * dim + col);
            dhigh = load8(dy + head * dim + col + half);
            turn(dlow, dhigh, angles + head / count % seq * half + col, -1.0f);
        }
        const float inverse = reciprocal_rms(low, high, lanes, dim, epsilon);
        float along = 0.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            low.v[i] *= inverse;
            high.v[i] *= inverse;
            da.v[i] += dlow.v[i] * low.v[i];
            db.v[i] += dhigh.v[i] * high.v[i];
            dlow.v[i] *= a.v[i];
            dhigh.v[i] *= b.v[i];
            along += dlow.v[i] * low.v[i] + dhigh.v[i] * high.v[i];
        }
        along = head_sum(along, lanes) / dim;
        if (!mine) continue;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            dlow.v[i] = inverse * (dlow.v[i] - low.v[i] * along);
            dhigh.v[i] = inverse * (dhigh.v[i] - high.v[i] * along);
        }
        store8(dy + head * dim + col, dlow);
        store8(dy + head * dim + col + half, dhigh);
    }
    if (columns) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            sums[group * dim + col + i] = da.v[i];
            sums[group * dim + half + col + i] = db.v[i];
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < dim; i += blockDim.x) {
        float sum = 0.0f;
        for (int g = 0; g < groups; ++g) sum += sums[g * dim + i];
        partial[size_t(blockIdx.x) * dim + i] = sum;
    }
}
