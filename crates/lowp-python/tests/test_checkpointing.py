"""Activation checkpointing over FSDP2, and other reads of codes in a phase that gathered others: to the bit what is computed without."""

import contextlib
import functools
import unittest
from unittest import mock

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import lowp
import ranks
from lowp import _fsdp
from lowp._fsdp import BACKWARD, FORWARD, WHOLE
from lowp._torch_compat import fsdp_groups, gathers_of, local_of

STEPS = 3


def recipes():
    return [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


class Block(nn.Module):
    """Two layers, whose forward may be repeated in the backward."""

    def __init__(self, rows, cols, repeat=None):
        super().__init__()
        # Recipes cut columns into whole blocks, and rows not.
        self.taken = rows // 32 * 32 or rows
        self.up, self.down, self.repeat = nn.Linear(cols, rows), nn.Linear(self.taken, cols), repeat

    def forward(self, x):
        inner = lambda x: self.down(torch.relu(self.up(x)[:, : self.taken]))
        return inner(x) if self.repeat is None else checkpoint(inner, x, **self.repeat)


class Blocks(nn.Sequential):
    """The same around blocks that FSDP2 gathers."""

    repeat = None

    def forward(self, x):
        for block in self:
            x = block(x) if self.repeat is None else checkpoint(block, x, **self.repeat)
        return x


def made(name, rows, cols, repeat=None):
    torch.manual_seed(1)
    net = Blocks(*[Block(rows, cols, repeat) for _ in range(2)])
    lowp.quantize_model_(net, name)
    return net


def shard(net):
    for block in net:
        fully_shard(block)
    fully_shard(net)
    return net


def plain(*of):
    return shard(made(*of))


def inside(reentrant, **how):
    return lambda *of: shard(made(*of, repeat=dict(use_reentrant=reentrant, **how)))


def around(reentrant, **how):
    def make(*of):
        net = plain(*of)
        net.repeat = dict(use_reentrant=reentrant, **how)
        return net

    return make


def wrapped(first, impl):
    """By PyTorch's wrapper, before or after ``fully_shard``."""

    def make(*of):
        net = made(*of)
        wrap = lambda: [net.__setitem__(at, checkpoint_wrapper(net[at], checkpoint_impl=impl)) for at in range(len(net))]
        if first == "wrap":
            wrap()
            return shard(net)
        shard(net)
        wrap()
        return net

    return make


def keeps_relu(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator is torch.ops.aten.relu.default else CheckpointPolicy.PREFER_RECOMPUTE


SELECTIVE = dict(context_fn=functools.partial(create_selective_checkpoint_contexts, keeps_relu))

#: Every way of asking for it.
WAYS = {
    "inside": inside(False),
    "inside, reentrant": inside(True),
    "around": around(False),
    "around, reentrant": around(True),
    "inside, selective": inside(False, **SELECTIVE),
    "around, selective": around(False, **SELECTIVE),
    "wrapped, sharded": wrapped("wrap", CheckpointImpl.NO_REENTRANT),
    "sharded, wrapped": wrapped("shard", CheckpointImpl.NO_REENTRANT),
    "wrapped, sharded, reentrant": wrapped("wrap", CheckpointImpl.REENTRANT),
}


@contextlib.contextmanager
def logged():
    """Which gathers each weight has, by its shape and its number among those. Each sends the bytes of the plan."""
    seen, fill = {}, _fsdp.Gathers.fill

    def log(gathers, index, sent, arrived):
        of = (gathers.recipe, *gathers.full, gathers.world)
        sizes, (forward, both) = lowp.plan(*of)["fsdp2"], lowp.plan(*of, recompute=True)["fsdp2"]
        assert forward == sizes[FORWARD] and both <= sum(sizes) and [both] == lowp.plan(*of, reshard_after_forward=False)["fsdp2"], (of, sizes, both)
        assert both == sizes[BACKWARD] or not serves_both(gathers.recipe), (of, sizes, both)
        sends = sum(send.numel() for send in gathers.gathers[index].sends)
        assert sends == [*sizes, both][index], (of, index, sends, sizes, both)
        seen.setdefault((gathers.full, id(gathers)), []).append(index)
        return fill(gathers, index, sent, arrived)

    with mock.patch.object(_fsdp.Gathers, "fill", log):
        yield seen


def held():
    """Bytes of all that was gathered: memory of FSDP2 for what arrives in each gather, and lowp's own."""
    found = []
    for group in fsdp_groups():
        found += [layout.memory for layout in getattr(gathers_of(group), "layouts", {}).values()]
        for param in group.fsdp_params:
            found += param.all_gather_outputs
            gathers = getattr(getattr(local_of(param.sharded_param), "_store", None), "gathers", None)
            if gathers is not None:
                found += [piece for pieces in gathers.outputs.values() for piece in pieces] + gathers.inner
                found += [own for gather in gathers.gathers for own in getattr(gather, "own", {}).values()]
    return sum(piece.untyped_storage().size() for piece in found)


def train(net, rank, steps=STEPS, batches=1, before=lambda at: None, between=lambda at: None):
    """Losses, gradients and weights of some steps, and what each batch gathered. Then nothing that was gathered is held."""
    opt = lowp.AdamW(net.parameters(), lr=1e-2)
    bits, gathered = [], []
    for at in range(steps * batches):
        before(at)
        torch.manual_seed(100 * at + rank)
        x = torch.randn(4, net[0].down.bias.shape[0], requires_grad=True)
        with logged() as seen:
            loss = net(x).square().mean()
            between(at)
            loss.backward()
        gathered.append([of for _, of in sorted(seen.items())])
        bits += [loss.detach(), x.grad]
        if at % batches == batches - 1:
            assert held() == 0, held()
            bits += [local_of(param.grad).clone() for param in net.parameters()]
            opt.step()
            opt.zero_grad()
    for param in net.parameters():
        local = local_of(param.detach())
        bits += local.buffers.values() if isinstance(local, lowp.Tensor) else [local]
    return bits, gathered


def compare(found, expected, *what):
    assert len(found) == len(expected), what
    for index, (a, b) in enumerate(zip(found, expected)):
        assert torch.equal(a, b), (*what, index)


def serves_both(name):
    return "shared_data" in lowp.quantize(torch.ones(128, 128), name).buffers


def checkpointed(rank, world, cases, ways):
    """Losses, gradients and weights beside those without checkpointing, and what each step gathers."""
    for name, *sizes in cases:
        repeated = [] if serves_both(name) else [WHOLE]
        expected, gathered = train(plain(name, *sizes), rank)
        assert gathered == [[[FORWARD, BACKWARD]] * 4] * STEPS, (name, gathered)
        for way in ways:
            found, gathered = train(WAYS[way](name, *sizes), rank)
            compare(found, expected, name, way)
            first, *later = gathered
            ways_of_one = {"around, reentrant": ([FORWARD, WHOLE],)}.get(way, ())
            assert all(of in ([FORWARD, BACKWARD, *repeated], *ways_of_one) for of in first), (name, way, first)
            one = [FORWARD, WHOLE] if repeated else [FORWARD, BACKWARD]
            assert all(of in (one, *ways_of_one) for step in later for of in step), (name, way, later)
    return len(cases) * len(ways)


def changing(rank, world, name):
    """Checkpointing that is turned on and off, full tensors that are kept in some steps, and ``unshard()`` between forward and backward. What the
    first weight gathers in each batch."""
    found = {}
    for what, batches, before, between in (
        ("checkpointing", 1, lambda net, at: setattr(net, "repeat", dict(use_reentrant=False) if at in (0, 1, 4) else None), None),
        ("reshard_after_forward", 1, lambda net, at: [block.set_reshard_after_forward(at not in (1, 2)) for block in net], None),
        ("reshard_after_backward", 2, lambda net, at: net.set_reshard_after_backward(at % 2 == 1), None),
        ("unshard", 1, None, lambda net, at: [block.unshard() for block in net] if at in (0, 1, 4) else None),
    ):
        expected, _ = train(plain(name, 256, 256), rank, 6, batches)
        net = plain(name, 256, 256)
        calls = {key: functools.partial(call, net) for key, call in (("before", before), ("between", between)) if call is not None}
        bits, gathered = train(net, rank, 6, batches, **calls)
        compare(bits, expected, name, what)
        found[what] = [of[0] if of else [] for of in gathered]
    return found


def changing_each(rank, world, names):
    return [changing(rank, world, name) for name in names]


#: The batch after checkpointing ends learns of it from that backward alone.
CHANGES = {
    "checkpointing": [[FORWARD, BACKWARD, WHOLE], [FORWARD, WHOLE], [FORWARD, WHOLE], [FORWARD, BACKWARD], [FORWARD, BACKWARD, WHOLE], [FORWARD, WHOLE]],
    "reshard_after_forward": [[FORWARD, BACKWARD], [WHOLE], [WHOLE], *[[FORWARD, BACKWARD]] * 3],
    "reshard_after_backward": [[WHOLE, WHOLE], [BACKWARD]] * 6,
    "unshard": [*[[FORWARD, FORWARD, WHOLE]] * 2, *[[FORWARD, BACKWARD]] * 2, [FORWARD, FORWARD, WHOLE], [FORWARD, BACKWARD]],
}


def loaded(rank, world, cases):
    """Loads between steps, which move the rows of a rank that has fewer than others."""
    for name, *sizes in cases:
        expected, _ = train(plain(name, *sizes), rank)
        net = inside(False)(name, *sizes)
        found, _ = train(net, rank, before=lambda at: net.load_state_dict(net.state_dict()) if at else None)
        compare(found, expected, name)
    return len(cases)


class Experts(nn.Module):
    """Two layers, which each rank uses in an order of its own."""

    def __init__(self, rank, repeat):
        super().__init__()
        self.layers, self.order, self.repeat = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)), (1, -1)[rank % 2], repeat
        self.down = nn.Linear(64, 64)

    def forward(self, x):
        def inner(x):
            parts = {layer: torch.relu(layer(x)) for layer in list(self.layers)[:: self.order]}
            return self.down(parts[self.layers[0]] + parts[self.layers[1]])

        return checkpoint(inner, x, use_reentrant=False) if self.repeat else inner(x)


