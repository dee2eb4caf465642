"""Errors of one rank reach the others, who would wait for it."""

import unittest
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowp
import ranks
from lowp import _optim


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


def missing_gradient(rank, world):
    """In the step that plans, and in one behind it."""
    found = []
    for good in (0, 1):
        net = sharded()
        opt = lowp.AdamW(net.parameters())
        net(torch.ones(4, 64)).sum().backward()
        for _ in range(good):
            opt.step()
        if rank == 1:
            net[0].bias.grad = None
        found.append(message(opt.step))
    return found


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
    return found


def other_gathers(rank, world):
    net = sharded("fp8-current", pow2=bool(rank))
    return message(lambda: net(torch.ones(4, 64)))


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


class OneOfTwo(unittest.TestCase):
    def test_hyperparameters_that_differ_in_any_step(self):
        for key, max_norm in (("lr", 1.0), ("lr", None), ("betas", None), ("eps", None), ("weight_decay", None)):
            with self.subTest(key=key, max_norm=max_norm):
                for found in ranks.run(2, other_rates, key, max_norm):
                    self.assertIn(f"the ranks disagree on {key} (rank 1 of 2 has another than rank 0)", found)

    def test_a_missing_gradient(self):
        for own, of_other in zip(*ranks.run(2, missing_gradient)):
            self.assertIn("rank 1 failed: LowpError: parameter 1 of shape (64,) has no gradient", own)
            self.assertIn("has no gradient", of_other)

    def test_codes_that_are_half_replaced(self):
        own, of_other = ranks.run(2, half_replaced)
        self.assertIn("rank 1 failed: LowpError: 32 of 32 rows are of another scale", own)
        self.assertIn("another scale", of_other)

    def test_slices_of_masters(self):
        for own, of_other in zip(*ranks.run(2, slices)):
            self.assertNotEqual(own, "no error")
            self.assertNotEqual(of_other, "no error")

    def test_gathers_that_differ(self):
        for message in ranks.run(2, other_gathers):
            self.assertIn("ranks disagree on the gathers of a parameter", message)

    def test_a_collective_of_the_device_that_fails(self):
        class Failing:
            rank, world, on_device, rounds = 0, 2, True, []

            def exchange(self, tag, own):
                self.rounds.append(tag)
                return [own, own]

            def all_gather(self, spans, stream):
                raise RuntimeError("the network is gone")

        param = nn.Parameter(torch.ones(8, 8))
        param.grad = torch.ones(8, 8)
        opt = lowp.AdamW([param])
        with mock.patch.object(_optim, "_ranks_of", lambda *_: (Failing(), (2, 1))):
            with self.assertRaisesRegex(lowp.LowpError, "the network is gone"):
                opt.step()
        self.assertEqual(Failing.rounds[-1], "failure")


if __name__ == "__main__":
    unittest.main()
