#!/usr/bin/env python3
"""Times PyTorch and torchao on the GPU of this machine, on the sizes of `lowp bench`; table.py calls it.

PyTorch's AdamW(fused=True), torch.compile'd casts and a transpose, and torchao's casts where it is
installed. Times are medians of CUDA events, as those of lowp; the host does not wait between runs.

    peers.py --json peers.json [--shrink N] [--runs N]
"""

import argparse
import json
import statistics
import sys

import torch

ROWS, ABSENT = [], []
PATH = None
FP8_MAX = 448.0


def seconds(run, runs):
    """Median seconds of `run`. The device has the next run before it ends one."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    marks = []
    for _ in range(runs):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) * 1e-3 for start, end in marks)


def report(peer, work, shape, time):
    ROWS.append(dict(peer=peer, work=work, shape=shape, us=time * 1e6))
    print(f"{peer:10} {work:34} {shape:18} {time * 1e6:10.1f} us", flush=True)


def attempt(what, run):
    """A peer that is missing or fails is named, and the rest goes on."""
    try:
        run()
    except Exception as error:  # noqa: BLE001
        text = f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
        ABSENT.append(text)
        print(f"not measured: {text}", flush=True)
    save()
    torch.cuda.empty_cache()


def save():
    """What is measured so far survives what comes later."""
    if PATH:
        with open(PATH, "w", encoding="utf-8") as file:
            json.dump(dict(device=torch.cuda.get_device_name(), torch=torch.__version__, rows=ROWS, absent=ABSENT), file)


def adamw(count, side, runs):
    """AdamW over f32 parameters, moments and gradients: PyTorch takes no bf16 gradient for them."""
    params = [torch.randn(side, side, device="cuda").requires_grad_() for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, fused=True)
    report("PyTorch", "AdamW(fused)", f"{count} x {side}x{side}", seconds(optimizer.step, runs))


def fp8_rowwise(x, scale):
    """Per-tensor FP8 with a known scale."""
    return (x.float() * scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_both(x, scale):
    """The same in both orientations."""
    codes = fp8_rowwise(x, scale)
    return codes, codes.t().contiguous()


def current(cast):
    """`cast` with the scale of the tensor's amax, and its inverse."""
    def with_amax(x):
        scale = FP8_MAX / x.abs().amax().float()
        return cast(x, scale), 1 / scale
    return with_amax


def e8m0(amax):
    """The power of two of a block and its reciprocal, rounded up."""
    bits = (amax * (1.0 / FP8_MAX)).view(torch.int32)
    exponent = ((bits + 0x7FFFFF) >> 23).clamp(0, 254)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return exponent.to(torch.uint8), inverse


def mxfp8_rowwise(x):
    """MXFP8 along rows."""
    blocks = x.float().view(x.shape[0], -1, 32)
    scale, inverse = e8m0(blocks.abs().amax(-1))
    codes = (blocks * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.view(x.shape), scale


def mxfp8_both(x):
    """MXFP8 of both orientations."""
    blocks = x.float().view(-1, 32, x.shape[1])
    scale, inverse = e8m0(blocks.abs().amax(1))
    codes = (blocks * inverse.unsqueeze(1)).to(torch.float8_e4m3fn)
    return mxfp8_rowwise(x), (codes.view(x.shape), scale)


def compiled(work, shape, function, inputs, runs):
    def measure():
        torch.compiler.reset()
        program = torch.compile(function)
        report("compiled", work, shape, seconds(lambda: program(*inputs), runs))
    attempt(f"compiled {work}", measure)


def casts(side, runs):
    """Casts and a transpose of one matrix."""
    shape = f"1 x {side}x{side}"
    scale = torch.tensor(1.5, device="cuda")
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        x = torch.randn(side, side, device="cuda", dtype=dtype)
        for usage, cast in (("both", fp8_both), ("rowwise", fp8_rowwise)):
            compiled(f"fp8 known scale, {name} {usage}", shape, cast, (x, scale), runs)
            compiled(f"fp8 current scale, {name} {usage}", shape, current(cast), (x,), runs)
    x = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    compiled("mxfp8, bf16 rowwise", shape, mxfp8_rowwise, (x,), runs)
    compiled("mxfp8, bf16 both", shape, mxfp8_both, (x,), runs)
    codes = torch.randint(0, 256, (side, side), device="cuda", dtype=torch.uint8)
    attempt("byte transpose", lambda: report("PyTorch", "byte transpose", shape,
                                             seconds(lambda: codes.t().contiguous(), runs)))


def torchao_casts(side, runs):
    """torchao's own MXFP8 and NVFP4 casts, where the package is installed."""
    shape = f"1 x {side}x{side}"
    x = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)

    def mx():
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        function = torch.compile(lambda t: to_mx(t, torch.float8_e4m3fn, 32))
        report("torchao", "to_mx", shape, seconds(lambda: function(x), runs))

    def nvfp4():
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale
        function = torch.compile(lambda t: nvfp4_quantize(t, 16, per_tensor_amax_to_scale(t.abs().amax())))
        report("torchao", "nvfp4_quantize with amax", shape, seconds(lambda: function(x), runs))

    attempt("torchao to_mx", mx)
    attempt("torchao nvfp4_quantize", nvfp4)


def main():
    global PATH
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="write the rows here")
    parser.add_argument("--shrink", type=int, default=1, help="divide both sides of every shape, as `lowp bench --shrink`")
    parser.add_argument("--runs", type=int, default=20, help="timed runs per row; the median is reported")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: peers are measured on the GPU that lowp was measured on")
    PATH = args.json
    for count, side in [(16, 4096), (256, 1024), (1000, 256)]:
        attempt(f"AdamW, {count} tensors", lambda: adamw(count, side // args.shrink, args.runs))
    casts(16384 // args.shrink, args.runs)
    torchao_casts(16384 // args.shrink, args.runs)


if __name__ == "__main__":
    main()
