"""What the package uses of PyTorch that PyTorch promises nobody: in one module, with the versions that it was tested with."""

import ast
import pathlib
import subprocess
import sys
import unittest

import lowp
from lowp import _torch_compat

PACKAGE = pathlib.Path(lowp.__file__).parent


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def own_names(trees):
    """Private names that the package gives: functions, classes, attributes that it assigns, slots, imports of its own modules."""
    names = {path.stem for path in PACKAGE.iterdir()}
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                names.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names.add(node.id)
    return names


def foreign(tree, own):
    """Private names of other packages that a file uses, with their lines."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            # Names of operators are public.
            names = [] if getattr(node.value, "id", "") == "aten" else [node.attr]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            if not getattr(node, "level", 0):
                names = [part for alias in node.names for part in f"{module}.{alias.name}".split(".")]
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "hasattr"):
            names = [arg.value for arg in node.args[1:2] if isinstance(arg, ast.Constant)]
        yield from ((node.lineno, name) for name in names if is_private(name) and name not in own)


class Compat(unittest.TestCase):
    def test_private_names_of_torch_are_in_one_module(self):
        trees = {path.name: ast.parse(path.read_text()) for path in PACKAGE.glob("*.py")}
        own = own_names(trees.values())
        found = {name: sorted(foreign(tree, own)) for name, tree in trees.items() if name != "_torch_compat.py"}
        self.assertEqual({name: where for name, where in found.items() if where}, {})
        self.assertTrue(list(foreign(trees["_torch_compat.py"], own)))

    def test_a_planted_use_is_found(self):
        for text in ("torch._C.thing()", "from torch._dynamo import eval_frame", "getattr(param, '_local', None)", "x._store._cdata"):
            self.assertTrue(list(foreign(ast.parse(text), {"_store"})), text)
        for text in ("x._store", "x.__dict__", "from . import _lowp", "self.fine"):
            self.assertFalse(list(foreign(ast.parse(text), {"_store"})), text)

    def test_versions_outside_of_the_range_are_warned_of(self):
        for version, known in (
            ("2.15.0", True),
            ("2.15.0a0+git1", True),
            ("2.11.1+cu130", True),
            ("2.10.0", True),
            ("2.9.1", False),
            ("2.16.0.dev20270101", False),
            ("3.0", False),
            ("unknown", False),
        ):
            self.assertEqual(_torch_compat.is_tested(version), known, version)

    def test_the_import_warns_and_works(self):
        text = "import torch; torch.__version__ = '9.1.0'; import lowp; print(lowp.quantize(torch.ones(32, 32), 'mxfp8').shape)"
        done = subprocess.run([sys.executable, "-W", "always", "-c", text], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("torch.Size([32, 32])", done.stdout)
        self.assertIn("torch 9.1.0", done.stderr)
        done = subprocess.run([sys.executable, "-W", "error", "-c", "import lowp"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    unittest.main()
