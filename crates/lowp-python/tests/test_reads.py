"""Reads of quantized tensors, which the decoded values answer, and writes, which are refused with what to do."""

import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import swa_utils

import lowp
import model
import ranks
from lowp import _linear

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


class Shapes(unittest.TestCase):
    def test_a_padding_of_columns_is_not_one_of_rows(self):
        weight = lowp.quantize(torch.randn(32, 64), "mxfp8-2d")
        for pad in ((0, 1), (0, 32), (0, 1, 0, 0)):
            with self.subTest(pad=pad), self.assertRaisesRegex(lowp.UnsupportedOp, "only rows of zeros"):
                nn.functional.pad(weight, pad)
        self.assertEqual(nn.functional.pad(weight, (0, 0, 0, 1)).shape, (33, 64))

    def test_what_reads_memory_says_what_to_read(self):
        weight = lowp.quantize(torch.randn(32, 64), "mxfp8-2d")
        ways = [lambda: weight.view(torch.int32), *(getattr(weight, name) for name in ("const_data_ptr", "mutable_data_ptr") if hasattr(weight, name))]
        for way in ways:
            with self.assertRaisesRegex(lowp.UnsupportedOp, ".buffers"):
                way()

    def test_inputs_of_layers_are_dense_floating_point_values(self):
        weight = lowp.quantize(torch.randn(32, 64), "mxfp8-2d")
        for x in (torch.ones(2, 64, dtype=torch.int64), torch.ones(2, 64, dtype=torch.complex64), torch.ones(2, 64).to_sparse()):
            with self.subTest(dtype=x.dtype, layout=x.layout), self.assertRaisesRegex(lowp.LowpError, "dense floating-point"):
                nn.functional.linear(x, weight)

    def test_memory_is_that_of_the_same_weight(self):
        weight, other = (lowp.quantize(torch.ones(32, 64), "mxfp8-2d") for _ in range(2))
        self.assertTrue(weight.is_set_to(weight) and weight.is_set_to(weight.detach()))
        self.assertFalse(weight.is_set_to(other) or weight.is_set_to(torch.ones(32, 64)) or weight.is_set_to(weight.view(-1)))

    def test_a_number_fills_a_weight(self):
        weight = lowp.quantize(torch.randn(32, 64), "mxfp8-2d", keep_master=True)
        weight.copy_(2)
        self.assertTrue(torch.equal(weight.master, torch.full((32, 64), 2.0)))
        self.assertTrue(torch.equal(weight, lowp.quantize(weight.master, "mxfp8-2d")))


FINITE = {
    "isfinite": (torch.isfinite, torch.Tensor.isfinite),
    "isinf": (torch.isinf, torch.Tensor.isinf),
    "isnan": (torch.isnan, torch.Tensor.isnan),
    "isposinf": (torch.isposinf, torch.Tensor.isposinf),
    "isneginf": (torch.isneginf, torch.Tensor.isneginf),
}


