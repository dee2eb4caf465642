"""Tensors and models in other processes: forked ones, queues, DistributedDataParallel."""

import os
import unittest

import torch
import torch.multiprocessing as mp
from torch import nn

import lowp
import model
import ranks


def forked(call):
    """What ``call`` returns in a forked child, or the text of its error."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            text = str(call())
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write, text.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def fork_first(rank, world):
    """A child of a process that did not work with lowp may, and its own child may not."""
    weight = torch.ones(32, 32)
    use = lambda: lowp.quantize(weight, "mxfp8").dequantize().sum().item()
    return forked(use), forked(lambda: (use(), forked(use))), use()


class Forks(unittest.TestCase):
    def test_a_child_of_a_process_that_used_lowp_raises(self):
        weight = lowp.quantize(torch.ones(32, 32), "mxfp8")
        param = nn.Parameter(weight)
        param.grad = torch.ones(32, 32)
        opt = lowp.AdamW([param])
        opt.step()
        for call in (weight.dequantize, lambda: weight.quantize_(torch.ones(32, 32)), opt.step, opt.last_step, opt.state_dict):
            text = forked(call)
            self.assertRegex(text, f"LowpError: process [0-9]+ was forked after process {os.getpid()} used lowp")
            self.assertIn("spawn", text)

    def test_a_fork_before_works(self):
        ((first, then, own),) = ranks.run(1, fork_first)
        self.assertEqual((first, own), ("1024.0", 1024.0))
        self.assertRegex(then, "1024.0, .LowpError: process")


def write(queue, back):
    weight = queue.get()
    shared = all(buffer.is_shared() for buffer in weight.buffers.values())
    weight.quantize_(torch.ones(weight.shape))
    back.put((shared, isinstance(weight, nn.Parameter)))
    queue.get()


class Queues(unittest.TestCase):
    def test_a_tensor_that_is_sent_shares_its_buffers(self):
        context = mp.get_context("spawn")
        queue, back = context.Queue(), context.Queue()
        child = context.Process(target=write, args=(queue, back))
        child.start()
        weight = nn.Parameter(lowp.quantize(torch.randn(32, 32), "mxfp8"))
        queue.put(weight)
        self.assertEqual(back.get(timeout=120), (True, True))
        queue.put(None)
        child.join()
        self.assertTrue(torch.equal(weight, lowp.quantize(torch.ones(32, 32), "mxfp8")))

    def test_memory_that_a_step_is_planned_over_is_not_moved(self):
        from multiprocessing.reduction import ForkingPickler

        weight = nn.Parameter(lowp.quantize(torch.randn(32, 32), "mxfp8"))
        weight.grad = torch.ones(32, 32)
        lowp.AdamW([weight]).step()
        with self.assertRaisesRegex(lowp.UnsupportedOp, r"clone"):
            ForkingPickler.dumps(weight)
        self.assertFalse(any(buffer.is_shared() for buffer in weight.buffers.values()))
        ForkingPickler.dumps(weight.detach().clone())


def ddp(rank, world, name, steps):
    net = model.make(name)
    whole = nn.parallel.DistributedDataParallel(net)
    opt = lowp.AdamW(net.parameters(), lr=3e-3, max_norm=1.0)
    losses = []
    for step in range(steps):
        loss = model.loss_of(whole, step, rank, world)
        loss.backward()
        opt.step()
        opt.zero_grad()
        value = loss.detach().clone()
        torch.distributed.all_reduce(value)
        losses.append(value.item() / world)
    return losses


def state(net):
    """Every bit of a model: codes, masters, what is known of them, and plain values."""
    found = []
    for value in net.state_dict().values():
        if not isinstance(value, lowp.Tensor):
            found.append(value.clone())
            continue
        found += [*value.clone().buffers.values(), *([] if value.master is None else [value.master.clone()])]
        found.append(torch.tensor(-1.0) if value._store.amax is None else value._store.amax.clone())
    return found


def synced(rank, world, names):
    """Models of other seeds on every rank, which hold the bytes of rank 0 after it; what each had before, and has."""
    found = {}
    for name in names:
        for keep in (True, False):
            torch.manual_seed(rank)
            net = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 128), nn.Linear(128, 64, bias=False))
            lowp.quantize_model_(net, name, ignore=["3"], keep_master=keep)
            if keep:
                opt = lowp.AdamW(net.parameters())
            before = state(net)
            whole = nn.parallel.DistributedDataParallel(net)
            after = state(net)
            for _ in range(2):
                opt = opt if keep else lowp.AdamW(net.parameters())
                whole(torch.ones(4, 64)).square().sum().backward()
                opt.step()
                opt.zero_grad()
            found[name, keep] = before, after, state(net)
    return found


def alone(rank, world):
    """One weight, and a weight in a bucket of its own; then by a call of ``broadcast``."""
    found = []
    for broadcast in (lambda net: nn.parallel.DistributedDataParallel(net), lambda net: torch.distributed.broadcast(net.weight.detach(), 1)):
        torch.manual_seed(rank)
        net = nn.Linear(64, 64, bias=False)
        lowp.quantize_model_(nn.Sequential(net), "mxfp8")
        broadcast(net)
        found.append(state(net))
    return found


def others(rank, world):
    """Ranks whose weights are of other recipes, or have no master."""
    found = []
    for case in ("recipe", "master"):
        net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        lowp.quantize_model_(net, "mxfp8" if rank and case == "recipe" else "fp8-current", keep_master=not (rank and case == "master"))
        try:
            nn.parallel.DistributedDataParallel(net)
        except lowp.LowpError as error:
            found.append(str(error))
    return found


class Replicas(unittest.TestCase):
    def test_replicas_train_what_one_process_trains(self):
        for name in ("mxfp8-2d", "fp8-current"):
            alone, _ = model.train(name, 20)
            for losses in ranks.run(2, ddp, name, 20):
                for step, (a, b) in enumerate(zip(alone, losses, strict=True)):
                    self.assertLess(abs(a - b), 1e-3 * max(1.0, abs(a)), (name, step))

    def test_replicas_begin_with_the_bytes_of_rank_0(self):
        names = [name for name in lowp.recipes() if lowp.Recipe(name).is_low_precision]
        first, second = ranks.run(2, synced, names)
        for key, (before, after, trained) in first.items():
            with self.subTest(key=key):
                self.assertEqual(len(before), len(second[key][1]))
                for index, values in enumerate(zip(before, after, second[key][1])):
                    self.assertTrue(torch.equal(values[0], values[1]) and torch.equal(values[0], values[2]), index)
                for index, (a, b) in enumerate(zip(trained, second[key][2], strict=True)):
                    self.assertTrue(torch.equal(a, b), index)
                self.assertFalse(all(torch.equal(a, b) for a, b in zip(before, second[key][0])))

    def test_one_weight_is_broadcast_as_others_are(self):
        first, second = ranks.run(2, alone)
        for a, b in zip(first, second, strict=True):
            self.assertTrue(all(torch.equal(x, y) for x, y in zip(a, b, strict=True)))
        self.assertFalse(torch.equal(first[0][0], first[1][0]))

    def test_replicas_of_other_weights_are_an_error_on_every_rank(self):
        for found in ranks.run(2, others):
            self.assertEqual(len(found), 2)
            for message in found:
                self.assertIn("ranks disagree on parameters that are broadcast", message)


if __name__ == "__main__":
    unittest.main()
