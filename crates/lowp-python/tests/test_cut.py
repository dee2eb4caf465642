"""Rows that FSDP2 cuts within blocks: the bytes of the whole tensor, and the steps of one process."""

import copy
import io
import tempfile
import unittest

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import lowp
import ranks
from lowp import _cut

#: Recipes, and rows that two or three ranks cut within blocks of 16, 32 or 128.
CASES = [("mxfp8-2d", 40), ("mxfp8-2d", 100), ("mxfp8", 40), ("nvfp4-2d", 100), ("fp8-block", 100), ("mxfp4", 41), ("nvfp4-1d", 33)]
# On three ranks the last two have a rank whose rows begin with a block, beside others that cut blocks.
CASES += [("nvfp4-mxfp8", 40), ("fp8-current", 41), ("mxfp8", 144), ("nvfp4-1d", 72)]


def values(rows, cols, seed=1):
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))


def make(name, rows):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(256, rows), nn.Linear(rows, 8))
    lowp.quantize_model_(net, name, ignore=["1"])
    return net


def trained(name, rows, rank=0, world=1):
    """Losses of five steps, and the model. One rank has gradients: sums over the ranks are those of one process, to the bit."""
    net = make(name, rows)
    if world > 1:
        for layer in net:
            fully_shard(layer)
        fully_shard(net)
        for module in (net, *net):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    opt = lowp.AdamW(net.parameters(), lr=1e-2, skip_nonfinite=True)
    losses = []
    for step in range(5):
        loss = net(values(4, 256, step)).square().mean()
        (loss * (torch.nan if step == 2 else float(rank == 0))).backward()
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses, net, opt


def of_ranks(rank, world, cases):
    found = []
    for name, rows in cases:
        losses, net, opt = trained(name, rows, rank, world)
        full = net[0].weight.full_tensor()
        master = opt.state[net[0].weight]["master"].full_tensor()
        found.append((losses, dict(full.buffers), master, net[0].weight.to_local()._store.cut is not None))
    return found


