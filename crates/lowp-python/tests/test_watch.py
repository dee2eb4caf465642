"""Ranks that wait for one that failed between gathers."""

import contextlib
import io
import time
import unittest

import torch.distributed as dist
from lowp import LowpError, _watch

TIMES = dict(every=0.05, stuck=0.4, forgotten=1.0)


class Waits(unittest.TestCase):
    def setUp(self):
        self.store, self.aborted = dist.HashStore(), []
        self.watch = _watch.Watch(self.store, lambda: self.aborted.append(True), **TIMES).start()
        self.other = _watch.Watch(self.store, None)

    def wait(self, seconds, progress=False):
        """What is raised meanwhile in this thread, and what was printed."""
        printed, until = io.StringIO(), time.monotonic() + seconds
        try:
            with contextlib.redirect_stderr(printed):
                while time.monotonic() < until:
                    time.sleep(0.01)
                    self.watch.passed += progress
        except LowpError as error:
            return str(error), printed.getvalue()
        return None, printed.getvalue()

    def test_a_rank_that_waits_raises_the_cause_of_another(self):
        self.assertEqual(self.wait(0.3), (None, ""))
        self.other.tell(1, "RuntimeError: out of luck: twice")
        raised, printed = self.wait(20)
        self.assertIn("rank 1 failed between gathers: RuntimeError: out of luck: twice", raised)
        self.assertIn(raised, printed)
        self.assertEqual(self.aborted, [True])

    def test_a_rank_that_goes_on_hears_nothing(self):
        self.other.tell(1, "caught there")
        self.assertEqual(self.wait(2.0, progress=True), (None, ""))
        # The failure is forgotten, and this rank may rest.
        self.assertEqual(self.wait(1.0), (None, ""))
        self.assertEqual(self.aborted, [])

    def test_a_rank_that_failed_too_waits_for_nobody(self):
        self.other.tell(1, "here and there")
        time.sleep(0.2)
        self.watch.tell(0, "here and there")
        self.assertEqual(self.wait(1.5), (None, ""))
        self.assertEqual(self.aborted, [])

    def test_a_failure_from_before_is_none_of_a_later_job(self):
        store = dist.HashStore()
        _watch.Watch(store, None).tell(1, "long ago")
        _watch.Watch(store, lambda: self.aborted.append(True), **TIMES).start()
        self.assertEqual(self.wait(1.5), (None, ""))
        self.assertEqual(self.aborted, [])


if __name__ == "__main__":
    unittest.main()
