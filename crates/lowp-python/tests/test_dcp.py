"""torch.distributed.checkpoint of sharded codes and their optimizer: what is written, and runs that go on from it on other ranks, or while it is written."""

import os
import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import lowp
import ranks

#: Recipes, with rows that fit 1, 2 and 3 ranks, and optimizers.
CASES = tuple((name, rows, lowp.AdamW) for name, rows in (("mxfp8", 192), ("fp8-current", 129), ("fp8-delayed", 129), ("nvfp4-2d", 96), (None, 129)))
CASES += (("mxfp8", 192, lowp.Muon), ("fp8-current", 129, lowp.Muon), (None, 129, lowp.Muon))


def made(name, rows, seed=1, make=lowp.AdamW):
    torch.manual_seed(seed)
    # Muon takes no biases. Few rows are none of the last rank.
    bias = make is not lowp.Muon
    net = nn.Sequential(nn.Linear(64, rows, bias=bias), nn.Linear(rows, 8, bias=bias), nn.Linear(8, 2, bias=bias))
    if name is None:
        net.bfloat16()
    else:
        lowp.quantize_model_(net, name, ignore=["1", "2"])
    fully_shard(net)
    return net, make(net.parameters(), lr=1e-2)


def step(net, opt, at):
    """A step of the same gradients on any number of ranks."""
    torch.manual_seed(at)
    for param in net.parameters():
        whole, mesh = torch.randn(param.shape, dtype=param.dtype), param.device_mesh
        param.grad = torch.distributed.tensor.distribute_tensor(whole, mesh, param.placements, src_data_rank=None)
    opt.step()
    opt.zero_grad()


def found(net, opt):
    """Everything that a run goes on from, whole."""
    values = []
    for param in net.parameters():
        full = param.detach().full_tensor()
        values += [full.dequantize(), full.tensor_scale] if hasattr(full, "tensor_scale") else [full]
        for state in opt.state_dict()["state"].values():
            values += [value.full_tensor() if hasattr(value, "full_tensor") else value for value in state.values()]
    return values


def state_of(net, opt, first="net"):
    of_net, of_opt = get_state_dict(net, opt)
    return {"net": of_net, "opt": of_opt} if first == "net" else {"opt": of_opt, "net": of_net}


def load(net, opt, folder, first="net"):
    state = state_of(net, opt, first)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(net, opt, model_state_dict=state["net"], optim_state_dict=state["opt"])


def saves(rank, world, folder):
    """Runs of two steps, a checkpoint, and two steps more."""
    after = {}
    for name, rows, make in CASES:
        net, opt = made(name, rows, make=make)
        case = f"{name} {make.__name__}"
        for at in range(4):
            if at == 2:
                dcp.save(state_of(net, opt), checkpoint_id=f"{folder}/{case}")
            step(net, opt, at)
        after[case] = found(net, opt)
    return after


def resumes(rank, world, folder, first):
    """The last two steps, from the checkpoint."""
    after = {}
    for name, rows, make in CASES:
        net, opt = made(name, rows, seed=2, make=make)
        case = f"{name} {make.__name__}"
        load(net, opt, f"{folder}/{case}", first)
        for at in (2, 3):
            step(net, opt, at)
        after[case] = found(net, opt)
    return after


def bytes_of(folder):
    return sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder))


def written(rank, world, folder):
    """Bytes per value of a large weight, in the checkpoint of a model and of both states; then what the model of that brings back alone."""
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(512, 512, bias=False))
    lowp.quantize_model_(net, "mxfp8")
    fully_shard(net)
    opt = lowp.AdamW(net.parameters(), lr=1e-2)
    step(net, opt, 0)
    state = {"net": get_model_state_dict(net)}
    dcp.save(state, checkpoint_id=f"{folder}/net")
    dcp.save(state_of(net, opt), checkpoint_id=f"{folder}/both")
    local = net[0].weight.detach().to_local()
    codes, master = local.clone(), local.master.clone()
    for where, expected in (("net", master), ("both", codes.dequantize())):
        step(net, opt, 1)
        taken = {**state, "opt": get_optimizer_state_dict(net, opt)}
        dcp.load(state, checkpoint_id=f"{folder}/{where}")
        # A state that was taken before is written as the next step makes it.
        dcp.save(taken, checkpoint_id=f"{folder}/{where}-taken")
        dcp.async_save(taken, checkpoint_id=f"{folder}/{where}-later").result()
        for again in ("taken", "later"):
            read = torch.zeros_like(opt.state[net[0].weight]["master"])
            dcp.load({"opt": {"state": {"0.weight": {"master": read}}}}, checkpoint_id=f"{folder}/{where}-{again}")
            assert torch.equal(read.to_local(), expected), (where, again)
        assert torch.equal(local, codes) and torch.equal(local.master, expected), where
        assert torch.equal(opt.state_dict()["state"][0]["master"].to_local(), expected), where
        # The next step starts from there.
        for group in opt.param_groups:
            group["lr"] = 0.0
        step(net, opt, 2)
        assert torch.equal(local.master, expected), where
        opt.param_groups[0]["lr"] = 1e-2
    return [bytes_of(f"{folder}/{name}") / 512**2 for name in ("net", "both")] if rank == 0 else None


