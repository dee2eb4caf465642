"""Training of a GPT or a Llama in PyTorch over FSDP2: bf16, torchao's float8 and mxfp8, and lowp; optimizer steps, layers and gathers, too.

    torchrun --nproc-per-node 2 benches/peers/torch_gpt.py train bf16 --compile
    torchrun --nproc-per-node 2 benches/peers/torch_gpt.py train lowp:fp8-current --compile
    torchrun --nproc-per-node 2 benches/peers/torch_gpt.py train torchao --compile
    torchrun --nproc-per-node 2 benches/peers/torch_gpt.py train lowp:fp8-current --llama --compile
    torchrun --nproc-per-node 2 benches/peers/torch_gpt.py train lowp:fp8-current --compile --profile
    torchrun --nproc-per-node 2 benches/peers/torch_gpt.py train bf16 --compile --optimizer muon
    python3 benches/peers/torch_gpt.py step
    python3 benches/peers/torch_gpt.py linear --recipes fp8-current fp8-block fp8-block-1d fp8-rowwise
    torchrun --nproc-per-node 2 benches/peers/torch_gpt.py gather

Each run prints lines of JSON. The GPT has the shape of 1b: width 2048, 24 blocks, 16 heads, 32768 words; the Llama is that of
transformers with 1.1 billion parameters: width 2048, 16 layers, 32 heads, 8 of them of keys and values, 32000 words. lowp is the package of
`cargo xtask wheel`; torchao and transformer_engine are used where they are installed.
"""

import argparse
import json
import os
import statistics
import time

# Processes that compile would still start up, on all cores, while steps are timed.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def say(**row):
    if RANK == 0:
        print(json.dumps({"world": WORLD, **row}), flush=True)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.words, self.places = nn.Embedding(args.words, args.width), nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(args.width), nn.Linear(args.width, args.words, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Llama(nn.Module):
    def __init__(self, args):
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            hidden_size=args.width,
            intermediate_size=args.mlp,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads // 4,
            vocab_size=args.words,
            max_position_embeddings=args.length,
            attn_implementation="sdpa",
            use_cache=False,
        )
        self.llama = LlamaForCausalLM(config)

    @property
    def blocks(self):
        return self.llama.model.layers

    def forward(self, ids):
        return self.llama(ids).logits


HEADS = ("head", "llama.lm_head")


def build(args, device):
    """The model and its optimizer, as each library asks for it."""
    torch.manual_seed(0)
    with device:
        net = Llama(args) if args.llama else GPT(args)
    kind, _, recipe = args.what.partition(":")
    after_step = lambda: None
    if kind == "lowp":
        import lowp

        lowp.quantize_model_(net, recipe, ignore=[name for name, _ in net.named_modules() if name in HEADS])
    elif kind == "torchao":
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

        config = Float8LinearConfig(enable_fsdp_float8_all_gather=WORLD > 1)
        convert_to_float8_training(net, config=config, module_filter_fn=lambda module, name: name not in HEADS)
        if WORLD > 1:
            after_step = lambda: precompute_float8_dynamic_scale_for_fsdp(net)
    elif kind == "torchao-mxfp8":
        from torchao.prototype.mx_formats import MXLinearConfig
        from torchao.quantization import quantize_

        config = MXLinearConfig.from_recipe_name(recipe or "mxfp8_cublas")
        quantize_(net, config, filter_fn=lambda module, name: isinstance(module, nn.Linear) and name not in HEADS)
    if args.recompute:
        for index, block in enumerate(net.blocks):
            net.blocks[index] = checkpoint_wrapper(block)
    if args.compile:
        for index, block in enumerate(net.blocks):
            net.blocks[index] = torch.compile(block)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    if kind == "lowp":
        import lowp

        moments = getattr(torch, args.moments)
        opts = [lowp.AdamW(net.parameters(), lr=1e-4, max_norm=1.0, moments_dtype=moments)]
        clip = lambda: None
    else:
        if args.optimizer == "muon":
            matrices = [p for block in net.blocks for p in block.parameters() if p.dim() == 2]
            ids = {id(p) for p in matrices}
            rest = [p for p in net.parameters() if id(p) not in ids]
            opts = [torch.optim.Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-4, fused=True)]
        else:
            opts = [torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)]
        clip = lambda: torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)

    def step():
        clip()
        for opt in opts:
            opt.step()
        after_step()
        for opt in opts:
            opt.zero_grad(set_to_none=True)

    return net, step


