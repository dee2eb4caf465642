"""Masters in bfloat16: the bits of their definition, and codes that are those of the rounded master wherever values come from."""

import copy
import io
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowp
import ranks
import test_moments

SEED, BF16 = test_moments.SEED, torch.bfloat16

RULES = dict(test_moments.RULES, muon=(lambda params, **options: lowp.Muon(params, lr=1e-2, **options), ("momentum_buffer",)))


def recipes():
    return [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


def rounded(values, words):
    """What a step stores of the values of a master (docs/numerics.md 23.2)."""
    return (values.view(torch.int32).long() + (words >> 16).view(values.shape) >> 16 << 16).int().view(torch.float32).bfloat16()


def weight(name, seed=0, **options):
    torch.manual_seed(seed)
    return nn.Parameter(lowp.quantize(torch.randn(64, 64), name, keep_master=True, **options))


class Masters(unittest.TestCase):
    def check(self, weight, name, of=None):
        """The codes are those of the master, and the master is ``of``."""
        self.assertEqual(weight.master.dtype, BF16)
        self.assertTrue(torch.equal(weight.detach(), lowp.quantize(weight.master, name)), name)
        if of is not None:
            self.assertTrue(torch.equal(weight.master, of.bfloat16()), name)

    def test_a_step_rounds_what_a_step_in_float32_makes(self):
        for rule, (make, _) in RULES.items():
            own = [weight("mxfp8-2d", seed, master_dtype=BF16) for seed in range(2)]
            opt = make(own, seed=SEED)
            for step in range(1, 4):
                wide = [nn.Parameter(lowp.quantize(of.master.float(), "mxfp8-2d", keep_master=True)) for of in own]
                other = make(wide)
                other.load_state_dict(opt.state_dict())
                for a, b in zip(own, wide):
                    a.grad = b.grad = torch.randn(a.shape)
                opt.step()
                other.step()
                for number, (a, b) in enumerate(zip(own, wide)):
                    with self.subTest(rule=rule, step=step, number=number):
                        self.check(a, "mxfp8-2d")
                        self.assertTrue(torch.equal(a.master, rounded(b.master, test_moments.words(number, step, a.numel()))))

    def test_codes_are_those_of_the_master(self):
        for name in recipes():
            torch.manual_seed(1)
            net = nn.Linear(64, 64)
            values, other = net.weight.detach().clone(), torch.randn(64, 64)
            lowp.quantize_model_(net, name, master_dtype=BF16)
            self.check(net.weight, name, values)
            with torch.no_grad():
                net.weight.copy_(other)
            self.check(net.weight, name, other)
            net.weight.quantize_(values)
            self.check(net.weight, name, values)
            net.load_state_dict({"weight": other, "bias": net.bias})
            self.check(net.weight, name, other)
            self.check(copy.deepcopy(net).weight, name, other)
            file = io.BytesIO()
            torch.save(net.state_dict(), file)
            file.seek(0)
            again = nn.Linear(64, 64)
            lowp.quantize_model_(again, name, master_dtype=BF16)
            again.load_state_dict(torch.load(file))
            self.check(again.weight, name, other)
            self.assertTrue(torch.equal(lowp.plain_state_dict(net)["weight"], other.bfloat16().float()))
            with torch.device("meta"):
                meta = nn.Linear(64, 64)
            lowp.quantize_model_(meta, name, master_dtype=BF16)
            meta.to_empty(device="cpu").load_state_dict({"weight": values, "bias": net.bias})
            self.check(meta.weight, name, values)

    def test_masters_of_another_dtype(self):
        for dtypes in ((torch.float32, BF16), (BF16, torch.float32)):
            saved, own = (nn.ParameterList([weight("mxfp8-2d", seed, master_dtype=dtype)]) for seed, dtype in enumerate(dtypes))
            saved_opt, opt = lowp.AdamW(saved.parameters()), lowp.AdamW(own.parameters())
            for of, steps in ((saved_opt, 2), (opt, 1)):
                for step in range(steps):
                    torch.manual_seed(step)
                    of.param_groups[0]["params"][0].grad = torch.randn(64, 64)
                    of.step()
            own.load_state_dict(saved.state_dict())
            opt.load_state_dict(saved_opt.state_dict())
            self.assertEqual(own[0].master.dtype, dtypes[1])
            self.assertTrue(torch.equal(own[0].master, saved[0].master.to(dtypes[1])))
            self.assertTrue(torch.equal(own[0], saved[0]))
            self.assertIs(opt.state[own[0]]["master"], own[0].master)

    def test_errors_have_the_remedy(self):
        with self.assertRaisesRegex(lowp.LowpError, "master_dtype=torch.float16; give torch.float32 or torch.bfloat16"):
            lowp.quantize_model_(nn.Linear(64, 64), "mxfp8", master_dtype=torch.float16)
        with self.assertRaisesRegex(lowp.LowpError, "without a master; add keep_master=True"):
            lowp.quantize(torch.zeros(64, 64), "mxfp8", master_dtype=BF16)
        net = nn.Sequential(nn.Linear(64, 64))
        lowp.quantize_model_(net, "mxfp8")
        with self.assertRaisesRegex(lowp.LowpError, "0.weight already has codes with a master in torch.float32, not in torch.bfloat16"):
            lowp.quantize_model_(net, "mxfp8", master_dtype=BF16)
        with self.assertRaisesRegex(lowp.LowpError, r"capturable=True with masters in torch.bfloat16 \(master_dtype=\)"):
            lowp.AdamW([weight("mxfp8", master_dtype=BF16)], capturable=True)


def loaded(rank, world):
    """Values and codes in shards, and those of rank 0 in replicas."""
    for name in ("fp8-current", "mxfp8-2d", "nvfp4-2d"):
        torch.manual_seed(2)
        values = torch.randn(64, 64)
        for way in ("values", "values of rank 0", "codes", "codes of rank 0", "written"):
            net = nn.Sequential(nn.Linear(64, 64, bias=False))
            lowp.quantize_model_(net, name, master_dtype=BF16)
            fully_shard(net)
            if way == "written":
                with torch.no_grad():
                    net[0].weight.to_local().copy_(values[32 * rank : 32 * rank + 32])
                lowp.AdamW(net.parameters())
            else:
                # The codes of a file may have masters in float32.
                state = {"0.weight": lowp.quantize(values.bfloat16().float(), name, keep_master=True) if way.startswith("codes") else values}
                from_rank_0 = way.endswith("rank 0")
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
                set_model_state_dict(net, state if rank == 0 or not from_rank_0 else {}, options=options)
            local = net[0].weight.to_local()
            assert torch.equal(local.master, values.bfloat16()[32 * rank : 32 * rank + 32]), (name, way)
            whole = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
            assert rank or torch.equal(whole["0.weight"], lowp.quantize(values.bfloat16(), name)), (name, way)
        torch.manual_seed(rank)
        net = nn.Linear(64, 64)
        lowp.quantize_model_(net, name, master_dtype=BF16)
        net = DistributedDataParallel(net).module
        assert net.weight.master.dtype == BF16
        assert torch.equal(net.weight.detach(), lowp.quantize(net.weight.master, name)), name
        sums = net.weight.master.float().sum()
        dist.all_reduce(sums)
        assert sums == world * net.weight.master.float().sum(), name
    return True


def thawed(rank, world):
    """Steps of each weight where one was frozen on one rank alone, and then on none."""
    net = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    lowp.quantize_model_(net, "mxfp8-2d", master_dtype=BF16)
    fully_shard(net)
    net[0].weight.requires_grad_(rank == 0)
    opt = lowp.AdamW(net.parameters(), moments_dtype=test_moments.FP8)
    for layers in (net[1:], net):
        for layer in layers:
            layer.weight.requires_grad_(True).grad = torch.ones_like(layer.weight)
        opt.step()
    return [int(opt.state_dict()["state"][number]["step"]) for number in range(2)]


class Ranks(unittest.TestCase):
    def test_what_was_frozen_on_one_rank_is_trained_later(self):
        self.assertEqual(ranks.run(2, thawed), [[1, 2]] * 2)

    def test_what_is_loaded_is_rounded(self):
        self.assertTrue(all(ranks.run(2, loaded)))


if __name__ == "__main__":
    unittest.main()
