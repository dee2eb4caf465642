"""Bars of the bench on a device: read, judged and raised. They stand in files such as benches/bars/h200.toml.

    device = "NVIDIA H200"

    ["encode bf16 both"."1 x 16384x16384"]
    "fp8-delayed" = { bar = 0.845, goal = 0.92, te = 0.92, te_goal = 1.0 }

`bar` is the least share of a copy, `te` the least time of TransformerEngine as a multiple of lowp's. A
measurement below one of them is a miss. `goal` and `te_goal` are what they shall become.
"""

import re
import tomllib

# What a bar is about, by its key: how it is called, and its goal.
KEYS = {"bar": ("share of a copy", "goal"), "te": ("TE/lowp", "te_goal")}
# How far a raised bar stays below what was measured.
NOISE = 0.02
SECTION = re.compile(r'\["([^"]+)"\."([^"]+)"\]\s*(#.*)?$')
ENTRY = re.compile(r'"([^"]+)"\s*=\s*\{.*\}\s*(#.*)?$')


class Invalid(Exception):
    """A file, or a measurement, that cannot be used; the text says why and what to do."""


class Bars:
    """The bars of one device, by (operation, recipe, shape)."""

    def __init__(self, text, path):
        self.text, self.path = text, path
        try:
            read = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise Invalid(f"{path} is no TOML: {error}") from error
        self.device = read.pop("device", None)
        if not isinstance(self.device, str):
            raise Invalid(f'{path} does not say whose bars it holds; add `device = "..."`, the name that `lowp bench` prints')
        self.rows = {}
        for operation, shapes in read.items():
            for shape, recipes in table_of(shapes, f"{path}: {operation}").items():
                for recipe, values in table_of(recipes, f"{path}: {operation}, {shape}").items():
                    where = f"{path}: {operation}, {recipe}, {shape}"
                    self.rows[operation, recipe, shape] = values_of(values, where)
        if not self.rows:
            raise Invalid(f"{path} holds no bar")

    @classmethod
    def read(cls, path):
        try:
            with open(path, encoding="utf-8") as file:
                return cls(file.read(), path)
        except (OSError, UnicodeDecodeError) as error:
            raise Invalid(f"the bars cannot be read: {path}: {error}") from error

    def check(self, device, measured, chosen):
        """Bars are for what was measured: another device, or a row that is in no bench, is an error. `chosen` tells whether
        a row was asked for."""
        if device != self.device:
            raise Invalid(f"{self.path} holds the bars of {self.device}, and this was measured on {device}; "
                          "give a file of that device, or none")
        missing = [row for row in self.rows if chosen(row) and row not in measured]
        if missing:
            names = "; ".join(", ".join(row) for row in missing)
            raise Invalid(f"{len(missing)} of the bars in {self.path} have no row in the bench: {names}; "
                          "correct their names, or take them out")

    def judge(self, measured):
        """What is below a bar, and what is below a goal only, as sentences. `measured`: {row: {key: value or None}}; a
        value of None was not measured, and is listed by itself."""
        misses, below, unknown = [], [], []
        for row, values in self.rows.items():
            for key, (name, goal_key) in KEYS.items():
                if key not in values or row not in measured:
                    continue
                got, bar, goal = measured[row].get(key), values[key], values.get(goal_key)
                text = f"{' '.join(part for part in row if part != '-')}: {name}"
                if got is None:
                    unknown.append(f"{text} not measured, bar {bar}")
                elif not got >= bar:
                    misses.append(f"{text} {got:.3f}, bar {bar}" + (f", goal {goal}" if goal else ""))
                elif goal and got < goal:
                    below.append(f"{text} {got:.3f}, goal {goal}")
        return misses, below, unknown

    def raised(self, measured, lower=False):
        """The file's text with bars as measured, less noise, and what changed; no bar gets lower but with `lower`."""
        lines, changes, section, unseen = [], [], None, set(self.rows)
        for line in self.text.splitlines():
            if found := SECTION.match(line):
                section = found.groups()[:2]
            elif (found := ENTRY.match(line)) and section:
                row = (section[0], found.group(1), section[1])
                unseen.discard(row)
                line = self.raised_line(line, row, measured.get(row, {}), lower, changes)
            lines.append(line)
        if unseen:
            raise Invalid(f"{self.path}: {', '.join(min(unseen))} is on no line of its own; write it as the others")
        return "\n".join(lines) + "\n", changes

    def raised_line(self, line, row, values, lower, changes):
        for key in KEYS:
            old, got = self.rows[row].get(key), values.get(key)
            if old is None or got is None:
                continue
            new = round(got - NOISE, 3)
            if new > old or (lower and new < old):
                line, count = re.subn(rf"\b{key} = [0-9.]+", f"{key} = {new}", line, count=1)
                if not count:
                    raise Invalid(f"{self.path}: no `{key} = NUMBER` in the line of {', '.join(row)}")
                changes.append((row, key, old, new))
        return line


def table_of(value, where):
    if not isinstance(value, dict):
        raise Invalid(f"{where} is no table; a bar is `\"recipe\" = {{ bar = 0.9 }}` below `[\"operation\".\"shape\"]`")
    return value


def values_of(values, where):
    known = {key for key in KEYS} | {goal for _, goal in KEYS.values()}
    for key, value in table_of(values, where).items():
        if key not in known:
            raise Invalid(f"{where}: `{key}` is not known; there are {', '.join(sorted(known))}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 100:
            raise Invalid(f"{where}: {key} is {value!r}; it must be a number above 0 and below 100")
    if not values.keys() & KEYS.keys():
        raise Invalid(f"{where} has no bar; give `bar`, `te` or both")
    return values
