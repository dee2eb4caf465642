"""Whether two programs do the same: `python3 tests/same_program.py OLD NEW`, two builds of `lowp`.

Each runs every file command in a folder of its own, and `lowp train` in every recipe. Exit codes are those that stand here. Output, results and the bytes
of all files but checkpoints must be equal, but for times, versions and the random numbers of checkpoints. NEW resumes checkpoints of OLD. Differences are
printed, and the exit code is 1. Where texts differ on purpose, `--messages` leaves output out.
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
# Parts of results and of checkpoints that differ from run to run.
TIMES = re.compile(r".*seconds.*|tokens_per_second|flops_per_second|version|id|checksum")

# Exit code and arguments.
FILES = """
2 quantize m.safetensors -o q.safetensors --recipe mxfp8
0 quantize m.safetensors -o q.safetensors --recipe mxfp8 --keep-unfit -v
0 quantize fit.safetensors -o q-nv.safetensors --recipe nvfp4-2d -v
0 quantize fit.safetensors -o q-nvn.safetensors --recipe nvfp4-2d --amax-group none --dtypes u8
0 quantize fit.safetensors -o q-cur.safetensors --recipe fp8-current --usage rowwise --scales compact
0 quantize fit.safetensors -o q-blk.safetensors --recipe fp8-block --tensors *proj*
0 quantize fit.safetensors -o q-flat.safetensors --recipe mxfp8 --flat-cuts 1000,5001
2 quantize fit.safetensors -o x.safetensors --recipe mxfp8 --flat-cuts 5001,1000
2 quantize fit.safetensors -o x.safetensors --recipe mxfp8 --tensors nothing*
2 quantize fit.safetensors -o x.safetensors --recipe mxfp8 --amax-group *.{q,k}_proj
0 quantize fit.safetensors -o q-g.safetensors --recipe nvfp4-2d --amax-group *.{q,k}_proj -v
2 quantize fit.safetensors -o fit.safetensors --recipe mxfp8
2 quantize fit.safetensors -o no/such/q.safetensors --recipe mxfp8
2 quantize fit.safetensors -o x.safetensors --delayed-scale 3 --recipe mxfp8
0 quantize fit.safetensors -o q-d.safetensors --delayed-scale 3 --recipe fp8-delayed
2 quantize q-nv.safetensors -o x.safetensors --recipe mxfp8
2 quantize bad.safetensors -o x.safetensors --recipe mxfp8
2 quantize short.safetensors -o x.safetensors --recipe mxfp8
0 quantize hub -o qhub --recipe mxfp8 -v --max-shard-size 100KB
0 dequantize q-nv.safetensors -o d.safetensors -v
0 dequantize q.safetensors -o d16.safetensors --dtype f16
2 dequantize q-cur.safetensors -o x.safetensors --usage columnwise
0 dequantize q.safetensors -o d-col.safetensors --usage columnwise --dtype bf16
0 dequantize qhub -o dhub -v
0 shard fit.safetensors -o ranks --world-size 3 --recipe nvfp4-2d -v
2 shard fit.safetensors -o x --world-size 0 --recipe mxfp8
0 shard hub -o rhub --world-size 2 --recipe mxfp8 -v
0 unshard ranks -o u.safetensors -v
0 unshard rhub -o uhub -v
2 unshard hub -o x.safetensors
0 inspect q.safetensors
0 inspect q-nv.safetensors --reference fit.safetensors --json
0 inspect ranks --json
2 inspect bad.safetensors
0 verify u.safetensors q-nv.safetensors
1 verify q-nv.safetensors q-nvn.safetensors
1 verify q.safetensors q-flat.safetensors
0 verify ranks ranks
0 verify q-nv.safetensors --source fit.safetensors
0 export q-nv.safetensors -o e-ct --to compressed-tensors -v
2 export q-nvn.safetensors -o x --to compressed-tensors --fused error
0 export q-nvn.safetensors -o e-ig --to modelopt --fused ignore
0 export q-cur.safetensors -o e-mo --to modelopt
0 export q-blk.safetensors -o e-ds --to deepseek
0 export q.safetensors -o e-te --to te
0 export q.safetensors -o e-bf --to bf16 --max-shard-size 50KB
0 export qhub -o e-hub --to compressed-tensors -v
0 import e-ct -o i-ct.safetensors -v
0 import e-mo -o i-mo.safetensors
0 import e-ds -o i-ds.safetensors --dtypes u8
0 import e-te -o i-te.safetensors
0 import e-hub -o i-hub -v
0 import e-ct -o i-bf.safetensors --to bf16 -v
0 recipes
0 plan --model 125m --world-size 8
0 plan --model 1b --world-size 64 --recipe nvfp4-2d --json
0 plan --recipe mxfp8 --shape 1000x4096 --world-size 7
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
    output = (done.stdout + done.stderr).replace(str(folder), ".")
    return done.returncode, re.sub(r"\d+(\.\d+)? (s|ms|us|[KMG]B/s)\b", "TIME", output)


def without_times(value):
    if isinstance(value, dict):
        return {key: without_times(of) for key, of in value.items() if not TIMES.fullmatch(key)}
    return [without_times(of) for of in value] if isinstance(value, list) else value


def content(path):
    if path.suffix == ".json":
        return without_times(json.loads(path.read_text()))
    return path.read_bytes()


def trained(program, folder, words):
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    code, output = run(program, folder, [*TRAIN, "--data", "text.txt", "--json", "result.json", *words])
    return code, content(result) if code == 0 else output


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

        def compare(what, expected, found):
            if args.messages and expected != 0:
                found = [(code, "") for code, _ in found]
            if found[0] != found[1] or found[0][0] != expected:
                wrong.append(f"{what}: {expected} is right\n  old: {found[0]}\n  new: {found[1]}")

        for code, *words in map(str.split, FILES):
            found = [run(program, folder, words) for program, folder in zip(programs, folders)]
            if args.messages:
                found = [(code, "") for code, _ in found]
            compare("lowp " + " ".join(words), int(code), found)
        old, new = ({p.relative_to(f): p for p in f.rglob("*") if p.is_file()} for f in folders)
        if old.keys() != new.keys():
            wrong.append(f"other files: {sorted(map(str, old.keys() ^ new.keys()))}")
        wrong += [f"other bytes: {name}" for name in old.keys() & new.keys() if content(old[name]) != content(new[name])]
        for recipe in RECIPES:
            for words in ("--steps 3", "--steps 3 --world-size 2 --accumulate 2", "--steps 4 --precision-tail 0.5"):
                found = [trained(p, f, f"{words} --recipe {recipe}".split()) for p, f in zip(programs, folders)]
                compare(f"lowp train {words} --recipe {recipe}", 0, found)
            # A checkpoint of the old program, resumed by each; what they save then.
            saved = f"--steps 4 --recipe {recipe} --world-size 2 --save saved-{recipe} --save-every 2".split()
            for folder in folders:
                trained(programs[0], folder, [*saved, "--stop-after", "2"])
            resumed = [*saved, "--resume", f"saved-{recipe}"]
            compare(f"resume of {recipe}", 0, [trained(p, f, resumed) for p, f in zip(programs, folders)])
            checkpoints = [str(folder / f"saved-{recipe}/{recipe}-seed0") for folder in folders]
            code, output = run(programs[1], folders[0], ["verify", *checkpoints])
            if code != 0:
                wrong.append(f"checkpoints of {recipe}: {output}")
    for difference in wrong:
        print(difference)
    print(f"{len(FILES)} commands, {len(old)} files, {4 * len(RECIPES)} runs of {len(RECIPES)} recipes: {len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
