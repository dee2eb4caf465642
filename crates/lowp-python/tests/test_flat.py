"""``lowp.cast_master_weights``: slices of masters, cut anywhere."""

import gc
import unittest
import weakref

import torch
import torch.distributed as dist

import lowp
import ranks


def cast(rank, world, name, shapes, dtype):
    weights, masters, starts, wholes = [], [], [], []
    for number, shape in enumerate(shapes):
        torch.manual_seed(number)
        values = torch.randn(shape)
        wholes.append(lowp.quantize(values.to(dtype), name))
        weights.append(torch.empty_like(wholes[-1]))
        # The last rank has nothing of the first weight.
        parts = world if number else max(world - 1, 1)
        # In the middle of a row, a block and a byte.
        cuts = [0] + [values.numel() * r // parts + (r % 2) for r in range(1, parts)] + [values.numel()]
        own = (cuts[rank], cuts[rank + 1]) if rank < parts else None
        masters.append(values.flatten()[own[0] : own[1]].to(dtype) if own else None)
        starts.append(own[0] if own else None)
    lowp.cast_master_weights(weights, masters, starts)
    for weight, whole in zip(weights, wholes):
        assert torch.equal(weight, whole), (name, weight)
    return len(weights)


def groups_end(rank, world):
    """Whether a process group that was destroyed is freed, once there are casts of another one."""
    weight, half = lowp.quantize(torch.zeros(32, 32), "mxfp8"), 32 * 32 // world
    cast = lambda group: lowp.cast_master_weights([weight], [torch.ones(half)], [rank * half], group)
    group = dist.new_group(list(range(world)))
    cast(group)
    known = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    cast(dist.new_group(list(range(world))))
    gc.collect()
    return known() is None


def mismatch(rank, world):
    weight = lowp.quantize(torch.zeros(32, 32 if rank else 64), "mxfp8")
    try:
        lowp.cast_master_weights([weight], [torch.zeros(weight.numel() // 2)], [rank * weight.numel() // 2])
    except lowp.LowpError as error:
        return str(error)
    return "no error"


class Flat(unittest.TestCase):
    def test_any_cuts_give_the_whole_cast(self):
        low = [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]
        for world in (1, 2, 3):
            with self.subTest(world=world):
                for count in ranks.run(world, all_of, low, [(64, 96), (37, 160)]):
                    self.assertEqual(count, 2 * 2 * len(low))

    def test_ranks_that_differ_are_an_error_on_each(self):
        for message in ranks.run(2, mismatch):
            self.assertIn("disagree", message)

    def test_groups_that_were_destroyed_are_freed(self):
        self.assertEqual(ranks.run(2, groups_end), [True, True])

    def test_lists_of_other_lengths(self):
        with self.assertRaisesRegex(lowp.LowpError, "1 weights, 2 masters"):
            lowp.cast_master_weights([lowp.quantize(torch.zeros(32, 32), "mxfp8")], [None, None], [0])


def all_of(rank, world, names, shapes):
    return sum(cast(rank, world, name, shapes, dtype) for name in names for dtype in (torch.float32, torch.bfloat16))


if __name__ == "__main__":
    unittest.main()
