"""``CPUOffloadPolicy``: rows, gradients and the optimizer on the host, and copies of the codes on a GPU for each gather.

There is no GPU here: the mesh says that it is one of GPUs, and FSDP2 copies what it gathers from ``cpu`` to ``cpu:0``.
"""

import contextlib
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

import lowp
import ranks
from lowp import _fsdp
from lowp._torch_compat import fsdp_groups, local_of

STEPS = 3


def recipes():
    return [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


@contextlib.contextmanager
def on_gpus():
    """A mesh of such GPUs. What FSDP2 moves to the host is a copy."""
    of_mesh = mock.patch("torch.distributed.fsdp._fully_shard._fully_shard._get_device_from_mesh", lambda mesh: torch.device("cpu"))
    with of_mesh, mock.patch.object(lowp.Tensor, "cpu", lambda tensor: tensor.to("cpu", copy=True)):
        yield DeviceMesh.from_group(dist.group.WORLD, "cuda")


class Net(nn.Module):
    """Two layers. Recipes cut columns into whole blocks, and rows not."""

    def __init__(self, rows, cols):
        super().__init__()
        self.taken = rows // 32 * 32
        self.up, self.down = nn.Linear(cols, rows), nn.Linear(self.taken, cols)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)[:, : self.taken]))


def train(name, rank, rows, cols, device, mesh=None, policy=OffloadPolicy()):
    """Losses of some steps; then gradients, codes, and the state of the optimizer."""
    torch.manual_seed(1)
    net = Net(rows, cols).to(device)
    lowp.quantize_model_(net, name)
    for module in (net.up, net.down, net):
        fully_shard(module, mesh=mesh, offload_policy=policy)
    for param in (param for group in fsdp_groups() for param in group.fsdp_params):
        param.device = device  # as it is, unless this is ``cpu:0``
    # Biases may be cut within blocks of fp8.
    groups = [{"params": [net.up.weight, net.down.weight], "moments_dtype": torch.float8_e4m3fn}, {"params": [net.up.bias, net.down.bias]}]
    opt = lowp.AdamW(groups, lr=1e-2, max_norm=1.0)
    losses, rows = [], []
    for at in range(STEPS):
        torch.manual_seed(100 * at + rank)
        loss = net(torch.randn(16, cols).to(device)).square().mean()
        loss.backward()
        losses.append(loss.detach())
        rows += [local_of(param.grad).clone() for param in net.parameters()]
        opt.step()
        opt.zero_grad()
    for param in net.parameters():
        local = local_of(param.detach())
        rows += local.buffers.values() if isinstance(local, lowp.Tensor) else [local]
    for state in opt.state_dict()["state"].values():
        rows += [local_of(value) for value in state.values()]
    return losses, rows


def compare(found, expected, *what):
    """To the bit, wherever it lies."""
    for a, b in zip(found, expected, strict=True):
        assert len(a) == len(b), what
        for index, (one, other) in enumerate(zip(a, b)):
            assert torch.equal(one.cpu(), other.cpu()), (*what, index)


def offloaded(rank, world, cases):
    gathered, gathers = _fsdp.pre_all_gather, []

    def without_master(store, *args):
        assert store.master is None and store.origin().master is not None
        gathers.append(store)
        return gathered(store, *args)

    for name, *sizes in cases:
        expected = train(name, rank, *sizes, torch.device("cpu"))
        gathers.clear()
        with on_gpus() as mesh, mock.patch.object(_fsdp, "pre_all_gather", without_master):
            found = train(name, rank, *sizes, torch.device("cpu", 0), mesh, CPUOffloadPolicy(pin_memory=False))
        assert len(gathers) == STEPS * 4, len(gathers)
        compare(found, expected, name, sizes)
    return len(cases)


class Offload(unittest.TestCase):
    def test_every_recipe_trains_as_without(self):
        cases = [(name, 256, 256) for name in recipes()]
        for world in (1, 2):
            self.assertEqual(ranks.run(world, offloaded, cases), [len(cases)] * world)

    def test_uneven_rows(self):
        cases = [("fp8-current", 50, 64), ("fp8-delayed", 33, 64), ("mxfp8-2d", 95, 64), ("mxfp8", 40, 64)]
        self.assertEqual(ranks.run(3, offloaded, cases), [len(cases)] * 3)


if __name__ == "__main__":
    unittest.main()
