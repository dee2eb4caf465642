"""Errors of one rank reach the others, who would wait for it."""

import contextlib
import ctypes
import io
import time
import unittest
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowp
import ranks
from lowp import _args, _flat, _fsdp, _optim, _ranks
from lowp._ranks import Ranks


def message(call):
    try:
        call()
    except (lowp.LowpError, NotImplementedError) as error:
        return str(error)
    return "no error"


def sharded(name="fp8-current", **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(64, 64))
    lowp.quantize_model_(net, name, **options)
    fully_shard(net)
    return net


def half_replaced(rank, world):
    net = sharded()
    opt = lowp.AdamW(net.parameters())
    net(torch.ones(4, 64)).sum().backward()
    if rank == 1:
        net[0].weight._local_tensor._store._stale = torch.ones(32, dtype=torch.bool)
    return message(opt.step)


def slices(rank, world):
    weight = lowp.quantize(torch.zeros(32, 32), "mxfp8")
    half = torch.zeros(512)
    found = []
    for bad in (half.to(torch.complex64).to("meta"), half[:7]):
        start = rank * 512
        found.append(message(lambda: lowp.cast_master_weights([weight], [bad if rank else half], [start])))
    found.append(message(lambda: lowp.cast_master_weights([weight], [half], [start, start] if rank else [start])))
    return found


def other_gathers(rank, world):
    net = sharded("fp8-current", pow2=bool(rank))
    return message(lambda: net(torch.ones(4, 64)))


