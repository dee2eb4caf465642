"""Whether two programs do the same: `python3 tests/same_program.py OLD NEW`, two builds of `lowp`.

Each runs every file command in a folder of its own, and `lowp train` in every recipe. Output, exit codes and the bytes of all files must be equal, but
for times and the versions of the programs. Checkpoints of OLD are resumed by NEW. Differences are printed, and the exit code is 1.
Texts that differ on purpose: `--messages` leaves output out and compares codes and files.
"""

import argparse
import json
import pathlib
import random
import re
import struct
import subprocess
import sys
import tempfile

RECIPES = "fp8-delayed fp8-current fp8-rowwise fp8-block mxfp8 mxfp8-2d mxfp4 nvfp4-1d nvfp4-2d".split()
# Parts of results that are times, rates or memory of the machine.
TIMES = re.compile(r"seconds|_s$|tokens_per|throughput|memory|peak|version|bytes_per|resident")

FILES = """
quantize m.safetensors -o q.safetensors --recipe mxfp8
quantize m.safetensors -o q.safetensors --recipe mxfp8 --keep-unfit -v
quantize fit.safetensors -o q-nv.safetensors --recipe nvfp4-2d -v
quantize fit.safetensors -o q-nvn.safetensors --recipe nvfp4-2d --amax-group none --dtypes u8
quantize fit.safetensors -o q-cur.safetensors --recipe fp8-current --usage rowwise --scales compact
quantize fit.safetensors -o q-blk.safetensors --recipe fp8-block --tensors *proj*
quantize fit.safetensors -o q-flat.safetensors --recipe mxfp8 --flat-cuts 1000,5001
quantize fit.safetensors -o x.safetensors --recipe mxfp8 --flat-cuts 5001,1000
quantize fit.safetensors -o x.safetensors --recipe mxfp8 --tensors nothing*
quantize fit.safetensors -o x.safetensors --recipe mxfp8 --amax-group *.{q,k}_proj
quantize fit.safetensors -o q-g.safetensors --recipe nvfp4-2d --amax-group *.{q,k}_proj -v
quantize fit.safetensors -o fit.safetensors --recipe mxfp8
quantize fit.safetensors -o no/such/q.safetensors --recipe mxfp8
quantize fit.safetensors -o x.safetensors --delayed-scale 3 --recipe mxfp8
quantize fit.safetensors -o q-d.safetensors --delayed-scale 3 --recipe fp8-delayed
quantize q-nv.safetensors -o x.safetensors --recipe mxfp8
quantize bad.safetensors -o x.safetensors --recipe mxfp8
quantize short.safetensors -o x.safetensors --recipe mxfp8
quantize hub -o qhub --recipe mxfp8 -v --max-shard-size 100KB
dequantize q-nv.safetensors -o d.safetensors -v
dequantize q.safetensors -o d16.safetensors --dtype f16
dequantize q-cur.safetensors -o x.safetensors --usage columnwise
dequantize q.safetensors -o d-col.safetensors --usage columnwise --dtype bf16
dequantize qhub -o dhub -v
shard fit.safetensors -o ranks --world-size 3 --recipe nvfp4-2d -v
shard fit.safetensors -o x --world-size 0 --recipe mxfp8
shard hub -o rhub --world-size 2 --recipe mxfp8 -v
unshard ranks -o u.safetensors -v
unshard rhub -o uhub -v
unshard hub -o x.safetensors
inspect q.safetensors
inspect q-nv.safetensors --reference fit.safetensors --json
inspect ranks --json
inspect bad.safetensors
verify u.safetensors q-nv.safetensors
verify q-nv.safetensors q-nvn.safetensors
verify q.safetensors q-flat.safetensors
verify ranks ranks
verify q-nv.safetensors --source fit.safetensors
export q-nv.safetensors -o e-ct --to compressed-tensors -v
export q-nvn.safetensors -o x --to compressed-tensors --fused error
export q-nvn.safetensors -o e-ig --to modelopt --fused ignore
export q-cur.safetensors -o e-mo --to modelopt
export q-blk.safetensors -o e-ds --to deepseek
export q.safetensors -o e-te --to te
export q.safetensors -o e-bf --to bf16 --max-shard-size 50KB
export qhub -o e-hub --to compressed-tensors -v
import e-ct -o i-ct.safetensors -v
import e-mo -o i-mo.safetensors
import e-ds -o i-ds.safetensors --dtypes u8
import e-te -o i-te.safetensors
import e-hub -o i-hub -v
import e-ct -o i-bf.safetensors --to bf16 -v
recipes
plan --model 125m --world-size 8
plan --model 1b --world-size 64 --recipe nvfp4-2d --json
plan --recipe mxfp8 --shape 1000x4096 --world-size 7
""".strip().splitlines()

TRAIN = "train --dim 32 --layers 2 --seq 32 --batch 8 --no-baseline".split()


