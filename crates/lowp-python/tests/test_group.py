"""Gathers of whole groups of FSDP2, next to those that PyTorch does: the same bits, whichever rank does which."""

import contextlib
import gc
import io
import unittest
import weakref
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import lowp
import ranks
from lowp import _fsdp, _group
from lowp import _torch_compat as compat
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


def made(name, width, rows, blocks=2, device="cpu", **how):
    torch.manual_seed(1)
    net = nn.Sequential(*[Block(width, rows) for _ in range(blocks)]).to(device)
    lowp.quantize_model_(net, name)
    for block in net:
        fully_shard(block, **how)
    fully_shard(net, **how)
    return net


def train(rank, name, width, rows, policy, here, change=None, mesh=None, blocks=2, prepare=lambda net: None, device="cpu"):
    """Losses and shards of some steps, and how many gathers were done ``here``. ``change`` is called with the model before the third step."""
    how = dict(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)) if policy else {}
    net = made(name, width, rows, blocks, device, mesh=mesh, **how)
    prepare(net)
    opt = lowp.AdamW(net.parameters(), lr=1e-2)
    losses, done = [], []
    arrive = _group._Group.arrive

    def count(*args):
        arrive(*args)
        done.append(True)

    follow = _group.follow if here else lambda group: None
    with mock.patch.object(_group, "follow", follow), mock.patch.object(_group._Group, "arrive", count):
        for step in range(STEPS):
            if change is not None and step == 2:
                change(net)
            x = torch.randn(4, width, generator=torch.Generator().manual_seed(STEPS * rank + step)).to(device)
            loss = net(x).float().square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(loss.detach())
    shards = [param.to_local().dequantize() if isinstance(param.to_local(), lowp.Tensor) else param.to_local() for param in net.parameters()]
    return losses + [shard.detach() for shard in shards], len(done)


def same(found, expected, *what):
    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(a, b), (*what, index)


def compared(rank, world, cases, **how):
    counts = []
    for *case, policy in cases:
        expected, none = train(rank, *case, policy, False, **how)
        found, all = train(rank, *case, policy, True, **how)
        # Some ranks here, and PyTorch on others.
        mixed, some = train(rank, *case, policy, rank % 2 == 0, **how)
        same(found, expected, case, policy)
        same(mixed, expected, case, policy)
        assert none == 0 and some == (all if rank % 2 == 0 else 0), (none, some, all)
        counts.append(all)
    return counts


def replicated(rank, world, cases):
    return compared(rank, world, cases, mesh=init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("replicate", "shard")))


def ahead(net):
    """Each block gathers the next ones in forward, and those before it in backward."""
    blocks = list(net)
    for at, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[at + 1 : at + 3])
        block.set_modules_to_backward_prefetch(blocks[max(at - 2, 0) : at][::-1])


def prefetched(rank, world, cases):
    """Steps and loads between gathers ahead: the bits are those without, whoever gathers."""
    counts = []
    for *case, policy in cases:
        for change in (None, replace, load):
            expected, _ = train(rank, *case, policy, False, change, blocks=3)
            for here in (rank % 2 == 0, True):
                found, count = train(rank, *case, policy, here, change, blocks=3, prepare=ahead)
                same(found, expected, case, change, here)
            counts.append(count)
    return counts


def replace(net):
    net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()}, assign=True)


def load(net):
    net.load_state_dict({key: value.clone() for key, value in net.state_dict().items()})


def changed(rank, world):
    """A model whose shards are replaced, which its gathers follow."""

    def freeze(net):
        net[0].norm.requires_grad_(False)

    counts = []
    for change in (replace, freeze):
        expected, _ = train(rank, "fp8-current", 64, 128, True, False, change)
        found, count = train(rank, "fp8-current", 64, 128, True, True, change)
        same(found, expected, change.__name__)
        counts.append(count)
    return counts


def alone(rank, world):
    """Losses of layers that are groups of one weight, with gathers here and those of PyTorch."""
    runs, count = [], []
    arrive = _group._Group.arrive
    for follow in (lambda group: None, _group.follow):
        torch.manual_seed(1)
        net = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(2)])
        lowp.quantize_model_(net, "fp8-current")
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        opt = lowp.AdamW(net.parameters(), lr=1e-2)
        watched = mock.patch.object(_group._Group, "arrive", lambda *args: (arrive(*args), count.append(True)))
        with mock.patch.object(_group, "follow", follow), watched:
            runs.append([step_of(net, opt, torch.ones(4, 64)) for _ in range(STEPS)])
    same(*runs)
    return bool(count)


