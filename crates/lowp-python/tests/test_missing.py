"""Steps in which parameters have no gradient: experts that no token reached, frozen and thawed layers, one of several losses."""

import copy
import io
import time
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import lowp
import ranks

#: Which of three parameters have a gradient in each step.
SETS = ((0, 1, 2), (0,), (1, 2), (0,), (), (1,), (0, 1, 2))


def weights(name, seed=0):
    """Three matrices, the last one of which is not quantized."""
    torch.manual_seed(seed)
    values = [torch.randn(64, 64) for _ in range(3)]
    last = values[2].bfloat16() if name else values[2]
    return [nn.Parameter(lowp.quantize(value, name, keep_master=True) if name else value) for value in values[:2]] + [nn.Parameter(last)]


def give(params, numbers, step):
    """Gradients for some parameters, and none for the others."""
    for number, param in enumerate(params):
        torch.manual_seed(10 * step + number)
        grad = torch.randn(64, 64).to(param.dtype)
        param.grad = grad if number in numbers else None


def state(opt, param):
    """Everything that is known of a parameter, without the steps of the optimizer."""
    opt.state_dict()
    found = {key: value.clone() for key, value in opt.state[param].items() if key not in ("skipped", "applied")}
    buffers = param.buffers if isinstance(param, lowp.Tensor) else {"values": param.detach()}
    return {**found, **{key: value.clone() for key, value in buffers.items()}}


