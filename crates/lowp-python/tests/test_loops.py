"""What training loops of PyTorch do between backward and step: they clip, scale losses, and add up gradients without a collective."""

import contextlib
import unittest

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

import lowp
import ranks
from lowp._torch_compat import local_of


def made():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    lowp.quantize_model_(net, "fp8-current")
    return net


def sharded():
    net = made()
    fully_shard(net[0])
    return fully_shard(net)


def adamw(net, **options):
    return lowp.AdamW(net.parameters(), lr=1e-2, **options)


def loss_of(net, number, rank):
    torch.manual_seed(100 * number + rank)
    return net(torch.randn(4, 64)).square().mean()


def masters(opt):
    return [local_of(state["master"]).clone() for state in opt.state_dict()["state"].values() if "master" in state]


def clipped(rank, world):
    """Gradients that PyTorch clips, beside those that the step clips."""
    found, norms = [], []
    for of_torch in (True, False):
        net = sharded()
        opt = adamw(net, **({} if of_torch else {"max_norm": 1e-3}))
        for number in range(3):
            loss_of(net, number, rank).backward()
            if of_torch:
                norm = clip_grad_norm_(net.parameters(), 1e-3).full_tensor().item()
            opt.step()
            opt.zero_grad()
        norms.append(norm if of_torch else opt.last_step()["grad_norm"])
        found.append(masters(opt))
    torch.testing.assert_close(norms[0], norms[1], rtol=1e-4, atol=0)
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


def scaled(rank, world):
    """A loss that is not finite on one rank: no rank takes the step, and the others are those without a scale."""
    found = []
    for scale in (True, False):
        net = sharded()
        opt = adamw(net)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scale)
        for number in range(3):
            if number == 1 and not scale:
                continue
            loss = loss_of(net, number, rank) * (float("inf") if (number, rank) == (1, 0) else 1)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert opt.last_step()["steps"] == 2
        found.append(masters(opt))
    assert all(map(torch.equal, *found))


def added_up(rank, world, kind):
    """Batches whose gradients are sent once, or each time."""
    found = []
    for once in (True, False):
        net = sharded() if kind == "shards" else DistributedDataParallel(made())
        opt = adamw(net)
        for number in range(8):
            last = number % 4 == 3
            if kind == "shards" and once:
                net.set_requires_gradient_sync(last)
            with net.no_sync() if kind == "replicas" and once and not last else contextlib.nullcontext():
                loss_of(net, number, rank).backward()
            if last:
                opt.step(grad_scale=1 / 4)
                opt.zero_grad()
        found.append(masters(opt))
    torch.testing.assert_close(*found, rtol=0, atol=1e-4)


class Loops(unittest.TestCase):
    def test_gradients_that_pytorch_clips(self):
        ranks.run(2, clipped)

    def test_a_scaled_loss(self):
        ranks.run(2, scaled)

    def test_gradients_that_are_added_up(self):
        for kind in ("shards", "replicas"):
            with self.subTest(kind=kind):
                ranks.run(2, added_up, kind)


if __name__ == "__main__":
    unittest.main()
