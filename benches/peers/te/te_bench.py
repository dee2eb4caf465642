#!/usr/bin/env python3
"""Times TransformerEngine's own kernels through its C API on the GPU of this machine.

    te_bench.py FOLDER CASE[,CASE...] [--shrink N] [--runs N]
    te_bench.py FOLDER list

FOLDER is the folder te of what ../fetch.py makes. The sizes are those of `lowp bench`. One JSON line per measurement:
`us` is the median time between CUDA events of calls one after another, `graph_us` that of the same
calls replayed as a CUDA graph. Every output is first compared with torch's.
"""

import argparse
import json
import os
import sys

import torch

import capi
from capi import (AMAX, BF16, BYTE, CHUNK, COL, COL_INV, E4M3, F32, I16, I32, PLAIN, ROW, ROW_INV, SCALE,
                  address, array, check, handle, lists, plain, stream)

SETS = [(16, 4096), (256, 1024), (1000, 256)]
SQUARE = 16384
DTYPES = {"bf16": (BF16, torch.bfloat16), "f32": (F32, torch.float32)}
# In the order of the call.
HYPER = dict(lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, step=3, mode=1, correct=1, decay=0.1)
OPTIONS = None
CASES = {}


def emit(**line):
    print(json.dumps(line), flush=True)


# ---------------------------------------------------------------- measuring

