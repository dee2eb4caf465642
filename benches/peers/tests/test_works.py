"""The names by which peers, the table and the bars know each other's work, with stand-ins for torch and the libraries."""

import contextlib
import importlib
import io
import os
import sys
import types
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
PEERS = os.path.dirname(HERE)
sys.path[:0] = [PEERS, os.path.join(PEERS, "te")]

import bars  # noqa: E402
import pairs  # noqa: E402
import table  # noqa: E402

TORCHAO = ["torchao", "torchao.prototype", "torchao.prototype.mx_formats", "torchao.prototype.mx_formats.mx_tensor",
           "torchao.prototype.mx_formats.nvfp4_tensor"]
NAMES = ["torch", *TORCHAO]


class Fake:
    """Stands in for torch, its modules and its tensors: whatever is asked of it is another."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Fake()

    def __call__(self, *_, **__):
        return Fake()

    def __getitem__(self, _):
        return Fake()

    def __iter__(self):
        return iter([Fake()])

    def __add__(self, _):
        return Fake()

    __lshift__ = __rshift__ = __add__


class Works(unittest.TestCase):
    def setUp(self):
        stand_ins = mock.patch.dict(sys.modules, {name: Fake() for name in NAMES})
        stand_ins.start()
        self.addCleanup(stand_ins.stop)

    def te_works(self):
        """What each case of te_bench.py would measure: {case: {(peer, work, shape)}}."""
        for name in ("capi", "te_bench"):
            sys.modules.pop(name, None)
        capi, bench = importlib.import_module("capi"), importlib.import_module("te_bench")
        self.addCleanup(sys.modules.pop, "capi")
        self.addCleanup(sys.modules.pop, "te_bench")
        capi.te = capi.loop = mock.MagicMock()
        capi.basic = lambda *_: capi.Basic()
        capi.config = bench.address = lambda *_: 1
        capi.handle = bench.handle = bench.plain = lambda *_: 1
        bench.stream = bench.check = lambda *_: 0
        bench.OPTIONS = types.SimpleNamespace(shrink=1, runs=1)
        works = {}
        for case, run in bench.CASES.items():
            def measure(work, shape, step, verify, found=works.setdefault(case, set())):
                step(0)
                found.add(("TE", work, shape))
            bench.measure = measure
            run()
        return works

    def peers_works(self):
        sys.modules.pop("peers", None)
        peers = importlib.import_module("peers")
        self.addCleanup(sys.modules.pop, "peers")
        peers.seconds = lambda run, runs: 1e-3
        with contextlib.redirect_stdout(io.StringIO()):
            for count, side in ((16, 4096), (256, 1024), (1000, 256)):
                peers.adamw(count, side, 1)
            peers.casts(16384, 1)
            peers.torchao_casts(16384, 1)
        self.assertEqual(peers.ABSENT, [])
        return {(row["peer"], row["work"], row["shape"]) for row in peers.ROWS}

    def test_every_case_of_te_runs_in_one_group(self):
        grouped = [case for group in table.TE_GROUPS for case in group]
        self.assertEqual(sorted(grouped), sorted(self.te_works()))

    def test_every_pair_is_measured_and_what_is_measured_is_paired(self):
        measured = self.peers_works().union(*self.te_works().values())
        works = {(peer, work) for peer, work, _ in measured}
        self.assertEqual(works, {(peer, work) for _, _, peer, work, _ in pairs.PAIRS})
        # The shapes are those of lowp's rows, which have bars.
        read = bars.Bars.read(os.path.join(PEERS, "../bars/h200.toml"))
        lines = [dict(peer=peer, work=work, shape=shape) for peer, work, shape in measured]
        beside = [peer for row in read.rows for peer, _ in pairs.peers_of(row, lines)]
        self.assertEqual({tuple(line.values()) for line in beside}, measured)

    def test_every_mark_is_explained_and_used(self):
        marks = {mark for *_, marks in pairs.PAIRS for mark in marks} | {"G"}
        self.assertEqual(marks, set(pairs.NOTES))


if __name__ == "__main__":
    unittest.main()
