"""`reflib compare A B`: finds the rows of run B that are slower than those of A.

Rows are matched by chapter, series, case, metric, unit, clock, cache, point of the sweep and the job's parameters. Only
times, rates per second and MiB are compared; of model sweeps, only reflib's rows, without the seconds of compiling,
which depend on what else compiles.

A row is **slower** if its ratio is over the limit and the interquartile ranges do not overlap. B is slower if one row
is, or if the geometric mean of all ratios, which has no spread, is over the limit. A case that ran in A and in B is
wrong, crashed or timed out is **broken**: it counts as slower.
"""

from __future__ import annotations

import json
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from reflib import atomic
from reflib.batch import artifacts, store, summary
from reflib.batch.artifacts import Failed
from reflib.errors import LabError
from reflib.lab import recording as recordings
from reflib.lab import runner
from reflib.lab.ratio_chart import geometric_mean
from reflib.lab.rows import Row, show_number, text_table

LOWER = frozenset((*summary.TIMES, "MiB"))
HIGHER = frozenset({"B/s", "kB/s", "MB/s", "GB/s", "TB/s", "FLOP/s", "GFLOP/s", "TFLOP/s"})
OMITTED = frozenset({"predicted", "cold compile"})  # metrics with units of time: not measured, or beside others
SWEEP = "sweep"  # the chapter of rows that `reflib sweep` measured

Key = tuple[str, ...]


@dataclass(frozen=True)
class Number:
    """A measurement of a run: the median, with the interquartile range of the samples."""

    value: float
    spread: float
    unit: str
    device: str

    def meets(self, other: Number) -> bool:
        """Whether the interquartile ranges overlap."""
        return abs(self.value - other.value) <= (self.spread + other.spread) / 2


@dataclass(frozen=True)
class Pair:
    """The same row of two runs. `ratio`: slowdown of B; below 1, B is faster."""

    key: Key
    a: Number
    b: Number

    @property
    def ratio(self) -> float:
        return self.a.value / self.b.value if self.a.unit in HIGHER else self.b.value / self.a.value

    def slower(self, limit: float) -> bool:
        return self.ratio > 1 + limit and not self.a.meets(self.b)

    def faster(self, limit: float) -> bool:
        return Pair(self.key, self.b, self.a).slower(limit)


@dataclass(frozen=True)
class Comparison:
    """The matched rows of two runs, and the rows of only one of them."""

    pairs: tuple[Pair, ...]
    only_a: tuple[Key, ...]
    only_b: tuple[Key, ...]
    devices: tuple[tuple[str, ...], tuple[str, ...]]
    broken: tuple[tuple[Key, str], ...] = ()  # with the reason

    @property
    def of_sweeps(self) -> bool:
        return all(p.key[0] == SWEEP for p in self.pairs)

    @property
    def overall(self) -> float:
        """Geometric mean of the ratios."""
        return geometric_mean([p.ratio for p in self.pairs])

    def fails(self, limit: float) -> bool:
        """Whether B is slower than A by more than `limit` (0.05 is 5%)."""
        return bool(self.broken) or self.overall > 1 + limit or any(p.slower(limit) for p in self.pairs)

    def report(self, limit: float = 0.05, most: int = 20) -> str:
        """Text for a terminal: the rows beyond the limit in both directions, then the overall result."""
        lines = []
        if self.devices[0] != self.devices[1]:
            lines.append(f"warning: A is of {', '.join(self.devices[0])}; B is of {', '.join(self.devices[1])}\n")
        slower = sorted((p for p in self.pairs if p.slower(limit)), key=lambda p: -p.ratio)
        faster = sorted((p for p in self.pairs if p.faster(limit)), key=lambda p: p.ratio)
        for word, found in (("slower", slower), ("faster", faster)):
            if found:
                beyond = f"by more than {100 * limit:.3g}% and the spreads"
                lines.append(f"{len(found)} of {len(self.pairs)} rows {word} {beyond}:")
                lines.append(text_table(*cells(found[:most])))
                lines.append(f"... and {len(found) - most} more\n" if len(found) > most else "")
        if self.broken:
            lines += [f"{len(self.broken)} broken in B:", *(f"  {named(key)}: {why}" for key, why in self.broken), ""]
        for word, keys in (("A", self.only_a), ("B", self.only_b)):
            if keys:
                lines.append(f"{len(keys)} rows only in {word}:")
                lines += [f"  {named(key)}" for key in keys[:most]]
                lines.append(f"  ... and {len(keys) - most} more\n" if len(keys) > most else "")
        same = len(self.pairs) - len(slower) - len(faster)
        lines.append(
            f"{len(self.pairs)} rows compared: {len(slower)} slower, {len(faster)} faster, {same} the same; "
            f"B takes {self.overall:.3f} times as long as A (geometric mean)"
        )
        return "\n".join(lines)


