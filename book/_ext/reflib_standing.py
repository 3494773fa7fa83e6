"""What was recorded, in short: the question on the first page, and the table with which the results begin.

Both compare only what was measured together: one measurement, one clock, one place of a sweep.
"""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflib_pages import chapters, html_table, recordings

EQUAL = 1.05  # two times that differ by less are told as equal
PEER = "TorchInductor"
TUNED = "reflib, tuned"  # what TorchInductor's max-autotune is compared with, where it was measured
COLOURS = {"eager": "#0072b2", PEER: "#d55e00", "reflib": "#009e73"}  # as in the chapters' figures


@dataclass(frozen=True)
class Pair:
    """One time of reflib's and the peer's for the same work; the peer's is None where it has none."""

    chapter: str
    what: str
    mine: float
    theirs: float | None
    status: str

    @property
    def ratio(self) -> float:
        return (self.theirs or math.nan) / self.mine


Found = tuple[str, list[Pair], list[dict[str, Any]]]  # a recording: its chapter, its pairs, its claims


def pairs(slug: str, rows: list[dict[str, Any]]) -> Iterator[Pair]:
    """Of a recording: reflib's times with the peer's of the same name, clock, cache and place of a sweep."""
    places: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["metric"] == "time":
            at = ", ".join(f"{k} {v}" for k, v in row.get("at", {}).items())
            place = row.get("name", ""), row.get("clock", ""), row.get("cache", ""), at
            places.setdefault(place, {}).setdefault(row["case"], row)
    for (name, clock, _, at), cases in places.items():
        for case in [c for c in cases if c.startswith(PEER)]:
            more = case.removeprefix(PEER)
            mine = next((cases[c] for c in partners(more) if c in cases), None)
            if mine is not None and mine["value"]:
                what = ", ".join(filter(None, (name + ("" if "autotune" in more else more), at)))
                what += f" (clock {clock})" if clock != "graph" else ""
                yield Pair(slug, what, mine["value"], cases[case]["value"], cases[case].get("status", "ok"))


def partners(more: str) -> tuple[str, ...]:
    return (TUNED, "reflib") if more == " max-autotune" else ("reflib" + more,)


def standing(root: Path) -> str:
    """Per device: a table of wins, losses, refusals and failed claims by chapter; then the losses, the worst first."""
    by_device: dict[str, list[Found]] = {}
    for slug, path in recordings(root):
        data = json.loads(path.read_text(encoding="utf-8"))
        found = slug, list(pairs(slug, data["rows"])), data["claims"]
        by_device.setdefault(data["shared"].get("device", "unknown"), []).append(found)
    order = sorted(by_device.items(), key=lambda item: -len(item[1]))
    return "\n\n".join(told(root, device, found) for device, found in order if any(some for _, some, _ in found))


def told(root: Path, device: str, found: list[Found]) -> str:
    known = chapters(root)
    heads = ("chapter", "faster", "equal", "slower", "refused or crashed", "claims that do not hold")
    body, everything = [], [p for _, some, _ in found for p in some]
    for slug, some, claims in found:
        failed = sum(c.get("holds") is False for c in claims)
        link = f'<a href="../notebooks/{slug}.html">{html.escape(known[slug].title)}</a>' if slug in known else slug
        body.append([link, *counts(some), f"{failed} of {len(claims)}" if claims else ""])
    body.append(["<b>all</b>", *counts(everything), ""])
    timed = [p for p in everything if p.theirs]
    mean = math.exp(sum(math.log(p.ratio) for p in timed) / len(timed)) if timed else 1.0
    text = (
        f"On **{device}**, reflib beside TorchInductor wherever both were timed together ({len(timed)} times of "
        f"{len(found)} recordings; *equal*: within {EQUAL - 1:.0%}). The geometric mean of TorchInductor's time over "
        f"reflib's is {mean:.2f}. These are cases that were chosen for a chapter; models that were not are on a "
        f"[page of their own](sweep).\n\n{html_table(heads, body)}"
    )
    lost = sorted((p for p in timed if p.ratio < 1 / EQUAL), key=lambda p: p.ratio)
    lines = [
        [known[p.chapter].title if p.chapter in known else p.chapter, p.what, *microseconds(p), f"{p.ratio:.2f}"]
        for p in lost
    ]
    lost_heads = ("chapter", "what", "reflib, µs", "TorchInductor, µs", "TorchInductor's over reflib's")
    table = html_table(lost_heads, lines, escape=True)
    return text + (f"\n\nThe losses, the largest first:\n\n{table}" if lines else "")


