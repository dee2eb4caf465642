"""Products of codes: on the CPU by ``torch._scaled_mm``, and by values of the codes and scales as a GPU would read them."""

import itertools
import unittest

import torch
from torch import nn

import lowp
from lowp import _lowp, _scaled


#: Rows of the input, and columns and rows of the weight: whole blocks of 128, four of them, or neither.
SIDES = ((32, 64, 48), (144, 272, 400), (512, 128, 640))
#: How a weight is quantized, and what each of its operands is.
OTHERS = {"fp8-rowwise": "fp8-rowwise", "fp8-block": "fp8-block-1d", "fp8-block-1d": "fp8-block-1d"}


def product(name, dtype, sides=SIDES[0], **options):
    """A linear layer by codes, and by the codes of each operand decoded."""
    torch.manual_seed(1)
    rows, depth, width = sides
    layer = nn.Linear(depth, width, dtype=dtype)
    lowp.quantize_model_(layer, name, **options)
    weight = layer.weight
    # Blocks, rows and columns of different magnitudes: scales that are not those of their codes are seen.
    x, grad = (torch.randn(rows, side) * torch.logspace(-2, 2, side) * torch.logspace(1, -1, rows)[:, None] for side in (depth, width))
    x, grad = x.to(dtype), (grad * 1e-3).to(dtype)
    with torch.no_grad():
        weight.copy_(weight.dequantize() * torch.logspace(-1, 1, depth) * torch.logspace(1, -1, width)[:, None])
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
        for name, operand in OTHERS.items():
            for format, of_gradient in (("hybrid", "E5M2"), ("e4m3", "E4M3")):
                recipe = lowp.Recipe(name, format=format, **options)
                for found, element, role in zip(_scaled.operands(recipe), ("E4M3", of_gradient), ("activation", "gradient")):
                    self.assertEqual((found.name, found.options["pow2"], found.options["epsilon"]), (operand, "true", "0.5"))
                    for orientation in ("rowwise", "columnwise"):
                        self.assertEqual(found.product(orientation), recipe.product(orientation, role))
                        self.assertEqual(found.product(orientation)[0], element)
            self.assertIsNone(_scaled.operands(lowp.Recipe(name, format="e5m2")))

    def test_scales_lie_where_native_products_read_them(self):
        for scales in ("tensor", "rows", "1x128", "128x128"):
            for rows, cols in itertools.product((1, 16, 127, 128, 129, 272, 513, 2048), repeat=2):
                begin = _scaled._begin(scales, rows, cols)
                both = 1 if scales == "tensor" else begin + _scaled.count(scales, cols, rows)
                self.assertEqual(_lowp.scale_places(scales, rows, cols), (begin, both), (scales, rows, cols))

    def test_gpus_multiply_what_they_have_products_of(self):
        hopper, ada, ampere, blackwell = (9, 0), (8, 9), (8, 0), (10, 0)
        for capability, names in ((hopper, ["fp8-current", "fp8-delayed", *OTHERS]), (ada, ["fp8-current", "fp8-delayed"]), (ampere, [])):
            found = [name for name in lowp.recipes() if _scaled.kind(lowp.Recipe(name), capability)]
            self.assertEqual(sorted(found), sorted(names))
        for name in OTHERS:
            self.assertIsNone(_scaled.kind(lowp.Recipe(name), blackwell))

    def test_results_are_those_of_the_codes_in_the_dtype_of_the_input(self):
        for name, sides in (*((name, SIDES[0]) for name in ("fp8-current", "fp8-delayed")), *((name, sides) for name in OTHERS for sides in SIDES)):
            for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
                with self.subTest(name=name, sides=sides, dtype=dtype):
                    weight, bias, x, grad, found = product(name, dtype, sides)
                    input, gradient = _scaled.operands(weight.recipe)

                    def decoded(values, orientation, recipe=None):
                        tensor = values if recipe is None else lowp.quantize(values, recipe)
                        return tensor.dequantize(orientation=orientation, dtype=torch.float32)

                    expected = (
                        decoded(x, "rowwise", input) @ decoded(weight, "rowwise").t() + bias.float(),
                        decoded(grad, "rowwise", gradient) @ decoded(weight, "columnwise"),
                        decoded(grad, "columnwise", gradient).t() @ decoded(x, "columnwise", input),
                    )
                    for own, values in zip(found, expected):
                        self.assertEqual(own.dtype, dtype)
                        self.assertLess((own.float() - values).norm() / values.norm(), near)

    def test_scales_of_squares_are_padded_for_each_product_and_others_are_views(self):
        for (rows, cols), padded in (((512, 1024), False), ((512, 400), False), ((512, 272), True)):
            weight = lowp.quantize(torch.randn(rows, cols), "fp8-block")
            _, scale, made = _scaled.codes(weight._store, "rowwise")
            self.assertEqual((made, scale.numel()), (padded, rows // 128 * ((cols + 511) // 512 * 4)))
            self.assertEqual(scale.data_ptr() == weight.buffers["rowwise_scale_inv"].data_ptr(), not padded)
        for name in ("fp8-rowwise", "fp8-block-1d"):
            weight = lowp.quantize(torch.randn(144, 272), name)
            for orientation in ("rowwise", "columnwise"):
                _, scale, made = _scaled.codes(weight._store, orientation)
                self.assertFalse(made)
                self.assertEqual(scale.data_ptr(), weight.buffers[f"{orientation}_scale_inv"].data_ptr())

    def test_frozen_weights_have_the_codes_and_scales_of_trained_ones(self):
        trained = nn.Linear(272, 400, bias=False)
        frozen = nn.Linear(272, 400, bias=False).requires_grad_(False)
        frozen.load_state_dict(trained.state_dict())
        for layer in (trained, frozen):
            lowp.quantize_model_(layer, "fp8-block")
        self.assertTrue(frozen.weight._store.leaves_out_columnwise)
        for orientation in ("rowwise", "columnwise"):
            (codes, scale, _), (others, of_others, _) = (_scaled.codes(layer.weight._store, orientation) for layer in (trained, frozen))
            self.assertTrue(torch.equal(codes.view(torch.uint8), others.view(torch.uint8)) and torch.equal(scale, of_others))


if __name__ == "__main__":
    unittest.main()
