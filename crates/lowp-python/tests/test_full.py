"""Full tensors and full state dictionaries of sharded codes."""

import io
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import lowp
import ranks


def recipes():
    return [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


#: Recipes and rows that three ranks cut within blocks. Of four rows the third has none.
WITHIN_BLOCKS = [("mxfp8", 40), ("mxfp8-2d", 100), ("nvfp4-2d", 40), ("nvfp4-1d", 41), ("fp8-block", 4), ("nvfp4-mxfp8", 4)]


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
    """A full state dictionary, written to a file and loaded into a model that is sharded after that."""
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


def plain_values(dtype):
    return lambda net, cut: {key: value.to(dtype) for key, value in lowp.plain_state_dict(net).items()}


def of_shards(net, cut):
    """Codes without masters."""
    return get_model_state_dict(cut, options=StateDictOptions(full_state_dict=True))


#: What a full state dictionary has.
KINDS = {
    "codes and masters": lambda net, cut: net.state_dict(),
    "codes": of_shards,
    "float32": plain_values(torch.float32),
    "bfloat16": plain_values(torch.bfloat16),
}


def whole_net(name, rows, seed=1):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, rows))
    lowp.quantize_model_(net, name)
    return net


def set_full(net, state, from_rank_0):
    rank = dist.get_rank()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
    set_model_state_dict(net, state if rank == 0 or not from_rank_0 else {}, options=options)