def leaves_plain(rank, world, layer):
    """A layer that one rank ignores."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    lowp.quantize_model_(net, "fp8-current", ignore=[layer] if rank else [])
    for of in net:
        fully_shard(of)
    fully_shard(net)
    try:
        opt = lowp.AdamW(net.parameters())
    except Exception as error:
        return str(error), type(error).__name__
    net(torch.ones(4, 64)).sum().backward()
    opt.step()


def other_rates(rank, world, key, max_norm):
    """Hyperparameters that one rank changes after the second step, which is skipped on both."""
    net = sharded()
    opt = lowp.AdamW(net.parameters(), lr=1e-2, max_norm=max_norm)
    for step in range(3):
        for group in opt.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        net(torch.ones(4, 64)).sum().backward()
        opt.step()
    before = [param.to_local().clone() for param in net.parameters()]
    if rank == 1:
        opt.param_groups[0][key] = (0.5, 0.5) if key == "betas" else 0.5
    found = message(opt.step)
    for param, old in zip(net.parameters(), before):
        assert torch.equal(param.to_local(), old)
    return found


def construction(rank, world):
    """What one rank alone gives the optimizer. Both go on."""
    found = []
    for options in ({"lr": "much"}, {"betas": 0.9}, {"moments_dtype": torch.float16}):
        net = sharded()
        found.append(message(lambda: lowp.AdamW(net.parameters(), **(options if rank else {}))))
    for make in (lambda net: net.named_parameters(), lambda net: [{"params": (p for p in net.parameters())}]):
        net = sharded()
        twice = [*make(net), *make(net)]
        found.append(message(lambda: lowp.AdamW(twice if rank else make(net))))
        opt = lowp.AdamW(make(net))
        net(torch.ones(4, 64)).sum().backward()
        opt.step()
    return found


def first_steps(rank, world):
    """Recipes, rates and states that are loaded, each others on one rank."""
    net = sharded("fp8-current", pow2=bool(rank))
    found = [message(lambda: lowp.AdamW(net.parameters()))]
    for state in (False, True):
        net = sharded()
        opt = lowp.AdamW(net.parameters(), lr=0.25 if rank and not state else 0.5)
        net(torch.ones(4, 64)).sum().backward()
        if state and rank == 1:
            opt.load_state_dict(opt.state_dict() | {"state": {0: dict(opt._param_state(net[0].weight, torch.float32), step=torch.tensor(3.0))}})
        found.append(message(opt.step))
    return found


def gone(rank, world):
    """A rank that ends while the others wait for it, without a word of why."""
    net = sharded()
    opt = lowp.AdamW(net.parameters())
    net(torch.ones(4, 64)).sum().backward()
    if rank == 1:
        dist.destroy_process_group()
        return None
    return message(opt.step)


class OnHost(Ranks):
    """Ranks of a GPU without one: its collectives are those of a group of its own, in memory of the host, and wait for ranks that never
    come as long as the time limit of the process group."""

    def __init__(self, group, device):
        super().__init__(group, device)
        self.on_device, self.host = True, dist.new_group(backend="gloo")
        self.rounds = []

    def exchange(self, tag, own):
        self.rounds.append(tag)
        return super().exchange(tag, own)

    def _on(self, stream):
        return contextlib.nullcontext()

    def _bytes(self, pointer, bytes):
        return torch.frombuffer((ctypes.c_uint8 * bytes).from_address(pointer), dtype=torch.uint8)


def elsewhere(rank, world):
    """The second step fails on one rank, while the other is in a collective of the device."""
    store = dist.distributed_c10d._get_default_store()
    net = sharded()
    with mock.patch.object(_args, "Ranks", OnHost):
        opt = lowp.AdamW(net.parameters())
        net(torch.ones(4, 64)).sum().backward()
        opt.step()
    if rank == 1:
        opt.param_groups[0]["betas"], own = (0.9,), io.StringIO()
        with contextlib.redirect_stderr(own):
            start = time.monotonic()
            found, seconds = message(opt.step), time.monotonic() - start
        store.set("raised", "")
        return found, own.getvalue(), seconds

    def never(*_, **__):
        store.wait(["raised"])
        raise RuntimeError("time limit of the process group")

    with mock.patch.object(dist, "all_gather_into_tensor", never):
        start = time.monotonic()
        return message(opt.step), "", time.monotonic() - start


def on_device(rank, world):
    """Weights of slices that are cut anywhere, by collectives of the device alone."""
    torch.manual_seed(5)
    sizes = ((32, 64), (96, 32), (32, 32))
    values = [torch.randn(size) for size in sizes]
    made = []
    keep = lambda *args: made.append(OnHost(*args)) or made[-1]
    with mock.patch.object(_flat.Ranks, "of", keep):
        for name in ("mxfp8-2d", "fp8-current", "nvfp4-2d"):
            for cuts in ((0, 700, 1001), (0, 0, 1024), (0, 1024, 1024)):
                weights = [lowp.quantize(torch.zeros(size), name) for size in sizes]
                ends = (*cuts[1:], None)
                masters = [value.flatten()[cuts[rank] : ends[rank]] for value in values]
                lowp.cast_master_weights(weights, masters, [cuts[rank]] * 3)
                for weight, value in zip(weights, values):
                    assert torch.equal(weight, lowp.quantize(value, name)), (name, cuts)
    return {tag for of in made for tag in of.rounds if not tag.startswith("agree")}


def of_one_rank_each(rank, world):
    """What moves and what is staged where most weights are of one rank, as slices of a flat buffer of all of them are; and where one is
    longer than what may be staged at once."""
    torch.manual_seed(6)
    staged, moved = [], []
    of_torch = {name: getattr(module, name) for module, name in ((torch, "empty"), (dist, "broadcast"), (dist, "all_gather_into_tensor"))}

    def empty(*size, dtype=None, **how):
        made = of_torch["empty"](*size, dtype=dtype, **how)
        if dtype is torch.uint8:
            staged.append(made.numel())
        return made

    def counted(name):
        def call(tensor, *args, **how):
            moved.append(tensor.numel())
            return of_torch[name](tensor, *args, **how)

        return call

    sizes, limit, found = ((64, 64),) * 6 + ((64, 256),) + ((32, 32),) * 3, 6000, {}
    starts = [0]
    for rows, cols in sizes:
        starts.append(starts[-1] + rows * cols)
    for name in ("mxfp8-2d", "nvfp4-2d"):
        values = [torch.randn(size) for size in sizes]
        weights = [lowp.quantize(torch.zeros(size), name) for size in sizes]
        # In the middle of a weight.
        cut = [starts[-1] * of // world + 7 for of in range(world)] + [starts[-1]]
        cut[0] = 0
        begins = [min(max(cut[rank] - start, 0), end - start) for start, end in zip(starts, starts[1:])]
        ends = [min(max(cut[rank + 1] - start, 0), end - start) for start, end in zip(starts, starts[1:])]
        masters = [value.flatten()[begin:end] for value, begin, end in zip(values, begins, ends)]
        with contextlib.ExitStack() as patched:
            patched.enter_context(mock.patch.object(_flat.Ranks, "of", OnHost))
            patched.enter_context(mock.patch.object(_ranks, "_STAGED", limit))
            patched.enter_context(mock.patch.object(torch, "empty", empty))
            for of in ("broadcast", "all_gather_into_tensor"):
                patched.enter_context(mock.patch.object(dist, of, counted(of)))
            lowp.cast_master_weights(weights, masters, begins)
        for weight, value in zip(weights, values):
            assert torch.equal(weight, lowp.quantize(value, name)), name
        found[name] = (sum(staged), sum(moved))
        staged.clear()
        moved.clear()
    return limit, starts[-1], found


def own_part(rank, world):
    """A part of an even piece that a rank has in its place, and one that it has elsewhere, beside uneven ones."""
    of = OnHost(None, torch.device("cpu"))
    found = []
    uneven, even = ((10, 10), (0, 33), (12, 12), (101, 3), (0, 0)), ((10, 10), (12, 12), (0, 0))
    for cuts, limit, direct in ((uneven, 1 << 20, 1 << 20), (uneven, 50, 1 << 20), (uneven, 1 << 20, 1), (even, 1 << 20, 1 << 20), (even, 7, 1 << 20)):
        rng = torch.Generator().manual_seed(7)
        items, expected, made = [], [], []
        for lengths in cuts:
            whole = torch.randint(256, (sum(lengths),), dtype=torch.uint8, generator=rng)
            start = sum(lengths[:rank])
            source, dest = whole[start : start + lengths[rank]].clone(), torch.zeros_like(whole)
            if lengths == (12, 12):
                source = dest[start : start + lengths[rank]].copy_(source)
            places = [(dest.data_ptr() + sum(lengths[:other]), lengths[other]) for other in range(world)]
            items.append(((source.data_ptr(), lengths[rank]), places))
            expected.append(whole)
            made += [source, dest]
        with mock.patch.object(_ranks, "_STAGED", limit), mock.patch.object(_ranks, "_DIRECT", direct):
            of.all_gather(items, 0)
        found.append(all(torch.equal(a, b) for a, b in zip(made[1::2], expected)))
    return found


def failing_gathers(rank, world, when):
    """A rank that fails in what a gather calls, before or after it, and whether it said so before it waited for anybody."""
    net = sharded()
    net(torch.ones(4, 64)).sum().backward()
    store, own = dist.distributed_c10d._get_default_store(), io.StringIO()
    if rank != 1:
        store.wait(["raised"])
        return Ranks(None, torch.device("cpu"))._stored()
    weight = net[0].weight._local_tensor._store
    if when == "before":
        weight._stale = torch.ones(32, dtype=torch.bool)
        call = lambda: net(torch.ones(4, 64))
    elif when == "anew":
        # A shard that is made again, as after a load, without a collective.
        weight.gathers = weight.shard = None
        weight._stale = torch.ones(32, dtype=torch.bool)
        call = lambda: net(torch.ones(4, 64))
    else:
        call = lambda: _fsdp.post_all_gather(weight, [], (weight.gathers, 0, None))
    with contextlib.redirect_stderr(own):
        try:
            call()
        except Exception:
            pass
    store.set("raised", "")
    return own.getvalue()


def fails_twice(rank, world):
    """A failure that is caught, and one of another cause over the same group, of a rank whose cause nobody has heard."""
    ranks_of = OnHost(None, torch.device("cpu"))
    found = []
    if rank == 1:
        with contextlib.redirect_stderr(io.StringIO()):
            ranks_of.fail("the first cause")
    else:
        found.append(message(lambda: ranks_of.exchange("a round", b"")))
    # What an optimizer that is made over the group again has.
    again = Ranks(None, torch.device("cpu"))
    again.group = again.host = ranks_of.host
    found.append(again._stored())
    dist.barrier()
    # A rank that fails between rounds and goes on is ahead of the others until the next one.
    if rank == 1:
        with contextlib.redirect_stderr(io.StringIO()):
            again.fail("nobody heard of it", gathers=True)
    dist.barrier()
    if rank == 0:
        found.append(again._stored())
    again.exchange("a round", b"")
    return found, again._stored(), again._round()


def replaced_too_late(rank, world):
    """What is wrong with parameters of optimizers that were made at another time."""
    found = []
    for case in ("before", "evaluated", "root evaluated"):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        lowp.quantize_model_(net, "fp8-current")
        if case == "before":
            opt = lowp.AdamW(net.parameters())
        if case != "root evaluated":
            fully_shard(net[0])
        fully_shard(net)
        if case == "before":
            net(torch.ones(4, 64)).sum().backward()
        else:
            with torch.no_grad():
                net(torch.ones(4, 64))
            opt = lowp.AdamW(net.parameters())
            for param in net.parameters():
                param.grad = torch.zeros_like(param)
        found.append(message(opt.step))
    net.reshard()
    opt = lowp.AdamW(net.parameters())
    net(torch.ones(4, 64)).sum().backward()
    found.append(message(opt.step))
    return found


def before_the_plan(rank, world):
    """What is wrong on one rank before the ranks have sent each other anything."""
    found = []
    for case in ("frozen", "whole", "betas", "dtype"):
        net = sharded()
        opt = lowp.AdamW(net.parameters())
        net(torch.ones(4, 64)).sum().backward()
        params = opt.param_groups[0]["params"]
        if rank == 1 and case == "frozen":
            net.requires_grad_(False).zero_grad()
        elif rank == 1 and case == "whole":
            params[1] = nn.Parameter(torch.zeros(3))
            params[1].grad = torch.zeros(3)
        elif rank == 1 and case == "betas":
            opt.param_groups[0]["betas"] = (0.9,)
        elif rank == 1:
            params[1]._local_tensor.data = params[1]._local_tensor.data.double()
        before = time.monotonic()
        try:
            opt.step()
            error = "no error"
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found.append((error, time.monotonic() - before))
    return found


class OneOfTwo(unittest.TestCase):
    def test_what_fails_before_the_plan_reaches_the_others(self):
        expected = ("none of 2 parameters requires gradients", "is not sharded, but others are", "LowpError: the hyperparameters of group 0", "float64")
        for text, (own, _), (of_other, seconds) in zip(expected, *reversed(ranks.run(2, before_the_plan))):
            with self.subTest(text=text):
                self.assertIn(text, own)
                self.assertIn("rank 1 failed", of_other)
                self.assertIn(text, of_other)
                self.assertLess(seconds, 20)

    def test_hyperparameters_that_differ_in_any_step(self):
        for key, max_norm in (("lr", 1.0), ("lr", None), ("betas", None), ("eps", None), ("weight_decay", None)):
            with self.subTest(key=key, max_norm=max_norm):
                for found in ranks.run(2, other_rates, key, max_norm):
                    self.assertIn(f"the ranks disagree on {key} (rank 1 of 2 differs from rank 0)", found)

    def test_codes_that_are_half_replaced(self):
        own, of_other = ranks.run(2, half_replaced)
        self.assertIn("rank 1 failed: LowpError: 32 of 32 rows have another scale", own)
        self.assertIn("another scale", of_other)

    def test_slices_of_masters(self):
        for own, of_other in zip(*ranks.run(2, slices)):
            self.assertNotEqual(own, "no error")
            self.assertNotEqual(of_other, "no error")

    def test_gathers_that_differ(self):
        for message in ranks.run(2, other_gathers):
            self.assertIn("ranks disagree on the gathers of a parameter", message)
            self.assertIn("fp8-current format=hybrid pow2=false", message)
            self.assertIn("fp8-current format=hybrid pow2=true", message)
            self.assertNotIn("{", message)

    def test_layers_that_one_rank_leaves_plain(self):
        for layer in ("0", "1"):
            for found, kind in ranks.run(2, leaves_plain, layer):
                self.assertEqual(kind, "LowpError")
                self.assertIn("ranks disagree on the parameters of the optimizer", found)
                self.assertRegex(found, rf"parameter {2 * int(layer)} \(.*weight\) of shape \(64, 64\) in group 0: torch.float32")

    def test_what_differs_in_the_first_step(self):
        for recipes, rates, states in ranks.run(2, first_steps):
            self.assertIn("ranks disagree on the parameters of the optimizer", recipes)
            for pow2 in ("false", "true"):
                self.assertRegex(recipes, f'parameter 0 .weight. of shape .64, 64. in group 0: codes of lowp.Recipe."fp8-current", .*pow2="{pow2}"')
            self.assertIn("the ranks disagree on the hyperparameters", rates)
            self.assertIn("lr 0.5, betas 0.9 and 0.999", rates)
            self.assertIn("lr 0.25, betas 0.9 and 0.999", rates)
            self.assertIn("ranks disagree on the state that was loaded before the first step", states)

    def test_a_rank_that_is_gone_is_not_said_to_be_another(self):
        found, _ = ranks.run(2, gone)
        self.assertIn("failed on rank 0", found)
        self.assertIn("if another rank ended, that rank has the cause", found)
        self.assertNotIn("fix the cause on rank 0", found)

    def test_a_rank_that_fails_waits_for_nobody(self):
        (of_other, _, _), (own, printed, seconds) = ranks.run(2, elsewhere)
        text = "the hyperparameters of group 0 are"
        self.assertIn(text, own)
        self.assertIn(f"lowp: rank 1 of 2 failed: LowpError: {text}", printed)
        self.assertLess(seconds, 20)
        self.assertIn(f"rank 1 failed: LowpError: {text}", of_other)

    def test_weights_are_gathered_by_the_device_alone(self):
        for rounds in ranks.run(3, on_device):
            self.assertNotIn("all_gather", rounds)

    def test_weights_of_one_rank_each_move_once(self):
        for world in (2, 3):
            for limit, elements, found in ranks.run(world, of_one_rank_each):
                for name, (staged, moved) in found.items():
                    with self.subTest(world=world, name=name):
                        # Codes, in half bytes for NVFP4, and the pairs that a cut divides.
                        self.assertLessEqual(moved, (elements if name == "mxfp8-2d" else elements // 2) * 1.01 + 64)
                        self.assertLessEqual(staged, limit)

    def test_pieces_of_every_kind_arrive_in_their_places(self):
        self.assertEqual(ranks.run(2, own_part), [[True] * 5] * 2)

    def test_what_fails_in_a_gather_is_said_without_a_collective(self):
        for when in ("before", "anew", "after"):
            with self.subTest(when=when):
                stored, printed = ranks.run(2, failing_gathers, when)
                self.assertEqual(printed.count("lowp: rank 1 of 2 failed: "), 1, printed)
                rank, cause = stored
                self.assertEqual(rank, 1)
                self.assertIn(cause, printed)
                if when != "after":
                    self.assertIn("LowpError: 32 of 32 rows have another scale", cause)

    def test_a_failure_that_was_caught_is_not_the_cause_of_the_next(self):
        for found, stored, rounds in ranks.run(2, fails_twice):
            self.assertIn(found, (["rank 1 failed: the first cause", None, (1, "nobody heard of it")], [None]))
            self.assertEqual((stored, rounds), (None, 3))

    def test_optimizers_that_are_made_at_the_wrong_time(self):
        for before, evaluated, root, well in ranks.run(2, replaced_too_late):
            self.assertIn("make the optimizer after it", before)
            for found in (evaluated, root):
                self.assertIn("call reshard() on the model before you make the optimizer", found)
            self.assertEqual(well, "no error")

    def test_an_optimizer_that_one_rank_cannot_make(self):
        expected = ("hyperparameters of group 0", "hyperparameters of group 0", "moments_dtype", "is also parameter 0", "is also parameter 0")
        others, own = ranks.run(2, construction)
        for what, other, one in zip(expected, others, own, strict=True):
            with self.subTest(what=what):
                self.assertIn(what, one)
                self.assertIn("rank 1 failed: ", other)
                self.assertIn(one, other)

    def test_a_collective_of_the_device_that_fails(self):
        class Failing:
            rank, world, on_device, failures = 0, 2, True, []

            def exchange(self, tag, own):
                return [own, own]

            def agree(self, what, text):
                pass

            def fail(self, message):
                self.failures.append(message)

            def all_gather(self, items, stream):
                raise RuntimeError("the network is gone")

        param = nn.Parameter(torch.ones(8, 8))
        param.grad = torch.ones(8, 8)
        opt = lowp.AdamW([param])
        patched = (mock.patch.object(_optim, "ranks_of", lambda *_: Failing()), mock.patch.object(_optim, "mesh_of", lambda *_: (2, 1)))
        with patched[0], patched[1]:
            with self.assertRaisesRegex(lowp.LowpError, "the network is gone"):
                opt.step()
        (failure,) = Failing.failures
        self.assertIn("the network is gone", failure)


if __name__ == "__main__":
    unittest.main()
