"""Linear layers beside others: which are left out, autocast, hooks of saved tensors; and rows and new tensors of weights."""

import unittest

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

import lowp


def tower():
    torch.manual_seed(0)
    block = lambda: nn.ModuleDict({"attn": nn.ModuleDict({"q": nn.Linear(32, 32)}), "up": nn.Linear(32, 32)})
    return nn.ModuleDict({"tower": nn.ModuleList([block(), block()]), "towers": nn.Linear(32, 32), "head": nn.Linear(32, 32)})


class Ignored(unittest.TestCase):
    def test_a_module_that_is_ignored_leaves_out_its_layers(self):
        all_of_them = [f"tower.{index}.{layer}.weight" for index in (0, 1) for layer in ("attn.q", "up")] + ["towers.weight", "head.weight"]
        cases = {
            ("tower",): ["towers.weight", "head.weight"],
            ("tower.1", "head"): [*all_of_them[:2], "towers.weight"],
            ("*.attn",): ["tower.0.up.weight", "tower.1.up.weight", "towers.weight", "head.weight"],
            ("tower.[0-9]",): ["towers.weight", "head.weight"],
            ("tower.0.attn.q.weight", "towers"): [*all_of_them[1:4], "head.weight"],
            (): all_of_them,
        }
        for ignore, expected in cases.items():
            with self.subTest(ignore=ignore):
                net = tower()
                self.assertEqual(lowp.quantize_model_(net, "mxfp8", ignore=ignore), expected)
                found = [name for name, param in net.named_parameters() if isinstance(param, lowp.Tensor)]
                self.assertEqual(found, expected)

    def test_a_pattern_of_no_module_is_an_error(self):
        for pattern in ("attn", "tower.2", "towe", "tower.0.attn.k"):
            with self.subTest(pattern=pattern), self.assertRaisesRegex(lowp.LowpError, f"{pattern}.*matches no module"):
                lowp.quantize_model_(tower(), "mxfp8", ignore=["tower", pattern])


def layer(recipe="mxfp8-2d"):
    torch.manual_seed(0)
    net = nn.Linear(64, 32)
    lowp.quantize_model_(net, recipe)
    return net


class Calls(unittest.TestCase):
    def test_autocast_leaves_inputs_in_float64(self):
        net = layer().double()
        x = torch.randn(4, 64, dtype=torch.float64, requires_grad=True)
        expected = net(x)
        expected.sum().backward()
        of_input, of_weight = x.grad, net.weight.grad
        x.grad = net.weight.grad = None
        with torch.autocast("cpu", torch.bfloat16):
            found = net(x)
            self.assertEqual(net(x.float()).dtype, torch.bfloat16)
        self.assertEqual(found.dtype, torch.float64)
        self.assertTrue(torch.equal(found, expected))
        found.sum().backward()
        self.assertTrue(torch.equal(x.grad, of_input))
        self.assertTrue(torch.equal(net.weight.grad, of_weight))

    def test_hooks_that_save_values_in_the_place_of_codes_are_an_error(self):
        net, x = layer(), torch.randn(4, 64, requires_grad=True)
        net(x).sum().backward()
        expected, x.grad = x.grad, None
        with save_on_cpu():
            out = net(x)
        out.sum().backward()
        self.assertTrue(torch.equal(x.grad, expected))
        with save_on_cpu(pin_memory=True):
            out = net(x)
        with self.assertRaisesRegex(lowp.UnsupportedOp, r"save_on_cpu\(pin_memory=False\)"):
            out.sum().backward()


class Rows(unittest.TestCase):
    def test_slices_that_begin_before_the_first_row_are_those_of_torch(self):
        weight = lowp.quantize(torch.randn(64, 64), "mxfp8-2d")
        plain = weight.dequantize()
        for rows in (slice(-100, None), slice(-100, 32), slice(None, -100), slice(-100, -32), slice(-32, None), slice(-100, -70), slice(200, None)):
            with self.subTest(rows=rows):
                found = weight[rows]
                self.assertEqual(found.shape, plain[rows].shape)
                self.assertTrue(torch.equal(found.dequantize(), plain[rows]))

    def test_new_tensors_are_on_the_device_that_is_asked_for(self):
        weight = lowp.quantize(torch.randn(64, 64), "mxfp8-2d")
        calls = {
            "zeros": lambda **how: weight.new_zeros((3, 5), **how),
            "codes": lambda **how: weight.new_zeros((32, 64), **how),
            "empty": lambda **how: weight.new_empty((3, 5), **how),
            "full": lambda **how: weight.new_full((3, 5), 2.0, **how),
            "ones": lambda **how: weight.new_ones((3, 5), **how),
        }
        for name, call in calls.items():
            with self.subTest(name=name):
                self.assertEqual(call().device.type, "cpu")
                self.assertEqual(call(device="meta").device.type, "meta")
                self.assertEqual(call(device="meta").shape, call().shape)
        self.assertIsInstance(calls["codes"](device="meta"), lowp.Tensor)


if __name__ == "__main__":
    unittest.main()
