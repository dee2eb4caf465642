#!/usr/bin/env python3
"""One table of lowp, TransformerEngine, PyTorch and torchao, measured in one sitting, and the bars.

    table.py OUT --lowp PROGRAM [--te FOLDER] [--torchao WHEEL] [--bars FILE] [--filter TEXT] [--shrink N] [--runs N]
    table.py OUT [--bars FILE [--raise [--lower]]]

The first measures on the GPU of this machine: `lowp bench`, then TransformerEngine (fetch.py makes FOLDER and
WHEEL), then PyTorch, then torchao. The second uses what OUT holds. Both write OUT/table.txt and OUT/table.json.
A bar that is missed fails the command; --raise sets the bars of FILE to what was measured, less the noise.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import zipfile

from bars import Bars, Invalid
from pairs import BARRED, NOTES, is_equal_work, peers_of

HERE = os.path.dirname(os.path.abspath(__file__))
# Cases of te_bench.py that share a process: one that crashes takes only its group along.
TE_GROUPS = [
    ["fp8_known_both_bf16", "fp8_known_rowwise_bf16", "fp8_known_both_f32", "fp8_known_rowwise_f32",
     "fp8_current_both_bf16", "fp8_current_rowwise_bf16", "fp8_current_both_f32", "fp8_current_rowwise_f32"],
    ["adamw", "adamw_fp8_rowwise", "adamw_fp8_both"],
    ["adamw_current_grouped", "adamw_current_fused"],
    ["mxfp8_partial", "adamw_mxfp8"],
    ["adamw_remainder", "adamw_bf16_moments", "adamw_fp8_moments"],
]
# Seconds that the bench may take, a group of cases, and PyTorch with all that it compiles.
BENCH_LIMIT, TE_LIMIT, PEERS_LIMIT = 400, 150, 400


# ---------------------------------------------------------------- measuring

def measure(args):
    """Runs everything, one after another, into sitting.json."""
    sizes = ["--shrink", str(args.shrink), "--runs", str(args.runs)]
    path = os.path.join(args.out, "lowp.json")
    command = [args.lowp, "bench", "--device", "cuda", "--json", path, *sizes]
    if args.filter:
        command += ["--filter", args.filter]
    output, problem = finished(command, BENCH_LIMIT)
    if problem:
        raise Invalid(f"`{' '.join(command)}` {problem}")
    print(output, end="", flush=True)
    sitting = dict(filter=args.filter, shrink=args.shrink, lowp=load(path), peers=[], absent=[], facts={})
    os.remove(path)
    # What is measured so far survives what comes later.
    save(args.out, sitting)
    transformer_engine(args.te, sizes, sitting)
    save(args.out, sitting)
    pytorch(args.torchao, sizes, sitting)
    save(args.out, sitting)


def save(folder, sitting):
    with open(os.path.join(folder, "sitting.json"), "w", encoding="utf-8") as file:
        json.dump(sitting, file, indent=1)


def transformer_engine(folder, sizes, sitting):
    if not folder or not os.path.isdir(folder):
        sitting["absent"].append("TE: " + (f"{folder} is no folder" if folder else "no --te FOLDER was given"))
        return
    for group in TE_GROUPS:
        command = [sys.executable, os.path.join(HERE, "te/te_bench.py"), folder, ",".join(group), *sizes]
        output, problem = finished(command, TE_LIMIT)
        for line in map(line_of, output.splitlines()):
            if "facts" in line:
                sitting["facts"]["TE"] = line["facts"]
                same_device(sitting, "TE", line["device"])
            elif "error" in line:
                sitting["absent"].append(f"TE, {line['work']} {line.get('shape', '')}: {line['error']}")
            elif "us" in line:
                if why := line.pop("no_graph", None):
                    sitting["absent"].append(f"TE, {line['work']} {line['shape']} as a graph: {why}")
                sitting["peers"].append(line)
        if problem:
            sitting["absent"].append(f"TE, of {', '.join(group)}: {problem}")


def line_of(text):
    """A line of JSON; what else a kernel or a library printed is nothing."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def pytorch(wheel, sizes, sitting):
    with tempfile.TemporaryDirectory(prefix="lowp-peers") as scratch:
        environment = dict(os.environ)
        if wheel:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(os.path.join(scratch, "site"))
            except (OSError, zipfile.BadZipFile) as error:
                sitting["absent"].append(f"torchao's wheel {wheel}: {error}")
            environment["PYTHONPATH"] = os.pathsep.join(
                path for path in (os.path.join(scratch, "site"), os.environ.get("PYTHONPATH")) if path)
        path = os.path.join(scratch, "peers.json")
        command = [sys.executable, os.path.join(HERE, "peers.py"), "--json", path, *sizes]
        _, problem = finished(command, PEERS_LIMIT, environment)
        if problem:
            sitting["absent"].append(f"PyTorch and torchao: {problem}")
        if not os.path.exists(path):
            return
        result = load(path)
    same_device(sitting, "PyTorch", result["device"])
    sitting["facts"]["PyTorch"] = result["torch"]
    sitting["peers"] += result["rows"]
    sitting["absent"] += result["absent"]


