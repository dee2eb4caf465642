"""Time of the host in FSDP2 around a step: gathers, what follows them, and reductions, in bf16 and with codes of lowp.

    python3 benches/peers/fsdp2_host.py bf16
    python3 benches/peers/fsdp2_host.py lowp:fp8-current
    python3 benches/peers/fsdp2_host.py lowp:fp8-current --calls 40
    python3 benches/peers/fsdp2_host.py lowp:fp8-current --gathers

Needs no GPU: one process is a rank of two whose collectives move nothing (PyTorch's backend `fake`), and layers are so small that what is left is the
time of Python, by the clock of the thread. A row has the parts of a step in microseconds for each block, each the shortest of many; `--calls` lists the functions that take longest instead. `--gathers`
has each block gathered and freed by itself, as forward and as backward do it, where nothing else is in between.
"""

import argparse
import cProfile
import gc
import json
import pstats
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.testing._internal.distributed.fake_pg import FakeStore

PARTS = ("unshard", "wait_for_unshard", "reshard", "post_backward", "pre_forward", "post_forward", "pre_backward")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.proj(q * k + v)
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def build(args):
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(args.width) for _ in range(args.layers)))
    kind, _, recipe = args.what.partition(":")
    if kind == "lowp":
        import lowp

        lowp.quantize_model_(net, recipe)
    if args.compile:
        for index, block in enumerate(net):
            net[index] = torch.compile(block)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net:
        fully_shard(block, mp_policy=policy)
    fully_shard(net, mp_policy=policy)
    if kind == "lowp":
        return net, lowp.AdamW(net.parameters(), lr=1e-4, max_norm=1.0)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-4, foreach=True)


class Parts:
    """Time by part, each without those inside it."""

    def __init__(self):
        self.times, self.open = {}, []
        of_torch = _fsdp_param_group.FSDPParamGroup
        for of in [of_torch, *of_torch.__subclasses__()]:
            for name in set(PARTS) & set(vars(of)):
                self._follow(of, name)

    def _follow(self, of, name):
        function = getattr(of, name)

        def call(*args, **kwargs):
            with self.part(name):
                return function(*args, **kwargs)

        setattr(of, name, call)

    def part(self, name):
        return _Part(self, name)


class _Part:
    def __init__(self, parts, name):
        self.parts, self.name = parts, name

    def __enter__(self):
        self.inner = 0.0
        self.parts.open.append(self)
        self.begun = time.thread_time()

    def __exit__(self, *error):
        elapsed = time.thread_time() - self.begun
        parts = self.parts
        parts.open.pop()
        if parts.open:
            parts.open[-1].inner += elapsed
        parts.times[self.name] = parts.times.get(self.name, 0.0) + elapsed - self.inner


def gathers(net, runs):
    """The shortest time of a gather of each block and of what frees it, in microseconds for each block."""
    net.reshard()
    groups = [block._get_fsdp_state()._fsdp_param_group for block in net]
    found = {}
    for phase in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD):
        for group in groups:
            group._training_state = phase
        times = []
        for _ in range(runs):
            begun = time.thread_time()
            for group in groups:
                group.unshard()
                group.wait_for_unshard()
                with group.use_training_state(TrainingState.IDLE):  # which frees
                    group.reshard()
            times.append(time.thread_time() - begun)
        found[phase.name.lower()] = round(min(times) / len(groups) * 1e6)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", help="bf16 or lowp:RECIPE")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--gathers", action="store_true")
    parser.add_argument("--calls", type=int, default=0, metavar="N", help="the N functions that take longest by themselves")
    for name, value in dict(layers=24, width=32, tokens=8, runs=60, warm=4).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    parts = None  # of the first steps, in which lowp makes classes of its own for groups, nothing is timed
    net, opt = build(args)
    x = torch.randn(args.tokens, args.width, dtype=torch.bfloat16)

    def step():
        net(x).float().square().mean().backward()
        if parts is None:
            opt.step()
        else:
            with parts.part("optimizer"):
                opt.step()
        opt.zero_grad(set_to_none=True)

    for _ in range(args.warm):
        step()
    gc.collect()
    gc.freeze()
    if args.gathers:
        print(json.dumps({"what": args.what, "torch": torch.__version__, **gathers(net, args.runs)}))
        return
    parts = None if args.calls else Parts()  # those classes included
    if parts is None:
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(args.runs):
            step()
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(args.calls)
        return
    rows = []
    for _ in range(args.runs):
        parts.times.clear()
        begun = time.thread_time()
        step()
        rows.append({**parts.times, "step": time.thread_time() - begun})
    fastest = {name: min(row[name] for row in rows) / args.layers * 1e6 for name in rows[0]}
    fsdp = sum(fastest[name] for name in PARTS)
    print(json.dumps({"what": args.what, "torch": torch.__version__, "fsdp2": round(fsdp), **{name: round(us) for name, us in fastest.items()}}))


if __name__ == "__main__":
    main()