def kept_in_part(rank, world):
    """A group of which one parameter keeps the memory of its full values, which PyTorch gathers from then on: how many gathers were done here, of a model
    that keeps none, some in a group, and all in it."""

    def keep(records):
        for record in records:
            record.keep_unsharded_storage = True

    def of_first(net):
        state = net[0]._get_fsdp_state()
        [group] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        return compat.records_of(group)

    counts = []
    for change in (lambda net: None, lambda net: keep(of_first(net)[:1]), lambda net: keep(of_first(net))):
        expected, _ = train(rank, "fp8-current", 64, 128, True, False, change)
        found, count = train(rank, "fp8-current", 64, 128, True, True, change)
        same(found, expected, len(counts))
        counts.append(count)
    return counts


def unknown(rank, world):
    """Gathers of a version of PyTorch that lacks a name, by list of names: all are its own."""
    counts, case = [], ("fp8-current", 64, 128, True)
    expected, _ = train(rank, *case, False)
    for names in ("_OF_GROUP", "_OF_ALL", "_OF_RECORD"):
        with mock.patch.object(compat, names, [*getattr(compat, names), "no_such_name"]):
            found, count = train(rank, *case, True)
        same(found, expected, names)
        counts.append(count)
    return counts


def released(rank, world):
    """How many replaced shards are alive after the next step, without a collector of cycles."""
    net = made("fp8-current", 64, 128)

    def step():
        net(torch.randn(4, 64)).square().mean().backward()

    for _ in range(3):
        step()
    old = [weakref.ref(local._store) for local in (param.to_local() for param in net.parameters()) if isinstance(local, lowp.Tensor)]
    gc.collect()
    gc.disable()
    try:
        replace(net)
        step()
        return len(old), sum(store() is not None for store in old)
    finally:
        gc.enable()


def step_of(net, opt, x):
    loss = net(x).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.detach()


def changed_ahead(rank, world):
    """Weights that change between a gather ahead and its use, in place and by other shards: the error, and later losses compared with a model
    that gathers afterwards."""
    x, messages = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank)), []
    for here in (False, True):
        for what in ("step", "load", "replace"):
            found = []
            for early in (False, True):
                with mock.patch.object(_group, "follow", _group.follow if here else lambda group: None):
                    net, other = made("fp8-current", 64, 128), made("fp8-current", 64, 128)
                    opt = lowp.AdamW(net.parameters(), lr=1e-2)
                    losses = [step_of(net, opt, x) for _ in range(3)]
                    net(x).square().mean().backward()
                    handles = [block.unshard(async_op=True) for block in net] if early else []
                    if what == "step":
                        opt.step()
                    else:
                        net.load_state_dict({key: value.clone() for key, value in other.state_dict().items()}, assign=what == "replace")
                    try:
                        for handle in handles:
                            handle.wait()
                    except lowp.LowpError as error:
                        messages.append(str(error))
                    opt.zero_grad()
                    if early and what == "replace":  # which was gathered before
                        net[0].reshard()
                        net[1].reshard()
                    # Of a model whose parameters were replaced the optimizer has others.
                    losses += [net(x).square().mean().detach() for _ in range(2)] if what == "replace" else [step_of(net, opt, x) for _ in range(2)]
                    found.append(losses)
            same(*found, here, what)
    return messages


def failing(rank, world):
    """A weight that fails in a gather on every rank, in forward or in backward: what is raised, and later losses compared with a model that nothing happened to."""
    x, found = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank)), []
    for phase in ("forward", "backward"):
        if phase == "backward" and not hasattr(FSDPModule, "reset_iter_state"):
            continue
        runs = []
        for fails in (False, True):
            net = made("fp8-current", 64, 128)
            opt = lowp.AdamW(net.parameters(), lr=1e-2)
            losses = [step_of(net, opt, x) for _ in range(3)]
            of = _fsdp.Gathers.choose

            def choose(gathers, kept, backward):
                if backward == (phase == "backward"):
                    raise RuntimeError(f"out of luck in {phase}")
                return of(gathers, kept, backward)

            if fails:
                printed = io.StringIO()
                with mock.patch.object(_fsdp.Gathers, "choose", choose), contextlib.redirect_stderr(printed):
                    try:
                        step_of(net, opt, x)
                    except RuntimeError as error:
                        found.append((str(error), printed.getvalue().count(f"lowp: rank {rank} of {world} failed: RuntimeError: {error}")))
                if phase == "backward":
                    net.reset_iter_state()
                opt.zero_grad()
            runs.append(losses + [step_of(net, opt, x) for _ in range(2)])
        same(*runs, phase)
    return found