def finished(command, limit, environment=None):
    """What a command printed, and what went wrong with it or None."""
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as output:
        try:
            ended = subprocess.run(command, stdout=output, stderr=errors, timeout=limit, env=environment, check=False)
            problem = f"ended with code {ended.returncode}" if ended.returncode else None
        except subprocess.TimeoutExpired:
            problem = f"took more than {limit} s"
        output.seek(0)
        errors.seek(0)
        last = errors.read().strip().splitlines()[-1:]
        return output.read(), problem and ": ".join([problem, *last])


def same_device(sitting, peer, device):
    if device != sitting["lowp"]["device"]:
        raise Invalid(f"lowp was measured on {sitting['lowp']['device']}, {peer} on {device}: the times do not compare; "
                      "let CUDA_VISIBLE_DEVICES name one GPU")


def load(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise Invalid(f"{path} cannot be read: {error}; measure again with --lowp PROGRAM") from error


# ---------------------------------------------------------------- the table

def read_sitting(path):
    """A sitting whose fields are there, so that all that follows can use them."""
    sitting = load(path)
    try:
        for row in sitting["lowp"]["rows"]:
            row["share"] + row["microseconds"], row_of(row)
        for row in sitting["peers"]:
            row["us"] + row.get("graph_us", 0.0), row["peer"], row["work"], row["shape"]
        sitting["lowp"]["device"], sitting["lowp"]["copy_gb_per_s"], sitting["absent"], sitting["facts"]
        sitting["filter"], sitting["shrink"]
    except (KeyError, TypeError, AttributeError) as error:
        raise Invalid(f"{path} is no sitting: {type(error).__name__}: {error}; measure again with --lowp PROGRAM") from error
    return sitting


def row_of(row):
    return row["operation"], row["recipe"], row["shape"]


def lines_of(sitting, bars):
    """One line for each row of lowp and each of its peers, and one for a row without any."""
    lines = []
    for ours in sitting["lowp"]["rows"]:
        row = row_of(ours)
        base = dict(operation=row[0], recipe=row[1], shape=row[2], lowp_us=ours["microseconds"], share=ours["share"],
                    **{key: value for key, value in bars.get(row, {}).items() if key in ("bar", "goal")})
        beside = list(peers_of(row, sitting["peers"]))
        lines += [base] if not beside else []
        for peer, marks in beside:
            us, graph = peer["us"], peer.get("graph_us")
            if graph is not None and graph < us:
                us, marks = graph, marks + "G"
            lines.append(base | dict(peer=peer["peer"], peer_work=peer["work"], peer_us=us, ratio=us / ours["microseconds"],
                                     marks=marks, equal_work=is_equal_work(marks)))
    return lines


def measured(lines):
    """What bars are about, by row: the share, and the best equal work of the peer under a bar."""
    found = {}
    for line in lines:
        values = found.setdefault(row_of(line), dict(bar=line["share"], te=None))
        if line.get("peer") == BARRED and line["equal_work"]:
            values["te"] = min(value for value in (values["te"], line["ratio"]) if value is not None)
    return found


HEADER = ["work", "shape", "lowp us", "share", "bar", "goal", "peer", "peer us", "peer/lowp", "notes"]
LEFT = (0, 1, 6, 9)


def cells(line):
    name = line["operation"] if line["recipe"] == "-" else f"{line['operation']} {line['recipe']}"
    number = lambda key, digits: f"{line[key]:.{digits}f}" if key in line else ""
    return [name, line["shape"], number("lowp_us", 1), number("share", 3), number("bar", 3), number("goal", 2),
            f"{line['peer']}: {line['peer_work']}" if "peer" in line else "", number("peer_us", 1), number("ratio", 2),
            "".join(sorted(line.get("marks", "")))]


def columns(rows):
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        parts = [cell.ljust(width) if i in LEFT else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))]
        yield "  ".join(parts).rstrip()


