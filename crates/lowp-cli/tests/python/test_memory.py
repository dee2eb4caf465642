"""Models larger than memory: a command needs one tensor and its output, however many tensors there are."""

import os
import subprocess
import sys
import unittest

import ml_dtypes
import numpy as np

import models
from support import LOWP, Bench

MIB = 1 << 20
ROWS, COLUMNS = 2048, 2048
TENSORS = 12
# What the tensors of a file do not explain: one mapped piece, the allocator's rounding, headers.
SLACK = 16 * MIB


# Run by an interpreter that has imported nothing large: a process counts the memory of the one that it was forked from.
MEASURE = """
import os, sys
process = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(process, 0)
assert os.waitstatus_to_exitcode(status) == 0, sys.argv
print(usage.ru_maxrss)
"""
# What the kernel counts in.
UNIT = 1 if sys.platform == "darwin" else 1024


def peak(folder, *args):
    """The most memory that the command ever had, in bytes."""
    words = [sys.executable, "-I", "-S", "-c", MEASURE, LOWP, *args]
    # The allocator keeps freed memory for some milliseconds, as long as there is plenty; what counts is what is in use.
    environment = os.environ | {"MIMALLOC_PURGE_DELAY": "0"}
    done = subprocess.run(words, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.splitlines()[-1]) * UNIT


class Memory(Bench):
    def test_peak_is_one_tensor_and_its_output(self):
        rng = np.random.default_rng(2)
        values = rng.standard_normal((ROWS, COLUMNS)).astype(ml_dtypes.bfloat16)
        vectors = {"norm": rng.standard_normal(64).astype(np.float32)}
        models.write(self.folder / "small.safetensors", vectors)
        models.write(self.folder / "model.safetensors", {f"w{i}": values for i in range(TENSORS)} | vectors)
        elements = ROWS * COLUMNS
        source, both, one, wide = 2 * elements, 2.25 * elements, 1.125 * elements, 4 * elements
        ranks = ["--world-size", "3"]
        quantize = ["--recipe", "mxfp8", "--scales", "compact"]
        base = peak(self.folder, "inspect", "small.safetensors")
        for name, most, *args in [
            ("quantize", source + both, "model.safetensors", "-o", "q.safetensors", *quantize),
            ("dequantize", one + wide, "q.safetensors", "-o", "d.safetensors"),
            # All ranks work at the same tensor, each at its rows.
            ("shard", source + both, "model.safetensors", "-o", "ranks", *ranks, *quantize),
            ("unshard", 2 * both, "ranks", "-o", "u.safetensors"),
            ("inspect", one + wide, "q.safetensors", "--reference", "model.safetensors"),
            ("verify", 0, "q.safetensors", "u.safetensors"),
            ("verify", source + both, "q.safetensors", "--source", "model.safetensors"),
        ]:
            used = peak(self.folder, name, *args) - base
            self.assertLess(used, most + SLACK, f"{name}: {used / MIB:.0f} MiB above an empty command")
            # A command that held the whole model would be far above that.
            self.assertGreater(TENSORS * source, most + SLACK)

    def test_ranks_share_what_the_file_says_of_its_tensors(self):
        """Many small tensors over many ranks: what is kept of each tensor is kept once."""
        count = 1000
        values = np.ones((64, 32), dtype=ml_dtypes.bfloat16)
        models.write(self.folder / "model.safetensors", {f"layer.{i:05}.weight": values for i in range(count)})
        used = {}
        for world in [2, 64]:
            ranks = f"ranks-{world}"
            shard = ["model.safetensors", "-o", ranks, "--recipe", "mxfp8", "--world-size", str(world)]
            used["shard", world] = peak(self.folder, "shard", *shard)
            used["unshard", world] = peak(self.folder, "unshard", ranks, "-o", "u.safetensors")
            used["inspect", world] = peak(self.folder, "inspect", ranks)
        for command in ["shard", "unshard", "inspect"]:
            small, large = used[command, 2], used[command, 64]
            # A thread and an open file for each rank, and 8 bytes for each of its fields.
            self.assertLess(large - small, 24 * MIB, f"{command}: {small / MIB:.0f} and {large / MIB:.0f} MiB")


if __name__ == "__main__":
    unittest.main()