def inferred(rank, world):
    """Outputs under inference mode, before the first gather that trains and between others, compared with those without it."""
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))

    def out(net, mode):
        with mode():
            found = net(x)
        net.reshard()
        return found.clone()

    for name, rows in (("fp8-current", 50), ("mxfp8", 96)):
        runs = []
        for mode in (torch.no_grad, torch.inference_mode):
            first, net = made(name, 64, rows), made(name, 64, rows)
            opt = lowp.AdamW(net.parameters(), lr=1e-2)
            # PyTorch cannot train a model whose first gather ran in inference mode.
            found = [out(first, mode), out(first, mode)]
            for at in range(6):
                found.append(step_of(net, opt, x))
                if at % 2:
                    found += [out(net, mode), out(net, mode)]
            runs.append(found)
        same(*runs, name)


class Groups(unittest.TestCase):
    def test_replicas(self):
        for counts in ranks.run(4, replicated, [("fp8-current", 64, 128, True), ("nvfp4-2d", 64, 128, False)]):
            self.assertTrue(all(counts), counts)

    def test_gathers_ahead(self):
        for counts in ranks.run(2, prefetched, [("mxfp8", 64, 128, True)]):
            self.assertTrue(all(counts), counts)

    def test_weights_that_change_after_they_were_gathered(self):
        for messages in ranks.run(2, changed_ahead):
            self.assertEqual(len(messages), 4)
            for message in messages:
                self.assertIn("call unshard() after a step, and after values are loaded, not before", message)

    def test_a_weight_that_fails_on_every_rank(self):
        phases = ("forward", "backward") if hasattr(FSDPModule, "reset_iter_state") else ("forward",)
        self.assertEqual(ranks.run(2, failing), [[(f"out of luck in {phase}", 1) for phase in phases]] * 2)

    def test_inference_mode(self):
        ranks.run(3, inferred)

    def test_shards_that_are_replaced_are_released(self):
        self.assertEqual(ranks.run(2, released), [(4, 0)] * 2)

    def test_the_bits_are_those_of_pytorch(self):
        cases = [(name, 128, 256, at % 2 == 0) for at, name in enumerate(recipes())]
        for counts in ranks.run(2, compared, cases):
            # The first gathers of each direction are PyTorch's.
            self.assertTrue(all(count >= 2 * 2 * (STEPS - 2) for count in counts), counts)

    def test_a_rank_alone(self):
        # Blocks have plain parameters, and a weight that is a group by itself sends nothing.
        cases = [("fp8-current", 64, 128, True), ("mxfp8", 64, 128, False), ("nvfp4-2d", 64, 128, True)]
        for counts in ranks.run(1, compared, cases):
            self.assertTrue(all(counts), counts)
        self.assertTrue(*ranks.run(1, alone))

    def test_uneven_rows(self):
        # Pieces of codes end at odd bytes, too.
        cases = [("fp8-current", 32, 50, True), ("fp8-current", 33, 50, True), ("mxfp8-2d", 96, 160, True), ("fp8-delayed", 64, 34, True), ("fp8-delayed", 64, 36, False)]
        for counts in ranks.run(3, compared, cases):
            self.assertTrue(all(counts), counts)

    def test_a_group_that_keeps_some_of_its_memory(self):
        for none, some, all in ranks.run(2, kept_in_part):
            self.assertTrue(0 < some < none == all, (none, some, all))

    def test_a_version_that_lacks_a_name(self):
        self.assertEqual(ranks.run(2, unknown), [[0, 0, 0]] * 2)

    def test_shards_that_are_replaced_are_followed(self):
        for counts in ranks.run(2, changed):
            self.assertTrue(all(counts), counts)


if __name__ == "__main__":
    unittest.main()
