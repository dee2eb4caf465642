"""Reads of quantized tensors, which the decoded values answer, and writes, which are refused with what to do."""

import copy
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import swa_utils

import lowp
import model
import ranks

READS = {
    "norm": lambda w: w.norm(),
    "norm of rows": lambda w: torch.linalg.vector_norm(w, dim=1),
    "Frobenius": lambda w: torch.linalg.matrix_norm(w),
    "foreach": lambda w: torch.stack(torch._foreach_norm([w, w], 1)),
    "total": lambda w: nn.utils.get_total_norm([w, torch.ones(3)]),
    "mean and deviation": lambda w: torch.stack([w.mean(), w.std()]),
    "largest": lambda w: torch.stack([w.abs().max(), w.amin(), w.min(dim=0).values.sum()]),
    "zeros": lambda w: (w == 0).sum() + w.count_nonzero(),
    "finite": lambda w: torch.isfinite(w).all() & ~torch.isnan(w).any(),
    "compared": lambda w: w > torch.zeros(w.shape),
    "lerp": lambda w: torch.lerp(torch.zeros(w.shape), w, 0.1),
    "lerp in place": lambda w: torch.zeros(w.shape).lerp_(w, 0.1),
    "add": lambda w: torch.ones(w.shape).mul_(0.9).add_(w, alpha=0.1),
    "foreach lerp": lambda w: _lerp([torch.zeros(w.shape)], [w]),
    "flat": lambda w: w.view(-1).sum(),
}


def _lerp(averages, weights):
    torch._foreach_lerp_(averages, weights, 0.1)
    return averages[0]


def of_torch(params):
    """Every way in which PyTorch's optimizers write."""
    yield from (torch.optim.AdamW(params, foreach=foreach) for foreach in (None, True, False))
    yield torch.optim.AdamW(params, fused=True)
    yield from (make(params, lr=0.1) for make in (torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop, torch.optim.Adagrad))


