"""Trains a small GPT over FSDP2, whose gathers carry codes.

    torchrun --nproc-per-node 2 crates/lowp-python/examples/fsdp2.py --recipe mxfp8-2d

On CPUs by gloo, on GPUs by NCCL (--device cuda), a process for each.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowp


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
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, words, width, layers, heads, length):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm_head(self.norm(x))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mxfp8-2d", choices=lowp.recipes())
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8, help="sequences of a rank")
    parser.add_argument("--length", type=int, default=64)
    args = parser.parse_args()

    rank = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device(args.device, rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")

    torch.manual_seed(0)  # the same model on every rank
    model = GPT(256, args.width, args.layers, args.width // 64, args.length).to(device)
    lowp.quantize_model_(model, args.recipe, ignore=["lm_head"])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    opt = lowp.AdamW(model.parameters(), lr=1e-3, max_norm=1.0)

    torch.manual_seed(1 + dist.get_rank())  # other text on each
    for step in range(args.steps):
        first = torch.randint(0, 256, (args.batch, 1), device=device)
        ids = (first + 7 * torch.arange(args.length + 1, device=device)) % 256
        loss = F.cross_entropy(model(ids[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 10 == 0 or step + 1 == args.steps:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                norm = opt.last_step()["grad_norm"]
                print(f"step {step:4}  loss {mean.item() / dist.get_world_size():.4f}  norm {norm:.3f}", flush=True)
    if dist.get_rank() == 0:
        print(model.blocks[0].up.weight._local_tensor)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
