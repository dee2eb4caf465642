// Causal attention by cuDNN, with a C interface: cuDNN is found when it is first asked for, by the dynamic loader.
#include <cudnn_frontend.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace cudnn_frontend {
void* cudnn_dlhandle = nullptr;
}

namespace fe = cudnn_frontend;
using Tensor = std::shared_ptr<fe::graph::Tensor_attributes>;

namespace {

enum Id : int64_t { Q = 1, K, V, O, STATS, MASK, DO, DQ, DK, DV };

void say(char* text, size_t room, const std::string& what) {
    if (room == 0) return;
    std::strncpy(text, what.c_str(), room - 1);
    text[room - 1] = 0;
}

}  // namespace

// Sizes; positions that each sees, its own included, or 0 for all before it; whether a mask, `[sequence, position, position]`, is added to
// the scores of all heads; which backward pass is planned (0: none, 1: sums of one order, 2: of any); strides in values by sequence, head and position of queries, keys, values and the
// result, and of their gradients.
struct LowpSdpaSizes {
    int64_t sequences, heads, kv_heads, seq, dim, window, masked, backward;
    int64_t q[3], k[3], v[3], o[3];
    float scale;
};

struct LowpSdpa {
    // Before the graphs, which end first.
    struct Handle {
        cudnnHandle_t raw = nullptr;
        ~Handle() {
            if (raw != nullptr) fe::detail::destroy_handle(raw);
        }
    } handle;
    fe::graph::Graph forward, backward;
    bool has_backward = false;
    int64_t workspace = 0;
};

// The version of cuDNN, or 0 where it is not found.
extern "C" size_t lowp_sdpa_version() {
    static std::once_flag once;
    std::call_once(once, [] {
        for (const char* name : {"libcudnn.so.9", "libcudnn.so"}) {
            fe::cudnn_dlhandle = dlopen(name, RTLD_NOW);
            if (fe::cudnn_dlhandle != nullptr) break;
        }
    });
    if (fe::cudnn_dlhandle == nullptr) return 0;
    try {
        return fe::detail::get_backend_version();
    } catch (const std::exception&) {
        return 0;
    }
}

static bool build(LowpSdpa& sdpa, fe::graph::Graph& graph, std::string& why) {
    const auto plans = std::vector<fe::HeurMode_t>{fe::HeurMode_t::A};
    for (auto step : {0, 1, 2, 3, 4}) {
        fe::error_t status;
        if (step == 0) status = graph.validate();
        if (step == 1) status = graph.build_operation_graph(sdpa.handle.raw);
        if (step == 2) status = graph.create_execution_plans(plans);
        if (step == 3) status = graph.check_support();
        if (step == 4) status = graph.build_plans();
        if (status.is_bad()) {
            why = status.get_message();
            return false;
        }
    }
    int64_t bytes = 0;
    if (graph.get_workspace_size(bytes).is_bad()) {
        why = "cuDNN does not say what memory it works in";
        return false;
    }
    sdpa.workspace = std::max(sdpa.workspace, bytes);
    return true;
}

static Tensor tensor(fe::graph::Graph& graph, const LowpSdpaSizes& s, const char* name, int64_t id, int64_t heads, const int64_t* stride) {
    return graph.tensor(fe::graph::Tensor_attributes()
                            .set_name(name)
                            .set_uid(id)
                            .set_dim({s.sequences, heads, s.seq, s.dim})
                            .set_stride({stride[0], stride[1], stride[2], 1}));
}

static void result(Tensor tensor, const LowpSdpaSizes& s, int64_t id, int64_t heads, const int64_t* stride) {
    tensor->set_output(true)
        .set_uid(id)
        .set_dim({s.sequences, heads, s.seq, s.dim})
        .set_stride({stride[0], stride[1], stride[2], 1});
}

static Tensor mask(fe::graph::Graph& graph, const LowpSdpaSizes& s) {
    return graph.tensor(fe::graph::Tensor_attributes()
                            .set_name("mask")
                            .set_uid(MASK)
                            .set_dim({s.sequences, 1, s.seq, s.seq})
                            .set_stride({s.seq * s.seq, s.seq * s.seq, s.seq, 1}));
}

static void stats(fe::graph::Tensor_attributes& stats, const LowpSdpaSizes& s) {
    stats.set_uid(STATS)
        .set_dim({s.sequences, s.heads, s.seq, 1})
        .set_stride({s.heads * s.seq, s.seq, 1, 1})
        .set_data_type(fe::DataType_t::FLOAT);
}

// Options that both passes share.
template <typename Options>
static void describe(Options& options, fe::graph::Graph& graph, const LowpSdpaSizes& s, const char* name) {
    graph.set_io_data_type(fe::DataType_t::BFLOAT16)
        .set_intermediate_data_type(fe::DataType_t::FLOAT)
        .set_compute_data_type(fe::DataType_t::FLOAT);
    options.set_name(name)
        .set_diagonal_alignment(fe::DiagonalAlignment_t::TOP_LEFT)
        .set_diagonal_band_right_bound(0)
        .set_attn_scale(s.scale);
    if (s.window > 0) options.set_diagonal_band_left_bound(static_cast<int>(s.window));
    if (s.masked != 0) options.set_bias(mask(graph, s));
}

