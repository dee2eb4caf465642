"""Models with codes in what PyTorch does to whole models: copies, averages, pickles, conversions and functional calls."""

import copy
import io
import unittest

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowp
import ranks


def made(recipe="mxfp8", dtype=torch.float32):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64)).to(dtype)
    if recipe is not None:
        lowp.quantize_model_(net, recipe)
    return net


def train(net, opt, steps=1):
    for _ in range(steps):
        net(torch.ones(2, 64, dtype=net[1].weight.dtype)).square().sum().backward()
        opt.step()
        opt.zero_grad()


def adamw(net):
    return lowp.AdamW(net.parameters(), lr=1e-2)


def assert_same(net, other):
    for a, b in zip(net.parameters(), other.parameters(), strict=True):
        assert type(a) is type(b) and isinstance(b, nn.Parameter) and torch.equal(a, b)
        assert not isinstance(a, lowp.Tensor) or torch.equal(a.master, b.master)


def average_of_shards(rank, world):
    """An average of plain shards follows codes, and what FSDP2 does not copy."""
    net = made(None)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    lowp.quantize_model_(net, "fp8-current")
    for module in (net, average.module):
        fully_shard(module)
    opt, values = adamw(net), []
    for _ in range(2):
        average.update_parameters(net)
        values.append(net[0].weight.detach().full_tensor().dequantize())
        train(net, opt)
    assert torch.equal(average.module[0].weight.full_tensor(), torch.lerp(*values, 0.5))
    try:
        copy.deepcopy(net)
    except AssertionError as error:
        return str(error)


def converted(rank, world):
    """Shards in another dtype, before the first gather."""
    net = made()
    expected = net[0].weight.detach().clone()
    fully_shard(net)
    net.bfloat16()
    assert net[0].weight.dtype == torch.bfloat16 and torch.equal(net[0].weight.full_tensor(), expected)
    opt = adamw(net)
    train(net, opt, 2)
    net.float()
    try:
        opt.step()
    except lowp.LowpError as error:
        return str(error)


class Copies(unittest.TestCase):
    def test_copies_and_pickles_train_by_themselves(self):
        net = made()
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        others = [copy.deepcopy(net), torch.load(file, weights_only=False)]
        first = copy.deepcopy(net)
        train(net, adamw(net), 2)
        for other in others:
            assert_same(other, first)
            train(other, adamw(other), 2)
            assert_same(other, net)

    def test_averages(self):
        net = made()
        for average in (AveragedModel(net), AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))):
            average.update_parameters(net)
            with self.assertRaisesRegex(lowp.UnsupportedOp, "AveragedModel of the model before quantize_model_"):
                average.update_parameters(net)
        for said in ranks.run(2, average_of_shards):
            self.assertIn("does not support deepcopy", said)

    def test_functional_calls(self):
        net, x = made(), torch.ones(2, 64)
        own = dict(net.named_parameters())
        self.assertTrue(torch.equal(functional_call(net, own, (x,)), net(x)))
        plain = lowp.plain_state_dict(net)
        loss = lambda params: functional_call(net, params, (x,)).square().sum()
        with self.assertRaises(lowp.UnsupportedOp):
            torch.func.grad(loss)(own)
        found = torch.func.grad(loss)(plain)
        reference = made(None)
        reference(x).square().sum().backward()
        for name, param in reference.named_parameters():
            torch.testing.assert_close(found[name], param.grad)


class Conversions(unittest.TestCase):
    def test_codes_and_masters_stay(self):
        for dtype, call in (
            (torch.float16, nn.Module.half),
            (torch.bfloat16, nn.Module.bfloat16),
            (torch.float64, nn.Module.double),
            (torch.bfloat16, lambda net: net.to("cpu", torch.bfloat16)),
            (torch.float32, nn.Module.float),
            (torch.float32, nn.Module.cpu),
        ):
            with self.subTest(dtype=dtype):
                net, same = made(), made()
                kept = net[0].weight
                call(net)
                self.assertIs(net[0].weight, kept)
                self.assertEqual((kept.dtype, kept.master.dtype, net(torch.ones(2, 64, dtype=dtype)).dtype), (dtype, torch.float32, dtype))
                self.assertTrue(torch.equal(kept, same[0].weight) and torch.equal(kept.master, same[0].weight.master))
        for call in (lambda: made().to("meta"), lambda: made().to_empty(device="meta")):
            with self.assertRaisesRegex(lowp.UnsupportedOp, "cannot be moved to the meta device"):
                call()

    def test_models_are_converted_before_the_optimizer_is_made(self):
        for first, then in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
            net = made(dtype=first)
            opt = adamw(net)
            train(net, opt)
            net.to(then)
            with self.subTest(then=then), self.assertRaisesRegex(lowp.LowpError, f"is {then} and was {first} when the optimizer made its state; convert"):
                train(net, opt)

    def test_shards(self):
        for said in ranks.run(2, converted):
            self.assertIn("is torch.float32 and was torch.bfloat16 when the optimizer made its state", said)


class Loaded(unittest.TestCase):
    def test_rows_of_loaded_codes_have_their_values_as_master(self):
        net, other = nn.Linear(64, 64, bias=False), lowp.quantize(torch.randn(64, 64), "mxfp8-2d")
        lowp.quantize_model_(net, "mxfp8-2d")
        opt = lowp.AdamW(net.parameters(), lr=1e-2)
        net(torch.randn(4, 64)).sum().backward()
        opt.step()
        net.load_state_dict({"weight": other})
        self.assertTrue(torch.equal(net.weight.master, other.dequantize(dtype=torch.float32)))
        self.assertTrue(torch.equal(net.weight[32:].master, net.weight.master[32:]))


if __name__ == "__main__":
    unittest.main()
