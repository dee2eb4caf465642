// Activations whose results are cast. What they make is rounded where it is made, as RoundJobs say that would read what the kernels of
// activation.cu store; these are jobs of blocks of 32 (lowp/round.cuh). Else it is stored, and AmaxJobs of the whole matrix get what they
// would find in it. No job reads its source.
#include <lowp/amax_tile.cuh>
#include <lowp/ring_transform.cuh>
#include <lowp/round.cuh>
#include "activation.cuh"

namespace {

constexpr int THREADS = lowp::THREADS;

// A matrix that is made: it has a `round`, or is stored, and then may have an `amax`.
struct Made {
    bf16* values;
    const lowp::Round* round;
    const lowp::Amax* amax;
};

// Of values that are stored eight at a time.
__device__ __forceinline__ Made made8(bf16* values, const lowp::Round* round, const lowp::Amax* amax) { return {values, round, amax}; }

// Values that are read eight at a time.
__device__ __forceinline__ const bf16* octets(const bf16* values) { return values; }

// Eight values of each of N matrices.
template <int N>
struct Words {
    uint4 of[N];
};

// Raises what `job` is of by the first `width` columns of a tile. All threads call it.
__device__ __forceinline__ void raise_amaxes(const lowp::Amax& job, const lowp::WidePart& part, const uint8_t* tile, uint32_t width) {
    using namespace lowp;
    const bool inside = 2 * part.pair < width;
    TwoColumns v;
#pragma unroll
    for (int i = 0; i < 16; ++i) v.x[i] = *reinterpret_cast<const uint32_t*>(tile + part.pair_at + i * WIDE_RING_PITCH);
    if (job.tensor) raise_by_pairs(job.tensor, inside ? largest_pairs(v.x) : 0);
    if (job.transformed) {
        const uint32_t first = largest_pairs(transformed_run(v, false).x), second = largest_pairs(transformed_run(v, true).x);
        raise_by_pairs(job.transformed, inside ? max_pair(first, second) : 0);
    }
}

// What a block of threads shares of a matrix.
struct Shared {
    __align__(128) uint8_t tile[lowp::WIDE_RING_TILE];
    lowp::RoundShared<lowp::WIDE_COLS> round;
};

// A tile of 32 x 256 of matrices of `cols` columns: `load` has eight values of what is read from an element on, and `make` what is made.
template <int N, typename Load, typename Make>
__device__ __forceinline__ void make_cast(const Made (&to)[N], int cols, Shared* shared, Load load, Make make) {
    using namespace lowp;
    const WidePart part;
    // From the last tile to the first, with which a cast begins: what was made last is in the cache.
    const uint32_t index = gridDim.x - 1 - blockIdx.x, across = (uint32_t(cols) + WIDE_COLS - 1) / WIDE_COLS;
    const uint64_t row = uint64_t(index / across) * WIDE_ROWS, col = uint64_t(index % across) * WIDE_COLS;
    const uint32_t width = min(WIDE_COLS, uint32_t(cols - col));
    const uint64_t first = (row + part.warp) * cols + col + part.lane * 8;
    const bool inside = part.lane * 8 < width;
    if (inside) {
        // All that is read is on its way before any of it is used.
        decltype(load(0)) read[WidePart::ROWS];
#pragma unroll
        for (uint32_t k = 0; k < WidePart::ROWS; ++k) read[k] = load(first + k * 8 * uint64_t(cols));
#pragma unroll
        for (uint32_t k = 0; k < WidePart::ROWS; ++k) {
            Octet made[N];
            make(read[k].of, made);
#pragma unroll
            for (int i = 0; i < N; ++i) *reinterpret_cast<uint4*>(shared[i].tile + part.at(k)) = narrowed(made[i]);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Round* round = to[i].round;
        if (round == nullptr) {
#pragma unroll
            for (uint32_t k = 0; k < WidePart::ROWS; ++k) {
                uint4* at = reinterpret_cast<uint4*>(to[i].values + first + k * 8 * uint64_t(cols));
                if (inside) *at = *reinterpret_cast<const uint4*>(shared[i].tile + part.at(k));
            }
            if (to[i].amax != nullptr) raise_amaxes(*to[i].amax, part, shared[i].tile, width);
        } else if (round->encode.pass[0].ingredients.element == E4M3) {
            WideRounding<E4m3, WIDE_COLS>(*round, part, first, width, shared[i].round)(shared[i].tile, 0);
        } else {
            WideRounding<E5m2, WIDE_COLS>(*round, part, first, width, shared[i].round)(shared[i].tile, 0);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (to[i].round != nullptr) store_rounded_scales(to[i].round->encode, row, col, WIDE_COLS, shared[i].round);
    }
}

__device__ __forceinline__ void gelu_tile(const Made& y, const bf16* x, int cols, Shared* shared) {
    make_cast<1>({y}, cols, shared, [&](uint64_t at) { return Words<1>{words8(x + at)}; },
                 [](const uint4* read, Octet(&made)[1]) { made[0] = gelu(widened(read[0])); });
}

__device__ __forceinline__ void swiglu_tile(const Made& y, const bf16* gate, const bf16* up, int cols, Shared* shared) {
    make_cast<1>({y}, cols, shared, [&](uint64_t at) { return Words<2>{words8(gate + at), words8(up + at)}; },
                 [](const uint4* read, Octet(&made)[1]) { made[0] = swiglu(widened(read[0]), widened(read[1])); });
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    gelu_forward_cast(bf16* y, const lowp::Round* round, const lowp::Amax* amax, const bf16* x, int cols) {
    __shared__ Shared shared[1];
    gelu_tile(made8(y, round, amax), octets(x), cols, shared);
}

// `dx` may be `dy`. With `y` what forward made is made again, and rounded.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    gelu_backward_cast(bf16* dx, const lowp::Round* round, const lowp::Amax* amax, const lowp::Round* y, const bf16* x,
                       const bf16* dy, int cols) {
    __shared__ Shared shared[1];
    make_cast<1>({made8(dx, round, amax)}, cols, shared, [&](uint64_t at) { return Words<2>{words8(x + at), words8(dy + at)}; },
                 [](const uint4* read, Octet(&made)[1]) { made[0] = gelu_gradient(widened(read[0]), widened(read[1])); });
    if (y == nullptr) return;
    __syncthreads();
    gelu_tile({nullptr, y, nullptr}, x, cols, shared);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    swiglu_forward_cast(bf16* y, const lowp::Round* round, const lowp::Amax* amax, const bf16* gate, const bf16* up, int cols) {
    __shared__ Shared shared[1];
    swiglu_tile(made8(y, round, amax), octets(gate), octets(up), cols, shared);
}

// With `y` what forward made is made again, of what the cache has by now, and rounded.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    swiglu_backward_cast(bf16* dgate, const lowp::Round* gate_round, const lowp::Amax* gate_amax, bf16* dup,
                         const lowp::Round* up_round, const lowp::Amax* up_amax, const lowp::Round* y, const bf16* gate,
                         const bf16* up, const bf16* dy, int cols) {
    __shared__ Shared shared[2];
    make_cast<2>({made8(dgate, gate_round, gate_amax), made8(dup, up_round, up_amax)}, cols, shared,
                 [&](uint64_t at) { return Words<3>{words8(gate + at), words8(up + at), words8(dy + at)}; },
                 [](const uint4* read, Octet(&made)[2]) {
                     swiglu_gradients(widened(read[0]), widened(read[1]), widened(read[2]), made);
                 });
    if (y == nullptr) return;
    __syncthreads();
    swiglu_tile({nullptr, y, nullptr}, gate, up, cols, shared);
}
