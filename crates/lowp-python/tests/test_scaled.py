"""Products of codes: the same on the CPU, whose ``torch._scaled_mm`` multiplies FP8, too."""

import unittest

import torch
from torch import nn

import lowp
from lowp import _scaled


def product(name, dtype, **options):
    """A linear layer by codes, and by the codes of each operand decoded."""
    torch.manual_seed(1)
    layer = nn.Linear(64, 48, dtype=dtype)
    lowp.quantize_model_(layer, name, **options)
    weight = layer.weight
    x, grad = torch.randn(32, 64, dtype=dtype), torch.randn(32, 48, dtype=dtype) * 1e-3
    out, *saved = _scaled.forward(x, weight._store, layer.bias)
    of_input, of_weight = _scaled.backward(grad, weight._store, saved, (True, True))
    return weight, layer.bias, x, grad, (out, of_input, of_weight)


class Products(unittest.TestCase):
    def test_operands_are_cast_by_role_with_the_options_of_the_weight(self):
        options = dict(pow2=True, epsilon=0.5)
        for format, of_gradient in (("hybrid", "E5M2"), ("e4m3", "E4M3")):
            input, gradient = _scaled.operands(lowp.Recipe("fp8-current", format=format, **options))
            self.assertEqual((input.product("rowwise")[0], gradient.product("rowwise")[0]), ("E4M3", of_gradient))
            for recipe in (input, gradient):
                self.assertEqual((recipe.options["pow2"], recipe.options["epsilon"]), ("true", "0.5"))
        self.assertIsNone(_scaled.operands(lowp.Recipe("mxfp8")))
        self.assertIsNone(_scaled.operands(lowp.Recipe("fp8-rowwise")))

    def test_results_are_those_of_the_codes_in_the_dtype_of_the_input(self):
        for name in ("fp8-current", "fp8-delayed"):
            for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
                with self.subTest(name=name, dtype=dtype):
                    weight, bias, x, grad, found = product(name, dtype)
                    input, gradient = _scaled.operands(weight.recipe)
                    decoded = lambda t, recipe: lowp.quantize(t, recipe).dequantize(dtype=torch.float32)
                    x, grad, w = decoded(x, input), decoded(grad, gradient), weight.dequantize(dtype=torch.float32)
                    for own, expected in zip(found, (x @ w.t() + bias.float(), grad @ w, grad.t() @ x)):
                        self.assertEqual(own.dtype, dtype)
                        self.assertLess((own.float() - expected).norm() / expected.norm(), near)


if __name__ == "__main__":
    unittest.main()