def later(rank, world, folder):
    """Checkpoints that are written while training goes on hold the state at the call."""
    group = dist.new_group(backend="gloo")
    for name in ("mxfp8", "fp8-delayed"):
        for kind in ("default", "writer"):
            where = f"{folder}/{name}-{kind}"
            net, opt = made(name, 128)
            step(net, opt, 0)
            writer = {"storage_writer": dcp.FileSystemWriter(where)} if kind == "writer" else {"checkpoint_id": where}
            saved = dcp.async_save(state_of(net, opt), process_group=group, **writer)
            step(net, opt, 1)
            saved.result()
            other = made(name, 128, seed=2)
            load(*other, where)
            step(*other, 1)
            assert all(torch.equal(a, b) for a, b in zip(found(net, opt), found(*other), strict=True)), (name, kind)


def values_of_files(rank, world, folder):
    """A checkpoint of bfloat16 values, as transformers write it, in shards: by a full state dictionary, and by its reader."""
    for name in ("mxfp8", "fp8-current"):
        torch.manual_seed(5)
        plain = {"0.weight": torch.randn(128, 64).bfloat16()}
        if rank == 0:
            save_file(plain, f"{folder}/model.safetensors")
        dist.barrier()
        for way in ("full", "reader"):
            torch.manual_seed(1)
            net = nn.Sequential(nn.Linear(64, 128, bias=False))
            lowp.quantize_model_(net, name)
            fully_shard(net)
            if way == "full":
                set_model_state_dict(net, dict(plain), options=StateDictOptions(full_state_dict=True))
            else:
                state = get_model_state_dict(net)
                dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder))
                set_model_state_dict(net, state)
            expected = lowp.quantize(plain["0.weight"], name)
            assert torch.equal(net[0].weight.full_tensor(), expected), (name, way)
            assert torch.equal(net[0].weight.to_local().master, plain["0.weight"].float()[64 * rank : 64 * rank + 64]), (name, way)


def whole_later(rank, world, folder):
    """What a checkpoint that is written later raises for a model that is not sharded, which ``dcp.save`` writes."""
    net = nn.Sequential(nn.Linear(64, 64))
    lowp.quantize_model_(net, "mxfp8")
    state = net.state_dict()
    dcp.save(state, checkpoint_id=f"{folder}/now")
    try:
        dcp.async_save(state, checkpoint_id=f"{folder}/later").result()
    except lowp.UnsupportedOp as error:
        return str(error)


class Dcp(unittest.TestCase):
    def test_runs_go_on_with_other_ranks(self):
        for world, others in ((2, ((1, "net"), (2, "opt"), (3, "net"))), (1, ((2, "net"),))):
            with tempfile.TemporaryDirectory() as folder:
                expected = ranks.run(world, saves, folder)[0]
                for other, first in others:
                    for after in ranks.run(other, resumes, folder, first):
                        for name, values in after.items():
                            with self.subTest(world=world, other=other, name=name):
                                for a, b in zip(values, expected[name], strict=True):
                                    self.assertTrue(torch.equal(a, b))

    def test_masters_are_written_once(self):
        with tempfile.TemporaryDirectory() as folder:
            net, both = ranks.run(2, written, folder)[0]
        # The moments are what the optimizer adds.
        self.assertAlmostEqual(both - net, 8.0, delta=0.2)

    def test_checkpoints_that_are_written_later(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks.run(2, later, folder)

    def test_a_model_that_is_not_sharded_is_written_at_once(self):
        with tempfile.TemporaryDirectory() as folder:
            (message,) = ranks.run(1, whole_later, folder)
        self.assertIn("call dcp.save in place of dcp.async_save", message)

    def test_values_of_other_programs_in_shards(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks.run(2, values_of_files, folder)


if __name__ == "__main__":
    unittest.main()
