"""Gathers of whole groups of FSDP2, next to those that PyTorch does: the same bits, whichever rank does which."""

import gc
import unittest
import weakref
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import lowp
import ranks
from lowp import _group
from test_fsdp2 import recipes

STEPS = 4


class Block(nn.Module):
    """Plain parameters before, between and after weights."""

    def __init__(self, width, rows):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, rows)
        self.middle, self.down = nn.LayerNorm(rows), nn.Linear(rows, width, bias=False)

    def forward(self, x):
        return x + self.down(self.middle(F.gelu(self.up(self.norm(x)))))


def train(rank, name, width, rows, policy, here, change=None):
    """Losses and shards of some steps, and how many gathers were done ``here``. ``change`` is called with the model before the third step."""
    torch.manual_seed(1)
    net = nn.Sequential(Block(width, rows), Block(width, rows))
    lowp.quantize_model_(net, name)
    how = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)) if policy else {}
    for block in net:
        fully_shard(block, **how)
    fully_shard(net, **how)
    opt = lowp.AdamW(net.parameters(), lr=1e-2)
    losses, done = [], []
    arrive = _group._Layout.arrive

    def count(*args):
        done.append(arrive(*args))
        return done[-1]

    follow = _group.follow if here else lambda group: None
    with mock.patch.object(_group, "follow", follow), mock.patch.object(_group._Layout, "arrive", count):
        for step in range(STEPS):
            if change is not None and step == 2:
                change(net)
            x = torch.randn(4, width, generator=torch.Generator().manual_seed(STEPS * rank + step))
            loss = net(x).float().square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
    shards = [param.to_local().dequantize() if isinstance(param.to_local(), lowp.Tensor) else param.to_local() for param in net.parameters()]
    return losses + [shard.detach() for shard in shards], sum(done)


def same(found, expected, *what):
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), (*what, index)


def compared(rank, world, cases):
    counts = []
    for *case, policy in cases:
        expected, none = train(rank, *case, policy, False)
        found, all = train(rank, *case, policy, True)
        # Some ranks here, and PyTorch on others.
        mixed, some = train(rank, *case, policy, rank % 2 == 0)
        # What versions of PyTorch do whose gathers are called otherwise.
        with mock.patch.object(_group._Group, "gather", lambda *args: None):
            asked, never = train(rank, *case, policy, True)
        same(found, expected, case, policy)
        same(asked, expected, case, policy)
        same(mixed, expected, case, policy)
        assert none == never == 0 and some == (all if rank % 2 == 0 else 0), (none, never, some, all)
        counts.append(all)
    return counts


def changed(rank, world):
    """A model whose shards are replaced, which its gathers follow."""

    def replace(net):
        state = {key: value.clone() for key, value in net.state_dict().items()}
        net.load_state_dict(state, assign=True)

    def freeze(net):
        net[0].norm.requires_grad_(False)

    counts = []
    for change in (replace, freeze):
        expected, _ = train(rank, "fp8-current", 64, 128, True, False, change)
        found, count = train(rank, "fp8-current", 64, 128, True, True, change)
        same(found, expected, change.__name__)
        counts.append(count)
    return counts


def released(rank, world):
    """How many replaced shards are alive after the next step, without a collector of cycles."""
    torch.manual_seed(1)
    net = nn.Sequential(Block(64, 128), Block(64, 128))
    lowp.quantize_model_(net, "fp8-current")
    for block in net:
        fully_shard(block)
    fully_shard(net)

    def step():
        net(torch.randn(4, 64)).square().mean().backward()

    for _ in range(3):
        step()
    old = [weakref.ref(local._store) for local in (param.to_local() for param in net.parameters()) if isinstance(local, lowp.Tensor)]
    gc.collect()
    gc.disable()
    try:
        net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()}, assign=True)
        step()
        return len(old), sum(store() is not None for store in old)
    finally:
        gc.enable()


class Groups(unittest.TestCase):
    def test_shards_that_are_replaced_are_released(self):
        self.assertEqual(ranks.run(2, released), [(4, 0)] * 2)

    def test_the_bits_are_those_of_pytorch(self):
        cases = [(name, 128, 256, policy) for name in recipes() for policy in (True, False)]
        for counts in ranks.run(2, compared, cases):
            # The first gathers of each direction are PyTorch's.
            self.assertTrue(all(count >= 2 * 2 * (STEPS - 2) for count in counts), counts)

    def test_uneven_rows(self):
        # Where pieces of codes end at odd bytes, no values begin: PyTorch gathers that group.
        cases = [("fp8-current", 32, 50, True), ("fp8-current", 33, 50, True), ("mxfp8-2d", 96, 160, True), ("fp8-delayed", 64, 34, True), ("fp8-delayed", 64, 36, False)]
        for counts in ranks.run(3, compared, cases):
            self.assertEqual([count > 0 for count in counts], [True, False, False, True, True])

    def test_shards_that_are_replaced_are_followed(self):
        for counts in ranks.run(2, changed):
            self.assertTrue(all(counts), counts)


if __name__ == "__main__":
    unittest.main()
