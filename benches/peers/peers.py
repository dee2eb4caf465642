#!/usr/bin/env python3
"""Times the peers of lowp's CUDA kernels on the GPU of this machine, on the sizes of `lowp bench`.

PyTorch's AdamW(fused=True), torch.compile'd casts and transposes, and torchao where it is
installed. Times are medians of CUDA events over runs that rotate among buffers larger than the
second-level cache; the share is that of compulsory bytes over the device-to-device copy bandwidth
of the same run. Prints a table, or both sides where a result of lowp is given:

    lowp bench --device cuda --json lowp.json
    python3 benches/peers/peers.py [--json peers.json] [--lowp lowp.json] [--quick]
"""

import argparse
import json
import statistics
import sys

import torch

ROWS = []


def seconds(run, count, repeats):
    """Median seconds of `run(i)`, i rotating below `count`."""
    for i in range(max(count, 3)):
        run(i % count)
    torch.cuda.synchronize()
    times = []
    for i in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run(i % count)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def copy_bandwidth(repeats):
    """Bytes per second of a device-to-device copy, read and written."""
    size = 1 << 30
    source, target = (torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * size / min(seconds(lambda _: target.copy_(source), 1, repeats) for _ in range(3))


def report(peer, work, shape, count, size, time, copy):
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


def adamw(count, side, copy, repeats):
    """AdamW over fp32 parameters, moments and gradients: PyTorch has no bf16 gradient for them."""
    params = [torch.randn(side, side, device="cuda").requires_grad_() for _ in range(count)]
    for p in params:
        p.grad = torch.randn_like(p)
    for name, options in [("fused", dict(fused=True)), ("foreach", dict(foreach=True))]:
        optimizer = torch.optim.AdamW(params, lr=1e-4, weight_decay=0.1, **options)
        time = seconds(lambda _: optimizer.step(), 1, repeats)
        # p, m, v read and written, g read.
        report("pytorch", f"AdamW({name})", f"{count} x {side}x{side}", count, 28 * count * side * side, time, copy)
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


def casts(side, copy, repeats):
    shape, elements = f"{side}x{side}", side * side
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
            time = seconds(lambda _: compiled(*inputs), 1, repeats)
            report("compiled", work, shape, 1, size, time, copy)
        attempt(work, measure)
    codes = torch.randint(0, 256, (side, side), device="cuda", dtype=torch.uint8)
    attempt("transpose", lambda: report("pytorch", "byte transpose", shape, 1, 2 * elements,
                                        seconds(lambda _: codes.t().contiguous(), 1, repeats), copy))


def torchao_casts(side, copy, repeats):
    """torchao's own MXFP8 and NVFP4 casts, where the package is installed."""
    shape, elements = f"{side}x{side}", side * side
    x = torch.randn(side, side, device="cuda", dtype=torch.bfloat16)

    def mx():
        from torchao.prototype.mx_formats.mx_tensor import to_mx
        function = torch.compile(lambda t: to_mx(t, torch.float8_e4m3fn, 32))
        report("torchao", "to_mx mxfp8 rowwise", shape, 1, 3 * elements + elements // 32,
               seconds(lambda _: function(x), 1, repeats), copy)

    def nvfp4():
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize
        function = torch.compile(lambda t: nvfp4_quantize(t, 16))
        report("torchao", "nvfp4_quantize rowwise", shape, 1, 2 * elements + elements // 2 + elements // 16,
               seconds(lambda _: function(x), 1, repeats), copy)

    attempt("torchao mxfp8", mx)
    attempt("torchao nvfp4", nvfp4)


def side_by_side(path):
    """Prints the rows of lowp below those of its peers."""
    with open(path, encoding="utf-8") as file:
        result = json.load(file)
    rows = result["rows"] if isinstance(result, dict) and "rows" in result else result
    print("\nlowp:")
    for row in rows:
        print("  " + "  ".join(f"{key} {value}" for key, value in row.items()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--lowp", help="result of `lowp bench --json` to print beside")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repeats")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: peers are measured on the GPU that lowp was measured on")
    repeats = 10 if args.quick else 30
    copy = copy_bandwidth(repeats)
    print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, copy {copy / 1e9:.0f} GB/s")
    for count, side in [(16, 4096), (256, 1024), (1000, 256)]:
        attempt("AdamW", lambda: adamw(count, side, copy, repeats))
    casts(8192 if args.quick else 16384, copy, repeats)
    torchao_casts(8192 if args.quick else 16384, copy, repeats)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(dict(device=torch.cuda.get_device_name(), copy_bandwidth=copy, rows=ROWS), file, indent=1)
    if args.lowp:
        side_by_side(args.lowp)


if __name__ == "__main__":
    main()
