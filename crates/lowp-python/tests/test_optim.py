"""The optimizers: beside PyTorch's, over shards, in and out of state dicts."""

import copy
import io
import pickle
import unittest

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowp
import model
import ranks


def muon_of_some(rank, world):
    """The errors of three steps, in the second of which rank 1 has no gradient of a matrix."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    fully_shard(net)
    opt, errors = lowp.Muon(net.parameters()), []
    for at in range(3):
        for param in net.parameters():
            param.grad = torch.ones_like(param)
        if (rank, at) == (1, 1):
            net[1].weight.grad = None
        try:
            opt.step()
            errors.append(None)
        except lowp.LowpError as error:
            errors.append(str(error))
    return errors


def muon_thawed_on_some(rank, world):
    """The errors of two steps after a matrix was thawed on rank 0 alone, in the first of which it has a gradient there."""
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    net[0].weight.requires_grad_(False)
    fully_shard(net)
    opt, errors = lowp.Muon(net.parameters()), []
    for at in range(3):
        for param in net.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        if (rank, at) == (0, 1):
            net[0].weight.requires_grad_(True)
            net[0].weight.grad = torch.ones_like(net[0].weight)
        if at == 2:
            net[0].weight.grad = None
        try:
            opt.step()
            errors.append(None)
        except lowp.LowpError as error:
            errors.append(str(error))
    return errors


def muon_of_replicas(rank, world):
    net = nn.Linear(64, 64, bias=False)
    fully_shard(net, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    opt = lowp.Muon(net.parameters())
    net.weight.grad = torch.zeros_like(net.weight)
    try:
        opt.step()
    except lowp.LowpError as error:
        return str(error)


def of_torch(params):
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=1e-2)


class Steps(unittest.TestCase):
    def test_plain_parameters_are_updated_as_by_torch(self):
        torch.manual_seed(0)
        own = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 7))
        other = copy.deepcopy(own)
        mine, theirs = lowp.AdamW(own.parameters(), lr=3e-3), of_torch(other.parameters())
        for step in range(20):
            x = torch.randn(8, 24)
            for net, opt in ((own, mine), (other, theirs)):
                net(x).square().mean().backward()
                opt.step()
                opt.zero_grad(set_to_none=step % 2 == 0)
        for a, b in zip(own.parameters(), other.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def test_sgd_is_that_of_torch(self):
        for momentum in ({}, {"momentum": 0.9}, {"momentum": 0.8, "nesterov": True}):
            for weight_decay in (0.0, 0.1):
                options = dict(momentum, lr=0.05, weight_decay=weight_decay)
                with self.subTest(**options):
                    torch.manual_seed(0)
                    own = nn.Sequential(nn.Linear(24, 40), nn.LayerNorm(40), nn.Linear(40, 7))
                    other = copy.deepcopy(own)
                    mine, theirs = lowp.SGD(own.parameters(), **options), torch.optim.SGD(other.parameters(), **options)
                    for _ in range(20):
                        x = torch.randn(8, 24)
                        for net, opt in ((own, mine), (other, theirs)):
                            net(x).square().mean().backward()
                            opt.step()
                            opt.zero_grad()
                    for a, b in zip(own.parameters(), other.parameters()):
                        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
                        self.assertEqual("momentum_buffer" in mine.state[a], bool(momentum))

    def test_momentum_of_a_group_needs_that_of_the_optimizer(self):
        first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
        with self.assertRaisesRegex(lowp.LowpError, "lowp.SGD\\(.., momentum=0.9\\)"):
            lowp.SGD([{"params": [first], "momentum": 0.9}, {"params": [second]}], lr=0.1)

    def test_lion_is_that_of_its_authors(self):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(5, 7))
        p, m = param.detach().double(), torch.zeros(5, 7, dtype=torch.float64)
        opt = lowp.Lion([param], lr=1e-2, betas=(0.9, 0.98), weight_decay=0.3)
        for step in range(20):
            grad = torch.randn(5, 7) * (step != 3)
            param.grad = grad
            opt.step()
            update = torch.sign(0.9 * m + 0.1 * grad.double())
            p, m = p - 1e-2 * (update + 0.3 * p), 0.98 * m + 0.02 * grad.double()
        torch.testing.assert_close(param.detach().double(), p, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(opt.state[param]["exp_avg"].double(), m, rtol=1e-5, atol=1e-6)

    def test_muon_is_that_of_torch(self):
        shapes = ((24, 40), (40, 24), (32, 32), (1, 16), (16, 1))
        for adjust_lr_fn in (None, "original", "match_rms_adamw"):
            for weight_decay in (0.0, 0.1):
                options = dict(lr=0.02, weight_decay=weight_decay, adjust_lr_fn=adjust_lr_fn)
                with self.subTest(**options):
                    torch.manual_seed(0)
                    own = [nn.Parameter(torch.randn(shape)) for shape in shapes]
                    other, first = copy.deepcopy(own), [param.detach().clone() for param in own]
                    mine, theirs = lowp.Muon(own, **options), torch.optim.Muon(other, **options)
                    for _ in range(8):
                        for a, b in zip(own, other):
                            a.grad = torch.randn_like(a)
                            b.grad = a.grad.clone()
                        mine.step()
                        theirs.step()
                    for a, b, begun in zip(own, other, first):
                        # Both round to bf16, each in other places, and a step repeats a rounding's effect up to 3.4 times.
                        self.assertLess((a - b).norm(), 0.02 * (b - begun).norm(), a.shape)
                        torch.testing.assert_close(mine.state[a]["momentum_buffer"] * (1 - 0.95), theirs.state[b]["momentum_buffer"])

    def test_muon_takes_matrices_alone(self):
        net = nn.Linear(8, 4)
        for params, title in ((net.parameters(), "parameter 1 of shape"), (net.named_parameters(), r"parameter 1 \(bias\) of shape")):
            with self.assertRaisesRegex(lowp.LowpError, f"{title} \\(4,\\) is no matrix; give lowp.Muon parameters of two axes"):
                lowp.Muon(params)
        opt = lowp.Muon([net.weight])
        with self.assertRaisesRegex(lowp.LowpError, "parameter 1 of shape"):
            opt.add_param_group({"params": [net.bias]})
        self.assertEqual(len(opt.param_groups), 1)
        for wrong, message in (
            (dict(adjust_lr_fn="spectral_unclamped"), "give 'original' or 'match_rms_adamw'"),
            (dict(nesterov=False), "leave nesterov out"),
            (dict(moments_dtype=torch.bfloat16), "moments_dtype=torch.bfloat16; give torch.float32$"),
        ):
            with self.assertRaisesRegex(lowp.LowpError, message):
                lowp.Muon([net.weight], **wrong)

    def test_muon_trains_what_was_frozen(self):
        torch.manual_seed(0)
        first, second = (nn.Parameter(torch.randn(8, 16)) for _ in range(2))
        second.requires_grad_(False)
        opt = lowp.Muon([first, second], lr=0.02)
        for step in range(4):
            if step == 2:
                second.requires_grad_(True)
            for param in (first, second):
                param.grad = torch.randn_like(param) if param.requires_grad else None
            before = second.detach().clone()
            opt.step()
            self.assertEqual(torch.equal(second, before), step < 2)
        self.assertEqual([int(state["step"]) for state in opt.state_dict()["state"].values()], [4, 2])

    def test_muon_over_ranks_is_that_of_one_process(self):
        expected = model.matrices_by_muon(0, 1, False)
        for world in (2, 3):
            for found in ranks.run(world, model.matrices_by_muon, True):
                for a, b in zip(found, expected, strict=True):
                    self.assertTrue(torch.equal(a, b), world)
        for errors in ranks.run(2, muon_of_some):
            self.assertIn("has a gradient on ranks [0] and none on ranks [1]", errors[1])
            self.assertEqual([errors[0], errors[2]], [None, None])
        for errors in ranks.run(2, muon_thawed_on_some):
            self.assertEqual(errors[0], None)
            self.assertIn("has a gradient on ranks [0] and none on ranks [1]", errors[1])
            self.assertIn("ranks disagree on who makes which matrix orthogonal", errors[2])
        for message in ranks.run(4, muon_of_replicas):
            self.assertIn("lowp.Muon over 2 replicas of 2 shards", message)

    def test_a_state_goes_on_in_another_optimizer_of_its_kind_alone(self):
        makes = [lowp.AdamW, lowp.Lion, lowp.SGD, lambda params: lowp.SGD(params, momentum=0.9), lowp.Muon]
        grads = torch.randn(4, 64, 64)
        for make in makes:
            net, copied = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
            lowp.quantize_model_(net, "mxfp8-2d")
            lowp.quantize_model_(copied, "mxfp8-2d")
            opt = make(net.parameters())
            for grad in grads[:2]:
                net.weight.grad = grad
                opt.step()
            copied.load_state_dict(net.state_dict())
            again = make(copied.parameters())
            again.load_state_dict(opt.state_dict())
            for grad in grads[2:]:
                for of, at in ((net, opt), (copied, again)):
                    of.weight.grad = grad
                    at.step()
            self.assertTrue(torch.equal(net.weight.master, copied.weight.master))
            self.assertTrue(torch.equal(net.weight, copied.weight))
            for other in makes:
                other = other(copied.parameters())
                if other.states != opt.states:
                    kept, found = (" and ".join(keys) or "nothing but masters" for keys in (other.states, opt.states))
                    with self.assertRaisesRegex(lowp.LowpError, f"has {found}, and lowp.{type(other).__name__} keeps {kept}"):
                        other.load_state_dict(opt.state_dict())

    def test_codes_are_those_of_the_master(self):
        for name in lowp.recipes():
            if not lowp.Recipe(name).is_low_precision or name == "fp8-delayed":
                continue  # a delayed scale follows from steps before
            with self.subTest(name=name):
                torch.manual_seed(0)
                net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 128, bias=False))
                lowp.quantize_model_(net, name)
                opt = lowp.AdamW(net.parameters(), lr=1e-2, max_norm=0.5)
                for _ in range(3):
                    net(torch.randn(4, 256)).square().mean().backward()
                    opt.step()
                    opt.zero_grad()
                for layer in net:
                    master = opt.state[layer.weight]["master"]
                    self.assertTrue(torch.equal(lowp.quantize(master, name), layer.weight), layer.weight)
                    self.assertIs(layer.weight.master, master)

    def test_bfloat16_parameters_have_masters(self):
        torch.manual_seed(0)
        net = nn.Linear(32, 32, dtype=torch.bfloat16)
        opt = lowp.AdamW(net.parameters(), lr=1e-3, moments_dtype=torch.bfloat16)
        for _ in range(3):
            net(torch.randn(4, 32, dtype=torch.bfloat16)).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
        for param in net.parameters():
            self.assertTrue(torch.equal(opt.state[param]["master"].bfloat16(), param))
            self.assertEqual(opt.state[param]["exp_avg"].dtype, torch.bfloat16)

    def test_parameters_that_are_not_contiguous_are_refused(self):
        for dtype in (torch.float32, torch.bfloat16):
            values = torch.randn(4, 8, 6, 6, dtype=dtype)
            for param in (values[0, 0].t()[:, :3], values.to(memory_format=torch.channels_last), values[:1, :1].expand(2, 2, 6, 6)):
                with self.subTest(dtype=dtype, shape=tuple(param.shape)):
                    param = nn.Parameter(param)
                    param.grad = torch.zeros_like(param)
                    before = param.detach().clone()
                    with self.assertRaisesRegex(lowp.LowpError, "not contiguous"):
                        lowp.AdamW([param]).step()
                    self.assertTrue(torch.equal(param, before))

    def test_state_on_another_device_is_refused(self):
        for key in ("master", "exp_avg", "exp_avg_sq"):
            net = nn.Linear(8, 8, bias=False, dtype=torch.bfloat16)
            net.weight.grad = torch.zeros_like(net.weight)
            first = lowp.AdamW(net.parameters())
            first.step()
            opt = lowp.AdamW(net.parameters())
            opt.load_state_dict(first.state_dict())
            state = opt.state[net.weight]
            state[key] = state[key].to("meta")
            with self.subTest(key=key), self.assertRaisesRegex(lowp.LowpError, f"{key} of parameter 0 is on meta"):
                opt.step()

    def test_schedules_and_groups_count(self):
        torch.manual_seed(0)
        own = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
        other = copy.deepcopy(own)
        runs = []
        for net, make in ((own, lowp.AdamW), (other, torch.optim.AdamW)):
            groups = [dict(params=net[0].parameters(), lr=1e-2), dict(params=net[1].parameters(), weight_decay=0.0)]
            opt = make(groups, lr=1e-3)
            runs.append((net, opt, torch.optim.lr_scheduler.CosineAnnealingLR(opt, 10)))
        for _ in range(10):
            x = torch.randn(8, 16)
            for net, opt, schedule in runs:
                net(x).square().mean().backward()
                opt.step()
                schedule.step()
                opt.zero_grad()
        for a, b in zip(own.parameters(), other.parameters()):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    def test_a_gradient_that_is_not_finite_skips_the_step(self):
        net = nn.Linear(8, 8, bias=False)
        opt = lowp.AdamW(net.parameters(), max_norm=1.0)
        before = net.weight.detach().clone()
        net.weight.grad = torch.full((8, 8), float("nan"))
        opt.step()
        self.assertFalse(opt.last_step()["applied"])
        self.assertTrue(torch.equal(net.weight, before))
        net.weight.grad = torch.full((8, 8), 2.0)
        opt.step()
        report = opt.last_step()
        self.assertEqual((report["applied"], report["steps"], report["skipped"]), (True, 1, 1))
        self.assertAlmostEqual(report["grad_norm"], 16.0)
        self.assertAlmostEqual(report["clip"], 1 / 16, places=5)

    def test_steps_without_a_norm(self):
        for skip in (False, True):
            net = nn.Linear(8, 8, bias=False)
            opt = lowp.AdamW(net.parameters(), skip_nonfinite=skip)
            net.weight.grad = torch.full((8, 8), float("nan"))
            opt.step()
            report = opt.last_step()
            with self.subTest(skip=skip):
                self.assertEqual(report["applied"], not skip)
                self.assertEqual(report["grad_norm"] is None, not skip)
                self.assertEqual(bool(net.weight.isnan().all()), not skip)

    def test_gradients_where_they_were_before_are_known(self):
        net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        lowp.quantize_model_(net[0], "fp8-current")
        opt, other = lowp.AdamW(net.parameters()), None
        for param in net.parameters():
            param.grad = torch.ones(param.shape)
        opt.step()
        rust, given = opt._built.rust, []

        class Spy:
            def step(self, device, grads, *args):
                given.append(grads is None)
                rust.step(device, grads, *args)

        opt._built.rust = Spy()
        opt.step()
        kept = net[1].bias.grad
        net[1].bias.grad = torch.ones(8)
        opt.step()
        opt.step()
        self.assertEqual(given, [True, False, True])
        opt._built.rust = rust
        self.assertEqual(opt.last_step()["steps"], 4)
        del kept, other

    def test_a_graph_of_the_values_before_a_step_is_not_used(self):
        for name in ("mxfp8-2d", None):
            torch.manual_seed(0)
            net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
            if name:
                lowp.quantize_model_(net, name)
            opt = lowp.AdamW(net.parameters())
            loss = net(torch.randn(4, 64)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            opt.step()
            with self.subTest(name=name), self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                loss.backward()
        weight = nn.Parameter(lowp.quantize(torch.randn(64, 64), "mxfp8"))
        writes = (
            lambda: weight.quantize_(torch.zeros(64, 64)),
            lambda: weight.copy_(torch.zeros(64, 64)),
            lambda: weight.detach().quantize_(torch.zeros(64, 64)),
            lambda: lowp.cast_master_weights([weight], [torch.zeros(64 * 64)], [0]),
        )
        for index, write in enumerate(writes):
            out = nn.functional.linear(torch.randn(4, 64, requires_grad=True), weight)
            with torch.no_grad():
                write()
            with self.subTest(index=index), self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                out.sum().backward()

    def test_optimizers_are_not_copied_whole(self):
        opt = lowp.AdamW([nn.Parameter(torch.zeros(2))])
        for call in (copy.copy, copy.deepcopy, pickle.dumps):
            with self.assertRaisesRegex(lowp.LowpError, "state_dict"):
                call(opt)

    def test_errors_name_the_parameter_and_the_remedy(self):
        net = nn.Linear(8, 8)
        opt = lowp.AdamW(net.parameters())
        with self.assertRaisesRegex(lowp.LowpError, "float16"):
            half = nn.Linear(8, 8).half()
            half.weight.grad, half.bias.grad = torch.zeros_like(half.weight), torch.zeros_like(half.bias)
            lowp.AdamW(half.parameters()).step()
        with self.assertRaisesRegex(lowp.LowpError, r"group 0 are .*betas=\(0.9,\).*two numbers as betas"):
            lowp.AdamW(net.parameters(), betas=(0.9,))
        with self.assertRaisesRegex(lowp.LowpError, "parameter 1 of shape .8, 8. is also parameter 0"):
            lowp.AdamW([net.weight, net.weight])
        with self.assertRaisesRegex(lowp.LowpError, r"parameter 2 \(c\) of shape .8, 8. is also parameter 0"):
            lowp.AdamW([{"params": [("a", net.weight), ("b", net.bias)]}, {"params": [("c", net.weight)]}])
        with self.assertRaisesRegex(lowp.LowpError, "parameter 1 of shape .8, 8. shares the memory of parameter 0"):
            alias = nn.Parameter(net.weight.data)
            alias.grad = net.weight.grad = torch.zeros(8, 8)
            lowp.AdamW([net.weight, alias]).step()
        with self.assertRaisesRegex(lowp.LowpError, "gradient of parameter 0 of shape .8, 4. has the layout .*sparse=False"):
            words = nn.Embedding(8, 4, sparse=True)
            words(torch.tensor([1])).sum().backward()
            lowp.AdamW(words.parameters()).step()
        with self.assertRaisesRegex(lowp.LowpError, "lr of group 0"):
            bad = lowp.AdamW(net.parameters(), lr=-1.0)
            net(torch.zeros(1, 8)).sum().backward()
            bad.step()


def quantized(name="mxfp8-2d", seed=0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    lowp.quantize_model_(net[0], name)
    net[1].to(torch.bfloat16)
    return net


def steps(net, opt, numbers):
    for number in numbers:
        torch.manual_seed(number)
        for param in net.parameters():
            param.grad = torch.randn(param.shape).to(param.dtype)
        opt.step()


class Writes(unittest.TestCase):
    """Values that something else than the optimizer writes between steps."""

    def trained(self):
        net = quantized()
        opt = lowp.AdamW(net.parameters(), lr=1e-6)
        steps(net, opt, range(2))
        return net, opt

    def near(self, a, b, name):
        a, b = (t.dequantize() if isinstance(t, lowp.Tensor) else t.float() for t in (a.detach(), b.detach()))
        self.assertLess((a - b).abs().max(), 1e-2, name)

    def test_parameters_in_other_memory_are_updated_there(self):
        net, opt = self.trained()
        other = quantized(seed=1)
        lost = [param.data for param in net[1].parameters()]
        for param, new in zip(net[1].parameters(), other[1].parameters()):
            param.data = new.detach().clone()
        before = [param.detach().clone() for param in lost]
        steps(net, opt, range(2, 3))
        self.assertEqual(opt.last_step()["steps"], 3)
        for param, new in zip(net[1].parameters(), other[1].parameters()):
            self.near(param, new, "replaced")
            self.assertTrue(torch.equal(opt.state[param]["master"].bfloat16(), param))
            self.assertFalse(torch.equal(opt.state[param]["master"], new.float()))
        for param, old in zip(lost, before):
            self.assertTrue(torch.equal(param, old))

    def test_codes_that_are_replaced_are_updated(self):
        for master in (True, False):
            net, opt = self.trained()
            other = quantized(seed=1)
            if not master:
                other[0].weight._store.master = None
            with self.subTest(master=master):
                net.load_state_dict(other.state_dict(), assign=False)
                steps(net, opt, range(2, 3))
                self.near(net[0].weight, other[0].weight, "copied")
                net, opt = self.trained()
                clone = other[0].weight.detach().clone()
                net[0].weight._store = clone._store
                steps(net, opt, range(2, 3))
                self.near(net[0].weight, other[0].weight, "another store")
                self.assertIs(net[0].weight._store, clone._store)
                self.assertTrue(torch.equal(lowp.quantize(opt.state[net[0].weight]["master"], "mxfp8-2d"), net[0].weight))

    def test_bfloat16_values_that_are_copied_in_stay(self):
        net, opt = self.trained()
        other = quantized(seed=1)
        kept = opt.state[net[1].bias]["master"].clone()
        with torch.no_grad():
            net[1].weight.copy_(other[1].weight)
            net[1].bias.copy_(net[1].bias.clone())
        opt.param_groups[0]["lr"] = 0.0
        steps(net, opt, range(2, 3))
        self.assertTrue(torch.equal(net[1].weight, other[1].weight))
        # Bits that bfloat16 does not have are not lost where nothing changed.
        self.assertTrue(torch.equal(opt.state[net[1].bias]["master"], kept))

    def test_slices_of_masters_are_what_is_updated(self):
        net, opt = self.trained()
        new = torch.randn(64, 64)
        lowp.cast_master_weights([net[0].weight], [new.flatten()], [0])
        self.assertTrue(torch.equal(net[0].weight, lowp.quantize(new, "mxfp8-2d")))
        self.near(net[0].weight.master, net[0].weight, "master")
        steps(net, opt, range(2, 3))
        self.near(net[0].weight, lowp.quantize(new, "mxfp8-2d"), "cast")


class States(unittest.TestCase):
    def test_its_own_state_is_loaded(self):
        # As torch.distributed.checkpoint does: it writes to what state_dict() returned, and loads that.
        net = quantized("fp8-delayed")
        opt = lowp.AdamW(net.parameters(), lr=1e-2)
        steps(net, opt, range(3))
        saved, of_net = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
        steps(net, opt, range(3, 6))
        expected = copy.deepcopy(net.state_dict())
        net.load_state_dict(of_net)
        own = opt.state_dict()
        for number, state in own["state"].items():
            for key, value in state.items():
                value.copy_(saved["state"][number][key])
        opt.load_state_dict(own)
        steps(net, opt, range(3, 6))
        for key, value in net.state_dict().items():
            self.assertTrue(torch.equal(value, expected[key]), key)

    def test_a_state_before_the_first_step(self):
        for name in ("mxfp8-2d", "fp8-delayed"):
            net = quantized(name)
            opt = lowp.AdamW(net.parameters(), lr=1e-2)
            empty = copy.deepcopy(opt.state_dict())
            steps(net, opt, range(3))
            saved, of_net = copy.deepcopy(opt.state_dict()), copy.deepcopy(net.state_dict())
            with self.subTest(name=name):
                # Loaded, and saved again before a step.
                again = quantized(name, 1)
                other = lowp.AdamW(again.parameters(), lr=1e-2)
                other.load_state_dict(saved)
                for a, b in zip(saved["state"].values(), other.state_dict()["state"].values()):
                    self.assertEqual(a.keys(), b.keys())
                    for key in a:
                        self.assertTrue(torch.equal(a[key], b[key]), key)
                # Either order, and a state that was loaded before it, which leaves nothing.
                steps(net, opt, range(3, 5))
                for of_net_first in (True, False):
                    again = quantized(name, 1)
                    other = lowp.AdamW(again.parameters(), lr=1e-2)
                    steps(again, other, range(2))
                    calls = [lambda: again.load_state_dict(of_net), lambda: other.load_state_dict(saved)]
                    for call in calls if of_net_first else calls[::-1]:
                        call()
                    steps(again, other, range(3, 5))
                    for a, b in zip(net.parameters(), again.parameters()):
                        self.assertTrue(torch.equal(a, b), (name, of_net_first))
                # Of an optimizer without steps.
                fresh, new = quantized(name), quantized(name)
                other, first = (lowp.AdamW(n.parameters(), lr=1e-2) for n in (fresh, new))
                other.load_state_dict(saved)
                other.load_state_dict(empty)
                fresh.load_state_dict(new.state_dict())
                for param, same in zip(fresh.parameters(), new.parameters()):
                    if "master" in other.state[param]:
                        other.state[param]["master"].copy_(same.master if isinstance(same, lowp.Tensor) else same.float())
                for opt_of, of in ((other, fresh), (first, new)):
                    steps(of, opt_of, range(2))
                self.assertEqual(other.last_step(), first.last_step())
                for a, b in zip(fresh.parameters(), new.parameters()):
                    self.assertTrue(torch.equal(a, b), name)

    def resume(self, name):
        """Trains 6 steps at once, and 3, a state dict, and 3."""
        whole, _ = model.train(name, 6)

        def make():
            net = model.make(name)
            return net, lowp.AdamW(net.parameters(), lr=3e-3, max_norm=1.0)

        def steps(net, opt, numbers):
            losses = []
            for step in numbers:
                loss = model.loss_of(net, step)
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses.append(loss.item())
            return losses

        net, opt = make()
        losses = steps(net, opt, range(3))
        file = io.BytesIO()
        torch.save({"net": net.state_dict(), "opt": opt.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        again, other = make()
        again.load_state_dict(saved["net"])
        other.load_state_dict(saved["opt"])
        losses += steps(again, other, range(3, 6))
        self.assertEqual(losses, whole)

    def test_training_goes_on_to_the_bit(self):
        for name in ("mxfp8-2d", "fp8-current", "fp8-delayed", "nvfp4-2d", "nvfp4-1d"):
            with self.subTest(name=name):
                self.resume(name)

    def test_delayed_scales_go_on_with_a_model_of_values(self):
        # As save_pretrained writes them; the state of the optimizer has the scale of the codes.
        for seed in range(6):
            net = quantized("fp8-delayed", seed)
            opt = lowp.AdamW(net.parameters(), lr=0.3)
            steps(net, opt, range(3))
            of_net, of_opt, codes = (copy.deepcopy(of) for of in (lowp.plain_state_dict(net), opt.state_dict(), net[0].weight))
            scale = float(of_opt["state"][0]["encode_scale"])
            self.assertTrue(torch.equal(codes, lowp.quantize(codes.master, "fp8-delayed", encode_scale=scale)))
            self.assertFalse(torch.equal(codes, lowp.quantize(codes.master, "fp8-delayed")))
            steps(net, opt, range(3, 6))
            for values_first in (True, False):
                for used in (False, True):
                    with self.subTest(seed=seed, values_first=values_first, used=used):
                        again = quantized("fp8-delayed", seed)
                        other = lowp.AdamW(again.parameters(), lr=0.3)
                        steps(again, other, range(20, 21) if used else ())
                        calls = [lambda: again.load_state_dict(of_net), lambda: other.load_state_dict(of_opt)]
                        for call in calls if values_first else calls[::-1]:
                            call()
                        self.assertTrue(torch.equal(again[0].weight, codes))
                        steps(again, other, range(3, 6))
                        for a, b in zip(net.parameters(), again.parameters()):
                            self.assertTrue(torch.equal(a, b))
        # Values that are copied in later have the scale that follows from them.
        with torch.no_grad():
            again[0].weight.copy_(again[0].weight.master.clone())
        self.assertTrue(torch.equal(again[0].weight, lowp.quantize(again[0].weight.master, "fp8-delayed")))

    def test_a_state_of_another_model_is_an_error(self):
        small, large = nn.Linear(8, 8), nn.Linear(8, 16)
        opts = []
        for net in (small, large):
            opt = lowp.AdamW(net.parameters())
            net(torch.ones(1, 8)).sum().backward()
            opt.step()
            opts.append(opt)
        with self.assertRaisesRegex(lowp.LowpError, "master|shape"):
            opts[0].load_state_dict(opts[1].state_dict())
        with self.assertRaisesRegex(lowp.LowpError, "groups"):
            opts[0].load_state_dict(lowp.AdamW([nn.Parameter(torch.ones(2))]).state_dict())


def shards_and_whole(rank, world, names):
    """The same gradients over FSDP2 and over whole tensors."""
    return {name: _shards_and_whole(rank, world, name) for name in names}


def _shards_and_whole(rank, world, name):
    nets = [model.make(name) for _ in range(2)]
    model.shard(nets[0])
    opts = [lowp.AdamW(net.parameters(), lr=3e-3, max_norm=1.0) for net in nets]
    for step in range(3):
        model.loss_of(nets[0], step).backward()
        for sharded, whole in zip(nets[0].parameters(), nets[1].parameters()):
            whole.grad = sharded.grad.full_tensor()
        for opt in opts:
            opt.step()
    same = 0
    for sharded, whole in zip(nets[0].parameters(), nets[1].parameters()):
        local = sharded._local_tensor
        first = local.shape[0] and rank * -(-sharded.shape[0] // world)
        if isinstance(local, lowp.Tensor):
            rows = whole.detach()[first : first + local.shape[0]]
            for key, buffer in local.buffers.items():
                assert torch.equal(buffer, rows.buffers[key]), (name, key, local)
            same += 1
        else:
            assert torch.equal(local, whole.detach()[first : first + local.shape[0]]), local
    return same


def optimizer_checkpoint(rank, world, folder, names):
    for name in names:
        _optimizer_checkpoint(rank, f"{folder}/{name}", name)


def _optimizer_checkpoint(rank, folder, name):
    """Saves with DCP and loads into another model."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def make():
        net = model.make(name)
        model.shard(net)
        return net, lowp.AdamW(net.parameters(), lr=3e-3)

    def step(net, opt, number):
        loss = model.loss_of(net, number)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    net, opt = make()
    for number in range(2):
        step(net, opt, number)
    of_net, of_opt = get_state_dict(net, opt)
    dcp.save({"net": of_net, "opt": of_opt}, checkpoint_id=folder)
    expected = [step(net, opt, number) for number in range(2, 4)]
    torch.manual_seed(rank)
    net, opt = make()
    step(net, opt, 9)
    of_net, of_opt = get_state_dict(net, opt)
    state = {"net": of_net, "opt": of_opt}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])
    found = [step(net, opt, number) for number in range(2, 4)]
    assert found == expected, (found, expected)


