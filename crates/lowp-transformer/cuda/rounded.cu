// Activations whose results are rounded where they are made, as RoundJobs say that would read what the kernels of activation.cu store.
// These are jobs of blocks of 32 (lowp/round.cuh), and their sources are not read.
#include <lowp/round.cuh>
#include "activation.cuh"

namespace {

constexpr int THREADS = lowp::THREADS;

// A matrix that is made: rounded, or stored as it is where there is no `round`.
struct Made {
    bf16* values;
    const lowp::Round* round;
};

__device__ __forceinline__ Made made8(bf16* values, const lowp::Round* round) { return {values, round}; }

// Eight values of each of N matrices.
template <int N>
struct Words {
    uint4 of[N];
};

// A tile of 32 x 256 of matrices of `cols` columns: `load` has eight values of what is read from an element on, and `make` what is made.
template <int N, typename Load, typename Make>
__device__ __forceinline__ void make_rounded(const Made (&to)[N], int cols, Load load, Make make) {
    using namespace lowp;
    __shared__ __align__(128) uint8_t tiles[N][WIDE_RING_TILE];
    __shared__ __align__(16) RoundShared<WIDE_COLS> shared[N];
    const WidePart part;
    const uint32_t across = (uint32_t(cols) + WIDE_COLS - 1) / WIDE_COLS;
    const uint64_t row = uint64_t(blockIdx.x / across) * WIDE_ROWS, col = uint64_t(blockIdx.x % across) * WIDE_COLS;
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
            for (int i = 0; i < N; ++i) *reinterpret_cast<uint4*>(tiles[i] + part.at(k)) = narrowed(made[i]);
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
                if (inside) *at = *reinterpret_cast<const uint4*>(tiles[i] + part.at(k));
            }
        } else if (round->encode.pass[0].ingredients.element == E4M3) {
            WideRounding<E4m3, WIDE_COLS>(*round, part, first, width, shared[i])(tiles[i], 0);
        } else {
            WideRounding<E5m2, WIDE_COLS>(*round, part, first, width, shared[i])(tiles[i], 0);
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (to[i].round != nullptr) store_rounded_scales(to[i].round->encode, row, col, WIDE_COLS, shared[i]);
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(THREADS, 4) gelu_forward_rounded(const lowp::Round* y, const bf16* x, int cols) {
    make_rounded<1>({{nullptr, y}}, cols, [&](uint64_t at) { return Words<1>{words8(x + at)}; },
                    [](const uint4* read, Octet(&made)[1]) { made[0] = gelu(widened(read[0])); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    gelu_backward_rounded(const lowp::Round* dx, const bf16* x, const bf16* dy, int cols) {
    make_rounded<1>({{nullptr, dx}}, cols, [&](uint64_t at) { return Words<2>{words8(x + at), words8(dy + at)}; },
                    [](const uint4* read, Octet(&made)[1]) { made[0] = gelu_gradient(widened(read[0]), widened(read[1])); });
}

extern "C" __global__ void __launch_bounds__(THREADS, 4)
    swiglu_forward_rounded(const lowp::Round* y, const bf16* gate, const bf16* up, int cols) {
    make_rounded<1>({{nullptr, y}}, cols, [&](uint64_t at) { return Words<2>{words8(gate + at), words8(up + at)}; },
                    [](const uint4* read, Octet(&made)[1]) { made[0] = swiglu(widened(read[0]), widened(read[1])); });
}

// Of `dgate` and `dup` one may be missing: its values are stored.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    swiglu_backward_rounded(const lowp::Round* dgate, bf16* gate_values, const lowp::Round* dup, bf16* up_values,
                            const bf16* gate, const bf16* up, const bf16* dy, int cols) {
    make_rounded<2>({made8(gate_values, dgate), made8(up_values, dup)}, cols,
                    [&](uint64_t at) { return Words<3>{words8(gate + at), words8(up + at), words8(dy + at)}; },
                    [](const uint4* read, Octet(&made)[2]) {
                        swiglu_gradients(widened(read[0]), widened(read[1]), widened(read[2]), made);
                    });
}
