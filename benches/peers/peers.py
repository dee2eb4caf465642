#!/usr/bin/env python3
"""Times the peers of lowp's CUDA kernels on the GPU of this machine, on the sizes of `lowp bench`.

PyTorch's AdamW(fused=True), torch.compile'd casts and transposes, and torchao where it is
installed. Times are medians of CUDA events, as those of lowp; the host does not wait between runs.
The share is that of compulsory bytes over the device-to-device copy bandwidth of the same program.
Where a result of lowp is given, each of its rows that has a peer stands beside it in one table:

    lowp bench --device cuda --json lowp.json
    python3 benches/peers/peers.py --lowp lowp.json [--json peers.json] [--shrink N] [--runs N]
"""

import argparse
import json
import statistics
import sys

import torch

ROWS = []

# Rows of lowp (operation, recipe or any) and the work of a peer that stands beside them, with notes.
PAIRS = [
    ("adamw", None, "AdamW(fused)", "a"),
    ("adamw", None, "AdamW(foreach)", "a"),
    ("adamw + encode both", None, "AdamW(fused)", "ab"),
    ("encode bf16 both", "fp8-delayed", "encode fp8 both", ""),
    ("encode bf16 both", "mxfp8", "encode mxfp8 both", ""),
    ("encode bf16 both", "mxfp8", "to_mx mxfp8 rowwise", "c"),
    ("encode bf16 both", "nvfp4-1d", "nvfp4_quantize rowwise", "cd"),
    ("transpose E4M3", None, "byte transpose", ""),
]
NOTES = {
    "a": "the peer reads f32 gradients, lowp bf16",
    "b": "the peer only updates; lowp updates and writes both orientations",
    "c": "the peer writes one orientation, lowp both",
    "d": "the peer has block scales only; lowp also takes the amax of the tensor, in a pass of its own",
}


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


def copy_bandwidth(runs, shrink):
    """Bytes per second of a device-to-device copy, read and written."""
    size = (1 << 30) // shrink
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * size / seconds(lambda: target.copy_(source), runs)


def report(peer, work, shape, size, time, copy):
    row = dict(peer=peer, work=work, shape=shape, us=time * 1e6, bytes=size, share=size / time / copy)
    ROWS.append(row)
    print(f"{peer:12} {work:34} {shape:18} {row['us']:10.1f} us {size / 1e9:8.3f} GB {row['share']:6.3f}", flush=True)


def attempt(what, run):
    """A peer that is missing or fails is named, and the rest goes on."""
    try:
        run()
    except Exception as error:  # noqa: BLE001
        print(f"{what}: not measured: {type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}", flush=True)
    torch.cuda.empty_cache()


def adamw(count, side, copy, runs):
    """AdamW over fp32 parameters, moments and gradients: PyTorch has no bf16 gradient for them."""
    params = [torch.randn(side, side, device="cuda").requires_grad_() for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    for name, options in [("fused", dict(fused=True)), ("foreach", dict(foreach=True))]:
        optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, **options)
        time = seconds(optimizer.step, runs)
        # p, m, v read and written, g read.
        report("pytorch", f"AdamW({name})", f"{count} x {side}x{side}", 28 * count * side * side, time, copy)
        del optimizer


FP8_MAX = 448.0


