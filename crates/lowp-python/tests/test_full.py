"""Full tensors and full state dictionaries of sharded codes."""

import io
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowp
import ranks


def recipes():
    return [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


def sharded(name, rows, mesh=None, seed=1):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, rows))
    whole = lowp.quantize(net[0].weight.detach(), name)
    lowp.quantize_model_(net, name)
    fully_shard(net, mesh=mesh)
    return net, whole


def gathered(rank, world, replicas, cases):
    """Full tensors beside whole ones, before and after FSDP2's own gathers."""
    mesh = None
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    for name, rows in cases:
        net, whole = sharded(name, rows, mesh)
        for _ in range(2):
            full = net[0].weight.full_tensor()
            assert type(full) is lowp.Tensor and torch.equal(full, whole), (name, rows, full)
            assert torch.equal(full.dequantize(orientation="columnwise"), whole.dequantize(orientation="columnwise"))
            net(torch.ones(2, 64)).sum().backward()
        own = net[0].weight._local_tensor
        # On one rank there is nothing to gather, as for plain tensors.
        assert world == 1 or not {b.data_ptr() for b in full.buffers.values()} & {b.data_ptr() for b in own.buffers.values() if b.numel()}
    return len(cases)


def dictionary(rank, world):
    """A full state dictionary, written to a file and loaded into a model that is sharded behind it."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    net, whole = sharded("mxfp8-2d", 64)
    state = get_model_state_dict(net, options=options)
    assert torch.equal(state["0.weight"], whole)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    other = nn.Sequential(nn.Linear(64, 64))
    lowp.quantize_model_(other, "mxfp8-2d")
    other.load_state_dict(state)
    fully_shard(other)
    assert torch.equal(other[0].weight.full_tensor(), whole)
    try:
        set_model_state_dict(other, state, options=options)
    except lowp.UnsupportedOp as error:
        return str(error)
    return "no error"


def other_cuts(rank, world):
    """Rows that are not cut as FSDP2 does."""
    weight = lowp.quantize(torch.randn(32 * (rank + 1), 64), "mxfp8")
    from lowp._full import gather_rows

    try:
        gather_rows(weight._store, dist.group.WORLD)
    except lowp.UnsupportedOp as error:
        return str(error)
    return "no error"


class Full(unittest.TestCase):
    def test_full_tensors_are_the_whole_ones(self):
        every = [(name, 2 * max(lowp.Recipe(name).row_quantum, 16)) for name in recipes()]
        uneven = [("fp8-current", 50), ("fp8-current", 2), ("mxfp8", 95), ("mxfp8-2d", 95), ("nvfp4-2d", 46)]
        for world, replicas, cases in ((1, 1, [("mxfp8", 64)]), (2, 1, every), (3, 1, uneven), (4, 2, every[:2])):
            with self.subTest(world=world, replicas=replicas):
                self.assertEqual(ranks.run(world, gathered, replicas, cases), [len(cases)] * world)

    def test_full_state_dictionaries(self):
        for message in ranks.run(2, dictionary):
            self.assertIn("load a full state dictionary before fully_shard", message)

    def test_rows_of_other_cuts_are_an_error_on_every_rank(self):
        for message in ranks.run(2, other_cuts):
            self.assertIn("a full tensor from [32, 64] rows", message)


if __name__ == "__main__":
    unittest.main()
