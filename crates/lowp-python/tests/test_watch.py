"""Ranks that wait for one that failed between gathers, and codes that native layers keep."""

import contextlib
import io
import pickle
import time
import unittest

import torch
import torch.distributed as dist
from lowp import LowpError, _watch

TIMES = dict(every=0.05, stuck=0.4, forgotten=1.0)


class Waits(unittest.TestCase):
    def setUp(self):
        self.store, self.aborted = dist.HashStore(), []
        self.watch, self.other = self.watching().start(), self.watching()
        for watch in (self.watch, self.other):
            for name in ("shards", "replicas"):
                watch.add(name, f"the group of {name}")

    def watching(self):
        watch = _watch.Watch(self.store, self.aborted.append, **TIMES)
        self.addCleanup(watch.end)
        return watch

    def wait(self, seconds, progress=False):
        """What is raised meanwhile in this thread, and what was printed."""
        printed, until = io.StringIO(), time.monotonic() + seconds
        try:
            with contextlib.redirect_stderr(printed):
                while time.monotonic() < until:
                    time.sleep(0.01)
                    self.watch.passed += progress
        except LowpError as error:
            self.assertEqual(str(pickle.loads(pickle.dumps(error))), str(error))
            return str(error), printed.getvalue()
        return None, printed.getvalue()

    def hears_nothing(self, seconds=1.5, **how):
        self.assertEqual((self.wait(seconds, **how), self.aborted), ((None, ""), []))

    def test_a_rank_that_waits_raises_the_first_cause_of_another(self):
        self.hears_nothing(0.3)
        self.other.tell("shards", 1, "RuntimeError: out of luck: twice \udcff")
        later = self.watching()
        later.groups = {"shards": (None, None)}
        later.tell("shards", 2, "the rest followed")
        raised, printed = self.wait(20)
        self.assertIn("rank 1 failed between gathers: RuntimeError: out of luck: twice ?", raised)
        self.assertIn(raised, printed)
        self.assertEqual(self.aborted, ["the group of shards"])

    def test_a_rank_that_goes_on_hears_nothing(self):
        self.other.tell("replicas", 1, "caught there")
        self.hears_nothing(2.0, progress=True)
        # The failure is forgotten, and this rank may rest.
        self.hears_nothing(1.0)

    def test_a_rank_that_failed_too_waits_for_nobody(self):
        self.other.tell("shards", 1, "here and there")
        time.sleep(0.2)
        self.watch.tell("shards", 0, "here and there")
        self.hears_nothing()

    def test_a_rank_that_failed_first_waits_for_nobody(self):
        self.watch.tell("shards", 0, "here and there")
        self.other.tell("shards", 1, "here and there")
        self.hears_nothing()

    def test_failures_of_other_groups_and_from_before_are_none_of_its_own(self):
        self.other.tell("another model", 1, "elsewhere")
        _watch.Watch(self.store, None).tell("added", 1, "long ago")
        self.watch.add("added", None)
        self.hears_nothing()

    def test_a_rank_that_failed_stays_until_others_have_asked(self):
        self.other.tell("shards", 1, "and ends")
        told = time.monotonic()
        self.other.end()
        self.assertGreater(time.monotonic() - told, TIMES["every"])
        self.store.delete_key(_watch._key("shards"))  # gone, if they had not


class Codes(unittest.TestCase):
    """When native layers ask for codes anew: recorded, since they are there on GPUs alone."""

    def test_a_shard_that_comes_back_is_asked_for(self):
        import ranks

        self.assertEqual(ranks.run(1, forgets)[0], {"first": True, "again": False, "other": True, "back": True, "elsewhere": False, "stays": False})
        for found in ranks.run(2, forgets):
            self.assertTrue(found["first"] and found["other"] and found["back"] and not found["again"] and not found["stays"], found)


def forgets(rank, world):
    """Whether a forward had native layers forget the codes that they hold: of a model whose shards are replaced, and put back."""
    import lowp
    from lowp import _fsdp
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(32, 32, bias=False))
    lowp.quantize_model_(net, "fp8-current")
    fully_shard(net[0])
    fully_shard(net)
    calls, found = [], {}
    _fsdp._native.forget = calls.append

    def forward(name):
        calls.clear()
        with torch.no_grad():
            out = net(torch.eye(32))
        net[0].reshard()
        net.reshard()
        found[name] = bool(calls)
        return out

    first = forward("first")
    forward("again")
    own = net.state_dict()
    other = {key: value.clone() for key, value in own.items()}
    for value in other.values():
        value.to_local().copy_(lowp.quantize(2 * torch.eye(32)[: value.to_local().shape[0]], "fp8-current"))
    net.load_state_dict(other, assign=True)
    assert not torch.equal(forward("other"), first)
    net.load_state_dict(own, assign=True)
    assert torch.equal(forward("back"), first)
    forward("elsewhere")  # of several ranks, whose gathers are lowp's own from here on
    forward("stays")
    return found


if __name__ == "__main__":
    unittest.main()