def fp8_known_scale(x, scale):
    """Per-tensor FP8 with a known scale, both orientations."""
    codes = (x.float() * scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return codes, codes.t().contiguous()


def e8m0(amax):
    """The power of two of a block and its reciprocal, rounded up."""
    bits = (amax * (1.0 / FP8_MAX)).view(torch.int32)
    exponent = ((bits + 0x7FFFFF) >> 23).clamp(0, 254)
    inverse = ((254 - exponent) << 23).view(torch.float32)
    return exponent.to(torch.uint8), inverse


def mxfp8_rows(x):
    """MXFP8 along rows."""
    blocks = x.float().view(x.shape[0], -1, 32)
    scale, inverse = e8m0(blocks.abs().amax(-1))
    codes = (blocks * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return codes.view(x.shape), scale


def mxfp8_columns(x):
    """MXFP8 along columns."""
    blocks = x.float().view(-1, 32, x.shape[1])
    scale, inverse = e8m0(blocks.abs().amax(1))
    codes = (blocks * inverse.unsqueeze(1)).to(torch.float8_e4m3fn)
    return codes.view(x.shape), scale


def mxfp8_both(x):
    """MXFP8 of both orientations."""
    return mxfp8_rows(x), mxfp8_columns(x)


def casts(side, copy, runs):
    """Casts and a transpose of one matrix."""
    shape, elements = f"1 x {side}x{side}", side * side
    x = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)
    scale = torch.tensor(1.5, device="cuda")
    cases = [
        ("encode fp8 both", fp8_known_scale, (x, scale), 4 * elements),
        ("encode mxfp8 rowwise", mxfp8_rows, (x,), 3 * elements + elements // 32),
        ("encode mxfp8 columnwise", mxfp8_columns, (x,), 3 * elements + elements // 32),
        ("encode mxfp8 both", mxfp8_both, (x,), 4 * elements + elements // 16),
    ]
    for work, function, inputs, size in cases:
        def measure():
            compiled = torch.compile(function)
            time = seconds(lambda: compiled(*inputs), runs)
            report("compiled", work, shape, size, time, copy)
        attempt(work, measure)
    codes = torch.randint(0, 256, (side, side), device="cuda", dtype=torch.uint8)
    attempt("transpose", lambda: report("pytorch", "byte transpose", shape, 2 * elements,
                                        seconds(lambda: codes.t().contiguous(), runs), copy))


def torchao_casts(side, copy, runs):
    """torchao's own MXFP8 and NVFP4 casts, where the package is installed."""
    shape, elements = f"1 x {side}x{side}", side * side
    x = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)

    def mx():
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        function = torch.compile(lambda t: to_mx(t, torch.float8_e4m3fn, 32))
        report("torchao", "to_mx mxfp8 rowwise", shape, 3 * elements + elements // 32,
               seconds(lambda: function(x), runs), copy)

    def nvfp4():
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
        function = torch.compile(lambda t: nvfp4_quantize(t, 16))
        report("torchao", "nvfp4_quantize rowwise", shape, 2 * elements + elements // 2 + elements // 16,
               seconds(lambda: function(x), runs), copy)

    attempt("torchao mxfp8", mx)
    attempt("torchao nvfp4", nvfp4)


def table(rows):
    """Lines of columns; numbers, which stand between names and notes, end together."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [cell.ljust(width) if i in (0, 1, 2, 8) else cell.rjust(width)
                 for i, (cell, width) in enumerate(zip(row, widths))]
        print("  ".join(cells).rstrip())


def side_by_side(device, result):
    """Prints each row of lowp that has a peer beside it."""
    if result["device"] != device:
        print(f"\nlowp was measured on {result['device']}, its peers on {device}: the times do not compare")
    rows, notes = [], set()
    for ours in result["rows"]:
        for operation, recipe, work, marks in PAIRS:
            if ours["operation"] != operation or recipe not in (None, ours["recipe"]):
                continue
            for peer in ROWS:
                if (peer["work"], peer["shape"]) != (work, ours["shape"]):
                    continue
                name = ours["operation"] if ours["recipe"] == "-" else f"{ours['operation']} {ours['recipe']}"
                rows.append([name, ours["shape"], f"{peer['peer']} {work}", f"{peer['us']:.1f}",
                             f"{ours['microseconds']:.1f}", f"{peer['share']:.3f}", f"{ours['share']:.3f}",
                             f"{peer['us'] / ours['microseconds']:.2f}", marks])
                notes.update(marks)
    header = ["work", "shape", "peer", "peer us", "lowp us", "peer share", "lowp share", "peer/lowp", "notes"]
    print()
    if not rows:
        print("no row of lowp has a peer of the same shape; run both with the same --shrink")
        return
    table([header, *rows])
    for mark in sorted(notes):
        print(f"{mark}: {NOTES[mark]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows of the peers here")
    parser.add_argument("--lowp", help="result of `lowp bench --json` to print beside")
    parser.add_argument("--shrink", type=int, default=1, help="divide both sides of every shape, as `lowp bench --shrink`")
    parser.add_argument("--runs", type=int, default=20, help="timed runs of each row; the median counts")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: peers are measured on the GPU that lowp was measured on")
    lowp = None
    if args.lowp:
        with open(args.lowp, encoding="utf-8") as file:
            lowp = json.load(file)
    device = torch.cuda.get_device_name()
    copy = copy_bandwidth(args.runs, args.shrink)
    print(f"{device}, PyTorch {torch.__version__}, copy {copy / 1e9:.0f} GB/s")
    for count, side in [(16, 4096), (256, 1024), (1000, 256)]:
        attempt("AdamW", lambda: adamw(count, side // args.shrink, copy, args.runs))
    casts(16384 // args.shrink, copy, args.runs)
    torchao_casts(16384 // args.shrink, copy, args.runs)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(dict(device=device, copy_bandwidth=copy, rows=ROWS), file, indent=1)
    if lowp:
        side_by_side(device, lowp)


if __name__ == "__main__":
    main()
