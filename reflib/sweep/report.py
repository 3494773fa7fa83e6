"""What a sweep found: geometric means per class (mode and dtype), then every model, the worst first.

A **speed** is a peer's time over reflib's: below 1, reflib is slower. Two clocks: calls with their launches (``wall``
on a CPU, ``events`` on a GPU), and ``graph``, the device's time alone. A mean is over the models that both ran
correctly; a model that reflib did not is in no mean, and first in its table. Losses are shown like gains.
"""

import html
import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflib import atomic
from reflib.lab.rows import Row, Rows, html_table, short, text_table

US, PEER, EAGER = "reflib", "TorchInductor", "eager"
CHOICES = ("numerics=eager", "batch_invariant", "autotune=blocking")  # reflib with an option, where asked for
INACCURATE = "inaccurate"  # what the note of such a row begins with
CALLS, GRAPH = ("events", "wall"), ("graph",)
Table = tuple[list[str], list[list[str]]]
Section = tuple[str, str, Table]  # heading, sentence, table

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 80rem; margin: 1.5rem auto; padding: 0 1rem; }}
div {{ overflow-x: auto; }} table {{ border-collapse: collapse; font-size: 14px; }}
th, td {{ padding: .2rem .6rem; border-bottom: 1px solid #8886; text-align: left; }}
</style></head><body><h1>{title}</h1>
{body}
</body></html>
"""


@dataclass(frozen=True)
class Step:
    """A model in one mode and dtype: the rows of each backend."""

    model: str
    mode: str
    dtype: str
    by: dict[str, Rows]

    def ran(self, who: str) -> bool:
        return who in self.by and all(row.ok for row in self.by[who])

    def status(self, who: str) -> str:
        """"ok", or why there is no result to rely on; "not measured" is not a failure: a sweep may be partial."""
        own = self.by.get(who, Rows())
        bad = next((row.status for row in own if not row.ok), "ok" if own else "not measured")
        return INACCURATE if bad == "ok" and self.inaccurate(who) else bad

    def inaccurate(self, who: str) -> bool:
        """It ran, and a tensor is further from float64 than twice eager's (see ``child.py``)."""
        return any(row.ok and row.note.startswith(INACCURATE) for row in self.by.get(who, Rows()))

    def number(self, who: str, metric: str, clocks: Sequence[str] = ("",)) -> float | None:
        """The metric's value by the first of the clocks that has one; None if ``who`` did not run correctly."""
        rows = self.by.get(who, Rows()) if self.ran(who) else Rows()
        found = {row.clock: row.value for row in rows.where(metric=metric)}
        return next((found[clock] for clock in clocks if found.get(clock) is not None), None)

    def ratio(self, above: str, below: str, metric: str, clocks: Sequence[str] = ("",)) -> float | None:
        a, b = self.number(above, metric, clocks), self.number(below, metric, clocks)
        return a / b if a and b else None

    def speed(self, peer: str) -> float | None:
        """The device's time if both were captured as graphs, else calls."""
        return self.ratio(peer, US, "time", GRAPH) or self.ratio(peer, US, "time", CALLS)

    def cell(self, who: str, metric: str, clocks: Sequence[str] = ("",)) -> str:
        """The number; among the times of calls, the reason why there is none."""
        if clocks == CALLS and who in self.by and not self.ran(who):
            return next(row.status for row in self.by[who] if not row.ok)
        return told(self.number(who, metric, clocks))


def steps(rows: Iterable[Row]) -> list[Step]:
    """In the order of the rows."""
    found: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    for row in rows:
        where = (row.at["model"], row.at["mode"], row.at["dtype"])
        found.setdefault(where, {}).setdefault(row.case, []).append(row)
    return [Step(*where, {who: Rows(own) for who, own in by.items()}) for where, by in found.items()]


def classes(rows: Iterable[Row]) -> dict[tuple[str, str], list[Step]]:
    """(mode, dtype) -> steps, the worst first: those where reflib failed, then by its speed beside TorchInductor's, or
    beside eager's where TorchInductor has none; last what is not measured yet. What is not installed is left out."""
    found: dict[tuple[str, str], list[Step]] = {}
    for step in steps(rows):
        if not any(row.status == "not installed" for own in step.by.values() for row in own):
            found.setdefault((step.mode, step.dtype), []).append(step)
    for listed in found.values():
        listed.sort(key=lambda s: (US not in s.by, s.ran(US), s.speed(PEER) or s.speed(EAGER) or 0.0))
    return dict(sorted(found.items()))


def geomean(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value]
    return statistics.geometric_mean(found) if found else None


def means(listed: Sequence[Step]) -> dict[str, Any]:
    """A class in numbers. Ratios of time: a peer's over reflib's. Of memory, kernels: reflib's over TorchInductor's."""
    beside = [s.speed(PEER) for s in listed]
    return {
        "models": sum(US in s.by for s in listed),
        "correct": sum(s.ran(US) for s in listed),
        "TorchInductor correct": sum(s.ran(PEER) for s in listed),
        "over eager": geomean(s.speed(EAGER) for s in listed),
        "TorchInductor over eager": geomean(
            s.ratio(EAGER, PEER, "time", GRAPH) or s.ratio(EAGER, PEER, "time", CALLS) for s in listed
        ),
        "over TorchInductor": geomean(beside),
        "over TorchInductor, calls": geomean(s.ratio(PEER, US, "time", CALLS) for s in listed),
        "inaccurate": sum(s.inaccurate(US) for s in listed),
        "slower than TorchInductor": sum(x < 1 for x in beside if x),
        "slower than eager": sum((s.speed(EAGER) or 1) < 1 for s in listed),
        "cold compile": geomean(s.ratio(PEER, US, "cold compile") for s in listed),
        "peak memory": geomean(s.ratio(US, PEER, "peak memory") for s in listed),
        "kernels": geomean(s.ratio(US, PEER, "kernels") for s in listed),
    }


def summary(rows: Rows) -> dict[str, Any]:
    """The data of summary.json."""
    found = classes(rows)
    worst = ranking(found)[:20]
    about = {name: getattr(rows[0], name) for name in ("device", "versions", "commit", "date")} if rows else {}
    return {
        **about,
        "classes": [{"mode": mode, "dtype": dtype, **means(listed)} for (mode, dtype), listed in found.items()],
        "worst": [
            {"model": s.model, "mode": s.mode, "dtype": s.dtype, "over TorchInductor": speed} for speed, s in worst
        ],
        "not ok": [{"case": r.case, **r.at, "status": r.status, "note": r.note} for r in rows if not r.ok],
    }  # fmt: skip


def ranking(found: dict[tuple[str, str], list[Step]]) -> list[tuple[float, Step]]:
    """(speed beside TorchInductor, step) of every class, the slowest first."""
    beside = [(speed, s) for listed in found.values() for s in listed if (speed := s.speed(PEER))]
    return sorted(beside, key=lambda pair: pair[0])


def coverage(rows: Rows) -> str:
    """How much of the registry's sweep these rows are, and what is missing; "" where models are of another list."""
    from reflib.sweep.run import Request, plan

    def where(job: dict[str, Any]) -> tuple[str, str, str, str]:
        return job["model"], job["mode"], job["dtype"], job["backend"]

    asked = {where(job) for job in plan(Request(size="real"), None)}
    there = {(r.at["model"], r.at["mode"], r.at["dtype"], r.case) for r in rows}
    if {model for model, *_ in there} - {model for model, *_ in asked}:
        return ""
    if not asked - there:
        return f"Complete: all {len(asked)} measurements are there."
    left = Counter((mode, dtype) for _, mode, dtype, _ in asked - there)
    every = Counter((mode, dtype) for _, mode, dtype, _ in asked)
    parts = [f"{m}, {d}: {every[m, d] - n} of {every[m, d]}" for (m, d), n in sorted(left.items())]
    return (
        f"Partial: {len(asked & there)} of {len(asked)} measurements are there ({'; '.join(parts)}). The same "
        "command goes on where it stopped; means are over what is there."
    )


# -- tables -----------------------------------------------------------------------------------------
def sections(rows: Rows) -> list[Section]:
    """The page: means, a table per class, what did not run."""
    found = classes(rows)
    out: list[Section] = [("Geometric means", MEANS, means_table(found))]
    out += [("What options cost", COST, costs)] if (costs := costs_table(rows))[1] else []
    out += [("The slowest and the fastest", EXTREMES, extremes_table(ranking(found)))] if ranking(found) else []
    for (mode, dtype), listed in found.items():
        out.append((f"{mode.capitalize()}, {dtype}", TIMES, times_table(listed)))
        out.append((f"{mode.capitalize()}, {dtype}: compiling, memory, errors", BESIDE, beside_table(listed)))
    bad = [r for r in rows if not r.ok and r.status != "not installed"]
    bad += {(r.case, *r.at.values()): r for r in rows if r.note.startswith(INACCURATE)}.values()
    bad.sort(key=lambda r: (r.case != US, r.case))
    body = [[r.case, *map(str, r.at.values()), r.status, r.note] for r in bad]
    absent = sorted({str(r.at["model"]) for r in rows if r.status == "not installed"})
    sentence = f"Not installed, so not measured: {', '.join(absent)}." if absent else ""
    if bad or absent:
        out.append(
            (
                "What did not run, or less accurately than eager",
                sentence,
                (["who", "model", "mode", "dtype", "status", "why"], body),
            )
        )
    return out


MEANS = (
    "A speed is the peer's time over reflib's: below 1, reflib is slower. It is the device's time, by replaying a CUDA "
    "graph, where both could be captured, else that of calls. Compile: TorchInductor's seconds over reflib's, with "
    "empty caches. Memory and kernels: reflib's over TorchInductor's."
)
COST = "Time with the option over that of reflib without."
EXTREMES = "Speeds beside TorchInductor, as many from one end as from the other."
TIMES = "Times in µs, the worst first."
BESIDE = (
    "Of the same models; the status is reflib's. Compile in seconds, memory in MiB beyond what was there before a "
    "step. Error: of the median tensor, against float64; eager's own beside it."
)
SHOWN = 10  # at most, of the slowest and of the fastest


def extremes_table(ranked: list[tuple[float, Step]]) -> Table:
    shown = min(SHOWN, len(ranked) // 2 or 1)
    ends = zip(ranked[:shown], reversed(ranked[-shown:]), strict=True)
    body = [[cell for speed, s in pair for cell in (f"{s.model}, {s.mode}, {s.dtype}", told(speed))] for pair in ends]
    return ["slowest", "speed", "fastest", "speed"], body


def means_table(found: dict[tuple[str, str], list[Step]]) -> Table:
    """A line per number, a column per class."""
    numbers = [means(listed) for listed in found.values()]
    return ["", *map(", ".join, found)], [[name, *(told(n[name]) for n in numbers)] for name in means([])]


def costs_table(rows: Rows) -> Table:
    """A line per step, the means first; a column per option that was measured."""
    measured = [name for name in CHOICES if any(row.case == name for row in rows)]
    among = [s for s in steps(rows) if any(name in s.by for name in measured)]
    ratios = [[s.ratio(n, US, "time", GRAPH) or s.ratio(n, US, "time", CALLS) for n in measured] for s in among]
    body = [["geometric mean", "", "", *(told(geomean(column)) for column in zip(*ratios))]] if among else []
    body += [[s.model, s.mode, s.dtype, *map(told, ratio)] for s, ratio in zip(among, ratios)]
    return ["model", "mode", "dtype", *measured], body


def told(value: float | None) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else short(value)


def times_table(listed: Sequence[Step]) -> Table:
    heads = ["model", f"over {PEER}", f"over {EAGER}"]
    heads += [f"{who}, {what}" for what in ("graph", "calls") for who in (EAGER, PEER, US)]
    body = []
    for s in listed:
        times = [s.cell(who, "time", clocks) for clocks in (GRAPH, CALLS) for who in (EAGER, PEER, US)]
        body.append([s.model, told(s.speed(PEER)), told(s.speed(EAGER)), *times])
    return filled(heads, body)


def beside_table(listed: Sequence[Step]) -> Table:
    heads = ["model", "status", f"compile, {PEER}", f"compile, {US}", *(f"memory, {who}" for who in (EAGER, PEER, US))]
    heads += [f"kernels, {PEER}", f"kernels, {US}", "graph breaks", "error", "eager's error"]
    body = []
    for s in listed:
        line = [s.model, s.status(US), *(s.cell(who, "cold compile") for who in (PEER, US))]
        line += [s.cell(who, "peak memory") for who in (EAGER, PEER, US)]
        line.append(s.cell(PEER, "kernels"))
        line += [s.cell(US, metric) for metric in ("kernels", "graph breaks", "error", "eager's error")]
        body.append(line)
    return filled(heads, body)


def filled(heads: list[str], body: list[list[str]]) -> Table:
    """Without columns that are empty."""
    kept = [i for i in range(len(heads)) if i == 0 or any(line[i] for line in body)]
    return [heads[i] for i in kept], [[line[i] for i in kept] for line in body]


# -- pages ------------------------------------------------------------------------------------------
def made_with(rows: Rows) -> str:
    first = rows[0]
    versions = ", ".join(f"{name} {number}" for name, number in first.versions.items())
    when = f"Measured on {first.device}, {first.date}, with {versions}, at commit {first.commit or 'unknown'}."
    return f"{when} {coverage(rows)}".strip()


def page(rows: Rows) -> str:
    parts = [f"<p>{html.escape(made_with(rows))}</p>"]
    for heading, sentence, table in sections(rows):
        parts.append(f"<h2>{heading}</h2>\n<p>{html.escape(sentence)}</p>")
        parts.append(f"<div>{html_table(*table)}</div>" if table[1] else "")
    return PAGE.format(title="Model sweep", body="\n".join(parts))


def write(folder: Path, rows: Rows) -> str:
    """summary.json and report.html; returns the means, the ten worst and what options cost as text."""
    if not rows:
        return "nothing was measured"
    data = summary(rows)
    atomic.write(folder / "summary.json", json.dumps(data, indent=1) + "\n")
    atomic.write(folder / "report.html", page(rows))
    text = text_table(*means_table(classes(rows)))
    worst = [[*map(str, list(x.values())[:3]), told(x["over TorchInductor"])] for x in data["worst"][:10]]
    told_worst = text_table(["the slowest beside TorchInductor", "mode", "dtype", "speed"], worst)
    costs = costs_table(rows)
    parts = [text, told_worst if worst else "", text_table(*costs) if costs[1] else ""]
    return "\n\n".join(part for part in parts if part)