class Training(unittest.TestCase):
    def test_steps_are_those_of_one_process(self):
        alone = [trained(*case) for case in CASES]
        for world in (2, 3):
            for found in ranks.run(world, of_ranks, CASES):
                for (name, rows), (own, net, _), (losses, buffers, master, cut) in zip(CASES, alone, found):
                    with self.subTest(world=world, name=name, rows=rows):
                        self.assertEqual(losses, own)
                        self.assertEqual(cut, name != "fp8-current" and -(-rows // world) % lowp.Recipe(name).row_quantum != 0)
                        weight = net[0].weight
                        self.assertTrue(torch.equal(master, weight.master))
                        self.assertEqual(buffers.keys(), weight.buffers.keys())
                        for key, buffer in buffers.items():
                            self.assertTrue(torch.equal(buffer, weight.buffers[key]), key)


class Rows(unittest.TestCase):
    def test_rows_within_blocks_decode_as_those_of_the_whole(self):
        for name in [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]:
            for rows in (41, 100):
                weight = lowp.quantize(values(rows, 256), name, keep_master=True)
                for start, end in ((0, 7), (7, 41), (13, 40), (16, 33), (32, 41)):
                    part = weight[start:end]
                    for orientation in ("rowwise", "columnwise"):
                        if not part._store.serves(orientation):
                            continue
                        with self.subTest(name=name, rows=rows, start=start, end=end, orientation=orientation):
                            expected = weight.dequantize(orientation=orientation)[start:end]
                            self.assertTrue(torch.equal(part.dequantize(orientation=orientation), expected))
                    self.assertTrue(torch.equal(part.master, weight.master[start:end]))
                    self.assertTrue(torch.equal(part[2:5].dequantize(), weight.dequantize()[start + 2 : start + 5]))

    def test_copies_know_their_rows(self):
        weight = lowp.quantize(values(100, 256), "mxfp8")
        part = weight[10:50]
        file = io.BytesIO()
        torch.save(part, file)
        file.seek(0)
        for other in (part.clone(), copy.deepcopy(part), torch.load(file), torch.empty_like(part).copy_(part), weight.new_zeros(40, 256).copy_(part)):
            self.assertEqual(other._store.cut, (10, 100))
            self.assertTrue(torch.equal(other, part))
            self.assertTrue(torch.equal(other.dequantize(), weight.dequantize()[10:50]))
        other = lowp.quantize(values(40, 256), "mxfp8")
        for rows in (40, 0, 120):
            self.assertTrue(torch.equal(weight.new_zeros(rows, 256).dequantize(), torch.zeros(rows, 256)))
        self.assertTrue(torch.equal(weight.new_zeros(40, 256).copy_(other), other))

    def test_rows_are_written_back(self):
        for name in ("mxfp8", "mxfp8-2d", "mxfp4", "nvfp4-1d"):
            with self.subTest(name=name):
                weight, other = (lowp.quantize(values(101, 256, seed), name) for seed in (1, 2))
                weight[:51].copy_(other[:51])
                with self.assertRaisesRegex(lowp.LowpError, "50 of 101 rows have another scale than the other rows"):
                    weight.dequantize()
                weight[51:].copy_(other[51:])
                self.assertTrue(torch.equal(weight, other))

    def test_what_rows_within_blocks_cannot(self):
        weight = lowp.quantize(values(100, 256), "mxfp8-2d")
        part, other = weight[10:50], lowp.quantize(values(40, 256), "mxfp8-2d")
        cases = (
            ("rows 10 to 50 of 100, which begin or end within blocks: the other rows", lambda: part.quantize_(values(40, 256))),
            ("the other rows of those blocks share their scales", lambda: part.copy_(values(40, 256))),
            ("40 rows with scales of their own into rows 10 to 50 of 100", lambda: part.copy_(other)),
            ("rows 10 to 50 of 100, which begin or end within blocks into 40 rows", lambda: other.copy_(part)),
            ("only where fully_shard cut them", lambda: step(part)),
            ("save the whole tensor", lambda: lowp.save("/dev/null", {"part": part})),
            ("four over six", lambda: lowp.quantize(values(100, 256), "nvfp4-2d", four_over_six="mse")[10:50]),
        )
        for text, call in cases:
            with self.subTest(text=text), self.assertRaisesRegex(lowp.LowpError, text):
                call()


#: What is saved on three ranks, which cut blocks. Two ranks cut between blocks of 32 rows and within those of 128, and the last of four has none of
#: five rows.
SAVED = [("mxfp8", 128), ("mxfp8", 5), ("mxfp8-2d", 128), ("nvfp4-2d", 100), ("nvfp4-1d", 97), ("fp8-block", 160)]


def sharded(name, rows, seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(256, rows, bias=False))
    whole = lowp.quantize(net[0].weight.detach(), name)
    lowp.quantize_model_(net, name)
    fully_shard(net)
    return net, whole


def saved(rank, world, folder):
    for name, rows in SAVED:
        dcp.save(sharded(name, rows, 1)[0].state_dict(), checkpoint_id=f"{folder}/{name}-{rows}")


def loaded(rank, world, folder):
    """Rows that other ranks saved, in shards that had others."""
    for name, rows in SAVED:
        net, _ = sharded(name, rows, 2)
        _, whole = sharded(name, rows, 1)
        state = net.state_dict()
        dcp.load(state, checkpoint_id=f"{folder}/{name}-{rows}")
        net.load_state_dict(state)
        for key, buffer in net[0].weight.full_tensor().buffers.items():
            assert torch.equal(buffer, whole.buffers[key]), (name, rows, world, key)
        start, weight = -(-rows // world) * rank, net[0].weight.to_local()
        torch.manual_seed(1)
        master = nn.Linear(256, rows, bias=False).weight.detach()[start : start + len(weight)]
        # Ranks without rows have no master.
        assert not len(weight) or torch.equal(weight.master, master), (name, rows, world)
        assert torch.equal(weight.dequantize(), whole.dequantize()[start : start + len(weight)]), (name, rows, world)


class Checkpoints(unittest.TestCase):
    def test_other_ranks_load_rows_within_blocks(self):
        with tempfile.TemporaryDirectory() as folder:
            ranks.run(3, saved, folder)
            for world in (1, 2, 4):
                with self.subTest(world=world):
                    ranks.run(world, loaded, folder)


def step(part):
    param = nn.Parameter(part.detach())
    param.grad = torch.zeros(part.shape)
    lowp.AdamW([param]).step()


def frozen(rank, world, name, rows):
    """A full state dictionary of a frozen model, whose codes follow from fewer, in shards."""
    torch.manual_seed(0)
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(nn.Sequential(nn.Linear(128, rows, bias=False)).requires_grad_(False))
        lowp.quantize_model_(made[-1], name)
    whole, net = made
    fully_shard(net)
    set_model_state_dict(net, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
    return torch.equal(net[0].weight.full_tensor(), whole[0].weight.detach())


class Frozen(unittest.TestCase):
    def test_full_state_dictionaries(self):
        for name in ("nvfp4-2d", "fp8-block"):
            with self.subTest(name=name):
                self.assertEqual(ranks.run(2, frozen, name, 40), [True, True])


if __name__ == "__main__":
    unittest.main()