def left(found: Comparison, limit: float, a: Path, b: Path, say: Callable[[str], Any]) -> bool:
    """Where that is asked for, what is slower or broken runs again, and leaves a folder (``artifacts.py``) in B's, or
    in runs/ if B is a recording. False: something that should be there is not."""
    again = regressed(found, limit, b, [sys.executable, "-m", "reflib.cli"])
    if not again or not artifacts.wanted():
        return True
    kept = (b / "run.json").exists() or (b / "results.jsonl").exists()
    folder = b / "regressed" if kept else runner.new_folder(Path("runs"), time.strftime("compare-%Y%m%d-%H%M%S"))
    links = {"the comparison": folder / "comparison.txt"}
    links |= {name: p / "summary.html" for name, p in (("A", a), ("B", b)) if (p / "summary.html").exists()}
    problems = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        atomic.write(folder / "comparison.txt", found.report(limit) + "\n")
    except OSError as error:
        problems.append(f"no comparison.txt: {error}")
    problems += artifacts.gather(folder, again, links, "slower or broken")
    for line in (*problems, f"artifacts: {runner.shown(folder / 'index.html')}"):
        say(line)
    return not problems


def regressed(found: Comparison, limit: float, b: Path, command: Sequence[str]) -> list[Failed]:
    """The notebooks and models of B with a slower or broken row, worst first; what runs each again."""
    slower = sorted((p for p in found.pairs if p.slower(limit)), key=lambda p: -p.ratio)
    lines = [(key, f"{named(key)}: {why}") for key, why in found.broken]
    lines += [(p.key, f"{named(p.key)}: {p.ratio:.3f} times as slow") for p in slower]
    grouped: dict[tuple[str, ...], list[str]] = {}
    for key, line in lines:
        at = json.loads(key[7])
        what = (SWEEP, *(at[n] for n in ("model", "mode", "dtype"))) if key[0] == SWEEP else (key[0], key[8])
        grouped.setdefault(what, []).append(line)
    return [
        Failed(" ".join(what), "\n".join(why), partial(_again, what, b, command), fails=False)
        for what, why in grouped.items()
    ]


def _again(what: tuple[str, ...], b: Path, command: Sequence[str], where: Path) -> list[str]:
    """The command that measures a model or a notebook once more."""
    out = ["--out", str(where / "run")]
    shutil.rmtree(where / "run", ignore_errors=True)
    if what[0] == SWEEP:
        _, model, mode, dtype = what
        how = ["--only", model, "--mode", mode, "--dtype", dtype, "--backend", "reflib", "--workers", "1"]
        return [*command, "sweep", *how, *out]
    chapter, parameters = what[0], json.loads(what[1])
    device, only = parameters.pop("device", "auto"), chapter
    if (b / "run.json").exists():
        about = store.load(b)
        asked = about.get("request", {})
        only = next((n for n in asked.get("only", ()) if Path(n).stem == chapter), chapter)
        device = asked.get("device", device) if device == "auto" else device
    given = [word for k, v in parameters.items() for word in ("-p", f"{k}={v}")]
    return [*command, "run", "--only", only, "--device", device, "--no-book", *out, *given]


def compare(a: Path, b: Path) -> Comparison:
    """Compare runs or recordings: folders of runs or of <chapter>.<gpu>.json files, or single files.

    LabError if they have no row in common.
    """
    first, second = rows_of(a), rows_of(b)
    by_device = any(len({p.get("device") for _, _, p in found}) > 1 for found in (first, second))
    numbers_a, numbers_b = numbers(first, by_device), numbers(second, by_device)
    common = [key for key in numbers_a if key in numbers_b]
    lost = broken(numbers_a, second, by_device)
    if not common and not lost:
        raise LabError(
            f"{runner.shown(a)} ({len(numbers_a)} rows) and {runner.shown(b)} ({len(numbers_b)} rows) have no measured "
            "row in common: are they of the same notebooks and parameters?"
        )
    return Comparison(
        tuple(Pair(key, numbers_a[key], numbers_b[key]) for key in common),
        tuple(key for key in numbers_a if key not in numbers_b),
        tuple(key for key in numbers_b if key not in numbers_a),
        (devices(numbers_a.values()), devices(numbers_b.values())),
        lost,
    )


