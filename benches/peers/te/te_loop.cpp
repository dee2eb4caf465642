// te_loop: loops over lists of tensors in C++, so that a Python caller adds nothing per tensor, and
// turns the C++ exceptions that TransformerEngine's functions throw into a return code and a message.
// Build: g++ -O2 -shared -fPIC -o te_loop.so te_loop.cpp
#include <cstddef>
#include <cstdio>
#include <exception>

typedef void *P;
static char message[8192];

#define GUARD(...)                                               \
  try {                                                          \
    __VA_ARGS__;                                                 \
    return 0;                                                    \
  } catch (const std::exception &e) {                            \
    std::snprintf(message, sizeof message, "%s", e.what());      \
    return 1;                                                    \
  } catch (...) {                                                \
    std::snprintf(message, sizeof message, "unknown exception"); \
    return 2;                                                    \
  }
#define FN(name, ...) reinterpret_cast<void (*)(__VA_ARGS__)>(name)

extern "C" {
const char *tl_error() { return message; }

// f(a, b, config, stream) for each i: nvte_quantize_v2
int tl_loop_abc(P f, P *a, P *b, P config, int n, P stream) {
  GUARD(for (int i = 0; i < n; i++) FN(f, P, P, P, P)(a[i], b[i], config, stream))
}
// f(a, b, stream) for each i: nvte_transpose
int tl_loop_ab(P f, P *a, P *b, int n, P stream) {
  GUARD(for (int i = 0; i < n; i++) FN(f, P, P, P)(a[i], b[i], stream))
}
// FP8 current scaling, tensor by tensor: amax, scale from amax, quantize. `out` has no amax, so that
// the quantize adds no atomics; `meta` is the same tensor with its amax.
int tl_current(P amax, P scale, P quantize, P *in, P *meta, P *out, P config, int n, P stream) {
  GUARD(for (int i = 0; i < n; i++) {
    FN(amax, P, P, P, P)(in[i], meta[i], config, stream);
    FN(scale, P, P, P)(meta[i], config, stream);
    FN(quantize, P, P, P, P)(in[i], out[i], config, stream);
  })
}
// The grouped form of the current scaling: three calls for all tensors.
int tl_grouped_current(P amax, P scale, P quantize, P in, P out, P config, P stream) {
  GUARD(FN(amax, P, P, P, P)(in, out, config, stream); FN(scale, P, P, P)(out, config, stream);
        FN(quantize, P, P, P, P)(in, out, config, stream))
}
int tl_mxfp8_amax(P f, P *in, P *row, P *col, int rows, int cols, int n, P stream) {
  GUARD(for (int i = 0; i < n; i++) FN(f, P, P, P, int, int, size_t, P)(in[i], row[i], col[i], rows,
                                                                        cols, 0, stream))
}
int tl_mxfp8_cast(P f, P *in, P *row, P *col, P *srow, P *scol, int rows, int cols, int n, P stream) {
  GUARD(for (int i = 0; i < n; i++) FN(f, P, P, P, P, P, int, int, size_t, P)(
      in[i], row[i], col[i], srow[i], scol[i], rows, cols, 0, stream))
}
int tl_e8m0(P f, int chunk, P **lists, size_t nlists, size_t ntensors, P stream) {
  GUARD(FN(f, int, P **, size_t, size_t, P)(chunk, lists, nlists, ntensors, stream))
}
int tl_adam(P f, int chunk, P noop, P **lists, size_t nlists, size_t ntensors, float lr, float beta1,
            float beta2, float eps, int step, int mode, int correct, float decay, P stream) {
  GUARD(FN(f, int, P, P **, size_t, size_t, float, float, float, float, int, int, int, float, P)(
      chunk, noop, lists, nlists, ntensors, lr, beta1, beta2, eps, step, mode, correct, decay, stream))
}
int tl_adam_fp8(P f, int chunk, P noop, P **lists, size_t nlists, size_t ntensors, float lr,
                float beta1, float beta2, float eps, int step, int mode, int correct, float decay,
                int fp8, P stream) {
  GUARD(FN(f, int, P, P **, size_t, size_t, float, float, float, float, int, int, int, float, int, P)(
      chunk, noop, lists, nlists, ntensors, lr, beta1, beta2, eps, step, mode, correct, decay, fp8,
      stream))
}
}