def microseconds(p: Pair) -> list[str]:
    return [f"{us:,.0f}" if us >= 1000 else f"{us:.4g}" for us in (p.mine, p.theirs or math.nan)]


def counts(some: list[Pair]) -> list[str]:
    timed = [p.ratio for p in some if p.theirs]
    faster, slower = sum(r > EQUAL for r in timed), sum(r < 1 / EQUAL for r in timed)
    return [str(n or "") for n in (faster, len(timed) - faster - slower, slower, len(some) - len(timed))]


# ---- the first page


def question(root: Path) -> str:
    """One function, its time in eager mode and the least that its bytes allow; the compilers' times unfold."""
    found = result(root)
    if found is None:
        return ""
    code, times, least, megabytes, device = found
    longest = max(times.values())
    shown = bar("eager", times["eager"], longest, least)
    answer = "".join(bar(name, us, longest, least) for name, us in times.items() if name != "eager")
    return (
        f"```python\n{code}\n```\n\n"
        f'<div class="reflib-guess"><p>A few small operations on a tensor of {megabytes:,.0f} MB, on an {device}. '
        f"Eager PyTorch takes {times['eager']:,.0f} µs. To read the tensor once and write the result once takes "
        f"{least:,.0f} µs: the upright line. <strong>Write down what a compiler will take</strong>, then look.</p>"
        f"{shown}<details><summary>What it took</summary>{answer}</details></div>\n\n"
        "[Start here](../notebooks/start-here) measures it on your machine, and shows where the time went."
    )


def bar(name: str, us: float, longest: float, least: float) -> str:
    """A labelled bar, as long as its time, with a line where the least time is."""
    return (
        f'<div class="reflib-bar"><span class="name">{name}</span><span class="track" aria-hidden="true">'
        f'<span class="fill" style="width:{us / longest:.1%};background:{COLOURS.get(name, "#555555")}"></span>'
        f'<span class="limit" style="left:{least / longest:.1%}"></span></span>'
        f'<span class="time">{us:,.0f} µs</span></div>'
    )


def result(root: Path) -> tuple[str, dict[str, float], float, float, str] | None:
    """(the function, case -> µs, the least µs, MB of its input, where), from the recordings; None without them."""
    from reflib.lab import notebook as nb

    folder = root / "notebooks" / "recorded"
    if not all((folder / f"{slug}.h200.json").exists() for slug in ("start-here", "measuring")):
        return None
    files = (folder / f"{slug}.h200.json" for slug in ("start-here", "measuring"))
    mine, roof = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    rows = {(r["case"], r["metric"]): r["value"] for r in mine["rows"] if r.get("name") == "mine"}
    times = {case: rows[case, "time"] for case in COLOURS if rows.get((case, "time"))}
    if len(times) < 2 or "eager" not in times:
        return None
    ceilings = [r for r in roof["rows"] if r.get("name") == "ceilings" and r["case"] == "copy"]
    moved = rows["eager", "time"] * rows["eager", "bandwidth"] / 1e3  # MB, of the input and the result
    least = moved * 1e3 / max(r["value"] for r in ceilings if r["metric"] == "bandwidth")
    cells = nb.read(root / "notebooks" / "start-here.ipynb").cells
    text = next(c.source for c in cells if c.source.startswith("def mine("))
    return text.split("\n\n\n")[0], times, least, moved / 2, mine["shared"]["device"]


PAGES = {"standing": standing, "landing-question": question}
