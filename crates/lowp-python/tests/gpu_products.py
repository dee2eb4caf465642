"""Products of codes in linear layers, part of gpu.py."""

import threading
import unittest

import torch
from torch import nn

import lowp
from lowp import _compile, _scaled

DEVICE = torch.device("cuda", 0)


def coded(dtype=torch.bfloat16, bias=True, name="fp8-current"):
    """A layer and an input, both wide enough that codes are multiplied."""
    torch.manual_seed(3)
    layer = nn.Linear(512, 256, device=DEVICE, dtype=dtype, bias=bias)
    lowp.quantize_model_(layer, name)
    x = torch.randn(64, 512, device=DEVICE, dtype=dtype)
    return layer, x


def decoded(values, recipe):
    return lowp.quantize(values, recipe).dequantize(dtype=torch.float32)


class Products(unittest.TestCase):
    def test_operators_check_what_they_are_given(self):
        layer, x = coded()
        layer(x)
        token, bias, rows = layer.weight._token, layer.bias.detach(), layer.weight.shape[0]
        out, codes, scale = torch.ops.lowp.forward(x, token, rows, bias, True)
        self.assertTrue(torch.equal(out, layer(x)))
        grad, cols = torch.randn_like(out), layer.weight.shape[1]

        def forward(number, added=bias):
            return torch.ops.lowp.forward(x, number, rows, added, True)

        def backward(codes, scale):
            return torch.ops.lowp.backward(grad, codes, scale, token, cols, False, True)

        wrong = {
            "one integer of 64 bits": [lambda: forward(token.to(DEVICE)), lambda: forward(token.int()), lambda: forward(token.repeat(2))],
            "contiguous values of bfloat16": [lambda: forward(token, bias.repeat(2)[::2])],
            "not contiguous": [lambda: backward(codes.t().contiguous().t(), scale)],
            "not on a GPU": [lambda: backward(codes.cpu(), scale), lambda: backward(codes, scale.cpu())],
            "codes of FP8": [lambda: backward(codes.view(torch.uint8), scale), lambda: backward(codes, scale.bfloat16())],
            "bfloat16, float32 or codes": [lambda: backward(codes, scale.half())],
        }
        for message, calls in wrong.items():
            for index, call in enumerate(calls):
                with self.subTest(message=message, index=index), self.assertRaisesRegex(RuntimeError, message):
                    call()

    def test_streams_hold_no_memory_after_their_products(self):
        layer, x = coded()
        with torch.no_grad():
            expected = layer(x)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated(DEVICE)
            for _ in range(20):
                stream = torch.cuda.Stream()
                with torch.cuda.stream(stream):
                    found = layer(x)
                stream.synchronize()
                self.assertTrue(torch.equal(found, expected))
            del found
            self.assertLess(torch.cuda.memory_allocated(DEVICE), before + _scaled._WORKSPACE)

    def test_they_are_those_of_the_decoded_operands(self):
        for dtype, near in ((torch.float32, 1e-3), (torch.bfloat16, 1e-2)):
            for bias in (True, False):
                with self.subTest(dtype=dtype, bias=bias):
                    layer, x = coded(dtype, bias)
                    self.assertTrue(_scaled.serves(x, layer.weight))
                    x.requires_grad_()
                    out = layer(x)
                    grad = torch.randn_like(out) * 1e-3
                    out.backward(grad)
                    input, gradient = _scaled.operands(layer.weight.recipe)
                    w, own, back = layer.weight.dequantize(dtype=torch.float32), decoded(x.detach(), input), decoded(grad, gradient)
                    plain = own @ w.t() + (layer.bias.float() if bias else 0)
                    for found, expected in ((out, plain), (x.grad, back @ w), (layer.weight.grad, back.t() @ own)):
                        self.assertEqual(found.dtype, dtype)
                        self.assertLess((found.float() - expected).norm() / expected.norm(), near)

    def test_native_layers_have_the_bits_of_python(self):
        bits = lambda t: t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        for dtype in (torch.float32, torch.bfloat16):
            for bias in (True, False):
                with self.subTest(dtype=dtype, bias=bias):
                    layer, x = coded(dtype, bias)
                    store = layer.weight._store
                    self.assertTrue(hasattr(lowp._lowp, "register_operators") and torch._C._dispatch_has_kernel_for_dispatch_key("lowp::forward", "CUDA"))
                    found, expected = _compile.forward(x, store, layer.bias), _scaled.forward(x, store, layer.bias)
                    grad = torch.randn(256, 64, device=DEVICE, dtype=dtype).t()  # not contiguous
                    found = [*found, *_compile.backward(grad, *found[1:], store, (True, True))]
                    expected = [*expected, *_scaled.backward(grad, store, expected[1:], (True, True))]
                    for a, b in zip(found, expected, strict=True):
                        self.assertEqual(a.dtype, b.dtype)
                        self.assertTrue(torch.equal(bits(a), bits(b)))

    def test_frozen_layers_hold_no_transpose(self):
        layer, x = coded()
        frozen = nn.Linear(512, 256, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
        frozen.load_state_dict({name: value.dequantize() if name == "weight" else value for name, value in layer.state_dict().items()})
        lowp.quantize_model_(frozen, "fp8-current")
        grads = []
        for net in (layer, frozen, frozen):
            own = x.clone().requires_grad_()
            net(own).square().sum().backward()
            grads.append(own.grad)
        self.assertEqual(frozen.weight.stored_bytes, 512 * 256 + 4)
        self.assertTrue(torch.equal(grads[0], grads[1]) and torch.equal(grads[1], grads[2]))

    def test_sides_that_do_not_fit_are_errors_and_the_next_product_is_right(self):
        layer, x = coded()
        right = layer(x)
        with self.assertRaisesRegex(lowp.LowpError, "must have 512 values"):
            layer(torch.randn(64, 528, device=DEVICE, dtype=torch.bfloat16))
        input, _ = _scaled.operands(layer.weight.recipe)
        rowwise, _, scale = _scaled.cast(x, input)
        weight, of_weight, _ = _scaled.codes(layer.weight._store, "rowwise")
        with self.assertRaisesRegex(lowp.LowpError, "the right operand of a product has .* bytes, but its shape needs"):
            _scaled.product((rowwise, scale, "tensor"), (weight[:, :256].contiguous(), of_weight, "tensor"), torch.bfloat16)
        for bias in (layer.bias[:255], layer.bias.cpu()):
            with self.assertRaises(RuntimeError):
                _scaled.product((rowwise, scale, "tensor"), (weight, of_weight, "tensor"), torch.bfloat16, bias)
            with self.assertRaises(RuntimeError):
                nn.functional.linear(x, layer.weight, bias)
        without = nn.functional.linear(x, layer.weight)
        for bias in (layer.bias[:1], torch.randn_like(without)):
            self.assertTrue(torch.equal(nn.functional.linear(x, layer.weight, bias), without + bias))
        with self.assertRaisesRegex(lowp.LowpError, "the scale of an operand of a product is on device"):
            _scaled.product((rowwise, scale.cpu(), "tensor"), (weight, of_weight, "tensor"), torch.bfloat16)
        self.assertTrue(torch.equal(layer(x), right))

    def test_freed_codes_are_an_error(self):
        layer, x = coded()
        layer(x)
        for buffer in layer.weight.buffers.values():
            buffer.untyped_storage().resize_(0)
        with self.assertRaises(lowp.LowpError):
            layer(x)

    def test_compiled_layers_multiply_the_same_codes(self):
        for name in ("fp8-current", "mxfp8-2d"):
            for dynamic in (False, True):
                with self.subTest(name=name, dynamic=dynamic):
                    torch._dynamo.reset()
                    layer, x = coded(name=name)
                    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
                    for rows in (64, 32):
                        found = []
                        for net in (compiled, layer):
                            own = x[:rows].clone().requires_grad_()
                            layer.zero_grad()
                            out = net(own)
                            out.square().sum().backward()
                            found.append((out.detach(), own.grad, layer.weight.grad.clone(), layer.bias.grad.clone()))
                        for a, b in zip(*found):
                            self.assertLess((a.float() - b.float()).norm() / b.float().norm(), 1e-2)


#: Recipes with more than one scale for a tensor, whose products Hoppers have.
SCALED = ("fp8-block", "fp8-block-1d", "fp8-rowwise")
#: Rows of the input, and columns and rows of the weight: whole blocks of 128, four of them, or neither.
SIDES = ((64, 512, 256), (144, 272, 400), (1040, 1424, 528))


def scaled(name, sides, dtype=torch.bfloat16, bias=True, device=DEVICE):
    """A layer, an input, and a gradient, whose rows, columns and blocks are of different magnitudes."""
    torch.manual_seed(5)
    rows, depth, width = sides
    layer = nn.Linear(depth, width, device=device, dtype=dtype, bias=bias)
    lowp.quantize_model_(layer, name)
    spread = lambda n: torch.logspace(-1, 1, n, device=device)
    x, grad = (torch.randn(rows, side, device=device) * spread(side) * spread(rows).flip(0)[:, None] for side in (depth, width))
    with torch.no_grad():
        layer.weight.copy_(layer.weight.dequantize() * spread(depth).flip(0) * spread(width)[:, None])
    return layer, x.to(dtype), (grad * 1e-3).to(dtype)


def products_of(net, layer, x, grad):
    """The output of ``net``, and the gradients of input, weight and bias."""
    own = x.clone().requires_grad_()
    layer.zero_grad()
    out = net(own)
    out.backward(grad)
    return [out.detach(), own.grad, layer.weight.grad.clone(), *(() if layer.bias is None else (layer.bias.grad.clone(),))]


def values_of(layer, x, grad):
    """The same by decoded values of what is multiplied, in float64."""
    weight = layer.weight
    input, gradient = _scaled.operands(weight.recipe)

    def of(values, orientation, recipe=None):
        tensor = values if recipe is None else lowp.quantize(values, recipe)
        return tensor.dequantize(orientation=orientation, dtype=torch.float32).double()

    out = of(x, "rowwise", input) @ of(weight, "rowwise").t() + (0 if layer.bias is None else layer.bias.double())
    of_input = of(grad, "rowwise", gradient) @ of(weight, "columnwise")
    of_weight = of(grad, "columnwise", gradient).t() @ of(x, "columnwise", input)
    return [out, of_input, of_weight, *(() if layer.bias is None else (grad.double().sum(0),))]


def assert_near(test, found, expected, near):
    for a, b in zip(found, expected, strict=True):
        test.assertLess((a.double() - b.double()).norm() / b.double().norm(), near)


@unittest.skipUnless(torch.cuda.get_device_capability(0) == (9, 0), "products with these scales are those of Hoppers")
class ScaledProducts(unittest.TestCase):
    def test_they_are_those_of_the_decoded_operands(self):
        for name in SCALED:
            for sides in SIDES:
                for dtype, near in ((torch.float32, 1e-3), (torch.bfloat16, 1e-2)):
                    for bias in (True, False):
                        with self.subTest(name=name, sides=sides, dtype=dtype, bias=bias):
                            layer, x, grad = scaled(name, sides, dtype, bias)
                            self.assertTrue(_scaled.serves(x, layer.weight))
                            found = products_of(layer, layer, x, grad)
                            self.assertTrue(all(of.dtype == dtype for of in found))
                            assert_near(self, found, values_of(layer, x, grad), near)

    def test_native_layers_have_the_bits_of_python(self):
        for name in SCALED:
            for sides in SIDES:
                with self.subTest(name=name, sides=sides):
                    layer, x, grad = scaled(name, sides)
                    store = layer.weight._store
                    found, expected = _compile.forward(x, store, layer.bias), _scaled.forward(x, store, layer.bias)
                    found = [*found, *_compile.backward(grad, *found[1:], store, (True, True))]
                    expected = [*expected, *_scaled.backward(grad, store, expected[1:], (True, True))]
                    for index, (a, b) in enumerate(zip(found, expected, strict=True)):
                        self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
                        if index == 2:  # both directions, with a gap between them that nothing writes
                            recipe = _scaled.operands(store.recipe)[0]
                            for codes, way in ((x, "rowwise"), (found[1], "columnwise")):
                                own, other = (_scaled._side(codes, scale, recipe, way)[1] for scale in (a, b))
                                self.assertTrue(torch.equal(own, other))
                        else:
                            self.assertTrue(torch.equal(a.view(torch.uint8), b.view(torch.uint8)), index)

    def test_compiled_layers_multiply_the_same_codes(self):
        for name in SCALED:
            for dynamic in (False, True):
                with self.subTest(name=name, dynamic=dynamic):
                    torch._dynamo.reset()
                    layer, x, grad = scaled(name, (144, 272, 400))
                    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
                    for rows in (144, 80):
                        found = products_of(compiled, layer, x[:rows], grad[:rows])
                        assert_near(self, found, products_of(layer, layer, x[:rows], grad[:rows]), 1e-2)
                        assert_near(self, found, values_of(layer, x[:rows], grad[:rows]), 1e-2)

    def test_steps_change_what_is_multiplied(self):
        for name in SCALED:
            for sides in SIDES[:2]:
                with self.subTest(name=name, sides=sides):
                    layer, x, grad = scaled(name, sides)
                    opt = lowp.AdamW(layer.parameters(), lr=1e-1)
                    for _ in range(3):
                        assert_near(self, products_of(layer, layer, x, grad), values_of(layer, x, grad), 1e-2)
                        opt.step()

    def test_frozen_layers_hold_no_transpose(self):
        for sides in SIDES:
            with self.subTest(sides=sides):
                layer, x, grad = scaled("fp8-block", sides, bias=False)
                frozen = nn.Linear(*sides[1:], bias=False, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
                lowp.quantize_model_(frozen, "fp8-block")
                with torch.no_grad():
                    frozen.weight.copy_(layer.weight)
                self.assertTrue(frozen.weight._store.leaves_out_columnwise)
                grads = []
                for net in (layer, frozen, frozen):
                    own = x.clone().requires_grad_()
                    net(own).backward(grad)
                    grads.append(own.grad)
                self.assertTrue(torch.equal(grads[0], grads[1]) and torch.equal(grads[1], grads[2]))

    def test_threads_share_a_layer(self):
        # Each product has scales of its own, padded for it.
        layer, x, _ = scaled("fp8-block", (144, 272, 400))
        with torch.no_grad():
            expected = layer(x)
        failures = []

        def work():
            try:
                with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream()):
                    for _ in range(200):
                        if not torch.equal(layer(x), expected):
                            failures.append("another result")
            except Exception as error:
                failures.append(str(error))

        torch.cuda.synchronize()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_sides_that_do_not_fit_are_decoded(self):
        for name in SCALED:
            layer, x, _ = scaled(name, (72, 272, 400))
            self.assertFalse(_scaled.serves(x, layer.weight))
            out = layer(x)
            expected = nn.functional.linear(x, layer.weight.dequantize(orientation="rowwise", dtype=x.dtype), layer.bias)
            self.assertTrue(torch.equal(out, expected))
