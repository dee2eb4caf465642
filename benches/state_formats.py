"""What narrow optimizer state costs: a small transformer on the bytes of a file, whose states and masters are rounded after each step.

    python3 benches/state_formats.py FILE --beta2 0.95

Written from docs/numerics.md 23 with PyTorch alone. One thread; a run of 500 steps takes half a minute.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


def to_grid(x, mantissa, lowest, largest, stochastic):
    """x >= 0 in a float format whose smallest normal value is 2^lowest."""
    exponent = torch.frexp(x)[1].clamp(min=lowest + 1) - 1
    step = torch.ldexp(torch.ones_like(x), exponent - mantissa)
    moved = torch.floor(x / step + torch.rand_like(x)) if stochastic else torch.round(x / step)
    return (moved * step).clamp(max=largest)


def in_blocks(x, largest, encode, size=32):
    """Blocks of consecutive elements with a power of two as their scale."""
    flat = x.reshape(-1)
    blocks = F.pad(flat, (0, -len(flat) % size)).reshape(-1, size)
    amax = blocks.abs().amax(1, keepdim=True)
    scale = torch.where(amax > 0, torch.exp2(torch.ceil(torch.log2(amax.clamp(min=1e-37) / largest))), 1.0)
    return (encode(blocks / scale) * scale).reshape(-1)[: len(flat)].reshape(x.shape)


def e4m3(stochastic, mantissa=3):
    return lambda m: in_blocks(m, 448.0, lambda b: torch.copysign(to_grid(b.abs(), mantissa, -6, 448.0, stochastic), b))


def squares(exponent, mantissa, stochastic):
    """Without a sign, and never zero where the square is not."""
    largest, lowest = 2 - 2.0**-mantissa, 2 - 2**exponent

    def encode(b):
        code = to_grid(b, mantissa, lowest, largest, stochastic)
        return torch.where(b > 0, code.clamp(min=2.0 ** (lowest - mantissa)), code)

    return lambda v: in_blocks(v, largest, encode)


def same(x):
    return x


def bf16(x):
    return x.bfloat16().float()


def bf16_stochastic(x):
    bits = x.view(torch.int32) + torch.randint(0, 1 << 16, x.shape, dtype=torch.int32)
    return (bits & -(1 << 16)).view(torch.float32)


# What exp_avg, exp_avg_sq and the masters are stored as.
FORMATS = {
    "f32": (same, same, same),
    "bf16 moments": (bf16, bf16, same),
    "E4M3 to nearest, UE4M4": (e4m3(False), squares(4, 4, True), same),
    "E4M3, UE4M4": (e4m3(True), squares(4, 4, True), same),
    "E4M3, UE5M3": (e4m3(True), squares(5, 3, True), same),
    "UE4M4 to nearest alone": (same, squares(4, 4, False), same),
    "bf16 masters to nearest": (same, same, bf16),
    "E4M3, UE4M4, bf16 masters": (e4m3(True), squares(4, 4, True), bf16_stochastic),
}

# The same where the weights of linear layers are masters cast to E4M3, in blocks of 32; other parameters stay in f32.
MASTERS = {
    "E4M3 of f32 masters": same,
    "E4M3 of bf16 masters": bf16_stochastic,
    "E4M3 of masters with 8 more bits": e4m3(True, 11),
    "E4M3 weights as masters": e4m3(True),
}


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        batch, seq, dim = x.shape
        q, k, v = self.qkv(self.norms[0](x)).reshape(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, dim))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Network(nn.Module):
    def __init__(self, dim, layers, heads, seq):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, dim), nn.Embedding(seq, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places.weight)))


def train(name, seed, data, args):
    """The validation loss of a run."""
    of_exp_avg, of_exp_avg_sq, of_master = FORMATS.get(name) or (same, same, MASTERS[name])
    torch.manual_seed(seed)
    network = Network(args.dim, args.layers, 4, args.seq)
    params = list(network.parameters())
    weights = {id(p) for p in network.blocks.parameters() if p.dim() == 2 and name in MASTERS}
    masters = [p.detach().clone() for p in params]
    ms, vs = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    cut = len(data) * 9 // 10

    def loss(text, generator):
        at = torch.randint(0, len(text) - args.seq - 1, (args.batch,), generator=generator)
        rows = torch.stack([text[i : i + args.seq + 1] for i in at]).long()
        return F.cross_entropy(network(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())

    batches = torch.Generator().manual_seed(seed + 1000)
    for step in range(1, args.steps + 1):
        done = step / args.steps
        lr = args.lr * min(1, 20 * done) * (0.55 + 0.45 * math.cos(math.pi * done))
        grads = torch.autograd.grad(loss(data[:cut], batches), params)
        clip = min(1.0, 1 / (math.sqrt(sum(float((g * g).sum()) for g in grads)) + 1e-6))
        with torch.no_grad():
            for i, (p, g) in enumerate(zip(params, grads)):
                g = g * clip
                m, v = 0.9 * ms[i] + 0.1 * g, args.beta2 * vs[i] + (1 - args.beta2) * g * g
                u = m / (1 - 0.9**step) / ((v / (1 - args.beta2**step)).sqrt() + 1e-8)
                after = masters[i] - lr * (u + 0.1 * masters[i])
                masters[i] = after if name in MASTERS and id(p) not in weights else of_master(after)
                p.copy_(e4m3(False)(masters[i]) if id(p) in weights else masters[i])
                ms[i], vs[i] = of_exp_avg(m), of_exp_avg_sq(v)
    with torch.no_grad():
        held_out = torch.Generator().manual_seed(7)
        return sum(float(loss(data[cut:], held_out)) for _ in range(100)) / 100


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--only", help="names of formats, separated by ;")
    for name, value in dict(dim=64, layers=2, seq=64, batch=16, steps=500, lr=3e-3, beta2=0.95, seeds=3).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = parser.parse_args()
    with open(args.file, "rb") as file:
        data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
    base = [train("f32", seed, data, args) for seed in range(args.seeds)]
    print(f"f32: {sum(base) / len(base):.4f}", flush=True)
    for name in args.only.split(";") if args.only else [name for name in [*FORMATS, *MASTERS] if name != "f32"]:
        gaps = [100 * (train(name, seed, data, args) / loss - 1) for seed, loss in enumerate(base)]
        print(f"{name}: {sum(gaps) / len(gaps):+.2f}%", " / ".join(f"{gap:+.2f}" for gap in gaps), flush=True)


if __name__ == "__main__":
    main()
