"""The lowp command in a folder of its own, and comparisons that name what differs."""

import os
import pathlib
import subprocess
import tempfile
import unittest

import numpy as np

LOWP = os.environ["LOWP"]


class Bench(unittest.TestCase):
    """A test with a folder that goes away."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def lowp(self, *args, code=0):
        """Runs the command, which must end with `code`; returns what it printed."""
        words = [LOWP, *map(str, args)]
        if args[0] in ("quantize", "unshard"):
            # numpy has none of the other dtypes.
            words += ["--dtypes", "u8"]
        done = subprocess.run(words, cwd=self.folder, capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, code, f"{args}: {done.stderr}")
        return done.stdout if code == 0 else done.stderr

    def assert_same_bytes(self, found, expected, what):
        """The same dtype, shape and bits."""
        self.assertEqual((found.dtype, found.shape), (expected.dtype, expected.shape), what)
        raw = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in (found, expected)]
        differing = np.flatnonzero(raw[0] != raw[1])
        if differing.size:
            at = differing[0]
            counts = f"{differing.size} of {raw[0].size} bytes differ"
            self.fail(f"{what}: {counts}, first at {at}: {raw[0][at]:#04x}, expected {raw[1][at]:#04x}")

    def assert_same_values(self, found, expected, what):
        """The same bits, where NaN equals NaN."""
        self.assertEqual((found.dtype, found.shape), (expected.dtype, expected.shape), what)
        same = (found.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(found) & np.isnan(expected))
        if not same.all():
            at = tuple(np.argwhere(~same)[0])
            self.fail(f"{what}: {np.sum(~same)} values differ, first at {at}: {found[at]!r}, expected {expected[at]!r}")