static bool build_forward(LowpSdpa& sdpa, const LowpSdpaSizes& s, std::string& why) {
    auto& graph = sdpa.forward;
    fe::graph::SDPA_attributes options;
    describe(options, graph, s, "sdpa");
    options.set_generate_stats(true);
    auto q = tensor(graph, s, "q", Q, s.heads, s.q);
    auto k = tensor(graph, s, "k", K, s.kv_heads, s.k);
    auto v = tensor(graph, s, "v", V, s.kv_heads, s.v);
    auto [o, sums] = graph.sdpa(q, k, v, options);
    result(o, s, O, s.heads, s.o);
    stats(*sums, s);
    sums->set_output(true);
    return build(sdpa, graph, why);
}

static bool build_backward(LowpSdpa& sdpa, const LowpSdpaSizes& s, std::string& why) {
    if (s.backward == 0) {
        why = "cuDNN's is left out";
        return false;
    }
    try {
        auto& graph = sdpa.backward;
        fe::graph::SDPA_backward_attributes options;
        describe(options, graph, s, "sdpa_backward");
        options.set_deterministic_algorithm(s.backward == 1);
        auto q = tensor(graph, s, "q", Q, s.heads, s.q);
        auto k = tensor(graph, s, "k", K, s.kv_heads, s.k);
        auto v = tensor(graph, s, "v", V, s.kv_heads, s.v);
        auto o = tensor(graph, s, "o", O, s.heads, s.o);
        auto gradient = tensor(graph, s, "do", DO, s.heads, s.o);
        fe::graph::Tensor_attributes kept;
        kept.set_name("stats");
        stats(kept, s);
        auto sums = graph.tensor(kept);
        auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, o, gradient, sums, options);
        result(dq, s, DQ, s.heads, s.q);
        result(dk, s, DK, s.kv_heads, s.k);
        result(dv, s, DV, s.kv_heads, s.v);
        return build(sdpa, graph, why);
    } catch (const std::exception& error) {
        why = error.what();
        return false;
    }
}

extern "C" {

// Plans forward, and backward where it is asked for, on the current device. Null where cuDNN has no forward pass. The reason is in `text`,
// also where it has no backward pass.
LowpSdpa* lowp_sdpa_new(const LowpSdpaSizes* sizes, char* text, size_t room) {
    std::string why;
    try {
        auto sdpa = std::make_unique<LowpSdpa>();
        if (lowp_sdpa_version() == 0) {
            say(text, room, "libcudnn.so.9 was not found");
            return nullptr;
        }
        if (fe::detail::create_handle(&sdpa->handle.raw) != CUDNN_STATUS_SUCCESS) {
            say(text, room, "cudnnCreate failed");
            return nullptr;
        }
        if (!build_forward(*sdpa, *sizes, why)) {
            say(text, room, why);
            return nullptr;
        }
        sdpa->has_backward = build_backward(*sdpa, *sizes, why);
        if (!sdpa->has_backward) say(text, room, why);
        return sdpa.release();
    } catch (const std::exception& error) {
        say(text, room, error.what());
        return nullptr;
    }
}

// Whether there is a backward pass.
int lowp_sdpa_has_backward(const LowpSdpa* sdpa) { return sdpa->has_backward; }

// Bytes that the passes work in.
int64_t lowp_sdpa_workspace(const LowpSdpa* sdpa) { return sdpa->workspace; }

void lowp_sdpa_free(LowpSdpa* sdpa) { delete sdpa; }

static int run(LowpSdpa* sdpa, fe::graph::Graph& graph, void* stream, std::unordered_map<int64_t, void*>& places,
               void* workspace, char* text, size_t room) {
    try {
        if (fe::detail::set_stream(sdpa->handle.raw, static_cast<cudaStream_t>(stream)) != CUDNN_STATUS_SUCCESS) {
            say(text, room, "cudnnSetStream failed");
            return 1;
        }
        auto status = graph.execute(sdpa->handle.raw, places, workspace);
        if (status.is_good()) return 0;
        say(text, room, status.get_message());
    } catch (const std::exception& error) {
        say(text, room, error.what());
    }
    return 1;
}

// The mask is null where there is none.
static void add_mask(std::unordered_map<int64_t, void*>& map, void* mask) {
    if (mask != nullptr) map[MASK] = mask;
}

// `places`: q, k, v, o, stats, mask.
int lowp_sdpa_forward(LowpSdpa* sdpa, void* stream, void* const* places, void* workspace, char* text, size_t room) {
    std::unordered_map<int64_t, void*> map = {
        {Q, places[0]}, {K, places[1]}, {V, places[2]}, {O, places[3]}, {STATS, places[4]}};
    add_mask(map, places[5]);
    return run(sdpa, sdpa->forward, stream, map, workspace, text, room);
}

// `places`: q, k, v, o, stats, mask, the gradient of o, then those of q, k and v.
int lowp_sdpa_backward(LowpSdpa* sdpa, void* stream, void* const* places, void* workspace, char* text, size_t room) {
    std::unordered_map<int64_t, void*> map = {{Q, places[0]},     {K, places[1]},  {V, places[2]},
                                              {O, places[3]},     {STATS, places[4]}, {DO, places[6]},
                                              {DQ, places[7]}, {DK, places[8]}, {DV, places[9]}};
    add_mask(map, places[5]);
    return run(sdpa, sdpa->backward, stream, map, workspace, text, room);
}

}  // extern "C"