class Missing(unittest.TestCase):
    def equal(self, a, b, what):
        self.assertEqual(a.keys(), b.keys(), what)
        for key in a:
            self.assertTrue(torch.equal(a[key].nan_to_num(), b[key].nan_to_num()), (what, key))

    def test_plain_parameters_are_updated_as_by_torch(self):
        own = weights(None)
        other = [nn.Parameter(param.detach().clone()) for param in own]
        mine = lowp.AdamW(own, lr=3e-2)
        theirs = torch.optim.AdamW(other, lr=3e-2, weight_decay=1e-2)
        for step, numbers in enumerate(SETS * 2):
            for params, opt in ((own, mine), (other, theirs)):
                give(params, numbers, step)
                opt.step()
            for a, b in zip(own, other):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for a, b in zip(own, other):
            self.assertEqual(state(mine, a)["step"], theirs.state[b]["step"])

    def test_each_parameter_is_what_an_optimizer_of_its_own_makes_of_it(self):
        for name in lowp.recipes():
            if not lowp.Recipe(name).is_low_precision:
                continue
            params, others = weights(name), weights(name)
            opt = lowp.AdamW(params, lr=1e-2, max_norm=1e9)
            alone = [lowp.AdamW([param], lr=1e-2) for param in others]
            for step, numbers in enumerate(SETS):
                give(params, numbers, step)
                give(others, numbers, step)
                before = [state(opt, param) for param in params] if step else None
                opt.step()
                for number in numbers:
                    alone[number].step()
                grads = [params[number].grad.float() for number in numbers]
                norm = torch.stack([grad.norm() for grad in grads]).norm().item() if grads else 0.0
                self.assertAlmostEqual(opt.last_step()["grad_norm"], norm, places=3)
                for number, (param, of) in enumerate(zip(params, alone)):
                    with self.subTest(name=name, step=step, number=number):
                        self.equal(state(opt, param), state(of, others[number]), "alone")
                        if before and number not in numbers:
                            self.equal(state(opt, param), before[number], "before")

    def test_a_norm_of_those_that_are_there_clips(self):
        params, others = weights("mxfp8"), weights("mxfp8")
        opt = lowp.AdamW(params, lr=1e-2, max_norm=0.5)
        give(params, (0, 2), 0)
        give(others, (0, 2), 0)
        opt.step()
        report = opt.last_step()
        self.assertLess(report["clip"], 0.02)
        other = lowp.AdamW([others[0], others[2]], lr=1e-2, max_norm=0.5)
        other.step()
        self.assertEqual(report, other.last_step())
        self.equal(state(opt, params[0]), state(other, others[0]), "clipped")

    def test_what_is_frozen_first_has_no_state_until_it_is_thawed(self):
        for name in ("mxfp8-2d", "fp8-current", "fp8-delayed", "nvfp4-2d"):
            params, others = weights(name), weights(name)
            for frozen in (params[1], params[2]):
                frozen.requires_grad_(False)
            opt = lowp.AdamW(params, lr=1e-2)
            alone = [lowp.AdamW([param], lr=1e-2) for param in others]
            for step, numbers in enumerate(((0,), (0,), (0, 1), (1, 2), (2,), (0, 1, 2))):
                for number in numbers:
                    params[number].requires_grad_(True)
                give(params, numbers, step)
                give(others, numbers, step)
                opt.step()
                # A delayed scale begins with the values of the first step.
                known = {number for of in ((0,), (0,), (0, 1), (1, 2), (2,), (0, 1, 2))[: step + 1] for number in of}
                known |= {1} if name == "fp8-delayed" else set()
                self.assertEqual({number for number, param in enumerate(params) if param in opt.state}, known)
                for number in numbers:
                    alone[number].step()
                for number in range(3):
                    if params[number] in opt.state and others[number] in alone[number].state:
                        with self.subTest(name=name, step=step, number=number):
                            self.equal(state(opt, params[number]), state(alone[number], others[number]), "alone")

    def test_frozen_parameters_of_any_kind_stay_out(self):
        net = nn.Linear(8, 8)
        half = nn.Parameter(torch.zeros(8, 8, dtype=torch.float16), requires_grad=False)
        number = nn.Parameter(torch.zeros(8, dtype=torch.int8), requires_grad=False)
        scalar = nn.Parameter(torch.zeros(()), requires_grad=False)
        opt = lowp.AdamW([half, *net.parameters(), number, scalar], lr=1e-2)
        for step in range(2):
            net(torch.ones(2, 8)).sum().backward()
            opt.step()
        scalar.requires_grad_(True).sum().backward()
        opt.step()
        self.assertLess(scalar.item(), 0)
        self.assertEqual([len(opt.state[param]) > 0 for param in (half, number) if param in opt.state], [])
        half.grad = torch.zeros_like(half)
        with self.assertRaisesRegex(lowp.LowpError, r"parameter 0 of shape \(8, 8\) was frozen in the first step.*make a new optimizer"):
            opt.step()

    def test_writes_of_what_has_no_gradient(self):
        """Neither followed as writes of a step, nor counted for autograd as such."""
        params = weights("mxfp8-2d")
        opt = lowp.AdamW(params, lr=1e-2)
        for step in range(4):
            give(params, (0,), step)
            opt.step()
        loss = (params[2] * params[2]).sum()
        other = params[1].float().square().sum()
        master = opt.state[params[2]]["master"].clone()
        give(params, (0,), 4)
        opt.step()
        loss.backward()
        other.backward()
        self.assertTrue(torch.equal(opt.state[params[2]]["master"], master))
        with torch.no_grad():
            params[2].fill_(3.0)
        give(params, (0,), 5)
        opt.step()
        self.assertTrue(torch.equal(opt.state[params[2]]["master"], torch.full((64, 64), 3.0)))

    def test_states_go_on_to_the_bit(self):
        for name in ("mxfp8-2d", "fp8-delayed", None):
            params = weights(name)
            opt = lowp.AdamW(params, lr=1e-2, skip_nonfinite=True)
            for step, numbers in enumerate(SETS[:4]):
                give(params, numbers, step)
                if step == 3:
                    params[0].grad[0, 0] = torch.nan
                opt.step()
            file = io.BytesIO()
            torch.save({"params": params, "opt": opt.state_dict()}, file)
            file.seek(0)
            saved = torch.load(file)
            self.assertEqual([int(of["step"]) for of in saved["opt"]["state"].values()], [2, 2, 2])
            others = saved["params"]
            other = lowp.AdamW(others, lr=1e-2, skip_nonfinite=True)
            other.load_state_dict(saved["opt"])
            late = weights(name, 1)
            stepped = lowp.AdamW(late, lr=1e-2, skip_nonfinite=True)
            give(late, (0, 1), 9)
            stepped.step()
            with torch.no_grad():
                for a, b in zip(late, params):
                    a.copy_(b) if name is None or a is late[2] else a.quantize_(b.master)
            stepped.load_state_dict(saved["opt"])
            for step, numbers in enumerate(SETS[1:]):
                for of, by in ((params, opt), (others, other), (late, stepped)):
                    give(of, numbers, step)
                    by.step()
                for number in range(3):
                    expected = state(opt, params[number])
                    self.equal(state(other, others[number]), expected, (name, step, number))
                    self.equal(state(stepped, late[number]), expected, (name, step, number, "stepped"))
            self.assertEqual(other.last_step(), opt.last_step())

    def test_parameters_that_a_state_does_not_have_begin_anew(self):
        params = weights("mxfp8-2d")
        opt = lowp.AdamW(params, lr=1e-2)
        give(params, (0, 1, 2), 0)
        opt.step()
        saved = copy.deepcopy(opt.state_dict())
        del saved["state"][1]
        opt.load_state_dict(saved)
        self.assertEqual([int(state(opt, param)["step"]) for param in params], [1, 0, 1])
        self.assertEqual(state(opt, params[1])["exp_avg"].abs().sum(), 0)

    def test_a_step_without_any_gradient(self):
        params = weights("mxfp8-2d")
        opt = lowp.AdamW(params, lr=1e-2, max_norm=1.0)
        before = [param.detach().dequantize() if isinstance(param, lowp.Tensor) else param.detach().clone() for param in params]
        opt.step()
        self.assertEqual(opt.last_step()["grad_norm"], 0.0)
        for param, value in zip(params, before):
            self.assertTrue(torch.equal(param.detach().dequantize() if isinstance(param, lowp.Tensor) else param, value))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x, numbers):
        x = self.first(x)
        return sum(self.experts[number](x).square().mean() for number in numbers)