class Finite(unittest.TestCase):
    def test_a_value_that_its_dtype_cannot_hold_is_finite(self):
        values = torch.full((32, 32), 1.0, dtype=torch.float16)
        values[3, 4] = -65504.0
        weight = lowp.quantize(values, "mxfp8")
        self.assertTrue(torch.isinf(weight.dequantize()[3, 4]))  # 65536 as float16
        for dtype in (torch.float16, torch.float32):
            for holder in (weight.to(dtype), nn.Parameter(weight.to(dtype)), weight.to(dtype).view(-1)):
                with self.subTest(dtype=dtype, holder=type(holder), dim=holder.dim()):
                    self.assertTrue(torch.isfinite(holder).all() and holder.isfinite().all())
                    for name in ("isinf", "isnan", "isposinf", "isneginf"):
                        self.assertFalse(any(ask(holder).any() for ask in FINITE[name]), name)

    def test_answers_are_those_of_the_decoded_float32(self):
        for name in ("fp8-current", "mxfp8", "nvfp4-2d", "mxfp4-mxfp8"):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                values = torch.randn(64, 64).to(dtype)
                values[1, 2], values[40, 3] = float("nan"), float("-inf")
                weight = lowp.quantize(values, name)
                decoded = weight.dequantize(dtype=torch.float32)
                for what, ways in FINITE.items():
                    for ask in ways:
                        with self.subTest(name=name, dtype=dtype, what=what):
                            found = ask(weight)
                            self.assertIs(type(found), torch.Tensor)
                            self.assertTrue(torch.equal(found, ask(decoded)))

    def test_arguments_are_those_of_the_functions(self):
        values = torch.zeros(32, 32)
        values[3, 4], values[5, 6] = float("inf"), float("-inf")
        weight = lowp.quantize(values, "fp8-current", format="e5m2")
        decoded = weight.dequantize()
        for name, (ask, _) in FINITE.items():
            self.assertTrue(torch.equal(ask(input=weight), ask(decoded)), name)
        for name in ("isposinf", "isneginf"):
            for ask in FINITE[name]:
                out = torch.zeros(32, 32, dtype=torch.bool)
                options = {"out": out} if ask is FINITE[name][0] else {}
                found = ask(weight, **options)
                self.assertTrue(torch.equal(found, ask(decoded)))
                self.assertEqual(found is out, bool(options))
            for given in (weight, decoded):
                with self.assertRaisesRegex(lowp.UnsupportedOp, "plain tensor of booleans"):
                    FINITE[name][0](given, out=weight)

    def test_shards_never_answer_for_another_value(self):
        for found in ranks.run(2, finite_shards):
            self.assertEqual(found["bfloat16"], "True")
            self.assertIn("65504", found["float16"])
            self.assertIn("dtype=torch.float32", found["float16"])


def finite_shards(rank, world):
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        net = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=dtype))
        net[0].weight.data.fill_(65504.0)
        lowp.quantize_model_(net, "mxfp8")
        model.fully_shard(net)
        try:
            answer = str(torch.isfinite(net[0].weight.detach()).to_local().all().item())
        except lowp.UnsupportedOp as error:
            answer = str(error)
        found[str(dtype).removeprefix("torch.")] = answer
    return found


PENALTIES = {
    "norm": lambda w: w.norm(),
    "norm of rows": lambda w: torch.linalg.vector_norm(w, dim=1).sum(),
    "squares": lambda w: (w**2).sum(),
    "square": lambda w: w.square().sum(),
    "mean of floats": lambda w: w.float().mean(),
    "norm of floats": lambda w: w.float().norm(),
    "largest": lambda w: w.abs().max(),
    "magnitudes": lambda w: w.abs().sum(),
    "deviation": lambda w: w.std() + w.var(dim=0).sum(),
    "maximum of rows": lambda w: w.amax(dim=1).sum() - w.min(dim=0).values.sum(),
    "foreach": lambda w: torch.stack(torch._foreach_norm([w, w])).sum(),
    "lerp": lambda w: torch.lerp(torch.ones(w.shape, dtype=w.dtype), w, 0.25).square().sum(),
    "added": lambda w: torch.zeros(w.shape).add_(w, alpha=0.5).square().sum(),
    "decoded": lambda w: values(w).square().sum(),
    "decoded and floats": lambda w: (values(w).float() * 3).norm(),
    "flat": lambda w: w.view(-1).norm(),
}


def values(w):
    return w.dequantize() if isinstance(w, lowp.Tensor) else w.clone()