def experts(rank, world, names):
    for name in names:
        found = []
        for repeat in (False, True):
            torch.manual_seed(1)
            net = Blocks(*[Experts(rank, repeat) for _ in range(2)])
            lowp.quantize_model_(net, name)
            found.append(train(shard(net), rank)[0])
        compare(found[1], found[0], name)
    return len(names)


class Checkpointing(unittest.TestCase):
    def test_ranks_that_read_weights_in_another_order(self):
        self.assertEqual(ranks.run(2, experts, ("mxfp8", "nvfp4-1d")), [2, 2])

    def test_every_recipe(self):
        names = recipes()
        self.assertEqual([name for name in names if serves_both(name)], ["mxfp8-2d"])
        cases = [(name, 256, 256) for name in names]
        for world in (1, 2):
            with self.subTest(world=world):
                self.assertEqual(ranks.run(world, checkpointed, cases, ["inside", "around"]), [2 * len(cases)] * world)

    def test_every_way_of_asking_for_it(self):
        cases = [(name, 256, 256) for name in ("fp8-current", "mxfp8", "mxfp8-2d")]
        self.assertEqual(ranks.run(2, checkpointed, cases, [*WAYS]), [len(cases) * len(WAYS)] * 2)

    def test_uneven_rows(self):
        cases = [("fp8-current", 50, 64), ("fp8-rowwise", 2, 64), ("mxfp8", 95, 96), ("nvfp4-1d", 46, 48), ("mxfp8", 40, 64)]
        self.assertEqual(ranks.run(3, checkpointed, cases, ["inside", "around, reentrant"]), [2 * len(cases)] * 3)

    def test_loads_between_steps(self):
        self.assertEqual(ranks.run(2, loaded, [("fp8-current", 33, 64), ("mxfp8", 63, 64), ("nvfp4-1d", 37, 64)]), [3, 3])

    def test_settings_that_change_between_steps(self):
        for found in ranks.run(2, changing_each, ("fp8-current", "mxfp8")):
            self.assertEqual(found, [CHANGES] * 2)


if __name__ == "__main__":
    unittest.main()