def broken(ran: Iterable[Key], found: Iterable[Found], by_device: bool) -> tuple[tuple[Key, str], ...]:
    """The cases of `ran` that have a failure in `found`. (A failure has no clock: no call was timed.)"""

    def case(key: Key) -> Key:
        return (*key[:3], *key[7:])

    failed = {
        case(key_of(chapter, row, parameters, by_device)): f"{row.status} {row.note}".strip()
        for chapter, row, parameters in found
        if not row.ok and row.status != "not installed"
    }
    lost = {case(key): key for key in ran if case(key) in failed}
    return tuple((key, failed[short]) for short, key in lost.items())


Found = tuple[str, Row, Mapping[str, Any]]  # chapter, row, job's parameters


def rows_of(place: Path) -> list[Found]:
    """All rows of a run, or of recordings."""
    if (place / "run.json").exists():
        kept = store.RunStore(place)
        found = []
        for identity in store.load(place)["jobs"]:
            outcome = kept.outcome(identity)
            record = kept.record(identity)
            for row in summary.named(outcome.records()[0]) if outcome else []:
                found.append((str(record["notebook"]), Row.from_data(row), record["parameters"]))
        return found
    files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    if (place / "results.jsonl").exists():  # of a model sweep, whose folder has a summary too
        files = sorted(place.glob(f"{SWEEP}.*.json"))
    if not files or not place.exists():
        raise LabError(f"{runner.shown(place)} is not a run (no run.json) and has no recordings (*.json)")
    every: list[Found] = [(file.name.split(".")[0], row, {}) for file in files for row in recorded(file)]
    return [found for found in every if found[0] != SWEEP or found[1].case == "reflib"]


def recorded(file: Path) -> Sequence[Row]:
    try:
        return recordings.load(file)[0]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LabError(f"{runner.shown(file)} is not a recording: {type(error).__name__}: {error}") from None


def numbers(found: Iterable[Found], by_device: bool) -> dict[Key, Number]:
    """The measured rows by key; the median of several with the same key."""
    groups: dict[Key, list[Row]] = {}
    for chapter, row, parameters in found:
        if row.ok and summary.is_measured(row) and row.unit in LOWER | HIGHER and row.metric not in OMITTED:
            groups.setdefault(key_of(chapter, row, parameters, by_device), []).append(row)
    return {
        key: Number(
            statistics.median(r.value for r in rows if r.value),
            max(r.spread or 0.0 for r in rows),
            rows[0].unit,
            rows[0].device,
        )
        for key, rows in groups.items()
    }


def key_of(chapter: str, row: Row, parameters: Mapping[str, Any], by_device: bool) -> Key:
    """The key of a row. The device is part of it only if one of the runs has several; else runs on different devices
    are compared, with a warning."""
    kept = {name: value for name, value in parameters.items() if name != "device" or by_device}
    at = json.dumps(dict(row.at), sort_keys=True)
    params = json.dumps(kept, sort_keys=True)
    return (chapter, row.name, row.case, row.metric, row.unit, row.clock, row.cache, at, params)


def devices(found: Iterable[Number]) -> tuple[str, ...]:
    return tuple(sorted({n.device or "an unknown device" for n in found}))


def named(key: Key) -> str:
    """'fusion, blocks: reflib, time; function=adam; dtype=float32'."""
    chapter, name, case, metric, _, clock, _, at, parameters = key
    parts = [f"{chapter}{f', {name}' if name else ''}: {case}", f"{metric}{f' ({clock})' if clock else ''}"]
    for text in (at, parameters):
        if found := json.loads(text):
            parts.append(", ".join(f"{k}={v}" for k, v in found.items()))
    return "; ".join(parts)


def cells(pairs: Iterable[Pair]) -> tuple[list[str], list[list[str]]]:
    body = []
    for p in pairs:
        a, b = (show_number(n.value, n.spread) for n in (p.a, p.b))
        body.append([named(p.key), a, b, p.a.unit, f"{p.ratio:.3f}"])
    return ["row", "A", "B", "unit", "times as slow"], body


def percent(text: str) -> float:
    """0.05 for "5%" or "5". LabError for other text.

    >>> percent("5%")
    0.05
    """
    try:
        value = float(text.strip().removesuffix("%")) / 100
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise LabError(f"--fail-over {text}: give a percentage, such as 5%")
    return value