def text_of(sitting, lines, verdicts):
    lowp = sitting["lowp"]
    equal = [line for line in lines if line.get("equal_work")]
    marks = sorted({mark for line in lines for mark in line.get("marks", "")})
    out = [f"{lowp['device']}: a copy moves {lowp['copy_gb_per_s']:.0f} GB/s (read and written)"]
    out += [f"{name}: {json.dumps(fact)}" for name, fact in sorted(sitting["facts"].items())]
    if sitting["shrink"] != 1:
        out.append(f"both sides of every shape divided by {sitting['shrink']}: no bar holds")
    out += [f"absent: {text}" for text in sitting["absent"]]
    out += ["", "Equal work: the same dtypes in and out", ""]
    out += list(columns([HEADER, *map(cells, equal)])) if equal else ["nothing; no peer was measured"]
    out += ["", "All rows; the notes say what differs", ""]
    out += list(columns([HEADER, *map(cells, lines)]))
    out += [f"{mark}: {NOTES[mark]}" for mark in marks]
    for title, texts in verdicts:
        if texts:
            out += ["", f"{len(texts)} {title}:"] + [f"  {text}" for text in texts]
    return "\n".join(out) + "\n"


def chosen(sitting):
    """Whether a row was to be measured: as `lowp bench --filter` chooses."""
    text = sitting["filter"]
    return lambda row: text is None or any(text in name for name in row)


def raise_bars(bars, found, lower):
    text, changes = bars.raised(found, lower)
    with open(bars.path, "w", encoding="utf-8") as file:
        file.write(text)
    for row, key, old, new in changes:
        print(f"{bars.path}: {', '.join(row)}: {key} {old} -> {new}")
    print(f"{bars.path}: {len(changes)} bars changed")
    return Bars(text, bars.path)


def run(args):
    if args.lowp:
        os.makedirs(args.out, exist_ok=True)
        # A file that is wrong is an error before minutes of measuring.
        bars = Bars.read(args.bars) if args.bars else None
        measure(args)
    sitting = read_sitting(os.path.join(args.out, "sitting.json"))
    if args.raising and sitting["shrink"] != 1:
        raise Invalid(f"no bar holds for shapes divided by {sitting['shrink']}; measure without --shrink to raise bars")
    bars = Bars.read(args.bars) if args.bars and sitting["shrink"] == 1 else None
    found = measured(lines_of(sitting, {}))
    verdicts, problem = [], None
    try:
        if bars:
            bars.check(sitting["lowp"]["device"], found, chosen(sitting))
            if args.raising:
                bars = raise_bars(bars, found, args.lower)
            misses, below, unknown = bars.judge(found)
            verdicts = [("not judged", unknown), ("below the goal only", below), ("below the bar", misses)]
            problem = f"{len(misses)} below the bar, listed above" if misses else None
    except Invalid as error:
        # The table is what minutes of measuring gave: it comes first.
        bars, problem = None, error
    lines = lines_of(sitting, bars.rows if bars else {})
    text = text_of(sitting, lines, verdicts)
    print(text, end="")
    with open(os.path.join(args.out, "table.txt"), "w", encoding="utf-8") as file:
        file.write(text)
    with open(os.path.join(args.out, "table.json"), "w", encoding="utf-8") as file:
        json.dump(dict(device=sitting["lowp"]["device"], copy_gb_per_s=sitting["lowp"]["copy_gb_per_s"],
                       absent=sitting["absent"], rows=lines, **{title.replace(" ", "_"): texts for title, texts in verdicts}),
                  file, indent=1)
    if problem:
        raise Invalid(problem)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", help="the folder for results")
    parser.add_argument("--lowp", metavar="PROGRAM", help="measure, with this lowp, built with CUDA")
    parser.add_argument("--te", metavar="FOLDER", help="TransformerEngine's library and te_loop.so, of fetch.py")
    parser.add_argument("--torchao", metavar="WHEEL", help="torchao, where it is not installed")
    parser.add_argument("--bars", metavar="FILE", help="the bars of this device")
    parser.add_argument("--filter", metavar="TEXT", help="only rows whose operation, recipe or shape contains TEXT")
    parser.add_argument("--shrink", type=int, default=1, help="divide both sides of every shape; no bar holds then")
    parser.add_argument("--runs", type=int, default=20, help="timed runs per row; the median is reported")
    parser.add_argument("--raise", dest="raising", action="store_true", help="set bars to what was measured, less 0.02")
    parser.add_argument("--lower", action="store_true", help="with --raise: lower bars, too")
    args = parser.parse_args(arguments)
    if (args.raising and not args.bars) or (args.lower and not args.raising):
        parser.error("--raise needs --bars FILE, and --lower needs --raise")
    try:
        run(args)
    except Invalid as error:
        sys.exit(f"table.py: {error}")


if __name__ == "__main__":
    main()
