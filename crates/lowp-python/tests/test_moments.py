"""Moments in fp8, with masters in float32 and bfloat16: the bits of their definition, over ranks, in and out of state dictionaries and checkpoints."""

import copy
import io
import itertools
import tempfile
import unittest
import unittest.mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import lowp
import ranks
from lowp import _moments

FP8, SEED = torch.float8_e4m3fn, 7

RULES = {
    "adamw": (lambda params, **options: lowp.AdamW(params, lr=1e-2, **options), ("exp_avg", "exp_avg_sq")),
    "lion": (lambda params, **options: lowp.Lion(params, lr=1e-2, **options), ("exp_avg",)),
    "sgd": (lambda params, **options: lowp.SGD(params, lr=1e-2, momentum=0.9, **options), ("momentum_buffer",)),
}


def words(number, step, size):
    """The random words of the elements of a parameter (docs/numerics.md 23.1)."""
    low, stream = (1 << 32) - 1, ((1 << 63) + number + (step << 32)) % (1 << 64)
    block = torch.arange(-(-size // 4))
    c, key = [block & low, block >> 32, torch.full_like(block, stream & low), torch.full_like(block, stream >> 32)], [SEED & low, SEED >> 32]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(b >> 32) & low ^ c[1] ^ key[0], b & low, (a >> 32) & low ^ c[3] ^ key[1], a & low]
        key = [(key[0] + 0x9E3779B9) & low, (key[1] + 0xBB67AE85) & low]
    return torch.stack(c, 1).flatten()[:size]


def rounded(key, values, words):
    """The scales and the values of a state that a step stores (docs/numerics.md 23.2 and 23.3)."""
    dropped, largest, smallest = (19, 1.9375, 2.0**-14) if key == "exp_avg_sq" else (20, 448.0, 2.0**-6)
    bits = words & 0xFFFF if key == "exp_avg_sq" else words >> 16 ^ words & 0xFFFF
    size, shape = values.numel(), values.shape
    blocks = nn.functional.pad(values.flatten(), (0, -size % 32)).view(-1, 32)
    part, power = torch.frexp(blocks.abs().amax(1) * torch.tensor(1 / largest))
    power = torch.where(part > 0.5, power, power - 1).clamp(min=24 - 127)
    power = torch.where(part > 0, power, 24 - 127)
    scales = power.float().exp2()[:, None].expand(-1, 32).flatten()[:size]
    scaled = values.flatten() / scales
    below = scaled.abs() < smallest
    moved = (scaled.abs() + smallest * below).view(torch.int32).long() + (bits << (dropped - 16))
    found = (moved >> dropped << dropped).int().view(torch.float32) - smallest * below
    found = found.clamp(max=largest)
    if key == "exp_avg_sq":
        found = torch.where((found == 0) & (scaled != 0), 2.0**-18, found)
    return power + 127, (found.copysign(scaled) * scales).view(shape)


def decoded(opt, params, make):
    """The values of all states."""
    wide = make([nn.Parameter(param.detach().clone()) for param in params])
    wide.load_state_dict(opt.state_dict())
    return wide


def in_fp8(params, dtype=FP8):
    """A group whose moments are in fp8 whatever the shapes of its parameters are."""
    return [{"params": params, "moments_dtype": dtype}]


class Definition(unittest.TestCase):
    def test_a_step_rounds_what_a_step_of_values_makes(self):
        for name, (make, keys) in RULES.items():
            torch.manual_seed(1)
            params = [nn.Parameter(torch.randn(shape)) for shape in ((3, 43), (70,), (), (0, 4), (2, 3, 33))]
            params.append(nn.Parameter(lowp.quantize(torch.randn(32, 64), "mxfp8", keep_master=True)))
            opt = make(in_fp8(params), seed=SEED)
            for step in range(1, 4):
                wide = decoded(opt, params, make)
                own = wide.param_groups[0]["params"]
                for a, b in zip(params, own):
                    # Blocks of magnitudes far apart, and one of zeros.
                    a.grad = b.grad = torch.randn(a.shape) * torch.rand(a.shape).mul(20).exp2() * (torch.arange(a.numel()).view(a.shape) // 32 != 1)
                opt.step()
                wide.step()
                stored = decoded(opt, params, make)
                for number, (a, b, c) in enumerate(zip(params, own, stored.param_groups[0]["params"])):
                    with self.subTest(rule=name, step=step, shape=tuple(a.shape)):
                        self.assertTrue(torch.equal(a, b))
                        for key in keys:
                            values = wide.state[b][key]
                            scales, expected = rounded(key, values, words(number, step, a.numel()))
                            self.assertTrue(torch.equal(stored.state[c][key], expected), key)
                            of = opt.state[a][f"{key}_scales"].flatten()
                            self.assertTrue(torch.equal(of[: len(scales)].int(), scales.int()) and not of[len(scales) :].any())
                            self.assertEqual(opt.state[a][f"{key}_codes"].shape, a.shape)

    def test_bytes_of_a_state(self):
        for shape, scales in (((64, 96), (64, 3)), ((5, 48), (3, 3)), ((7, 33), (1, 33)), ((100,), (4, 1)), ((), (1, 1)), ((4, 3, 32), (4, 3))):
            param = nn.Parameter(torch.randn(shape))
            param.grad = torch.randn(shape)
            opt = lowp.AdamW(in_fp8([param]))
            opt.step()
            state = opt.state[param]
            self.assertEqual({key: (of.dtype, tuple(of.shape)) for key, of in state.items() if key.startswith("exp")}, {
                f"{key}_{part}": (torch.uint8, size) for key in ("exp_avg", "exp_avg_sq") for part, size in (("codes", shape), ("scales", scales))
            })

    def test_groups_have_moments_of_their_own(self):
        first, second = (nn.Parameter(torch.ones(40)) for _ in range(2))
        groups = [*in_fp8([first]), {"params": [second], "moments_dtype": torch.bfloat16}]
        opt = lowp.AdamW(groups)
        self.assertEqual(groups[0]["moments_dtype"], FP8)
        self.assertEqual([set(group) for group in opt.param_groups], [{"params", *opt.defaults}] * 2)
        for param in (first, second):
            param.grad = torch.ones(40)
        opt.step()
        self.assertIn("exp_avg_codes", opt.state[first])
        self.assertEqual(opt.state[second]["exp_avg"].dtype, torch.bfloat16)
        # A state that is loaded leaves them as they are.
        other = lowp.AdamW([*in_fp8([first]), *in_fp8([second])])
        other.load_state_dict(opt.state_dict())
        self.assertTrue(all("exp_avg_codes" in other.state[param] for param in (first, second)))
        # Groups that are edited keep theirs, and new ones have that of the optimizer.
        opt = lowp.AdamW([*in_fp8([nn.Parameter(torch.ones(40))]), {"params": [second]}, *in_fp8([first])])
        opt.param_groups.pop(0)
        opt.param_groups.append({**opt.param_groups[0], "params": [third := nn.Parameter(torch.ones(40))]})
        third.grad = torch.ones(40)
        opt.step()
        self.assertEqual(["exp_avg_codes" in opt.state[param] for param in (first, second, third)], [True, False, False])

    def test_fp8_by_default_is_of_matrices_with_whole_blocks(self):
        shapes = {(64, 96): True, (3, 4, 32): True, (5, 33): False, (64,): False, (): False}
        params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
        for param in params:
            param.grad = torch.ones_like(param)
        opt = lowp.AdamW(params, moments_dtype=FP8)
        opt.step()
        self.assertEqual(["exp_avg_codes" in opt.state[param] for param in params], list(shapes.values()))

    def test_many_groups_are_checked_once(self):
        params = [nn.Parameter(torch.ones(1, 32)) for _ in range(400)]
        with unittest.mock.patch("lowp._moments.check", wraps=_moments.check) as check:
            lowp.AdamW([{"params": [param], "moments_dtype": FP8} for param in params])
        self.assertEqual(check.call_count, len(params))

    def test_a_group_that_is_refused_is_not_added(self):
        first, second = (nn.Parameter(torch.ones(8, 32)) for _ in range(2))
        opt = lowp.AdamW([first])
        with self.assertRaisesRegex(lowp.LowpError, "torch.float16 of group 1; give"):
            opt.add_param_group({"params": [second], "moments_dtype": torch.float16})
        first.grad = torch.ones(8, 32)
        opt.step()
        self.assertEqual(len(opt.param_groups), 1)

    def test_what_was_frozen_has_moments_of_that_dtype(self):
        for dtype, master_dtype in itertools.product((torch.float32, torch.bfloat16, FP8), (None, torch.float32, torch.bfloat16)):
            net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
            if master_dtype is not None:
                lowp.quantize_model_(net, "mxfp8-2d", master_dtype=master_dtype)
            net.requires_grad_(False)
            net[0].requires_grad_(True)
            opt = lowp.AdamW(net.parameters(), moments_dtype=dtype)
            for layers in (net[:1], net):
                layers.requires_grad_(True)
                for param in layers.parameters():
                    param.grad = torch.ones_like(param)
                opt.step()
            self.assertEqual([int(state["step"]) for state in opt.state_dict()["state"].values()], [2, 2, 1, 1])

    def test_errors_have_the_numbers_and_the_remedy(self):
        param = [nn.Parameter(torch.ones(8, 8))]
        for make, message in (
            (lambda: lowp.AdamW(param, moments_dtype=torch.float16), "torch.float16; give torch.float32 or torch.bfloat16 or torch.float8_e4m3fn$"),
            (lambda: lowp.AdamW([{"params": param, "moments_dtype": torch.float16}]), "torch.float16 of group 0; give"),
            (lambda: lowp.AdamW(param, moments_dtype=FP8, capturable=True), "same random bits; leave one of the two out"),
            (lambda: lowp.Muon(param, moments_dtype=FP8), "moments_dtype=torch.float8_e4m3fn; give torch.float32$"),
            (lambda: lowp.AdamW(param, seed=-1), "seed=-1; give an integer from 0"),
            (lambda: lowp.AdamW(param, seed=True), "seed=True; give an integer from 0"),
        ):
            with self.assertRaisesRegex(lowp.LowpError, message):
                make()


class States(unittest.TestCase):
    def trained(self, dtype=FP8, seed=0, steps=range(3), device="cpu"):
        torch.manual_seed(seed)
        params = [nn.Parameter(torch.randn(5, 33).to(device)), nn.Parameter(torch.randn(70).to(device, torch.bfloat16))]
        opt = lowp.AdamW(in_fp8(params, dtype), lr=1e-2, seed=SEED, skip_nonfinite=True)
        self.step(opt, steps)
        return params, opt

    def step(self, opt, steps):
        for step in steps:
            for number, param in enumerate(opt.param_groups[0]["params"]):
                torch.manual_seed(2 * step + number)
                # Not every parameter has a gradient in every step, and one step is skipped: random bits follow the steps of the optimizer.
                param.grad = torch.randn(param.shape).to(param) * (torch.nan if step == 3 else 1) if step % 2 != number else None
            opt.step()

    def same(self, *opts):
        for a, b in zip(*(opt.state_dict()["state"].values() for opt in opts), strict=True):
            self.assertEqual(a.keys(), b.keys())
            for key in a:
                self.assertTrue(torch.equal(a[key], b[key]), key)

    def test_training_goes_on_to_the_bit(self):
        params, opt = self.trained(steps=range(5))
        file = io.BytesIO()
        torch.save({"params": params, "opt": opt.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file)
        others, other = self.trained(seed=1, steps=range(1))
        with torch.no_grad():
            for own, value in zip(others, saved["params"]):
                own.copy_(value)
        other.load_state_dict(saved["opt"])
        self.same(opt, other)
        for of in (opt, other):
            self.assertEqual([int(of.state_dict()["state"][0][key]) for key in ("step", "skipped", "applied")], [1, 1, 4])
            self.step(of, range(5, 9))
        self.same(opt, other)
        for a, b in zip(params, others):
            self.assertTrue(torch.equal(a, b))

    def test_a_state_of_another_dtype(self):
        _, codes = self.trained()
        for dtype in (torch.float32, torch.bfloat16):
            # Values have what codes say, and give those codes again.
            _, values = self.trained(dtype, steps=range(1))
            values.load_state_dict(codes.state_dict())
            _, again = self.trained(seed=2, steps=range(2))
            again.load_state_dict(values.state_dict())
            for a, b in zip(codes.state_dict()["state"].values(), again.state_dict()["state"].values()):
                for key in ("exp_avg_scales", "exp_avg_sq_scales"):
                    # The scale of a block may be less than the one that it was rounded by.
                    self.assertTrue((a[key] >= b[key]).all())
            _, third = self.trained(dtype, steps=range(2))
            third.load_state_dict(again.state_dict())
            self.same(values, third)
        # Values are rounded to nearest.
        _, values = self.trained(torch.float32)
        codes.load_state_dict(values.state_dict())
        _, near = self.trained(torch.float32, steps=range(1))
        near.load_state_dict(codes.state_dict())
        for a, b in zip(*(opt.state_dict()["state"].values() for opt in (values, near))):
            for key, share in (("exp_avg", 2**-4), ("exp_avg_sq", 2**-5)):
                large = a[key].abs() > a[key].abs().max() / 100
                self.assertTrue(((a[key] - b[key]).abs() <= a[key].abs() * share)[large].all())

    def test_states_that_cannot_be_taken(self):
        _, opt = self.trained()
        before = copy.deepcopy(opt.state_dict())
        for change, message in (
            (lambda state: state.pop("exp_avg_scales"), "has no exp_avg_scales"),
            (lambda state: state.update(exp_avg=torch.zeros(5, 33)), "has exp_avg and exp_avg_codes: a full state dictionary"),
            (lambda state: state.update(exp_avg_codes=torch.zeros(4, 33, dtype=torch.uint8)), r"exp_avg_codes has shape \(4, 33\) instead of \(5, 33\)"),
        ):
            bad = copy.deepcopy(before)
            change(bad["state"][0])
            with self.assertRaisesRegex(lowp.LowpError, message):
                opt.load_state_dict(bad)
            with self.assertRaisesRegex(lowp.LowpError, f"after a state that was not loaded: .*{message}"):
                opt.step()
        _, values = self.trained(torch.float32)
        for key, value, message in (("exp_avg_sq", -1.0, "exp_avg_sq .* has 1 values that are below zero"), ("exp_avg", torch.inf, "exp_avg .* has 1 values that are not finite")):
            bad = copy.deepcopy(values.state_dict())
            bad["state"][0][key][0, 0] = value
            with self.assertRaisesRegex(lowp.LowpError, message):
                opt.load_state_dict(bad)
        opt.load_state_dict(before)
        param = opt.param_groups[0]["params"][0]
        opt.state[param]["exp_avg_codes"] = opt.state[param]["exp_avg_codes"].clone()
        param.data = param.data.clone()
        param.grad = torch.ones_like(param)
        with self.assertRaisesRegex(lowp.LowpError, "not in one piece of memory"):
            opt.step()


class Net(nn.Module):
    """Codes whose rows are uneven, and plain parameters: rows that end within bytes of scales, a rank without rows, widths that are no multiple of 32."""

    def __init__(self, name, master_dtype):
        super().__init__()
        self.codes = nn.Linear(64, 129, bias=False)
        self.narrow, self.few = nn.Parameter(torch.randn(11, 48)), nn.Parameter(torch.randn(2, 64))
        self.odd, self.norm = nn.Parameter(torch.randn(192, 33)), nn.Parameter(torch.randn(192).bfloat16())
        self.some = nn.Parameter(torch.randn(7))
        lowp.quantize_model_(self.codes, name, master_dtype=master_dtype)


CASES = tuple(("fp8-current", make, torch.float32) for make in RULES)
CASES += tuple((name, "adamw", torch.bfloat16) for name in ("fp8-current", "fp8-delayed", "mxfp8-2d"))


def made(name, make, master_dtype, sharded, seed=1, mesh=None, dtype=FP8, device="cpu"):
    torch.manual_seed(seed)
    net = Net(name, master_dtype).to(device)
    if sharded:
        fully_shard(net, mesh=mesh)
    # Seven elements are cut within a block: they have moments in float32.
    groups = [*in_fp8([param for param in net.parameters() if param is not net.some], dtype), {"params": [net.some]}]
    return net, RULES[make][0](groups, moments_dtype=dtype, seed=SEED)


def step(net, opt, at):
    """A step of the same gradients on any number of ranks."""
    torch.manual_seed(at)
    for index, param in enumerate(net.parameters()):
        grad, mesh = torch.randn(param.shape).to(param.device, param.dtype), getattr(param, "device_mesh", None)
        if mesh is not None:
            grad = distribute_tensor(grad, mesh, param.placements, src_data_rank=None)
        param.grad = None if (at + index) % 4 == 0 else grad
    opt.step()


def found(net, opt):
    """Everything that a run goes on from, whole."""
    weights = [whole(param.detach()) for param in net.parameters()]
    states = [value for state in opt.state_dict()["state"].values() for value in state.values()]
    return [weight.dequantize().cpu() if isinstance(weight, lowp.Tensor) else weight.cpu() for weight in weights] + [whole(value).cpu() for value in states]


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def state_of(net, opt):
    of_net, of_opt = get_state_dict(net, opt)
    return {"net": of_net, "opt": of_opt}


def saves(rank, world, folder, sharded, shape=None, device="cpu"):
    """Runs of two steps, a checkpoint that is written while three steps more are taken, and those."""
    group = dist.new_group(backend="gloo") if folder is not None else None
    after, mesh = {}, None if shape is None else init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for case in CASES:
        net, opt = made(*case, sharded, mesh=mesh, device=device if device == "cpu" else torch.device(device, rank))
        for at in range(5):
            if at == 2 and folder is not None:
                saved = dcp.async_save(state_of(net, opt), checkpoint_id=f"{folder}/{case}", process_group=group)
            step(net, opt, at)
        if folder is not None:
            saved.result()
        after[case] = found(net, opt)
    return after


def resumes(rank, world, folder):
    """The last steps, from the checkpoint."""
    after = {}
    for case in CASES:
        net, opt = made(*case, True, seed=2)
        state = state_of(net, opt)
        dcp.load(state, checkpoint_id=f"{folder}/{case}")
        set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])
        for at in range(2, 5):
            step(net, opt, at)
        after[case] = found(net, opt)
    return after


def read_into_another_dtype(rank, world, folder):
    """What a checkpoint of other moments raises, where PyTorch would read bytes as values."""
    errors = []
    for dtypes in ((FP8, torch.float32), (torch.float32, FP8)):
        saved, own = (get_state_dict(*made(*CASES[0], True, dtype=dtype))[1] for dtype in dtypes)
        dcp.save({"opt": saved}, checkpoint_id=f"{folder}/{dtypes[0]}")
        try:
            dcp.load({"opt": own}, checkpoint_id=f"{folder}/{dtypes[0]}")
        except dcp.CheckpointException as error:
            errors.append(str(error))
    return errors


def sharded_later(rank, world):
    """The error of a step over shards that took the place of parameters."""
    net = nn.Linear(64, 129)
    opt = lowp.AdamW(in_fp8(net.parameters()))
    fully_shard(net)
    opt.param_groups[0]["params"] = list(net.parameters())
    for param in net.parameters():
        param.grad = torch.zeros_like(param)
    try:
        opt.step()
    except lowp.LowpError as error:
        return str(error)


def whole_states(rank, world):
    """Full state dictionaries, of which each rank takes its rows, or rank 0 sends them, and flat ones; and what a full one of another dtype raises."""
    for from_rank_0 in (True, False):
        net, opt = made(*CASES[-1], True)
        step(net, opt, 1)
        full = get_optimizer_state_dict(net, opt, options=StateDictOptions(full_state_dict=True, cpu_offload=from_rank_0))
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        other, again = made(*CASES[-1], True)
        set_optimizer_state_dict(other, again, full if rank == 0 or not from_rank_0 else {}, options=options)
        States().same(opt, again)
    other, again = made(*CASES[-1], True)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    set_optimizer_state_dict(other, again, get_optimizer_state_dict(net, opt, options=flat), options=flat)
    States().same(opt, again)
    net, opt = made(*CASES[-1], True, dtype=torch.float32)
    full = get_optimizer_state_dict(net, opt, options=StateDictOptions(full_state_dict=True))
    try:
        set_optimizer_state_dict(other, again, full, options=options)
    except lowp.LowpError as error:
        return str(error)


#: Dtypes of moments and masters: of a state, and of the optimizer that takes it.
OTHERS = tuple(itertools.permutations(((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (FP8, torch.float32)), 2))


def other_dtypes(rank, world, folder):
    """What comes of a state in an optimizer of other dtypes, by way: ``None`` where it is there, or the error of this rank."""

    def small(moments, masters, seed=1):
        torch.manual_seed(seed)
        net = nn.Linear(64, 64, bias=False)
        lowp.quantize_model_(net, "mxfp8-2d", master_dtype=masters)
        fully_shard(net)
        return net, lowp.AdamW(net.parameters(), moments_dtype=moments)

    found = {}
    for of, to in OTHERS:
        net, opt = small(*of)
        for at in (1, 2):
            step(net, opt, at)
        for way in ("dcp", "full", "broadcast", "flat"):
            options = StateDictOptions(full_state_dict=way in ("full", "broadcast"), broadcast_from_rank0=way == "broadcast", flatten_optimizer_state_dict=way == "flat")
            other, again = small(*to, seed=2)
            try:
                if way == "dcp":
                    dcp.save({"opt": get_optimizer_state_dict(net, opt)}, checkpoint_id=f"{folder}/{of} {to}")
                    state = {"opt": get_optimizer_state_dict(other, again)}
                    dcp.load(state, checkpoint_id=f"{folder}/{of} {to}")
                    state = state["opt"]
                else:
                    state = get_optimizer_state_dict(net, opt, options=options)
                set_optimizer_state_dict(other, again, state if way != "broadcast" or rank == 0 else {}, options=options)
            except (Exception, dcp.CheckpointException) as error:
                found[of, to, way] = str(error)
                continue
            found[of, to, way] = None
            for own, loaded in zip(*(opt.state_dict()["state"][0].items() for opt in (opt, again)), strict=True):
                assert own[0] == loaded[0] and torch.equal(whole(own[1]).to(loaded[1].dtype), whole(loaded[1])), (of, to, way, own[0])
    return found


def of_some_ranks(rank, world):
    """The errors of optimizers that ranks make with other options, in the constructor."""
    errors = []
    for options in ({"seed": rank}, {"moments_dtype": FP8 if rank else torch.float32}):
        net = nn.Linear(64, 64)
        fully_shard(net)
        try:
            lowp.AdamW(net.parameters(), **options)
        except lowp.LowpError as error:
            errors.append(str(error))
    return errors


def cut_within_blocks(rank, world):
    net = nn.Linear(64, 129)
    fully_shard(net)
    try:
        lowp.AdamW(net.parameters(), moments_dtype=FP8)
        lowp.AdamW(in_fp8(list(net.named_parameters())))
    except lowp.LowpError as error:
        return str(error)


class Ranks(unittest.TestCase):
    def same(self, results, expected, **what):
        for after in results:
            for case, values in after.items():
                with self.subTest(case=case, **what):
                    for a, b in zip(values, expected[case], strict=True):
                        self.assertTrue(torch.equal(a, b))

    def test_ranks_train_what_one_process_trains(self):
        expected = saves(0, 1, None, False)
        with tempfile.TemporaryDirectory() as folder:
            self.same(ranks.run(2, saves, folder, True), expected, world=2)
            for world in (1, 3):
                self.same(ranks.run(world, resumes, folder), expected, resumed=world)
        self.same(ranks.run(4, saves, None, True, (2, 2)), expected, world="2 replicas of 2")

    def test_full_state_dictionaries(self):
        for message in ranks.run(2, whole_states):
            self.assertIn("load it into one of its own moments_dtype", message)

    def test_checkpoints_are_not_read_as_another_dtype(self):
        with tempfile.TemporaryDirectory() as folder:
            for codes, values in ranks.run(2, read_into_another_dtype, folder):
                self.assertRegex(codes, "Missing key in checkpoint state_dict: opt.state.*exp_avg")
                self.assertRegex(values, "Missing key in checkpoint state_dict: opt.state.*exp_avg_codes")

    def test_states_of_other_dtypes_load_or_raise_on_every_rank(self):
        with tempfile.TemporaryDirectory() as folder:
            results = ranks.run(2, other_dtypes, folder)
        for case in results[0]:
            (of, _), (to, _), way = case
            for rank, found in enumerate(results):
                with self.subTest(case=case, rank=rank):
                    if (of is FP8) == (to is FP8):
                        self.assertIsNone(found[case])
                    else:
                        remedy = {"dcp": "Missing key in checkpoint", "flat": "exp_avg|keeps"}.get(way, "load it into one of its own moments_dtype")
                        self.assertRegex(found[case] or "nothing was raised", remedy)

    def test_ranks_have_the_same_seed_and_dtypes(self):
        for seeds, dtypes in ranks.run(2, of_some_ranks):
            self.assertRegex(seeds, "rank . has seed .; rank . has seed .; every rank must have the same")
            self.assertRegex(dtypes, "moments in torch.float8_e4m3fn")

    def test_ranks_do_not_cut_blocks(self):
        for message in ranks.run(2, cut_within_blocks) + ranks.run(2, sharded_later):
            self.assertIn("parameter 1 (bias) of shape (129,) has 65 elements on each rank", message)
            self.assertIn("blocks of 32, which ranks do not cut; put it and others like it (1 of 2 parameters of the group)", message)


if __name__ == "__main__":
    unittest.main()