def loaded(rank, world, replicas, cases):
    """Full state dictionaries of every kind in shards, which every rank has, or rank 0 alone."""
    mesh = None
    if replicas > 1:
        mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replicate", "shard"))
    runs = 0
    for name, rows in cases:
        for kind, make in KINDS.items():
            source = whole_net(name, rows)
            state = make(source, sharded(name, rows, mesh)[0])
            # In the model that is whole as PyTorch loads it.
            source.load_state_dict(state)
            for from_rank_0 in (False, True):
                net = sharded(name, rows, mesh, seed=3)[0]
                set_full(net, dict(state), from_rank_0)
                what = (name, rows, kind, from_rank_0)
                expected, local = source[0].weight, net[0].weight.to_local()
                assert torch.equal(net[0].weight.full_tensor(), expected), what
                start = (rank % (world // replicas)) * -(-rows // (world // replicas))
                # Ranks without rows have no master.
                assert not local.numel() or torch.equal(local.master, expected.master[start : start + local.shape[0]]), what
                assert torch.equal(net[0].bias.full_tensor(), source[0].bias), what
                x = torch.ones(2, 64)
                assert torch.equal(net(x), source(x)), what
                runs += 1
    return runs


#: Dictionaries that do not fit the model, and what every rank says then.
WRONG = {
    "shape": (lambda: whole_net("mxfp8", 128).state_dict(), "of shape (128, 64) in a full state dictionary"),
    "recipe": (lambda: whole_net("mxfp8-2d", 64).state_dict(), "load its values"),
    "dtype": (lambda: {"0.weight": torch.ones(64, 64, dtype=torch.int32), "0.bias": torch.ones(64)}, "0.weight in a full state dictionary: values of torch.int32"),
    "direction": (lambda: {"0.weight": lowp.quantize(torch.ones(64, 64), "mxfp8", usage="rowwise"), "0.bias": torch.ones(64)}, "usage='both'"),
}


def wrong(rank, world):
    found = {}
    for kind, (make, _) in WRONG.items():
        for where in ("every rank", "rank 1", "rank 0 alone"):
            net, whole = sharded("mxfp8", 64)
            state = {"0.weight": whole, "0.bias": torch.ones(64)} if where == "rank 1" and rank == 0 else make()
            try:
                set_full(net, state, where == "rank 0 alone")
            except lowp.LowpError as error:
                found[kind, where] = str(error)
            else:
                found[kind, where] = "no error"
    return found


def missing(rank, world):
    """A weight that the dictionary of rank 0 has not."""
    found = []
    for strict in (True, False):
        net, _ = sharded("mxfp8", 64)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=strict)
        try:
            set_model_state_dict(net, {} if rank else {"0.bias": torch.ones(64)}, options=options)
        except RuntimeError as error:
            found.append(str(error))
    assert torch.equal(net[0].bias.full_tensor(), torch.ones(64))
    return found


def resumed(rank, world):
    """Steps after full states of a model and its optimizer were loaded into other shards are those of the model that was saved."""
    options = StateDictOptions(full_state_dict=True)
    for name, rows in (("fp8-current", 50), ("mxfp8", 95), ("nvfp4-2d", 40), ("mxfp8", 4)):
        net, other = sharded(name, rows)[0], sharded(name, rows, seed=2)[0]
        opts = [lowp.AdamW(of.parameters(), lr=1e-2) for of in (net, other)]

        def step(of, opt, at):
            torch.manual_seed(at + rank)
            of(torch.randn(4, 64)).square().mean().backward()
            opt.step()
            opt.zero_grad()

        step(net, opts[0], 0)
        step(other, opts[1], 7)
        set_full(other, get_model_state_dict(net, options=options), False)
        state = get_optimizer_state_dict(net, opts[0], options=options)
        set_optimizer_state_dict(other, opts[1], state, options=options)
        for at in range(2):
            for of, opt in zip((net, other), opts):
                step(of, opt, 10 * at)
            for a, b in zip(net.parameters(), other.parameters()):
                a, b = a.to_local(), b.to_local()
                assert torch.equal(a, b), (name, rows, at)
                assert not isinstance(a, lowp.Tensor) or torch.equal(a.master, b.master), (name, rows, at)


def other_cuts(rank, world, rows):
    """Rows that are not cut as FSDP2 does, or have scales of their own where FSDP2 cuts blocks."""
    weight = lowp.quantize(torch.randn(rows[rank], 64), "mxfp8")
    from lowp._full import gather_rows

    try:
        gather_rows(weight._store, dist.group.WORLD)
    except lowp.LowpError as error:
        return str(error)
    return "no error"


class Full(unittest.TestCase):
    def test_full_tensors_are_the_whole_ones(self):
        every = [(name, 2 * max(lowp.Recipe(name).row_quantum, 16)) for name in recipes()]
        uneven = [("fp8-current", 50), ("fp8-current", 2), ("mxfp8", 95), ("mxfp8-2d", 95), ("nvfp4-2d", 46), *WITHIN_BLOCKS]
        for world, replicas, cases in ((1, 1, [("mxfp8", 64)]), (2, 1, every), (3, 1, uneven), (4, 2, [*every[:2], ("nvfp4-2d", 40)])):
            with self.subTest(world=world, replicas=replicas):
                self.assertEqual(ranks.run(world, gathered, replicas, cases), [len(cases)] * world)

    def test_full_state_dictionaries(self):
        ranks.run(2, dictionary)

    def test_full_state_dictionaries_in_shards(self):
        every = [(name, 2 * max(lowp.Recipe(name).row_quantum, 16)) for name in recipes()]
        uneven = [("fp8-current", 50), ("fp8-delayed", 2), ("mxfp8", 95), ("mxfp8-2d", 95), ("nvfp4-2d", 46), *WITHIN_BLOCKS]
        for world, replicas, cases in ((1, 1, [("mxfp8", 64)]), (2, 1, every), (3, 1, uneven), (4, 2, [*every[:2], ("nvfp4-2d", 40)])):
            with self.subTest(world=world, replicas=replicas):
                self.assertEqual(ranks.run(world, loaded, replicas, cases), [len(cases) * len(KINDS) * 2] * world)

    def test_full_state_dictionaries_that_do_not_fit(self):
        for found in ranks.run(2, wrong):
            for (kind, where), message in found.items():
                with self.subTest(kind=kind, where=where):
                    self.assertIn(WRONG[kind][1], message)

    def test_weights_that_a_full_state_dictionary_has_not(self):
        for found in ranks.run(2, missing):
            self.assertEqual(len(found), 1)
            self.assertIn('Missing key(s) in state_dict: "0.weight"', found[0])

    def test_training_goes_on_from_full_states(self):
        ranks.run(3, resumed)

    def test_rows_of_other_cuts_are_an_error_on_every_rank(self):
        for rows, text in (((32, 64), "a full tensor from [32, 64] rows"), ((24, 24), "24 rows with scales of their own, and 48 rows")):
            for message in ranks.run(2, other_cuts, rows):
                self.assertIn(text, message)


if __name__ == "__main__":
    unittest.main()
