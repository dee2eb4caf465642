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
    whole = nn.parallel.DistributedDataParallel(net, init_sync=False)
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


def synced(rank, world):
    found = []
    for layers in ([nn.Linear(64, 64, bias=False)], [nn.Linear(64, 64), nn.Linear(64, 64)]):
        net = nn.Sequential(*layers)
        lowp.quantize_model_(net, "mxfp8")
        try:
            nn.parallel.DistributedDataParallel(net)
        except lowp.UnsupportedOp as error:
            found.append(str(error))
    return found


class Replicas(unittest.TestCase):
    def test_replicas_train_what_one_process_trains(self):
        for name in ("mxfp8-2d", "fp8-current"):
            alone, _ = model.train(name, 20)
            for losses in ranks.run(2, ddp, name, 20):
                for step, (a, b) in enumerate(zip(alone, losses, strict=True)):
                    self.assertLess(abs(a - b), 1e-3 * max(1.0, abs(a)), (name, step))

    def test_values_that_are_broadcast_name_the_setting(self):
        for found in ranks.run(2, synced):
            self.assertEqual(len(found), 2)
            for message in found:
                self.assertIn("init_sync=False", message)


if __name__ == "__main__":
    unittest.main()