def safetensors(path, tensors):
    header, data = {}, b""
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def inputs(folder):
    rng = random.Random(1)
    f32 = lambda n: struct.pack(f"<{n}f", *(rng.gauss(0, 1) for _ in range(n)))
    bf16 = lambda n: b"".join(f32(1)[2:] for _ in range(n))
    fit = {
        "model.layers.0.self_attn.q_proj.weight": ("F32", [128, 256], f32(128 * 256)),
        "model.layers.0.self_attn.k_proj.weight": ("F32", [128, 256], f32(128 * 256)),
        "model.layers.0.mlp.down_proj.weight": ("BF16", [256, 128], bf16(256 * 128)),
        "embed.weight": ("F32", [64, 128], f32(64 * 128)),
        "ids": ("I64", [2, 2], bytes(32)),
        "norm.weight": ("F32", [256], f32(256)),
    }
    (folder / "hub").mkdir(parents=True)
    safetensors(folder / "fit.safetensors", fit)
    safetensors(folder / "hub/model.safetensors", fit)
    safetensors(folder / "m.safetensors", fit | {"odd.weight": ("F32", [33, 17], f32(33 * 17))})
    (folder / "hub/config.json").write_text('{"torch_dtype": "float32"}\n')
    (folder / "hub/tokenizer.json").write_text("{}")
    (folder / "bad.safetensors").write_bytes(b"GGUF1234")
    (folder / "short.safetensors").write_bytes((folder / "fit.safetensors").read_bytes()[:-9])
    (folder / "text.txt").write_bytes(bytes(rng.choice(b"abcdefgh \n") for _ in range(20_000)))


def run(program, folder, words):
    done = subprocess.run([program, *words], cwd=folder, capture_output=True, text=True, timeout=600)
    output = (done.stdout + done.stderr).replace(str(folder), ".").replace(folder.name, ".")
    return done.returncode, re.sub(r"\d+(\.\d+)? (s|ms|us|[KMG]B/s)\b", "TIME", output)


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(of) for key, of in value.items() if not TIMES.search(key)}
    return [without_times(of) for of in value] if isinstance(value, list) else value


def content(path):
    if path.suffix == ".json":
        return without_times(json.loads(path.read_text()))
    return path.read_bytes()


def trained(program, folder, words):
    code, output = run(program, folder, [*TRAIN, "--data", "text.txt", "--json", "result.json", *words])
    result = folder / "result.json"
    losses = content(result) if code == 0 else output
    result.unlink(missing_ok=True)
    return code, losses


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=pathlib.Path)
    parser.add_argument("new", type=pathlib.Path)
    parser.add_argument("--messages", action="store_true", help="leave out the output of commands, which may differ on purpose")
    args = parser.parse_args()
    programs = [args.old.resolve(), args.new.resolve()]
    wrong = []
    with tempfile.TemporaryDirectory() as top:
        folders = [pathlib.Path(top) / name for name in ("old", "new")]
        for folder in folders:
            inputs(folder)
        for line in FILES:
            found = [run(program, folder, line.split()) for program, folder in zip(programs, folders)]
            if args.messages:
                found = [code for code, _ in found]
            if found[0] != found[1]:
                wrong.append(f"lowp {line}\n  old: {found[0]}\n  new: {found[1]}")
        old, new = ({p.relative_to(f): p for p in f.rglob("*") if p.is_file()} for f in folders)
        if old.keys() != new.keys():
            wrong.append(f"other files: {sorted(map(str, old.keys() ^ new.keys()))}")
        wrong += [f"other bytes: {name}" for name in old.keys() & new.keys() if content(old[name]) != content(new[name])]
        for recipe in RECIPES:
            for words in ("--steps 3", "--steps 3 --world-size 2 --accumulate 2", "--steps 4 --precision-tail 0.5"):
                found = [trained(p, f, f"{words} --recipe {recipe}".split()) for p, f in zip(programs, folders)]
                if found[0] != found[1]:
                    wrong.append(f"lowp train {words} --recipe {recipe}\n  old: {found[0]}\n  new: {found[1]}")
            # A checkpoint of the old program, resumed by each.
            saved = f"--steps 4 --recipe {recipe} --world-size 2 --save saved-{recipe} --save-every 2".split()
            for folder in folders:
                trained(programs[0], folder, [*saved, "--stop-after", "2"])
            found = [trained(p, f, [*saved, "--resume"]) for p, f in zip(programs, folders)]
            if found[0] != found[1] or found[0][0] != 0:
                wrong.append(f"resume of {recipe}\n  old: {found[0]}\n  new: {found[1]}")
    for difference in wrong:
        print(difference)
    print(f"{len(FILES)} commands, {len(old)} files, {4 * len(RECIPES)} runs of {len(RECIPES)} recipes: {len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
