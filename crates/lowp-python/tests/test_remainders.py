"""Masters of bfloat16 parameters as 16 bits beside them: the values of masters in float32 after every step."""

import copy
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

import lowp
import ranks
from lowp import _remainders

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn

RULES = {
    "adamw": lambda params, **options: lowp.AdamW(params, lr=1e-2, **options),
    "adamw in fp8": lambda params, **options: lowp.AdamW(params, lr=1e-2, moments_dtype=FP8, **options),
    "lion": lambda params, **options: lowp.Lion(params, lr=1e-2, moments_dtype=BF16, **options),
    "sgd": lambda params, **options: lowp.SGD(params, lr=1e-2, **options),
}


def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(48, 64), nn.Linear(64, 96), nn.LayerNorm(96), nn.Linear(96, 40)).bfloat16()


def give_grads(net, step):
    """Gradients of a step: of this rank's rows, those of the whole."""
    for number, param in enumerate(net.parameters()):
        torch.manual_seed(100 * step + number)
        grad = torch.randn(param.shape).to(param.dtype)
        if hasattr(param, "device_mesh"):
            grad = torch.distributed.tensor.distribute_tensor(grad, param.device_mesh, param.placements)
        param.grad = grad


def steps(net, opt, numbers):
    for step in numbers:
        give_grads(net, step)
        opt.step()


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def masters(net, opt):
    """The masters, in float32."""
    found = []
    for param in net.parameters():
        state = opt.state[param]
        found.append(whole(state["master"]) if "master" in state else _remainders.join(whole(param.detach()), whole(state["remainder"])))
    return found


def same(found, expected):
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(found, expected, strict=True))


class Remainders(unittest.TestCase):
    def test_halves_are_the_value(self):
        bits = torch.arange(-(1 << 31), 1 << 31, 4099).to(torch.int32)
        ties = (torch.arange(0, 1 << 16, 7) << 16 | 0x8000).to(torch.int32)
        values = torch.cat([bits, ties]).view(torch.float32)
        values = values[~values.isnan()]
        parameter, remainder = _remainders.split(values)
        self.assertTrue(same([_remainders.join(parameter, remainder)], [values]))
        even = values.bfloat16()
        ties = values.view(torch.int32) & 0xFFFF == 0x8000
        self.assertTrue(torch.equal(parameter[~ties], even[~ties]))
        self.assertTrue(bool((parameter[ties].abs() >= even[ties].abs()).all()))
        parameter, remainder = _remainders.split(torch.tensor([torch.nan]))
        self.assertTrue(bool(parameter.isnan()) and not remainder.any())

    def test_a_step_leaves_the_masters_in_float32(self):
        for rule, make in RULES.items():
            wide, narrow = network(), network()
            opts = make(wide.parameters()), make(narrow.parameters(), remainders=True)
            for step in range(1, 5):
                for net, opt in zip((wide, narrow), opts):
                    steps(net, opt, [step])
                expected = masters(wide, opts[0])
                with self.subTest(rule=rule, step=step):
                    self.assertTrue(same(masters(narrow, opts[1]), expected))
                    for param, master in zip(narrow.parameters(), expected):
                        self.assertTrue(torch.equal(param, _remainders.split(master)[0]))
            states = [opts[1].state[param] for param in narrow.parameters()]
            self.assertTrue(all("master" not in state for state in states))
        sizes = [(state["remainder"].nbytes, param.nbytes) for state, param in zip(states, narrow.parameters())]
        self.assertTrue(all(remainder == parameter for remainder, parameter in sizes))

    def test_float32_parameters_and_weights_have_no_remainders(self):
        net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        lowp.quantize_model_(net[1], "mxfp8-2d")
        opt = lowp.AdamW(net.parameters(), remainders=True)
        steps(net, opt, [1])
        self.assertFalse(any("remainder" in opt.state[param] for param in net.parameters()))

    def test_a_written_parameter_is_what_its_master_rounds_to(self):
        net = network()
        opt = RULES["adamw"](net.parameters(), remainders=True)
        steps(net, opt, [1, 2])
        with torch.no_grad():
            for param in net.parameters():
                param.mul_(0.75).add_(0.01)
                param.view(-1)[::3] = 0
                param.view(-1)[1::3] = -0.0
        for param, master in zip(net.parameters(), masters(net, opt)):
            self.assertTrue(torch.equal(_remainders.split(master)[0], param))
        steps(net, opt, [3])
        self.assertTrue(all(bool(param.isfinite().all()) for param in net.parameters()))

    def test_a_state_loads_into_either(self):
        for saved, loaded in ((False, True), (True, False), (True, True)):
            old, new = network(), network()
            opt = RULES["adamw"](old.parameters(), remainders=saved)
            steps(old, opt, [1, 2])
            other = RULES["adamw"](new.parameters(), remainders=loaded)
            new.load_state_dict(old.state_dict())
            other.load_state_dict(copy.deepcopy(opt.state_dict()))
            with self.subTest(saved=saved, loaded=loaded):
                self.assertTrue(same(masters(new, other), masters(old, opt)))
                for net, of in ((old, opt), (new, other)):
                    steps(net, of, [3])
                self.assertTrue(same(masters(new, other), masters(old, opt)))

    def test_a_remainder_needs_its_parameter(self):
        net = network()
        opt = RULES["adamw"](net.parameters(), remainders=True)
        steps(net, opt, [1])
        wide = network().float()
        lowp.quantize_model_(wide, "mxfp8-2d")
        other = RULES["adamw"]([param for param in wide.parameters() if isinstance(param, lowp.Tensor)])
        state = opt.state_dict()
        numbers = [1, 5]
        state = {"state": {new: state["state"][old] for new, old in enumerate(numbers)}, "param_groups": [{**state["param_groups"][0], "params": [0, 1]}]}
        with self.assertRaisesRegex(lowp.LowpError, "the remainder of a master of a bfloat16 parameter"):
            other.load_state_dict(state)


def sharded(rank, world, folder):
    """Masters after four steps of rows, of which the last two follow a checkpoint."""
    found = []
    for resumed in (False, True):
        net = network()
        fully_shard(net)
        opt = RULES["adamw"](net.parameters(), remainders=True)
        if not resumed:
            steps(net, opt, [1, 2])
            dcp.save({"net": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, opt)}, checkpoint_id=folder)
        else:
            state = {"net": get_model_state_dict(net), "opt": get_optimizer_state_dict(net, opt)}
            dcp.load(state, checkpoint_id=folder)
            set_model_state_dict(net, state["net"])
            set_optimizer_state_dict(net, opt, state["opt"])
        steps(net, opt, [3, 4])
        found.append([master.numpy() for master in masters(net, opt)])
        dist.barrier()
    return found


class Sharded(unittest.TestCase):
    def test_rows_are_those_of_the_whole(self):
        net = network()
        opt = RULES["adamw"](net.parameters())
        steps(net, opt, [1, 2, 3, 4])
        expected = masters(net, opt)
        with tempfile.TemporaryDirectory() as folder:
            for results in ranks.run(2, sharded, folder):
                for found in results:
                    self.assertTrue(same([torch.from_numpy(master) for master in found], expected))


if __name__ == "__main__":
    unittest.main()
