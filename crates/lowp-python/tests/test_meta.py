"""Models on the meta device: quantized, sharded and allocated before their values are there."""

import copy
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import lowp
import ranks

RECIPES = [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]


def layers(rows, device="cpu", seed=1, dtype=torch.float32):
    torch.manual_seed(seed)
    with torch.device(device):
        return nn.Sequential(nn.Linear(64, rows, dtype=dtype), nn.Linear(rows, 64, dtype=dtype))


def on_meta(name, rows, keep_master=True, dtype=torch.float32):
    net = layers(rows, "meta", dtype=dtype)
    lowp.quantize_model_(net, name, ignore=["1"], keep_master=keep_master)
    return net


def sharded(name, rows, keep_master=True):
    """The shards of a model, with memory and without values."""
    net = on_meta(name, rows, keep_master)
    for layer in net:
        fully_shard(layer)
    fully_shard(net)
    assert net[0].weight.is_meta
    return net.to_empty(device="cpu")


def whole(name, rows, seed=1, values=None):
    """The model with the same values, that was quantized whole."""
    net = layers(rows, seed=seed)
    if values is not None:
        net.load_state_dict(values)
    lowp.quantize_model_(net, name, ignore=["1"])
    return net


def values_of(net):
    """The values of a model, as every rank has them."""
    return {key: value.full_tensor() for key, value in lowp.plain_state_dict(net).items()}


# What gives shards their values.


def reset(net, name, rows, folder):
    torch.manual_seed(torch.distributed.get_rank())
    for layer in net:
        layer.reset_parameters()


def filled(net, name, rows, folder):
    """What nn.init writes; ranks have rows of unlike magnitude."""
    with torch.no_grad():
        for param in net.parameters():
            nn.init.normal_(param, std=1 + torch.distributed.get_rank())


def truncated(net, name, rows, folder):
    """Values of several operations, of which comparisons look at those that were written."""
    if torch.__version__ >= "2.15":  # before, PyTorch multiplies in place
        for layer in net:
            nn.init.trunc_normal_(layer.weight, std=0.02)
    else:
        zeros(net, name, rows, folder)
    for layer in net:
        nn.init.zeros_(layer.bias)


def zeros(net, name, rows, folder):
    for param in net.parameters():
        nn.init.zeros_(param)


def parts(net, name, rows, folder):
    """Rows of plain values, as a sharded state dictionary has them."""
    plain = {key: distribute_tensor(value.detach(), net[0].weight.device_mesh, net[0].weight.placements) for key, value in layers(rows, seed=3).state_dict().items()}
    net.load_state_dict(plain)


def full(net, name, rows, folder):
    set_model_state_dict(net, dict(layers(rows, seed=3).state_dict()), options=StateDictOptions(full_state_dict=True))


def checkpoint(net, name, rows, folder):
    """Codes and masters of another model, over values that were written before."""
    reset(net, name, rows, folder)
    other = whole(name, rows, seed=5)
    for layer in other:
        fully_shard(layer)
    fully_shard(other)
    dcp.save({"net": other.state_dict()}, checkpoint_id=folder)
    dcp.load({"net": net.state_dict()}, checkpoint_id=folder)


def by_forward(net):
    net(torch.ones(2, 64))
    net.reshard()


def by_optimizer(net):
    lowp.AdamW(net.parameters())


def by_full_tensor(net):
    net[0].weight.full_tensor()


WRITES = (reset, filled, truncated, zeros, parts, full, checkpoint)
MEETINGS = (by_forward, by_optimizer, by_full_tensor)