class Reads(unittest.TestCase):
    def test_reads_are_those_of_the_decoded_values(self):
        torch.manual_seed(3)
        for name in lowp.recipes():
            if not lowp.Recipe(name).is_low_precision:
                continue
            weight = lowp.quantize(torch.randn(64, 96), name)
            for what, read in READS.items():
                with self.subTest(name=name, what=what):
                    found, expected = read(weight), read(weight.dequantize())
                    self.assertIs(type(found), torch.Tensor)
                    self.assertTrue(torch.equal(found, expected))

    def test_plain_averages_follow_quantized_weights(self):
        ways = (
            dict(multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
            dict(avg_fn=lambda mean, new, count: mean.lerp(new, 1 / (count + 1))),
        )
        for number, way in enumerate(ways):
            torch.manual_seed(1)
            net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            averages = [swa_utils.AveragedModel(net, **way) for _ in range(2)]
            lowp.quantize_model_(net, "mxfp8-2d")
            opt = lowp.AdamW(net.parameters(), lr=1e-2)
            for _ in range(3):
                net(torch.randn(4, 64)).square().mean().backward()
                opt.step()
                opt.zero_grad()
                decoded = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
                with torch.no_grad():
                    for plain, param in zip(decoded.parameters(), net.parameters()):
                        plain.copy_(param)
                averages[0].update_parameters(net)
                averages[1].update_parameters(decoded)
            for a, b in zip(*(average.module.parameters() for average in averages)):
                with self.subTest(number=number):
                    self.assertIs(type(a), nn.Parameter)
                    self.assertTrue(torch.equal(a, b))

    def test_norms_of_shards_are_those_of_the_whole(self):
        for world in (1, 2):
            ranks.run(world, norms)


def norms(rank, world):
    net = model.make("fp8-current")
    whole = [param.detach().clone() for param in net.parameters()]
    model.shard(net)
    for param, full in zip(net.parameters(), whole):
        found, expected = param.detach().norm().full_tensor(), full.norm()
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
        assert type(found) is torch.Tensor


class Writes(unittest.TestCase):
    def refused(self, call, *messages):
        with self.assertRaises(lowp.UnsupportedOp) as caught:
            call()
        for message in messages:
            self.assertIn(message, str(caught.exception))
        self.assertNotIn("DistributedDataParallel", str(caught.exception))

    def test_optimizers_of_torch_name_that_of_lowp(self):
        for number in range(len(list(of_torch([nn.Parameter(torch.zeros(1))])))):
            weight = nn.Parameter(lowp.quantize(torch.randn(64, 64), "mxfp8"))
            before = weight.detach().clone()
            weight.grad = torch.ones(64, 64)
            opt = list(of_torch([weight]))[number]
            with self.subTest(opt=opt):
                self.refused(opt.step, "lowp.AdamW")
                self.assertTrue(torch.equal(weight, before))

    def test_writes_in_place_name_what_writes_values(self):
        weight = lowp.quantize(torch.randn(64, 64), "mxfp8")
        before = weight.clone()
        index = torch.zeros((64, 64), dtype=torch.int64)
        for call in (
            lambda: weight.mul_(2),
            lambda: weight.lerp_(torch.zeros(64, 64), 0.5),
            lambda: weight.clamp_(-1, 1),
            lambda: weight.scatter_(0, index, 1.0),
            lambda: torch._foreach_copy_([weight], [torch.zeros(64, 64)]),
            lambda: torch.add(torch.zeros(64, 64), 1, out=weight),
        ):
            self.refused(call, ".quantize_(values)")
            self.assertTrue(torch.equal(weight, before))
        average = swa_utils.AveragedModel(nn.Sequential(nn.Linear(64, 64)))
        lowp.quantize_model_(average.module, "mxfp8")
        average.update_parameters(average.module)
        self.refused(lambda: average.update_parameters(average.module), "averages of weights in plain tensors")

    def test_copies_are_of_one_shape_and_memory_is_no_others(self):
        weight = lowp.quantize(torch.randn(32, 64), "mxfp8")
        before = weight.clone()
        for source in (torch.zeros(64, 32), torch.zeros(2048), lowp.quantize(torch.zeros(64, 32), "mxfp8")):
            with self.assertRaisesRegex(lowp.LowpError, "give a source of the same shape"):
                weight.copy_(source)
        self.assertTrue(torch.equal(weight, before))
        weight.view(-1).copy_(torch.ones(2048))
        self.assertTrue(torch.equal(weight.dequantize(), torch.ones(32, 64)))
        # It would share nothing with the weight.
        self.refused(lambda: torch.zeros(2).set_(weight), "set_.source_Tensor of a lowp.Tensor", ".copy_()")

    def test_what_would_be_copied_back_is_decoded_by_whoever_asks(self):
        weight = lowp.quantize(torch.randn(64, 64), "mxfp8")
        for call in (lambda: torch.mm(weight, weight), lambda: weight.cumsum(0), lambda: weight * 0.999, lambda: weight - torch.ones(64, 64)):
            self.refused(call, "decode it first")


class Ranks(unittest.TestCase):
    def test_collectives_of_codes_name_the_way_of_each(self):
        for found in ranks.run(2, collectives):
            for name, (expected, message) in found.items():
                with self.subTest(name=name):
                    self.assertIn(expected, message)
                    self.assertEqual("DistributedDataParallel" in message, expected == "init_sync=False")


def collectives(rank, world):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (world,))
    weight = lambda: lowp.quantize(torch.randn(64, 64), "mxfp8")

    def layer(style):
        net = nn.Sequential(nn.Linear(64, 64, bias=False))
        lowp.quantize_model_(net, "mxfp8")
        parallelize_module(net, mesh, {"0": style})

    def raised(call):
        try:
            call()
        except lowp.UnsupportedOp as error:
            return str(error)
        return "no error"

    ways = {
        "columns": ("no tensor parallelism", lambda: layer(ColwiseParallel())),
        "rows": ("no tensor parallelism", lambda: layer(RowwiseParallel())),
        "shards": ("no tensor parallelism", lambda: distribute_tensor(weight(), mesh, [Shard(0)])),
        "scatter": ("fully_shard", lambda: dist.scatter(weight(), [weight(), weight()] if rank == 0 else None)),
        "reduce": ("fully_shard", lambda: dist.all_reduce(weight())),
        "replicas": ("init_sync=False", lambda: nn.parallel.DistributedDataParallel(quantized())),
    }
    found = {}
    for name, (expected, call) in ways.items():
        found[name] = (expected, raised(call))
    return found


def quantized():
    net = copy.deepcopy(nn.Sequential(nn.Linear(64, 64)))
    lowp.quantize_model_(net, "mxfp8")
    return net


if __name__ == "__main__":
    unittest.main()
