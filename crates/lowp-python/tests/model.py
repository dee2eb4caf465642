"""A small GPT, and 50 steps of it on one process or over FSDP2."""

import torch
import torch.nn.functional as F
from torch import nn

import lowp

WIDTH, HEADS, LAYERS, WORDS, LENGTH, BATCH = 192, 4, 2, 64, 24, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, length, _ = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make(recipe, ignore=("head",), device="cpu"):
    torch.manual_seed(7)
    net = GPT().to(device)
    # FSDP2 cuts at ceil(rows / world): the widths of this model are multiples of the quantum on 1, 2 and 3 ranks.
    if recipe is not None:
        lowp.quantize_model_(net, recipe, ignore=list(ignore))
    return net


def batch(step):
    make = torch.Generator().manual_seed(step)
    first = torch.randint(0, WORDS, (BATCH, 1), generator=make)
    ids = (first + torch.arange(LENGTH + 1) * 5) % WORDS
    return ids[:, :-1], ids[:, 1:]


def shard(net, policy=False, mesh=None, reshard=True):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kwargs = dict(mesh=mesh, reshard_after_forward=reshard)
    if policy:
        kwargs["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, **kwargs)
    fully_shard(net, **kwargs)


def fully_shard(module, **kwargs):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(module, **kwargs)


def loss_of(net, step, rank=0, world=1):
    ids, next_ids = (tensor.to(next(net.parameters()).device) for tensor in batch(step))
    rows = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    logits = net(ids[rows]).float()
    return F.cross_entropy(logits.flatten(0, 1), next_ids[rows].flatten())


def train(recipe, steps, rank=0, world=1, fsdp=False, policy=False, optimizer=None, device="cpu", backend=None, reshard=True):
    """Losses of all ranks together, and the model. ``backend`` compiles its blocks, each as one graph."""
    net = make(recipe, device=device)
    if backend is not None:
        for index, block in enumerate(net.blocks):
            net.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)
    if fsdp:
        shard(net, policy, reshard=reshard)
    make_optimizer = optimizer or (lambda params: lowp.AdamW(params, lr=3e-3, max_norm=1.0))
    opt = make_optimizer(net.parameters())
    losses = []
    for step in range(steps):
        loss = loss_of(net, step, rank, world)
        loss.backward()
        opt.step()
        opt.zero_grad()
        value = loss.detach().clone()
        if world > 1:
            torch.distributed.all_reduce(value)
            value /= world
        losses.append(value.item())
    return losses, net


def matrices_by_muon(rank, world, sharded, device="cpu"):
    """Weights, masters and momenta after some steps of the same gradients, whole, on the host. The last rank has no rows of the second matrix."""
    from torch.distributed.tensor import distribute_tensor

    device, found = torch.device(device, rank) if device == "cuda" else torch.device(device), []
    for name, rows in (("mxfp8", 192), ("nvfp4-2d", 96), (None, 129)):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, rows, bias=False), nn.Linear(rows, 2, bias=False)).to(device)
        if name is not None:
            lowp.quantize_model_(net, name, ignore=["1"])
        if sharded:
            fully_shard(net)
        net[1].weight.requires_grad_(False)
        opt = lowp.Muon(net.parameters(), lr=0.02, adjust_lr_fn="match_rms_adamw")
        for at in range(4):
            # One matrix is thawed, and then the other has no gradient in a step.
            net[1].weight.requires_grad_(at > 0)
            torch.manual_seed(at)
            for param in net.parameters():
                whole = torch.randn(param.shape).to(device)
                if param.requires_grad:
                    param.grad = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None) if sharded else whole
            if at == 2:
                net[0].weight.grad = None
            opt.step()
        for param in net.parameters():
            for value in (param.detach(), *(opt.state[param][key] for key in ("master", "momentum_buffer") if key in opt.state[param])):
                value = value.full_tensor() if hasattr(value, "full_tensor") else value
                found.append((value.dequantize() if isinstance(value, lowp.Tensor) else value).cpu())
    return found