def written(rank, world, cases, folder):
    runs = 0
    for name, rows, writes in cases:
        for write in writes:
            for meet in MEETINGS if write is filled else MEETINGS[runs % 3 :][:1]:
                what = (name, rows, write.__name__, meet.__name__)
                net = sharded(name, rows)
                write(net, name, rows, f"{folder}/{name}-{rows}")
                values = values_of(net)
                meet(net)
                expected = whole(name, rows, values=values)
                local, start = net[0].weight.to_local(), min(rank * -(-rows // world), rows)
                # One rank alone has the whole tensor, without the codes that follow from others; a rank without rows has no master.
                own = expected[0].weight.detach()[start : start + local.shape[0]] if 0 < local.shape[0] < rows else None
                assert own is None or torch.equal(local, own), what
                assert own is None or torch.equal(local.master, own.master), what
                found = net[0].weight.full_tensor()
                assert world == 1 or torch.equal(found, expected[0].weight), what
                assert torch.equal(found.dequantize(), expected[0].weight.dequantize()), what
                x = torch.ones(2, 64)
                assert torch.equal(net(x), expected(x)), what
                runs += 1
    return runs


def in_parts(rank, world, folder, save):
    """A checkpoint that another number of ranks saved, over values that wait for their cast."""
    expected = whole("fp8-current", 50, seed=5)
    net = expected if save else sharded("fp8-current", 50)
    if save:
        for layer in net:
            fully_shard(layer)
        dcp.save({"net": net.state_dict()}, checkpoint_id=folder)
        return
    reset(net, "fp8-current", 50, folder)
    dcp.load({"net": net.state_dict()}, checkpoint_id=folder)
    for meet in MEETINGS:
        meet(net)
        assert torch.equal(net[0].weight.full_tensor(), expected[0].weight), meet.__name__


def trained(rank, world, names):
    """Steps after values were written are those of the model that has them from the start."""
    for name in names:
        net = sharded(name, 128)
        reset(net, name, 128, None)
        nets = [whole(name, 128, values=values_of(net)), net]
        opts = [lowp.AdamW(of.parameters(), lr=1e-2) for of in nets]
        for step in range(2):
            for of, opt in zip(nets, opts):
                torch.manual_seed(step)
                of(torch.randn(4, 64)).square().mean().backward()
                opt.step()
                opt.zero_grad()
        assert torch.equal(net[0].weight.full_tensor(), nets[0][0].weight), name


def without_master(rank, world):
    net = sharded("fp8-current", 50, keep_master=False)
    given = torch.randn(25, 64) * (1 + rank)
    with torch.no_grad():
        net[0].weight.copy_(DTensor.from_local(given, net[0].weight.device_mesh, net[0].weight.placements))
    values = DTensor.from_local(given.clone(), net[0].weight.device_mesh, net[0].weight.placements).full_tensor()
    given.zero_()
    assert torch.equal(net[0].weight.full_tensor(), lowp.quantize(values, "fp8-current"))
    assert net[0].weight.to_local().master is None


def unlike(rank, world):
    """Values on one rank alone, and codes that are read before ranks have met."""
    said = []
    for meet in MEETINGS:
        net = sharded("nvfp4-2d", 64)
        if rank == 0:
            net[0].weight.to_local().detach().fill_(1)
        try:
            meet(net)
        except lowp.LowpError as error:
            said.append(str(error))
    early = []
    net = sharded("fp8-current", 64)
    net[0].reset_parameters()
    local = net[0].weight.to_local().detach()
    for read in (local.dequantize, lambda: local.buffers, lambda: local.tensor_scale, lambda: torch.equal(local, local), local.norm, lambda: copy.deepcopy(local).dequantize()):
        try:
            read()
        except lowp.LowpError as error:
            early.append(str(error))
    try:
        set_model_state_dict(on_meta("mxfp8", 64), dict(layers(64).state_dict()), options=StateDictOptions(full_state_dict=True))
    except lowp.LowpError as error:
        early.append(str(error))
    return said, early


class Meta(unittest.TestCase):
    def test_weights_get_memory_and_values(self):
        for name in RECIPES:
            with self.subTest(name=name):
                net, expected = on_meta(name, 128), whole(name, 128)
                self.assertIsInstance(net[0].weight, lowp.Tensor)
                self.assertEqual((net[0].weight.is_meta, net[0].weight.master.is_meta), (True, True))
                self.assertEqual(net[0].weight.recipe, lowp.Recipe(name))
                self.assertIn("0 bytes", repr(net[0].weight))
                other = copy.deepcopy(net)
                for of, state in ((net, layers(128).state_dict()), (other, expected.state_dict())):
                    self.assertTrue(of.state_dict()["0.weight"].is_meta)
                    of.load_state_dict(of.state_dict())
                    of.to_empty(device="cpu")
                    self.assertEqual(of(torch.ones(2, 64)).shape, (2, 64))
                    of.load_state_dict(state)
                    self.assertTrue(torch.equal(of[0].weight, expected[0].weight))
                    self.assertTrue(torch.equal(of[0].weight.master, expected[0].weight.master))

    def test_values_that_are_assigned_become_codes(self):
        expected = whole("mxfp8-2d", 64)
        for keep, state in ((True, layers(64).state_dict()), (False, layers(64).state_dict()), (True, expected.state_dict())):
            net = copy.deepcopy(on_meta("mxfp8-2d", 64, keep))
            net.load_state_dict(state, assign=True)
            self.assertTrue(torch.equal(net[0].weight, expected[0].weight))
            self.assertEqual(net[0].weight.master is not None, keep)
            self.assertIs(type(net[1].weight), nn.Parameter)
            net.load_state_dict(layers(64, seed=2).state_dict())
            self.assertTrue(torch.equal(net[0].weight, whole("mxfp8-2d", 64, seed=2)[0].weight))

    def test_tied_weights_stay_tied(self):
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        net[1].weight = net[0].weight
        self.assertEqual(lowp.quantize_model_(net, "mxfp8"), ["0.weight", "1.weight"])
        net.to_empty(device="cpu")
        self.assertIs(net[0].weight, net[1].weight)
        nn.init.ones_(net[1].weight)
        self.assertTrue(torch.equal(net[0].weight, lowp.quantize(torch.ones(64, 64), "mxfp8")))
        self.assertTrue(torch.equal(net[0].weight.master, torch.ones(64, 64)))

    def test_initial_values_are_those_of_the_layer(self):
        net = on_meta("fp8-current", 64, dtype=torch.bfloat16)
        for layer in net.to(torch.float32):
            nn.init.kaiming_uniform_(layer.weight)  # writes nothing here
        net.to_empty(device="cpu")
        torch.manual_seed(1)
        for layer in net:
            layer.reset_parameters()
        self.assertTrue(torch.equal(net[0].weight, whole("fp8-current", 64)[0].weight))

    def test_uses_before_there_is_memory(self):
        net = on_meta("mxfp8", 64)
        for use in (
            lambda: net(torch.ones(2, 64)),
            lambda: net(torch.ones(2, 64, device="meta")),
            lambda: net[0].weight.dequantize(),
            lambda: net[0].weight.detach().norm(),
            lambda: lowp.dequantize_model_(net),
            lambda: lowp.plain_state_dict(on_meta("mxfp8", 64, keep_master=False)),
        ):
            with self.assertRaisesRegex(lowp.LowpError, r"on the meta device has no codes; allocate them \(model.to_empty\(device=..\)\)"):
                use()
        self.assertIsInstance(net[0].weight, lowp.Tensor)
        with self.assertRaisesRegex(NotImplementedError, "to_empty"):
            net.to("cpu")
        with self.assertRaisesRegex(RuntimeError, "Cannot copy out of meta tensor"):
            lowp.save("/dev/null", net.state_dict())
        with self.assertRaisesRegex(RuntimeError, "Cannot copy out of meta tensor"):
            whole("mxfp8", 64).load_state_dict(net.state_dict())
        with self.assertRaisesRegex(lowp.UnsupportedOp, "cannot be moved to the meta device"):
            whole("mxfp8", 64).to("meta")
        self.assertTrue(net.to("meta")[0].weight.is_meta)

    def test_shards_get_the_codes_of_the_whole(self):
        of_two = [(name, 2 * max(lowp.Recipe(name).row_quantum, 16), (filled,)) for name in ("mxfp8", "nvfp4-2d", "fp8-block", "fp8-rowwise")]
        of_three = [("fp8-delayed", 2, (parts, checkpoint)), ("mxfp8-2d", 95, (reset,)), ("nvfp4-2d", 46, (full, checkpoint))]
        for world, cases in ((1, [("fp8-current", 50, (reset,))]), (2, [("fp8-current", 50, WRITES), *of_two]), (3, of_three)):
            with self.subTest(world=world), tempfile.TemporaryDirectory() as folder:
                runs = sum(len(writes) + 2 * (filled in writes) for *_, writes in cases)
                self.assertEqual(ranks.run(world, written, cases, folder), [runs] * world)

    def test_checkpoints_of_other_ranks(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks.run(2, in_parts, folder, True)
            ranks.run(3, in_parts, folder, False)

    def test_shards_train_as_the_whole(self):
        ranks.run(2, trained, ("fp8-current", "fp8-delayed", "nvfp4-2d"))

    def test_shards_without_masters(self):
        ranks.run(2, without_master)

    def test_values_on_one_rank_alone_and_codes_that_are_not_there(self):
        for said, early in ranks.run(2, unlike):
            self.assertEqual(len(said), 3)
            for text in said:
                self.assertIn("on ranks [0] and not on ranks [1], whose rows share its scale; write the values on every rank", text)
            self.assertEqual(len(early), 7)
            for text in early[:-1]:
                self.assertIn("first make the optimizer (lowp.AdamW)", text)
            self.assertIn("0.weight is on the meta device", early[-1])


if __name__ == "__main__":
    unittest.main()
