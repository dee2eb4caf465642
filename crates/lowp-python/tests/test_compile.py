"""Graphs of ``torch.compile`` around linear layers: they are whole, and train what layers without graphs train."""

import contextlib
import shutil
import unittest
from unittest import mock

import torch
from torch import nn

import lowp
import model
import ranks
from lowp import _compile, _scaled

STEPS = 3


def multiplies_codes(input, weight):
    """As on a GPU that multiplies FP8; ``torch._scaled_mm`` does on the CPU, too."""
    return _scaled.operands(weight._store.recipe) is not None


def train(rank, world, name, backend, codes, reshard):
    """Losses, each rank on its part of the batch."""
    torch._dynamo.reset()
    with torch.compiler.config.patch(force_disable_caches=True):
        with mock.patch.object(_scaled, "serves", multiplies_codes) if codes else contextlib.nullcontext():
            fsdp = world > 1
            return model.train(name, STEPS, rank, world, fsdp, policy=fsdp, backend=backend, reshard=reshard)[0]


def train_each(rank, world, cases):
    """The same by case, without graphs and with them."""
    return [[train(rank, world, name, backend, *case) for backend in (None, "aot_eager")] for name, *case in cases]


class Compiled(unittest.TestCase):
    def assert_near(self, found, expected, near):
        for a, b in zip(found, expected, strict=True):
            self.assertLess(abs(a - b), near)

    def test_one_process_trains_alike(self):
        for name in ("mxfp8", "fp8-current", "fp8-block", "fp8-block-1d", "fp8-rowwise"):
            for codes in (False, True):
                with self.subTest(name=name, codes=codes):
                    plain, compiled = (train(0, 1, name, backend, codes, True) for backend in (None, "aot_eager"))
                    self.assert_near(compiled, plain, 1e-5)

    def test_ranks_train_alike(self):
        cases = (("mxfp8", False, True), ("fp8-current", True, False), ("fp8-block", True, True), ("fp8-rowwise", True, True))
        for case, (plain, compiled) in zip(cases, ranks.run(2, train_each, cases)[0], strict=True):
            with self.subTest(case=case):
                self.assert_near(compiled, plain, 1e-4)

    def test_graphs_follow_what_the_weight_holds(self):
        layer = nn.Linear(64, 64)
        lowp.quantize_model_(layer, "mxfp8")
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x = torch.randn(16, 64)
        for scale in (1.0, 0.5):
            with torch.no_grad():
                layer.weight.copy_(torch.randn(64, 64) * scale)
                self.assertTrue(torch.equal(compiled(x), layer(x)))

    def test_plain_layers_with_quantized_weights_and_autocast(self):
        layer = nn.Linear(64, 64)
        layer.weight = nn.Parameter(lowp.quantize(layer.weight, "mxfp8"))
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        x = torch.randn(16, 64)
        self.assertTrue(torch.equal(compiled(x), layer(x)))
        with torch.autocast("cpu", torch.bfloat16):
            found = compiled(x)
            self.assertEqual(found.dtype, torch.bfloat16)
            self.assertTrue(torch.equal(found, layer(x)))

    @unittest.skipUnless(shutil.which("g++"), "inductor compiles C++ for the CPU")
    def test_inductor_and_batches_of_any_size(self):
        torch.manual_seed(3)
        for name, codes in (("mxfp8", False), ("fp8-current", True), ("fp8-block", True), ("fp8-rowwise", True)):
            layers = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32, bias=False))
            lowp.quantize_model_(layers, name)
            torch._dynamo.reset()
            compiled = torch.compile(layers, dynamic=True, fullgraph=True)
            with mock.patch.object(_scaled, "serves", multiplies_codes) if codes else contextlib.nullcontext():
                for rows in (16, 48, 80):
                    with self.subTest(name=name, rows=rows):
                        x = torch.randn(rows, 64)
                        found = []
                        for net in (layers, compiled):
                            own = x.clone().requires_grad_()
                            out = net(own)
                            out.square().sum().backward()
                            found.append((out, own.grad, *(p.grad for p in layers.parameters())))
                            layers.zero_grad()
                        for a, b in zip(*found, strict=True):
                            self.assertLess((a - b).norm() / a.norm(), 1e-2 if codes else 1e-5)

    def test_frozen_layers(self):
        torch.manual_seed(5)
        layers = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(3)])
        lowp.quantize_model_(layers, "fp8-current")
        layers[1].requires_grad_(False)
        compiled = torch.compile(layers, backend="aot_eager", fullgraph=True)
        x, found = torch.randn(16, 64), []
        with mock.patch.object(_scaled, "serves", multiplies_codes):
            for net in (layers, compiled):
                net(x).square().sum().backward()
                self.assertIsNone(layers[1].weight.grad)
                found.append([layers[0].weight.grad, layers[2].weight.grad])
                layers.zero_grad()
        for a, b in zip(*found):
            self.assertTrue(torch.equal(a, b))

    def test_a_bias_of_another_dtype_is_rounded_alike(self):
        torch.manual_seed(7)
        x = torch.randn(64, 256).bfloat16()
        for name in ("fp8-current", "fp8-rowwise", "fp8-block"):
            torch._dynamo.reset()
            layer = nn.Linear(256, 256)
            lowp.quantize_model_(layer, name)
            compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
            with self.subTest(name=name), mock.patch.object(_scaled, "serves", multiplies_codes):
                found, expected = compiled(x), layer(x)
                self.assertEqual(found.dtype, torch.bfloat16)
                self.assertTrue(torch.equal(found, expected))

    def test_layers_of_one_input_share_its_codes(self):
        layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        lowp.quantize_model_(layers, "fp8-current")
        compiled = torch.compile(lambda x: sum(layer(x) for layer in layers), backend="aot_eager_decomp_partition", fullgraph=True)
        x = torch.randn(16, 64)
        with mock.patch.object(_scaled, "serves", multiplies_codes):
            expected = sum(layer(x) for layer in layers)
            with mock.patch.object(_scaled, "cast", side_effect=_scaled.cast) as cast:
                self.assertTrue(torch.equal(compiled(x), expected))
        self.assertEqual(cast.call_count, 1)

    def test_inputs_of_another_width_are_an_error(self):
        for name in ("fp8-current", "mxfp8"):
            layer = nn.Linear(64, 64)
            lowp.quantize_model_(layer, name)
            for shape in ((16, 32), (16, 128), (), (64, 1)):
                with self.assertRaisesRegex(lowp.LowpError, "the last axis of the input must have 64 values"):
                    layer(torch.zeros(shape))
            torch._dynamo.reset()
            with self.assertRaisesRegex(Exception, "the last axis of the input must have 64 values"):
                torch.compile(layer, backend="eager")(torch.zeros(16, 32))

    def test_weights_are_looked_at_after_a_break(self):
        layer = nn.Linear(64, 64)
        lowp.quantize_model_(layer, "mxfp8")

        def look(x):
            out = layer(x)
            torch._dynamo.graph_break()
            return out, [(p.requires_grad, p.shape, p.dim(), p.dtype, p.device) for p in layer.parameters()]

        x = torch.randn(16, 64)
        for _ in range(2):
            found, expected = torch.compile(look, backend="aot_eager")(x), look(x)
            self.assertTrue(torch.equal(found[0], expected[0]))
            self.assertEqual(found[1], expected[1])

    def test_a_compiled_step(self):
        layer = nn.Linear(64, 64)
        lowp.quantize_model_(layer, "mxfp8")
        opt, before = lowp.AdamW(layer.parameters(), lr=1e-2), layer.weight.dequantize()

        @torch.compile(backend="aot_eager")
        def step(x):
            opt.zero_grad()
            layer(x).square().sum().backward()
            opt.step()

        for _ in range(2):
            step(torch.randn(16, 64))
        self.assertEqual(opt.last_step()["steps"], 2)
        self.assertFalse(torch.equal(layer.weight.dequantize(), before))

    def test_graphs_decode(self):
        weight = nn.Parameter(lowp.quantize(torch.randn(64, 64), "mxfp8"))
        compiled = torch.compile(lambda x: x @ weight.dequantize(), backend="aot_eager")
        x = torch.randn(4, 64)
        self.assertTrue(torch.equal(compiled(x), x @ weight.dequantize()))

    def test_a_write_before_backward_is_an_error(self):
        layer = nn.Linear(64, 64)
        lowp.quantize_model_(layer, "mxfp8")
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        opt = lowp.AdamW(layer.parameters())
        compiled(torch.randn(4, 64)).sum().backward()
        for write in (opt.step, lambda: layer.weight.quantize_(torch.zeros(64, 64))):
            out = compiled(torch.randn(4, 64, requires_grad=True))
            write()
            with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                out.sum().backward()

    def test_a_weight_that_is_gone_is_an_error(self):
        token = torch.tensor([1 << 40])
        with self.assertRaisesRegex(lowp.LowpError, "keep the model"):
            _compile.store_of(token)
        with self.assertRaisesRegex(lowp.LowpError, "need a weight"):
            torch.ops.lowp.linear(torch.zeros(2, 2), torch.zeros(2, 2), None)


if __name__ == "__main__":
    unittest.main()
