"""Loads between steps over uneven rows: FSDP2 moves a shard that is shorter than others, on that rank alone."""

import copy
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import lowp
import ranks

#: Ranks, recipe, rows. With 5 rows over 4 ranks and 2 over 3 the last one has none.
CASES = (
    (1, "mxfp8-2d", 127),
    (2, "fp8-current", 129),
    (2, "fp8-delayed", 129),
    (2, "mxfp8-2d", 127),
    (2, "nvfp4-2d", 31),
    (2, None, 129),
    (3, "fp8-current", 128),
    (3, "fp8-delayed", 2),
    (3, "mxfp8", 95),
    (4, "fp8-current", 5),
    (4, "fp8-rowwise", 5),
    (2, "mxfp8", 41),
    (2, "nvfp4-2d", 100),
    (3, "mxfp8-2d", 100),
    (4, "nvfp4-1d", 5),
)


def own(net, opt, folder):
    net.load_state_dict(net.state_dict())


def assigned(net, folder):
    """Other parameters, which belong to no optimizer yet."""
    net(torch.ones(4, 64)).sum().backward()
    net.load_state_dict(net.state_dict(), assign=True)
    net.zero_grad()


def of_optimizer(net, opt, folder):
    opt.load_state_dict(opt.state_dict())
    own(net, opt, folder)


def checkpoint(net, opt, folder):
    of_net, of_opt = get_state_dict(net, opt)
    state = {"net": of_net, "opt": of_opt}
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])


def of_net(net, opt, folder):
    state = {"net": net.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    dcp.load(state, checkpoint_id=folder)


#: What is called before which steps of a run; ``None``: before the optimizer is made.
LOADS = (
    ((assigned, None), (own, 0), (of_net, 0), (checkpoint, 1), (of_net, 2), (own, 3)),
    ((checkpoint, 0), (of_optimizer, 1), (of_optimizer, 2), (checkpoint, 3)),
)


def trained(rank, name, rows, loads, folder):
    """Losses of five steps, and what the rank has then."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, rows), nn.Linear(rows, 8))
    if name is not None:
        lowp.quantize_model_(net, name, ignore=["1"])
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    for load in (load for load, at in loads if at is None):
        load(net, folder)
    opt = lowp.AdamW(net.parameters(), lr=1e-2, max_norm=1.0)
    found = []
    for step in range(5):
        for load in (load for load, at in loads if at == step):
            load(net, opt, f"{folder}/{step}-{load.__name__}")
        torch.manual_seed(100 * step + rank)
        loss = net(torch.randn(4, 64)).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        found.append(loss.detach())
    for param in net.parameters():
        local = param.detach().to_local()
        found += local.buffers.values() if isinstance(local, lowp.Tensor) else [local]
    for state in opt.state_dict()["state"].values():
        found += [getattr(value, "_local_tensor", value) for value in state.values()]
    return found


def set_between(rank, world, first):
    """Gradients that are added up over two batches, a load that moves the shorter shard alone, and an evaluation; ``first`` is whether the full
    tensor is kept in the batch that gathers first."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 129))
    lowp.quantize_model_(net, "fp8-current")
    whole = copy.deepcopy(net)
    fully_shard(net[0])
    fully_shard(net)
    for keep in (first, not first):
        net.set_reshard_after_backward(not keep)
        xs = [torch.ones(4, 64, requires_grad=True) for _ in range(2)]
        for x, model in zip(xs, (net, whole)):
            model(x).sum().backward()
        assert torch.equal(xs[0].grad, xs[1].grad)
        own(net, None, None)
    with torch.no_grad():
        assert torch.equal(net(torch.ones(4, 64)), whole(torch.ones(4, 64)))
    for param, other in zip(net.parameters(), whole.parameters()):
        assert torch.equal(param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad, other.grad)


def loaded(rank, world, folder):
    runs = 0
    for ranks_of, name, rows in CASES:
        if ranks_of != world:
            continue
        expected = trained(rank, name, rows, (), folder)
        for at, loads in enumerate(LOADS):
            found = trained(rank, name, rows, loads, f"{folder}/{name}-{rows}-{at}")
            assert len(found) == len(expected)
            for index, (a, b) in enumerate(zip(found, expected)):
                assert torch.equal(a, b), (name, rows, at, index, a, b)
            runs += 1
    return runs


def written(rank, world, name):
    """What a write of values into a shard raises after a gather, and whether the weight gathers as before or as those values."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False))
    lowp.quantize_model_(net, name)
    fully_shard(net)
    x = torch.eye(64)
    before = net(x).detach()
    net.reshard()
    shard = net[0].weight.to_local()
    values = torch.full(shard.shape, float(rank + 1))
    said = []
    for write in (shard.detach().copy_, shard.detach().quantize_):
        try:
            write(values)
        except lowp.UnsupportedOp as error:
            said.append(str(error))
    expected = torch.cat([torch.full((64 // world, 64), float(r + 1)) for r in range(world)]).t()
    assert torch.equal(net(x), before if said else expected), name
    return said


def written_delayed(rank, world):
    """Values that are written after a gather by a recipe whose scale the optimizer has: what the next gather raises, and what it gives once that was
    loaded."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False))
    lowp.quantize_model_(net, "fp8-delayed")
    fully_shard(net)
    opt = lowp.AdamW(net.parameters(), lr=1e-2)
    for scale in (1, 9):
        net(scale * torch.eye(64)).square().sum().backward()
        opt.step()
    expected, state, saved = net(torch.eye(64)).detach(), copy.deepcopy(opt.state_dict()), lowp.plain_state_dict(net)
    saved = {name: value.detach().clone() for name, value in saved.items()}
    said = []
    for others in (False, True):
        net.reshard()
        if others:
            opt.step()
        net.load_state_dict(saved)
        try:
            net(torch.eye(64))
        except lowp.LowpError as error:
            said.append(str(error))
        opt.load_state_dict(state)
        assert torch.equal(net(torch.eye(64)), expected)
    return said


class Loads(unittest.TestCase):
    def test_values_of_delayed_scales_wait_for_the_optimizer(self):
        for said in ranks.run(2, written_delayed):
            self.assertEqual(len(said), 2)
            for text in said:
                self.assertIn("load its state", text)

    def test_values_that_would_have_a_scale_of_their_own_are_refused(self):
        for name, refused in (("fp8-current", True), ("nvfp4-2d", True), ("mxfp8", False), ("fp8-rowwise", True)):
            with self.subTest(name=name):
                for said in ranks.run(2, written, name):
                    self.assertEqual(len(said), 2 if refused else 0)
                    for text in said:
                        self.assertIn("has a scale that rows of several ranks share", text)

    def test_steps_after_a_load_are_those_without_it(self):
        for world in (1, 2, 3, 4):
            with self.subTest(world=world), tempfile.TemporaryDirectory() as folder:
                cases = sum(case[0] == world for case in CASES)
                self.assertEqual(ranks.run(world, loaded, folder), [cases * len(LOADS)] * world)

    def test_loads_between_settings_of_fsdp(self):
        for first in (True, False):
            ranks.run(2, set_between, first)


if __name__ == "__main__":
    unittest.main()
