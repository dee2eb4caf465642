#!/usr/bin/env python3
"""Puts what table.py needs of TransformerEngine and torchao into a folder: fetch.py FOLDER

FOLDER/te/ gets TransformerEngine's library, of a wheel of 276 MB cut to the code of sm_90 (te/trim.py) and
compressed (23 MB), and te_loop.so, compiled with g++; FOLDER/torchao.whl is torchao's wheel (3 MB). What is
there already is kept.
"""

import glob
import lzma
import os
import subprocess
import sys
import tempfile
import zipfile

TE, TORCHAO = "transformer_engine_cu13==2.20.2", "torchao==0.18.0"
LIBRARY = "libtransformer_engine.so"
HERE = os.path.dirname(os.path.abspath(__file__))


def download(package, folder):
    """The wheel of `package` for a machine with x86-64 Linux."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
         "--only-binary=:all:", "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64", "--dest", folder,
         package], check=True)
    wheel, = glob.glob(os.path.join(folder, "*.whl"))
    return wheel


def library(target, scratch):
    """The cut library of the wheel, compressed, at `target`."""
    whole, cut, small = (os.path.join(scratch, name) for name in ("whole.so", "cut.so", "cut.so.xz"))
    with zipfile.ZipFile(download(TE, scratch)) as archive:
        entry, = (name for name in archive.namelist() if os.path.basename(name) == LIBRARY)
        with archive.open(entry) as source, open(whole, "wb") as file:
            while data := source.read(1 << 24):
                file.write(data)
    subprocess.run([sys.executable, os.path.join(HERE, "te/trim.py"), whole, cut], check=True)
    subprocess.run(["strip", "--strip-all", cut], check=True)
    with open(cut, "rb") as source, lzma.open(small, "wb", preset=6) as file:
        while data := source.read(1 << 24):
            file.write(data)
    os.replace(small, target)


def fetch(package, target, make):
    """Makes `target` with `make(target, scratch)`, unless it is there and of this version of `package`."""
    stamp = target + ".version"
    if os.path.exists(target) and os.path.exists(stamp):
        with open(stamp, encoding="utf-8") as file:
            if file.read() == package:
                return
    print(f"fetching {package}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(target)) as scratch:
        make(target, scratch)
    with open(stamp, "w", encoding="utf-8") as file:
        file.write(package)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = os.path.abspath(sys.argv[1])
    te = os.path.join(folder, "te")
    os.makedirs(te, exist_ok=True)
    try:
        fetch(TORCHAO, os.path.join(folder, "torchao.whl"),
              lambda target, scratch: os.replace(download(TORCHAO, scratch), target))
        fetch(TE, os.path.join(te, LIBRARY + ".xz"), library)
        subprocess.run(["g++", "-O2", "-shared", "-fPIC", "-o", os.path.join(te, "te_loop.so"),
                        os.path.join(HERE, "te/te_loop.cpp")], check=True)
    except (OSError, subprocess.CalledProcessError, ValueError) as error:
        sys.exit(f"the peers cannot be fetched: {error}; it needs pip with a package index, strip and g++")


if __name__ == "__main__":
    main()
