"""Checks that an installed wheel works in this interpreter: its modules compile, and its library loads. Needs no torch."""

import compileall
import importlib.util
import pathlib
import sys
import sysconfig

folder = pathlib.Path(sysconfig.get_path("platlib")) / "lowp"
if not compileall.compile_dir(folder, quiet=1):
    sys.exit(f"modules in {folder} are no Python of {sys.version}")
(library,) = [*folder.glob("_lowp*.so"), *folder.glob("_lowp*.pyd")]
spec = importlib.util.spec_from_file_location("lowp._lowp", library)
native = importlib.util.module_from_spec(spec)
spec.loader.exec_module(native)
if native.VERSION != sys.argv[1] or not native.recipes():
    sys.exit(f"{library} is lowp {native.VERSION} with the recipes {native.recipes()}, and not lowp {sys.argv[1]}")
