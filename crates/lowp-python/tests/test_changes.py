"""What programs change between steps of an optimizer: values of parameters, the stores of weights, groups, and loaded states."""

import copy
import unittest

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import lowp
import ranks


def give_grads(params, value=1.0):
    for param in params:
        param.grad = torch.full_like(param, value) if not isinstance(param, lowp.Tensor) else torch.full(param.shape, value)


def written_shards(rank, world):
    """Plain parameters in bfloat16 and their masters after values were written to the shards, and whether steps alone count as writes."""
    torch.manual_seed(0)
    net = nn.Linear(8, 7).to(torch.bfloat16)
    fully_shard(net)
    opt = lowp.AdamW(net.parameters(), lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        give_grads(net.parameters())
        opt.step()
    opt.param_groups[0]["lr"] = 0.0

    def step():
        give_grads(net.parameters())
        opt.step()
        return [(param.full_tensor(), opt.state[param]["master"].full_tensor()) for param in net.parameters()]

    def unchanged():
        counted, kept = step(), step()
        return all(torch.equal(a, b) for pair in zip(counted, kept) for a, b in zip(*pair))

    def copied():
        with torch.no_grad():
            net.weight.copy_(torch.full_like(net.weight, 3.0))
            net.bias.fill_(5.0)

    def loaded():
        state = net.state_dict()
        net.load_state_dict({key: torch.full_like(value, 7.0) for key, value in state.items()})

    def of_rows():
        with torch.no_grad():
            for param in net.parameters():
                param.to_local().fill_(9.0)

    found = []
    for write in (copied, loaded, of_rows):
        same = unchanged()
        write()
        values = step()
        found.append((same, [[sorted({*of.flatten().tolist()}) for of in pair] for pair in values]))
    # Steps alone are no writes of others.
    followed = []
    for _ in range(3):
        step()
        followed.append([version for *_, version in opt._built.copied])
    return found, followed[0] == followed[1] == followed[2]


class Values(unittest.TestCase):
    def test_values_that_are_written_to_shards_are_updated(self):
        expected = [(True, [[[a], [a]], [[b], [b]]]) for a, b in ((3.0, 5.0), (7.0, 7.0), (9.0, 9.0))]
        for world in (1, 2):
            with self.subTest(world=world):
                self.assertEqual(ranks.run(world, written_shards), [(expected, True)] * world)

    def test_values_that_are_written_to_remainders_by_data_are_updated(self):
        # What docs/pytorch.md says of .data: masters that are remainders follow it.
        for remainders in (True, False):
            param = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
            opt = lowp.SGD([param], lr=1.0, remainders=remainders)
            give_grads([param], 0.0)
            opt.step()
            if remainders:
                param.data.fill_(2.0)
            else:
                with torch.no_grad():
                    param.fill_(2.0)
            opt.step()
            self.assertEqual({*param.tolist()}, {2.0})


class Stores(unittest.TestCase):
    def test_a_store_that_was_replaced_keeps_its_values(self):
        for recipe in ("mxfp8-2d", "fp8-current"):
            with self.subTest(recipe=recipe):
                torch.manual_seed(0)
                first, second = torch.randn(64, 64), torch.randn(64, 64)
                weight = nn.Parameter(lowp.quantize(first, recipe, keep_master=True))
                other = lowp.quantize(second, recipe, keep_master=True)
                opt = lowp.SGD([weight], lr=0.0)
                give_grads([weight])
                opt.step()
                saved = weight.data
                for data, values in ((other, second), (saved, first), (other, second), (saved, first)):
                    weight.data = data
                    opt.step()
                    self.assertTrue(torch.equal(opt.state[weight]["master"], values))
                    self.assertTrue(torch.equal(weight.detach(), lowp.quantize(values, recipe)))
                # What nobody trains any more is as it was left.
                opt.param_groups[0]["lr"] = 1.0
                opt.step()
                self.assertTrue(torch.equal(weight.master, first - 1))
                self.assertTrue(torch.equal(other.master, second))


class Groups(unittest.TestCase):
    def optimizer(self):
        params = [nn.Parameter(torch.ones(4)) for _ in range(5)]
        opt = lowp.SGD([{"params": params[:3]}, {"params": params[3:], "lr": 0.1}], lr=1.0)
        give_grads(params)
        opt.step()
        return opt, params

    def test_groups_that_change_after_the_first_step_are_an_error(self):
        def append(groups):
            groups[1]["params"].append(nn.Parameter(torch.ones(4)))

        def replace(groups):
            groups[1]["params"][0] = nn.Parameter(torch.ones(4))

        def move(groups):
            groups[0]["params"].append(groups[1]["params"].pop())

        def another(groups):
            groups.append({**groups[0], "params": [nn.Parameter(torch.ones(4))]})

        cases = (
            ("the parameters of group 1 changed", append),
            ("the parameters of group 1 changed", replace),
            ("the parameters of group 0 changed", move),
            ("the parameters of group 0 changed", lambda groups: groups[0]["params"].pop(1)),
            ("the parameters of group 0 changed", lambda groups: groups.reverse()),
            ("group 1 was removed", lambda groups: groups.pop()),
            ("group 2 was added", another),
        )
        for message, change in cases:
            opt, params = self.optimizer()
            state = opt.state_dict()
            change(opt.param_groups)
            before = [param.detach().clone() for param in params]
            for call in (opt.step, lambda: opt.load_state_dict(state)):
                with self.subTest(message=message), self.assertRaisesRegex(lowp.LowpError, f"^{message} after the first step.*make a new optimizer"):
                    call()
            for param, values in zip(params, before):
                self.assertTrue(torch.equal(param, values))

    def test_groups_may_change_before_the_first_step(self):
        # accelerate gives an optimizer the shards of its parameters.
        first, second = (nn.Parameter(torch.ones(4)) for _ in range(2))
        opt = lowp.SGD([first], lr=1.0)
        opt.param_groups[0]["params"] = [second]
        give_grads([first, second])
        opt.step()
        opt.param_groups[0]["params"] = [second]
        opt.step()
        self.assertEqual((first.sum().item(), second.sum().item()), (4.0, -4.0))


class Hooks(unittest.TestCase):
    def test_hooks_of_loads_run_as_those_of_torch(self):
        def run(make):
            param, calls = nn.Parameter(torch.ones(4)), []
            opt = make([param])
            give_grads([param])
            opt.step()
            saved = copy.deepcopy(opt.state_dict())
            opt.step()

            def before(optimizer, state):
                calls.append(("before", optimizer is opt, state is saved, torch.is_grad_enabled()))
                state["param_groups"] = [{**state["param_groups"][0], "lr": 0.5}]

            def other(optimizer, state):
                calls.append(("other", state["param_groups"][0]["lr"]))
                return {**state, "param_groups": [{**state["param_groups"][0], "weight_decay": 0.25}]}

            def after(optimizer):
                calls.append(("after", optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["weight_decay"], torch.is_grad_enabled()))

            opt.register_load_state_dict_pre_hook(before)
            opt.register_load_state_dict_pre_hook(other)
            opt.register_load_state_dict_post_hook(after)
            opt.load_state_dict(saved)
            self.assertEqual(float(opt.state[param]["step"]), 1.0)
            return calls, saved["param_groups"][0]["lr"], saved["param_groups"][0]["weight_decay"]

        self.assertEqual(run(lambda params: lowp.AdamW(params, lr=0.1)), run(lambda params: torch.optim.AdamW(params, lr=0.1)))

    def test_a_hook_that_fails_leaves_a_state_that_was_not_loaded(self):
        param = nn.Parameter(torch.ones(4))
        opt = lowp.AdamW([param])
        give_grads([param])
        opt.step()
        saved = opt.state_dict()

        def fail(*_):
            raise ValueError("no such state")

        handle = opt.register_load_state_dict_pre_hook(fail)
        with self.assertRaisesRegex(ValueError, "no such state"):
            opt.load_state_dict(saved)
        with self.assertRaisesRegex(lowp.LowpError, "a state that was not loaded: no such state"):
            opt.step()
        handle.remove()
        opt.load_state_dict(saved)
        opt.step()
        self.assertEqual(opt.last_step()["steps"], 2)


if __name__ == "__main__":
    unittest.main()