def delayed_values(rank, world):
    """Masters and the optimizer's state in another model."""
    def make():
        torch.manual_seed(2)
        net = nn.Sequential(nn.Linear(64, 50), nn.Linear(50, 40))
        lowp.quantize_model_(net, "fp8-delayed")
        model.fully_shard(net)
        return net, lowp.AdamW(net.parameters(), lr=0.1)

    def step(net, opt, number):
        loss = (net(torch.randn(4, 64, generator=torch.Generator().manual_seed(number))) ** 2).mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.item()

    net, opt = make()
    for number in range(3):
        step(net, opt, number)
    of_net, of_opt = (copy.deepcopy(state) for state in (lowp.plain_state_dict(net), opt.state_dict()))
    expected = [step(net, opt, number) for number in range(3, 5)]
    found = []
    for used in (False, True):
        net, opt = make()
        for number in range(used):
            step(net, opt, number)
        net.load_state_dict(of_net)
        opt.load_state_dict(of_opt)
        found.append([step(net, opt, number) for number in range(3, 5)])
    return [expected] * 2, found


class Shards(unittest.TestCase):
    def test_delayed_scales_go_on_with_a_model_of_values(self):
        for expected, found in ranks.run(3, delayed_values):
            self.assertEqual(expected, found)

    def test_shards_are_rows_of_what_whole_tensors_become(self):
        names = ("mxfp8-2d", "mxfp8", "fp8-current", "nvfp4-2d", "fp8-rowwise", None)
        for world in (2, 3):
            with self.subTest(world=world):
                for counts in ranks.run(world, shards_and_whole, names):
                    self.assertEqual(counts, {name: 8 if name else 0 for name in names})

    def test_distributed_checkpoints_go_on_to_the_bit(self):
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            ranks.run(2, optimizer_checkpoint, folder, ("mxfp8-2d", "fp8-current", "fp8-delayed"))


if __name__ == "__main__":
    unittest.main()