class Gradients(unittest.TestCase):
    def test_gradients_of_gradients_of_layers_are_those_of_the_decoded_values(self):
        for recipe in ("mxfp8-2d", "nvfp4-2d", "fp8-current"):
            torch.manual_seed(1)
            layer, x = nn.Linear(64, 32), torch.randn(4, 64)
            lowp.quantize_model_(layer, recipe)
            found = []
            for weight in (layer.weight, nn.Parameter(layer.weight.detach().dequantize())):
                bias, at = nn.Parameter(layer.bias.detach().clone()), x.clone().requires_grad_()
                loss = nn.functional.linear(at, weight, bias).square().mean()
                penalty = sum(grad.square().sum() for grad in torch.autograd.grad(loss, (at, weight, bias), create_graph=True))
                found.append([penalty, *torch.autograd.grad(penalty, (at, weight, bias))])
            for own, expected in zip(*found):
                torch.testing.assert_close(own, expected)

    def test_gradients_of_gradients_of_codes_raise(self):
        weight = lowp.quantize(torch.randn(32, 64), "fp8-current")
        with self.assertRaisesRegex(lowp.UnsupportedOp, r"weight.dequantize\(\)"):
            _linear.differentiable_gradients(torch.ones(4, 32), None, weight, torch.ones(64, 4), torch.ones(()), (True, False, False))

    def test_gradients_of_reads_are_those_of_the_decoded_values(self):
        torch.manual_seed(5)
        # Whose values bfloat16 holds: w.float() has those of float32.
        powers = lowp.Recipe("fp8-current", pow2=True)
        for name, dtype in (("mxfp8", torch.float32), ("nvfp4-2d", torch.float32), (powers, torch.bfloat16)):
            weight = nn.Parameter(lowp.quantize(torch.randn(64, 96).to(dtype), name))
            plain = nn.Parameter(weight.detach().dequantize())
            for what, penalty in PENALTIES.items():
                with self.subTest(name=name, what=what):
                    weight.grad = plain.grad = None
                    found, expected = penalty(weight), penalty(plain)
                    self.assertTrue(torch.equal(found, expected))
                    found.backward()
                    expected.backward()
                    self.assertIs(type(weight.grad), torch.Tensor)
                    self.assertEqual(weight.grad.dtype, dtype)
                    self.assertTrue(torch.equal(weight.grad, plain.grad))

    def test_a_penalty_trains(self):
        torch.manual_seed(1)
        nets = [nn.Sequential(nn.Linear(64, 64, bias=False)) for _ in range(2)]
        nets[1].load_state_dict(nets[0].state_dict())
        x = torch.randn(4, 64)
        for net, strength in zip(nets, (0.0, 1.0)):
            lowp.quantize_model_(net, "mxfp8-2d")
            opt = lowp.AdamW(net.parameters(), lr=1e-2, weight_decay=0)
            for _ in range(5):
                (net(x).square().mean() + strength * sum(p.norm() + p.dequantize().square().sum() for p in net.parameters())).backward()
                opt.step()
                opt.zero_grad()
        self.assertLess(nets[1][0].weight.detach().norm(), nets[0][0].weight.detach().norm())

    def test_a_step_between_forward_and_backward_is_an_error(self):
        weight = nn.Parameter(lowp.quantize(torch.randn(64, 64), "mxfp8-2d"))
        opt = lowp.AdamW([weight])
        penalty = weight.norm()
        weight.grad = torch.ones(64, 64)
        opt.step()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            penalty.backward()

    def test_without_gradients_nothing_is_recorded(self):
        weight = nn.Parameter(lowp.quantize(torch.randn(64, 64), "mxfp8-2d"))
        with torch.no_grad():
            self.assertFalse(weight.dequantize().requires_grad)
        self.assertFalse(weight.detach().dequantize().requires_grad)
        self.assertFalse(weight.detach().norm().requires_grad)

    def test_gradients_of_shards_are_those_of_one_process(self):
        for recipe in ("fp8-current", "mxfp8", "mxfp8-2d"):
            expected = ranks.run(1, penalties, recipe)[0]
            for found in ranks.run(2, penalties, recipe):
                for name, grad in expected.items():
                    with self.subTest(recipe=recipe, name=name):
                        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)

    def test_reads_inside_of_modules_that_fsdp2_gathered(self):
        """Their gradients need in backward the codes that forward read."""
        expected = ranks.run(1, inside)[0]
        for found in ranks.run(2, inside):
            for name, grad in expected.items():
                with self.subTest(name=name):
                    torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6)