def timed(call, runs, warm):
    """Milliseconds of a call: the median, between events."""
    times = []
    for run in range(warm + runs):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if run >= warm:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def train(args, device):
    net, step = build(args, device)
    torch.manual_seed(1 + RANK)
    ids = torch.randint(0, args.words, (args.batch, args.length + 1), device=device)
    of_step = []

    def once(record=False):
        loss = F.cross_entropy(net(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        if record:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        step()
        if record:
            end.record()
            of_step.append((begin, end))
        return loss

    begun = time.time()
    first = once().item()
    for _ in range(args.warm - 1):
        once()
    torch.cuda.synchronize()
    warm, peak_of_warm = time.time() - begun, torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    dist.barrier()
    begun = time.time()
    for _ in range(args.runs):
        loss = once(record=True)
    torch.cuda.synchronize()
    seconds = (time.time() - begun) / args.runs
    say(
        table="train",
        what=args.what,
        compile=args.compile,
        optimizer=args.optimizer,
        moments=args.moments,
        recompute=args.recompute,
        shape=f"{'llama' if args.llama else 'gpt'} {args.batch}x{args.length}",
        ms=round(1e3 * seconds, 2),
        tokens_s=round(args.batch * args.length * WORLD / seconds),
        step_ms=round(statistics.median(a.elapsed_time(b) for a, b in of_step), 3),
        peak_gb=round(torch.cuda.max_memory_allocated() / 1e9, 2),
        peak_of_warm_gb=round(peak_of_warm / 1e9, 2),
        warm_s=round(warm, 1),
        first=round(first, 4),
        loss=round(loss.item(), 4),
    )
    if args.profile:
        profile(args, once)


def profile(args, once):
    """What a step's time is spent on: kernels, and operations on the host that take longest by themselves."""
    steps = 3
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as found:
        begun = time.time()
        for _ in range(steps):
            once()
        torch.cuda.synchronize()
        seconds = time.time() - begun
    rows = found.key_averages()
    kernels = [row for row in rows if row.device_type == torch.autograd.DeviceType.CUDA and not row.is_user_annotation]
    kernels = [row for row in kernels if not row.key.startswith("nccl:")]  # the same once more
    of_nccl = sum(row.self_device_time_total for row in kernels if row.key.startswith("nccl"))
    busy = sum(row.self_device_time_total for row in kernels) - of_nccl
    say(
        table="profile",
        what=args.what,
        compile=args.compile,
        ms=round(1e3 * seconds / steps, 1),
        gpu_busy_ms=round(busy / steps / 1e3, 1),
        nccl_ms=round(of_nccl / steps / 1e3, 1),
        launches=sum(row.count for row in kernels) // steps,
    )
    for row in sorted(kernels, key=lambda row: -row.self_device_time_total)[:30]:
        say(table="kernel", name=row.key[:80], ms=round(row.self_device_time_total / steps / 1e3, 2), count=row.count // steps)
    for row in sorted(rows, key=lambda row: -row.self_cpu_time_total)[:40]:
        say(table="host", name=row.key[:80], ms=round(row.self_cpu_time_total / steps / 1e3, 2), count=row.count // steps)


def steps(args, device):
    """Optimizer steps on one GPU, over whole parameters: casts included where weights live in codes."""
    import lowp

    for count, side in ((16, 4096), (1000, 256)):
        def parameters(dtype=torch.float32):
            torch.manual_seed(0)
            params = [nn.Parameter(torch.randn(side, side, device=device, dtype=dtype)) for _ in range(count)]
            for param in params:
                param.grad = torch.randn(side, side, device=device, dtype=dtype)
            return params

        def measure(name, opt, bytes):
            ms = timed(opt.step, args.runs, args.warm)
            begun = time.perf_counter()
            for _ in range(args.runs):
                opt.step()
            host = (time.perf_counter() - begun) / args.runs * 1e3
            torch.cuda.synchronize()
            elements = count * side * side
            say(table="step", what=name, params=f"{count}x{side}^2", ms=round(ms, 4), host_ms=round(host, 3), gbs=round(elements * bytes / ms / 1e6))

        # Master, two moments, read and written, and the gradient: 28 bytes; codes beside that.
        measure("torch fused, fp32", torch.optim.AdamW(parameters(), lr=1e-4, fused=True), 28)
        measure("torch fused, fp32, captured", _captured(torch.optim.AdamW(parameters(), lr=1e-4, fused=True, capturable=True)), 28)
        measure("lowp, fp32", lowp.AdamW(parameters(), lr=1e-4), 28)
        for recipe in args.recipes:
            net = nn.ParameterList()
            for param in parameters():
                tensor = nn.Parameter(lowp.quantize(param.detach(), recipe, keep_master=True))
                tensor.grad = param.grad
                net.append(tensor)
            measure(f"lowp, {recipe}", lowp.AdamW(net.parameters(), lr=1e-4), 28 + net[0].stored_bytes / side**2)
            measure(f"lowp, {recipe}, captured", _captured(lowp.AdamW(net.parameters(), lr=1e-4, capturable=True)), 28 + net[0].stored_bytes / side**2)
            del net, tensor
        measure("lowp, fp32, moments in bf16", lowp.AdamW(parameters(), lr=1e-4, moments_dtype=torch.bfloat16), 20)
        try:
            from torchao.optim import AdamW8bit, AdamWFp8
        except ImportError:
            say(table="step", what="torchao is not installed")
        else:
            # Moments of a byte, and a scale for each 256 elements.
            for make in (AdamW8bit, AdamWFp8):
                measure(f"torchao {make.__name__}, fp32", make(parameters(), lr=1e-4), 16 + 16 / 256)
        try:
            from transformer_engine.pytorch.optimizers import FusedAdam
        except ImportError:
            say(table="step", what="transformer_engine is not installed")
        else:
            measure("TE FusedAdam, fp32", FusedAdam(parameters(), lr=1e-4), 28)
        torch.cuda.empty_cache()


def linears(args, device):
    """Forward and backward of one linear layer on one GPU, eager and compiled: bf16, and recipes with their codes multiplied or, eager, decoded."""
    from unittest import mock

    import lowp
    from lowp import _scaled

    for depth, width in ((args.width, 4 * args.width), (4 * args.width, args.width)):
        x = torch.randn(args.batch * args.length, depth, device=device, dtype=torch.bfloat16, requires_grad=True)
        grad = torch.randn(args.batch * args.length, width, device=device, dtype=torch.bfloat16)

        def measure(recipe, what, compiled):
            torch._dynamo.reset()
            layer = nn.Linear(depth, width, bias=False, device=device, dtype=torch.bfloat16)
            if recipe is not None:
                lowp.quantize_model_(layer, recipe)
            net = torch.compile(layer) if compiled else layer

            def call():
                net(x).backward(grad)
                x.grad = layer.weight.grad = None

            ms = timed(call, args.runs, args.warm)
            flops = 6 * x.shape[0] * depth * width
            multiplied = recipe is not None and bool(_scaled.serves(x, layer.weight))
            shape = f"{x.shape[0]}x{depth}x{width}"
            say(table="linear", what=what, codes=multiplied, compile=compiled, shape=shape, ms=round(ms, 3), tflops=round(flops / ms / 1e9))

        for compiled in (False, True):
            measure(None, "bf16", compiled)
            for recipe in args.recipes:
                measure(recipe, f"lowp:{recipe}", compiled)
                # Graphs choose by what the GPU has, so decoded weights are measured without them.
                if not compiled:
                    with mock.patch.object(_scaled, "serves", lambda *_: False):
                        measure(recipe, f"lowp:{recipe}, decoded", compiled)


class _captured:
    """A step as a CUDA graph."""

    def __init__(self, opt):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                opt.step()
        torch.cuda.current_stream().wait_stream(side)
        self.opt, self.graph = opt, torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=side):
            opt.step()
        self.step = self.graph.replay


def gathers(args, device):
    """All blocks gathered one after another and freed, as forward does."""
    for what in ["bf16", *(f"lowp:{recipe}" for recipe in args.recipes)]:
        args.what = what
        net, _ = build(args, device)
        blocks = list(net.blocks)
        net(torch.zeros(1, 16, dtype=torch.long, device=device))  # FSDP2 makes its groups

        def gather():
            for block in blocks:
                block.unshard()
                block.reshard()

        weights = [p for block in blocks for p in block.parameters() if p.dim() == 2]
        elements = sum(p.numel() for p in weights)
        if what == "bf16":
            sent = 2 * elements
        else:
            import lowp

            recipe = what.partition(":")[2]
            sent = sum(lowp.plan(recipe, *p.shape, WORLD)["fsdp2"][0] * WORLD for p in weights)
        dist.barrier()
        ms = timed(gather, args.runs, args.warm)
        say(table="gather", what=what, ms=round(ms, 3), mb=round(sent / 1e6, 1), gbs=round(sent * (WORLD - 1) / WORLD / ms / 1e6))
        del net, blocks, weights
        torch.cuda.empty_cache()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=("train", "step", "linear", "gather"))
    parser.add_argument("what", nargs="?", default="bf16", help="bf16, torchao, torchao-mxfp8 or lowp:RECIPE")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing of each block")
    parser.add_argument("--profile", action="store_true", help="tables of kernels and of operations on the host, after those of `train`")
    parser.add_argument("--recipes", nargs="+", default=["fp8-current", "mxfp8-2d", "mxfp8", "nvfp4-2d"])
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw", help="of bf16 and torchao; `muon` updates the matrices of blocks")
    parser.add_argument("--moments", choices=("float32", "bfloat16", "float8_e4m3fn"), default="float32", help="of lowp.AdamW")
    parser.add_argument("--llama", action="store_true", help="the Llama of transformers instead of the GPT")
    for name, value in dict(width=2048, mlp=None, layers=None, heads=None, words=None, length=2048, batch=4, runs=30, warm=8).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    shape = dict(layers=16, heads=32, words=32000) if args.llama else dict(layers=24, heads=16, words=32768)
    shape["mlp"] = 4 * args.width
    for name, value in shape.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    if args.table in ("step", "linear"):
        (steps if args.table == "step" else linears)(args, device)
        return
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    dist.init_process_group("nccl", device_id=device)
    (train if args.table == "train" else gathers)(args, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