def experts(name, shard=True):
    torch.manual_seed(0)
    net = Experts()
    lowp.quantize_model_(net, name)
    if shard:
        fully_shard(net)
    return net


def train(net, opt, sets):
    """The same on every rank, so that means of gradients are those of one process."""
    for step, numbers in enumerate(sets):
        torch.manual_seed(step)
        net(torch.randn(8, 64), numbers).backward()
        opt.step()
        opt.zero_grad()
    state = get_optimizer_state_dict(net, opt, options=StateDictOptions(full_state_dict=True))["state"]
    return {name: {key: torch.as_tensor(value).clone() for key, value in of.items()} for name, of in state.items()}


EXPERTS = ((0, 1), (0,), (2,), (0,), (0, 1, 2), (1,))


def alternating(rank, world, name):
    """Experts that alternate, with another one frozen until the third step."""
    net = experts(name, shard=world > 1)
    net.experts[2].requires_grad_(False)
    opt = lowp.AdamW(net.parameters(), lr=1e-2, max_norm=0.1)
    first = train(net, opt, EXPERTS[:2])
    net.experts[2].requires_grad_(True)
    found = train(net, opt, EXPERTS[2:])
    # A state goes into another optimizer, and both go on alike.
    other_net = experts(name, shard=world > 1)
    other = lowp.AdamW(other_net.parameters(), lr=1e-2, max_norm=0.1)
    train(other_net, other, EXPERTS[:1])
    state = get_optimizer_state_dict(net, opt)
    with torch.no_grad():
        other_net.load_state_dict(net.state_dict())
    set_optimizer_state_dict(other_net, other, state)
    a, b = train(net, opt, EXPERTS[:3]), train(other_net, other, EXPERTS[:3])
    alike = all(torch.equal(a[name][key].nan_to_num(), b[name][key].nan_to_num()) for name in a for key in a[name])
    return first, found, alike