def penalties(rank, world, recipe):
    """Gradients of shards that a penalty adds to, outside of the modules, and one inside of each linear layer."""
    torch.manual_seed(2)
    net = nn.Sequential(*(Penalized(128, 128, bias=False) for _ in range(2)))
    lowp.quantize_model_(net, recipe)
    for layer in net:
        model.fully_shard(layer)
    model.fully_shard(net)
    x = torch.randn(4, 128)
    loss = net(x).square().mean() + sum(layer.penalty for layer in net)
    # Norms are sums over ranks; gradients of what every rank computes of its batch are means.
    outside = sum((p.norm() + (p**2).sum()) for p in net.parameters())
    outside = outside.full_tensor() if hasattr(outside, "full_tensor") else outside
    (loss + outside).backward()
    return {name: param.grad.full_tensor() for name, param in net.named_parameters()}


class Penalized(nn.Linear):
    def forward(self, x):
        self.penalty = self.weight.dequantize().square().mean()
        return super().forward(x)


class Read(nn.Linear):
    def forward(self, x):
        self.penalty = self.weight.norm() + (self.weight**2).sum() + self.weight.abs().amax()
        return super().forward(x)


def inside(rank, world):
    """Gradients of shards that reads inside of each layer add to."""
    found = {}
    for recipe in ("mxfp8", "mxfp8-2d", "fp8-current"):
        torch.manual_seed(2)
        net = nn.Sequential(*(Read(128, 128, bias=False) for _ in range(2)))
        lowp.quantize_model_(net, recipe)
        for layer in net:
            model.fully_shard(layer)
        model.fully_shard(net)
        for _ in range(2):
            net.zero_grad()
            (net(torch.ones(4, 128)).square().mean() + sum(layer.penalty for layer in net)).backward()
        found |= {f"{recipe} {name}": param.grad.full_tensor() for name, param in net.named_parameters()}
    return found


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

    def test_updates_in_hooks_of_backward_name_the_optimizer(self):
        def update(param):
            with torch.no_grad():
                param.copy_(param - 1e-4 * param.grad)

        weight = nn.Parameter(lowp.quantize(torch.randn(64, 64), "mxfp8", keep_master=True))
        before, master = weight.detach().clone(), weight.master.clone()
        weight.register_post_accumulate_grad_hook(update)
        self.refused(lambda: nn.functional.linear(torch.ones(4, 64), weight).sum().backward(), "lowp.AdamW", ".quantize_(values)")
        self.assertTrue(torch.equal(weight, before) and torch.equal(weight.master, master))
        # Codes are copied, as a gather does.
        weight = nn.Parameter(before.clone())
        weight.register_hook(lambda grad: (weight.detach().copy_(lowp.quantize(torch.ones(64, 64), "mxfp8")), grad)[1])
        nn.functional.linear(torch.ones(4, 64), weight).sum().backward()
        self.assertTrue(torch.equal(weight.dequantize(), torch.ones(64, 64)))

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
        "columns": ("do not support tensor parallelism", lambda: layer(ColwiseParallel())),
        "rows": ("do not support tensor parallelism", lambda: layer(RowwiseParallel())),
        "shards": ("do not support tensor parallelism", lambda: distribute_tensor(weight(), mesh, [Shard(0)])),
        "scatter": ("fully_shard", lambda: dist.scatter(weight(), [weight(), weight()] if rank == 0 else None)),
        "reduce": ("fully_shard", lambda: dist.all_reduce(weight())),
        "joined": ("decode it first", lambda: torch.cat([weight(), weight()])),
        "joined flat": ("decode it first", lambda: torch.cat([weight().view(-1), weight().view(-1)]) + 1),
        "vector": ("decode it first", lambda: torch.nn.utils.parameters_to_vector([weight(), weight()]).numpy()),
    }
    found = {}
    for name, (expected, call) in ways.items():
        found[name] = (expected, raised(call))
    return found


if __name__ == "__main__":
    unittest.main()