def median(run):
    times = []
    for i in range(3 + OPTIONS.runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(i)
        end.record()
        times.append((start, end))
    torch.cuda.synchronize()
    times = sorted(start.elapsed_time(end) * 1e3 for start, end in times[3:])
    return round((times[(len(times) - 1) // 2] + times[len(times) // 2]) / 2, 2)


def measure(work, shape, run, verify):
    """Times `run(i)`, after a call whose outputs `verify()` accepts: it returns what is wrong with them, or nothing."""
    line = dict(peer="TE", work=work, shape=shape)
    try:
        run(0)
        torch.cuda.synchronize()
        if wrong := verify():
            emit(**line, error=wrong)
            return
        line["us"] = median(run)
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run(0)
            line["graph_us"] = median(lambda i: graph.replay())
        except RuntimeError as error:
            line["no_graph"] = str(error)[:300]
        emit(**line)
    except RuntimeError as error:
        emit(**line, error=str(error)[:300])


def cast(values, scale):
    return (values.float() * scale).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def differences(name, got, expected, least=0.99):
    """What is wrong with codes of which rounding may move a few."""
    same = float((got.view(torch.uint8) == expected).float().mean())
    return "" if same >= least else f"only {same:.4f} of the {name} bytes are torch's"


# ---------------------------------------------------------------- inputs and outputs

def randn(*shape, dtype=torch.float32, std=1.0):
    return torch.empty(*shape, dtype=dtype, device="cuda").normal_(0, std)


def zeros(*shape, dtype=torch.uint8):
    return torch.zeros(*shape, dtype=dtype, device="cuda")


class State:
    """n tensors of side x side: f32 masters, moments, and gradients in bf16; each kind is contiguous."""

    def __init__(self, n, side):
        self.n, self.side, self.shape = n, side, f"{n} x {side}x{side}"
        torch.manual_seed(1)
        size = n * side * side
        self.whole = dict(p=randn(size, std=0.02), m=randn(size, std=1e-4), v=randn(size, std=1e-4).square_(),
                          g=randn(size, dtype=torch.bfloat16, std=1e-3))
        for key, whole in self.whole.items():
            setattr(self, key, list(whole.view(n, side, side).unbind(0)))
        self.before = self.slab()

    def handles(self, key):
        return [plain(tensor, BF16 if key == "g" else F32) for tensor in getattr(self, key)]

    def new(self, dtype):
        return list(zeros(self.n, self.side, self.side, dtype=dtype).unbind(0))

    def slab(self):
        """A part of the last tensor."""
        return {key: getattr(self, key)[-1].reshape(-1)[:65536].double() for key in "pmvg"}

    def verify(self):
        """One update against torch's arithmetic in f64."""
        old, new, h = self.before, self.slab(), HYPER
        m = h["beta1"] * old["m"] + (1 - h["beta1"]) * old["g"]
        v = h["beta2"] * old["v"] + (1 - h["beta2"]) * old["g"] ** 2
        root = (v / (1 - h["beta2"] ** h["step"])).sqrt() + h["eps"]
        p = old["p"] - h["lr"] * (m / (1 - h["beta1"] ** h["step"]) / root + h["decay"] * old["p"])
        for key, expected in (("p", p), ("m", m), ("v", v)):
            size = expected.abs() + expected.abs().mean()
            worst = float(((new[key] - expected).abs() / size).max())
            if not worst < 1e-4:
                return f"AdamW's {key} is off by {worst:.1e}"
        return ""


def adam(columns, form=""):
    """A call of TransformerEngine's multi-tensor Adam on lists of handles, in the form `fp8`, `param_remainder` or neither."""
    call = address("multi_tensor_adam_" + (form and form + "_") + "cuda")
    flag = plain(zeros(1, dtype=torch.int32), I32)
    args = (call, CHUNK, flag, *lists(*columns), *HYPER.values())
    if form == "fp8":
        return lambda: check(capi.loop.tl_adam_fp8(*args, E4M3, stream()))
    return lambda: check(capi.loop.tl_adam(*args, stream()))


def adam_of(state, grad=None):
    """The update of f32 masters, from bf16 gradients or those given in f32."""
    grads = state.handles("g") if grad is None else [plain(tensor, F32) for tensor in grad]
    return adam([grads, state.handles("p"), state.handles("m"), state.handles("v")])


class Fp8:
    """E4M3 outputs with one scale a tensor: rowwise, and transposed where both are wanted."""

    def __init__(self, n, side, both=True, scale=1.0):
        self.n, self.row = n, [zeros(side, side) for _ in range(n)]
        self.col = [zeros(side, side) for _ in range(n)] if both else None
        self.scale = torch.full((n,), scale, device="cuda")
        self.amax, self.inverse = zeros(n, dtype=torch.float32), zeros(n, dtype=torch.float32)
        out, meta = [], []
        for i in range(n):
            one = slice(i, i + 1)
            params = {ROW: (self.row[i], E4M3), ROW_INV: (self.inverse[one], F32), SCALE: (self.scale[one], F32)}
            if both:
                params |= {COL: (self.col[i], E4M3), COL_INV: (self.inverse[one], F32)}
            out.append(handle(PLAIN, params))
            # With the amax, which the functions that make the scale want.
            meta.append(handle(PLAIN, params | {AMAX: (self.amax[one], F32)}))
        self.out, self.meta, self.config = array(out), array(meta), capi.config()

    def quantize(self, inputs):
        call = address("quantize_v2")
        return lambda: check(capi.loop.tl_loop_abc(call, inputs, self.out, self.config, self.n, stream()))

    def current(self, inputs):
        calls = [address(name) for name in ("compute_amax_with_config", "compute_scale_from_amax", "quantize_v2")]
        return lambda: check(capi.loop.tl_current(*calls, inputs, self.meta, self.out, self.config, self.n, stream()))

    def dequantize(self, outputs):
        call = address("dequantize")
        return lambda: check(capi.loop.tl_loop_ab(call, self.out, outputs, self.n, stream()))

    def verify(self, values, i=-1):
        col = self.col and self.col[i]
        return verify_fp8(values, self.row[i], col, self.scale[i])


def verify_fp8(values, row, col, scale):
    part = min(512, values.shape[0])
    wrong = differences("rowwise", row[:part], cast(values[:part], scale))
    if not wrong and col is not None and not torch.equal(row[:part].T, col[:, :part]):
        wrong = "the columnwise bytes are not the transposed rowwise ones"
    return wrong


def up(value, step):
    return (value + step - 1) // step * step


class Mxfp8:
    """MXFP8 outputs of both orientations; the columnwise bytes are not transposed."""

    def __init__(self, n, side):
        self.n, self.side = n, side
        many = lambda *shape: [zeros(*shape) for _ in range(n)]
        self.row, self.row_scale = many(side, side), many(up(side, 128), up(side // 32, 4))
        self.col, self.col_scale = many(side, side), many(up(side // 32, 4), up(side, 128))

    def partial(self, sources):
        """What quantize_master_weights runs for bf16 tensors, all of them whole on one device: a pass for amaxes,
        one for all E8M0 scales, a pass that casts."""
        size = (self.side * self.side,)
        amaxes = [[zeros(*scale.shape, dtype=torch.bfloat16) for scale in scales]
                  for scales in (self.row_scale, self.col_scale)]
        amaxes = [[plain(tensor, BF16) for tensor in tensors] for tensors in amaxes]
        scales = [[plain(tensor, BYTE) for tensor in tensors] for tensors in (self.row_scale, self.col_scale)]
        inputs = array([plain(tensor, BF16, size) for tensor in sources])
        codes = [array([plain(tensor, BYTE, size) for tensor in tensors]) for tensors in (self.row, self.col)]
        all_scales = lists(amaxes[0] + amaxes[1], scales[0] + scales[1])
        amax_arrays, scale_arrays = list(map(array, amaxes)), list(map(array, scales))
        amax, scale, encode = (address(name) for name in (
            "mxfp8_scaling_compute_partial_amax", "multi_tensor_compute_scale_inv_e8m0_cuda",
            "mxfp8_scaling_partial_cast"))
        sizes = (self.side, self.side, self.n)

        def run():
            check(capi.loop.tl_mxfp8_amax(amax, inputs, *amax_arrays, *sizes, stream()))
            check(capi.loop.tl_e8m0(scale, CHUNK, *all_scales, stream()))
            check(capi.loop.tl_mxfp8_cast(encode, inputs, *codes, *scale_arrays, *sizes, stream()))
        return run

    def verify(self, values):
        """The first tensor against torch's cast with the scales that it states."""
        part, blocks = min(512, self.side), self.side // 32
        row = self.row_scale[0][:part, :blocks].repeat_interleave(32, 1)
        col = self.col_scale[0][:part // 32, :self.side].repeat_interleave(32, 0)
        for name, codes, scales in (("rowwise", self.row[0], row), ("columnwise", self.col[0], col)):
            expected = cast(values[:part], torch.exp2(127.0 - scales.float()))
            if wrong := differences(name, codes[:part], expected):
                return wrong
        return ""


class Grouped:
    """Current scaling of contiguous tensors of one shape through the grouped functions: three calls for all."""

    def __init__(self, state):
        self.n, self.side = n, side = state.n, state.side
        self.row, self.col = zeros(n * side * side), zeros(n * side * side)
        self.amax, self.scale, self.inverse = (zeros(n, dtype=torch.float32) for _ in range(3))
        rows = capi.shape_of((n * side, side))
        self.input, self.out = (capi.te.nvte_create_grouped_tensor(PLAIN, n, rows) for _ in range(2))
        for made, which, spec in (
                (self.input, ROW, (state.whole["p"], F32)), (self.out, ROW, (self.row, E4M3)),
                (self.out, COL, (self.col, E4M3)), (self.out, SCALE, (self.scale, F32)),
                (self.out, AMAX, (self.amax, F32)), (self.out, ROW_INV, (self.inverse, F32)),
                (self.out, COL_INV, (self.inverse, F32))):
            value = capi.basic(*spec)
            capi.te.nvte_set_grouped_tensor_param(made, which, capi.C.byref(value), capi.C.sizeof(value))
        self.config = capi.config()

    def run(self):
        calls = [address("group_" + name) for name in ("compute_amax_with_config", "compute_scale_from_amax", "quantize")]
        args = (*calls, self.input, self.out, self.config)
        return lambda: check(capi.loop.tl_grouped_current(*args, stream()))

    def verify(self, state):
        last = lambda whole: whole.view(self.n, self.side, self.side)[-1]
        return verify_fp8(state.p[-1], last(self.row), last(self.col), self.scale[-1])


# ---------------------------------------------------------------- encodes of one matrix

def encode_case(dtype, both, current):
    kind, outputs = "current" if current else "known", "both" if both else "rowwise"
    name = f"fp8 {kind} scale, {dtype} {outputs}"

    def case():
        code, torch_dtype = DTYPES[dtype]
        side = SQUARE // OPTIONS.shrink
        torch.manual_seed(2)
        inputs = [randn(side, side, dtype=torch_dtype, std=0.02) for _ in range(2)]
        outs = [Fp8(1, side, both, scale=2048.0) for _ in inputs]
        arrays = [array([plain(tensor, code)]) for tensor in inputs]
        runs = [(out.current if current else out.quantize)(source) for out, source in zip(outs, arrays)]
        measure(name, f"1 x {side}x{side}", lambda i: runs[i % 2](), lambda: outs[0].verify(inputs[0]))
    CASES[f"fp8_{kind}_{outputs}_{dtype}"] = case


for _dtype in DTYPES:
    for _both in (True, False):
        for _current in (False, True):
            encode_case(_dtype, _both, _current)


def mxfp8_partial():
    side = SQUARE // OPTIONS.shrink
    torch.manual_seed(2)
    inputs = [randn(side, side, dtype=torch.bfloat16, std=0.02) for _ in range(2)]
    outs = [Mxfp8(1, side) for _ in inputs]
    runs = [out.partial([source]) for out, source in zip(outs, inputs)]
    measure("mxfp8 partial cast, bf16 both", f"1 x {side}x{side}", lambda i: runs[i % 2](),
            lambda: outs[0].verify(inputs[0]))


CASES["mxfp8_partial"] = mxfp8_partial


# ---------------------------------------------------------------- optimizer steps

def each_set(function, sets=SETS):
    """A case of every set of tensors: `function(state)` returns the name, the step and what verifies its output."""
    def case():
        for n, side in sets:
            state = State(n, side // OPTIONS.shrink)
            work, step, verify = function(state)
            measure(work, state.shape, lambda i: step(), lambda: verify() or state.verify())
            capi.release()
    CASES[function.__name__] = case


def each_end(function):
    """The same of the largest and the smallest tensors, which lowp has rows of with states in fewer bits."""
    each_set(function, [SETS[0], SETS[-1]])


def then(*calls):
    def run():
        for call in calls:
            call()
    return run


@each_set
def adamw(state):
    """f32 masters and moments, bf16 gradients."""
    return "Adam", adam_of(state), lambda: ""


def adam_fp8(state, out):
    """Adam that writes rowwise FP8 of a known scale."""
    one = lambda tensor: [plain(tensor[i:i + 1], F32) for i in range(state.n)]
    weights = [plain(tensor, BYTE) for tensor in out.row]
    return adam([state.handles("g"), weights, state.handles("m"), state.handles("v"), state.handles("p"),
                 one(out.scale), one(out.amax), one(out.inverse)], "fp8")


@each_set
def adamw_fp8_rowwise(state):
    out = Fp8(state.n, state.side, both=False, scale=1024.0)
    return "Adam with FP8 rowwise", adam_fp8(state, out), lambda: out.verify(state.p[-1])


@each_set
def adamw_fp8_both(state):
    """The same, then a transpose per tensor."""
    out = Fp8(state.n, state.side, scale=1024.0)
    call = address("transpose")
    rows, cols = (array([plain(tensor, E4M3) for tensor in tensors]) for tensors in (out.row, out.col))
    transposes = lambda: check(capi.loop.tl_loop_ab(call, rows, cols, state.n, stream()))
    return "Adam with FP8, transposes", then(adam_fp8(state, out), transposes), lambda: out.verify(state.p[-1])


@each_set
def adamw_current_grouped(state):
    """Adam, then the grouped current scaling."""
    out = Grouped(state)
    return "Adam, grouped current scaling", then(adam_of(state), out.run()), lambda: out.verify(state)


@each_set
def adamw_current_fused(state):
    """What FusedAdam.step does for weights of current scaling: each gradient to f32, Adam, a quantize per tensor."""
    grads, out = state.new(torch.float32), Fp8(state.n, state.side)
    quantize = out.current(array(state.handles("p")))

    def convert():
        for to, source in zip(grads, state.g):
            to.copy_(source)
    return "FusedAdam's current scaling", then(convert, adam_of(state, grads), quantize), lambda: out.verify(state.p[-1])


@each_set
def adamw_mxfp8(state):
    """quantize_master_weights for MXFP8: Adam, each master to bf16, then the passes of a partial cast."""
    halves, out = state.new(torch.bfloat16), Mxfp8(state.n, state.side)

    def convert():
        for to, source in zip(halves, state.p):
            to.copy_(source)
    return "Adam, quantize_master_weights mxfp8", then(adam_of(state), convert, out.partial(halves)), \
        lambda: out.verify(halves[0])


@each_end
def adamw_remainder(state):
    """FusedAdam's store_param_remainders: bf16 parameters, which are f32 masters together with 16 more bits."""
    params, rest = state.new(torch.bfloat16), state.new(torch.int16)
    for master, param, low in zip(state.p, params, rest):
        bits = master.view(torch.int32)
        low.copy_(bits << 16 >> 16)
        param.view(torch.int16).copy_((bits + 0x8000) >> 16)
    step = adam([state.handles("g"), [plain(tensor, BF16) for tensor in params], state.handles("m"), state.handles("v"),
                 [plain(tensor, I16) for tensor in rest]], "param_remainder")

    def join():
        high, low = params[-1].view(torch.int16).int(), rest[-1].int()
        state.p[-1].view(torch.int32).copy_((high << 16) + low)
        return ""
    return "Adam, parameter remainders", step, join


@each_end
def adamw_bf16_moments(state):
    """What FusedAdam.step does for bf16 moments: each to f32, Adam, and back."""
    halves = {key: state.new(torch.bfloat16) for key in "mv"}
    pairs = [pair for key in "mv" for pair in zip(getattr(state, key), halves[key])]
    for wide, half in pairs:
        half.copy_(wide)

    def widen():
        for wide, half in pairs:
            wide.copy_(half)

    def narrow():
        for wide, half in pairs:
            half.copy_(wide)
    widen()
    state.before = state.slab()
    return "FusedAdam's bf16 moments", then(widen, adam_of(state), narrow), lambda: ""


@each_end
def adamw_fp8_moments(state):
    """What FusedAdam.step does for FP8 moments, by the library's own kernels: each to f32, Adam, then an amax, a scale and codes."""
    codes = {key: Fp8(state.n, state.side, both=False) for key in "mv"}
    wide = {key: array(state.handles(key)) for key in "mv"}
    narrow = [codes[key].current(wide[key]) for key in "mv"]
    widen = [codes[key].dequantize(wide[key]) for key in "mv"]
    then(*narrow, *widen)()
    state.before = state.slab()

    def verify():
        for key in "mv":
            values, amax = getattr(state, key)[-1], getattr(state, key)[-1].abs().max()
            decoded = codes[key].row[-1].view(torch.float8_e4m3fn).float() * codes[key].inverse[-1]
            if not bool(((decoded - values).abs() <= values.abs() / 16 + amax / 448 / 512).all()):
                return f"the codes of {key} are not those of its values"
        return ""
    return "FusedAdam's FP8 moments", then(*widen, adam_of(state), *narrow), verify


def main():
    global OPTIONS
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("cases")
    parser.add_argument("--shrink", type=int, default=1)
    parser.add_argument("--runs", type=int, default=20)
    OPTIONS = parser.parse_args()
    if OPTIONS.cases == "list":
        print("\n".join(CASES))
        return
    emit(facts=capi.load(OPTIONS.folder), device=torch.cuda.get_device_name())
    for name in OPTIONS.cases.split(","):
        try:
            CASES[name]()
            capi.release()
        except (AttributeError, RuntimeError) as error:     # a function that this version lacks, an argument it refuses
            emit(peer="TE", work=name, error=str(error)[:300])
    sys.stdout.flush()
    os._exit(0)                                             # without tearing down the state of the device


if __name__ == "__main__":
    main()