def disagreeing(rank, world, name):
    """A parameter has a gradient on one rank: in the first step, in a later one, and where it is frozen on the other."""
    net, found = experts(name), []
    opt = lowp.AdamW(net.parameters(), lr=1e-2)

    def step(break_):
        net(torch.ones(4, 64), (0, 1)).backward()
        break_()
        start = time.monotonic()
        try:
            opt.step()
            error = "no error"
        except lowp.LowpError as raised:
            error = str(raised)
        opt.zero_grad()
        found.append((error, time.monotonic() - start))

    def drop(number):
        if rank == 1:
            net.experts[number].weight.grad = net.experts[number].bias.grad = None

    step(lambda: drop(1))
    step(lambda: None)
    step(lambda: drop(0))
    if rank == 0:
        net.experts[2].requires_grad_(False)
    step(lambda: None)
    return found, [int(of["step"]) for of in opt.state_dict()["state"].values()]


def frozen_on_one(rank, world, names):
    """Ranks that froze other parameters before the first step plan the same collectives."""
    found = []
    for name in names:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        lowp.quantize_model_(net, name)
        fully_shard(net)
        net[rank].requires_grad_(False)
        opt = lowp.AdamW(net.parameters(), lr=1e-2)
        for param in net[1 - rank].parameters():
            param.grad = torch.zeros_like(param)
        try:
            opt.step()
            found.append("no error")
        except lowp.LowpError as raised:
            found.append(str(raised))
        for param in net.parameters():
            param.grad = dist.tensor.DTensor.from_local(
                torch.ones(param.to_local().shape), param.device_mesh, param.placements, run_check=False
            )
        opt.step()
        found.append(opt.last_step()["steps"])
    return found


class Ranks(unittest.TestCase):
    def test_experts_that_alternate_are_those_of_one_process(self):
        for name in ("fp8-current", "fp8-delayed"):
            (one,) = ranks.run(1, alternating, name)
            for found in ranks.run(2, alternating, name):
                self.assertTrue(found[2], name)
                for of_one, of_two in zip(one[:2], found[:2]):
                    self.assertEqual(of_one.keys(), of_two.keys())
                    for param in of_one:
                        for key in of_one[param]:
                            a, b = of_one[param][key].nan_to_num(), of_two[param][key].nan_to_num()
                            self.assertTrue(torch.equal(a, b), (name, param, key))

    def test_ranks_that_disagree_all_raise(self):
        for found, counts in ranks.run(2, disagreeing, "mxfp8-2d"):
            errors = [error for error, _ in found]
            self.assertLess(max(seconds for _, seconds in found), 20)
            for error, number in ((errors[0], 1), (errors[2], 0)):
                self.assertRegex(
                    error, rf"experts.{number}.weight\)' has a gradient on ranks \[0\] and none on ranks \[1\] \(and 1 more\); .*0 \* param.sum"
                )
            self.assertEqual([errors[1], errors[3]], ["no error"] * 2)
            self.assertEqual(counts[:6], [2] * 6)

    def test_ranks_that_froze_others(self):
        names = [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]
        for found in ranks.run(2, frozen_on_one, names):
            for name, error, steps in zip(names, found[::2], found[1::2]):
                with self.subTest(name=name):
                    self.assertRegex(error, r"'0 \(weight\)' has a gradient on ranks \[1\] and none on ranks \[0\]")
                    self.assertEqual(steps, 1)


class Delayed(unittest.TestCase):
    def test_a_new_optimizer_leaves_codes_without_a_gradient(self):
        torch.manual_seed(0)
        net = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(2))
        lowp.quantize_model_(net, "fp8-delayed")
        opt = lowp.AdamW(net.parameters(), lr=1e-1)
        for _ in range(3):
            net[1](net[0](torch.randn(4, 64))).square().mean().backward()
            opt.step()
            opt.zero_grad()
        for frozen in (False, True):
            net[1].requires_grad_(not frozen)
            before, other = net[1].weight.detach().clone(), lowp.AdamW(net.parameters(), lr=1e-1)
            net[0](torch.randn(4, 64)).square().mean().backward()
            other.step()
            net.zero_grad()
            self.assertTrue(torch.equal(before, net[1].weight.detach()), frozen)


if __name__ == "__main__":
    unittest.main()
