"""docs/tutorial-pytorch.md, run as it is written: its Python blocks one after another, as one program."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

PAGE = pathlib.Path(__file__).parents[3] / "docs/tutorial-pytorch.md"


class Tutorial(unittest.TestCase):
    def test_runs_as_it_is_written(self):
        blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
        self.assertGreater(len(blocks), 4, "blocks of Python")
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "tutorial.py"
            program.write_text("\n".join(blocks))
            # One thread: several on busy cores wait for each other in every operation.
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            ran = subprocess.run([sys.executable, program], cwd=folder, env=environment, capture_output=True, text=True, timeout=170)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertRegex(ran.stdout, r"\d\.\d\d -> \d\.\d\d")


if __name__ == "__main__":
    unittest.main()
