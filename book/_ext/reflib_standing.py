"""What was recorded, in short: the question on the first page, and the tables and bars with which the results begin.

All compare only what was measured together: one measurement, one clock, one place of a sweep.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from reflib_claims import CLAIM
from reflib_pages import chapters, html_table, recordings

EQUAL = 1.05  # two times that differ by less are told as equal
FEW = 10  # pairs of times; with fewer a table of them says nothing
ALL_CASES = "all cases"  # the case of a row that says how many a set has
PEER, PACKAGER = "TorchInductor", "AOTInductor"  # the packager's calls are compared with the first of reflib's
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
    """Of a recording: reflib's times with the peer's of the same name, clock, cache and place of a sweep. A peer that
    has no time, and so no clock, is compared in the first of these where reflib has one."""
    places: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["value"] is None):
        if row["metric"] == "time":
            at = ", ".join(f"{k} {v}" for k, v in row.get("at", {}).items())
            place = row.get("name", ""), row.get("clock", ""), row.get("cache", ""), at
            if row["value"] is None:
                place = next((p for p in places if (p[0], p[3]) == (place[0], at)), place)
            places.setdefault(place, {}).setdefault(row["case"], row)
    for (name, clock, _, at), cases in places.items():
        for case in [c for c in cases if c.startswith((PEER, PACKAGER))]:
            more = case.removeprefix(PEER)
            mine = next((cases[c] for c in partners(more, cases) if c in cases), None)
            if mine is not None and mine["value"]:
                more = "" if "autotune" in more else f", {more}" if more == case else more
                what = ", ".join(filter(None, (name + more, at)))
                what += f" (clock {clock})" if clock != "graph" else ""
                yield Pair(slug, what, mine["value"], cases[case]["value"], cases[case].get("status", "ok"))


def partners(more: str, cases: Iterable[str]) -> tuple[str, ...]:
    if more.startswith(PACKAGER):
        return tuple(c for c in cases if c.startswith("reflib"))[:1]
    return (TUNED, "reflib") if more == " max-autotune" else ("reflib" + more,)


def standing(root: Path) -> str:
    """Per device: a table of wins, losses, refusals and failed claims by chapter; then the losses, the worst first."""
    by_device: dict[str, list[Found]] = {}
    sets: dict[str, list[str]] = {}
    for slug, path in recordings(root):
        data = json.loads(path.read_text(encoding="utf-8"))
        found = slug, list(pairs(slug, data["rows"])), data["claims"]
        by_device.setdefault(data["shared"].get("device", "unknown"), []).append(found)
        sets.setdefault(data["shared"].get("device", "unknown"), []).extend(sets_of(data["rows"]))
    order = sorted(by_device.items(), key=lambda item: -len(item[1]))
    shown = [(device, found) for device, found in order if any(some for _, some, _ in found)]
    return "\n\n".join(told(root, device, found, sets[device]) for device, found in shown)


def sets_of(rows: list[dict[str, Any]]) -> Iterator[str]:
    """How much of each set was measured, of a benchmark whose rows say how many cases its sets have."""

    def cases(name: str, begins: str) -> int:
        timed = [r for r in rows if r.get("name") == name and r["metric"] == "time" and r["case"].startswith(begins)]
        return len({json.dumps(row["at"], sort_keys=True) for row in timed})

    for row in rows:
        if row["case"] == ALL_CASES:
            name = row["name"]
            yield f"{name}, {cases(name, '')} of {row['value']:.0f} cases, {cases(name, PEER)} of them beside {PEER}"


def told(root: Path, device: str, found: list[Found], sets: list[str]) -> str:
    known = chapters(root)
    everything = [p for _, some, _ in found for p in some]
    timed = [p for p in everything if p.theirs]
    claims_made = [c for _, _, claims in found for c in claims]
    all_failed = f"{sum(c.get('holds') is False for c in claims_made)} of {len(claims_made)}"
    if len(timed) < FEW:
        return (
            f"On **{html.escape(device)}** claims were recorded, and hardly any times: {all_failed} claims do not hold "
            "([below](#what-does-not-hold))."
        )
    heads = ("chapter", "faster", "equal", "slower", "refused or crashed", "claims that do not hold")
    body = []
    for slug, some, claims in found:
        failed = sum(c.get("holds") is False for c in claims)
        page = f'<a href="../notebooks/{slug}.html">'
        link = f"{page}{html.escape(known[slug].title)}</a>" if slug in known else f"{slug} (a benchmark)"
        body.append([link, *counts(some), f"{failed} of {len(claims)}" if claims else ""])
    body.append(["<b>all</b>", *counts(everything), all_failed])
    mean = math.exp(sum(math.log(p.ratio) for p in timed) / len(timed)) if timed else 1.0
    text = (
        f"On **{device}**, reflib beside TorchInductor wherever both were timed together ({len(timed)} times of "
        f"{len(found)} recordings; *equal*: within {EQUAL - 1:.0%}). The geometric mean of TorchInductor's time over "
        f"reflib's is {mean:.2f}. These are cases that were chosen for a chapter; models that were not are on a "
        f"[page of their own](sweep).\n\n{html_table(heads, body)}"
    )
    text += f"\n\nOf the benchmark's sets were measured: {'; '.join(sets)}." if sets else ""
    lost = sorted((p for p in timed if p.ratio < 1 / EQUAL), key=lambda p: p.ratio)
    lines = [
        [known[p.chapter].title if p.chapter in known else p.chapter, p.what, *microseconds(p)]
        for p in (*lost, *(p for p in everything if not p.theirs))
    ]
    lost_heads = ("chapter", "what", "reflib, µs", "TorchInductor, µs", "TorchInductor's over reflib's")
    table = html_table(lost_heads, lines, escape=True)
    said = "The losses, the largest first; then what has no time to compare:"
    return f"{text}\n\n{said}\n\n{table}" if lines else text


def microseconds(p: Pair) -> list[str]:
    mine, theirs = (f"{us:,.0f}" if us >= 1000 else f"{us:.4g}" for us in (p.mine, p.theirs or 0.0))
    return [mine, theirs, f"{p.ratio:.2f}"] if p.theirs else [mine, p.status, ""]


def counts(some: list[Pair]) -> list[str]:
    timed = [p.ratio for p in some if p.theirs]
    faster, slower = sum(r > EQUAL for r in timed), sum(r < 1 / EQUAL for r in timed)
    return [str(n or "") for n in (faster, len(timed) - faster - slower, slower, len(some) - len(timed))]


# ---- a result per chapter, beside its floor

Place = tuple[str, str, float, dict[str, float]]  # measurement, where in its sweep, least µs, case -> µs
CONTENDERS = ("eager", PEER, "reflib", "torch.mm")
ALONE = "device alone"  # a case that has the device's own time for the same work
SHORT = 5.0  # µs: a floor below that is not what such a call waits for


FLOOR = re.compile(r"\b(?:limit|ledger)\b|A line at ")  # how a figure's own words name its floor


def floors(root: Path) -> str:
    """For each chapter with a measurement whose least time is known, the one with the most work, as bars; for others
    the last figure of the chapter itself that has a floor."""
    shown: dict[str, str] = {}
    for slug, path in sorted(recordings(root), key=lambda found: ".h200." not in found[1].name):
        data = json.loads(path.read_text(encoding="utf-8"))
        found = list(places(data["rows"], ceilings(root, data["rows"], path.name.split(".")[1])))
        if slug in chapters(root) and slug not in shown and found:
            shown[slug] = floor_figure(chapters(root)[slug].title, slug, max(found, key=lambda place: place[2]), data)
    for slug, told in chapters(root).items():
        if slug not in shown and (figure := own_figure(root, slug)):
            page = f'<a href="../notebooks/{slug}.html">{html.escape(told.title)}</a>'
            shown[slug] = f'<div class="reflib-floor"><p>{page}, the chapter\'s own figure:</p>{figure}</div>'
    return "\n\n".join(shown[slug] for slug in chapters(root) if slug in shown)


def own_figure(root: Path, slug: str) -> str:
    """The last figure in a notebook's outputs whose words name a floor, as HTML in one line, of those with reflib in
    them if there is one; "" if there is none."""
    found: dict[bool, str] = {}
    for cell in notebook(root, slug).cells:
        for output in cell.get("outputs", []):
            drawn = output.get("data", {}).get("text/html", "")
            words = re.search(r'<figure.*<img[^>]* alt="([^"]*)"', drawn, re.S)
            if words and FLOOR.search(words[1]):
                found["reflib" in words[1]] = " ".join(drawn.split())
    return found.get(True, found.get(False, ""))


def ceilings(root: Path, rows: list[dict[str, Any]], device: str) -> tuple[float, float] | None:
    """(bytes, operations) per µs of this device, from this recording or the chapter about measuring; None: unknown."""
    path = root / "notebooks" / "recorded" / f"measuring.{device}.json"
    others = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    for some in (rows, others):
        known = [r for r in some if r.get("name") == "ceilings"]
        best = [max((r["value"] for r in known if r["metric"] == m), default=0.0) for m in ("bandwidth", "rate")]
        if all(best):
            return best[0] * 1e3, best[1] * 1e6
    return None


def places(rows: list[dict[str, Any]], limits: tuple[float, float] | None) -> Iterator[Place]:
    """Measurements of reflib and another with a floor of some µs: the fewest bytes, the sizes of a product of 2-byte
    numbers, or, by the host's clock, the device's own time."""
    found: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        at = ", ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in row.get("at", {}).items())
        found.setdefault((row.get("name", ""), at, row.get("clock", "")), []).append(row)
    alone = {place[:2]: r["value"] for place, some in found.items() for r in some if r["case"] == ALONE}
    for (name, at, clock), some in found.items():
        times = {r["case"]: r["value"] for r in some if r["metric"] == "time" and r["value"]}
        raced = {c: us for c, us in times.items() if c.startswith(CONTENDERS)}
        kinds = {case.split(",")[0] for case in raced}
        if name == "live" or len(kinds) < 2 or "reflib" not in kinds:
            continue
        speed = {r["case"]: r["value"] for r in some if r["metric"] == "bandwidth" and r["case"] in raced}
        moved = min((times[case] * speed[case] * 1e3 for case in speed), default=0.0)
        m, n, k = (some[0].get("at", {}).get(size, 0) for size in "MNK")
        least = alone.get((name, at), 0.0) if clock == "wall" else 0.0
        if clock == "graph" and limits:
            least = max((2 * (m * k + k * n + m * n) + moved) / limits[0], 2 * m * n * k / limits[1])
        if least > SHORT:
            yield name, at, least, raced


def floor_figure(title: str, slug: str, place: Place, data: dict[str, Any]) -> str:
    name, at, least, times = place
    bars = "".join(bar(case, us, max(times.values()), least) for case, us in sorted(times.items(), key=lambda t: -t[1]))
    where = html.escape(", ".join(filter(None, (name, at, data["shared"].get("device", "")))))
    return (
        f'<div class="reflib-floor"><p><a href="../notebooks/{slug}.html">{html.escape(title)}</a>: {where}; '
        f"floor {least:,.1f} µs</p>{bars}</div>"
    )


# ---- claims that failed


def failed(root: Path) -> str:
    """A table per kind of device: what a chapter claims and a recording contradicts, and why it says that may be; above
    it, how many of each kind."""
    lines: dict[str, list[list[str]]] = {}
    made: dict[str, int] = {}  # claims that were decided
    told_on: dict[str, set[str]] = {}  # the chapters with claims there
    for slug, told in chapters(root).items():
        title = f'<a href="../notebooks/{slug}.html">{html.escape(told.title)}</a>'
        for device, claims in claims_of(root, slug).items():
            kind = device if device.startswith("NVIDIA") else "CPUs"
            made[kind] = made.get(kind, 0) + len(claims)
            told_on.setdefault(kind, set()).update([slug] if claims else [])
            some = [
                [title, kind_of(what, why), html.escape(what), html.escape(why)]
                for holds, what, why in claims
                if not holds
            ]
            lines.setdefault(kind, []).extend(some)
    heads = ("chapter", "kind", "claim", "why not")
    everywhere = set().union(*told_on.values())
    text = []
    for kind, some in sorted(lines.items()):
        absent = [told.link for slug, told in chapters(root).items() if slug in everywhere - told_on[kind]]
        kinds = Counter(line[1] for line in some)
        told = ", ".join(f"{kinds[k]} {KINDS[k] if kinds[k] > 1 else k}" for k in KINDS if kinds[k])
        said = f"{len(some)} of {made[kind]} claims in {len(told_on[kind])} chapters" + (f": {told}." if told else ".")
        said += f" Not recorded there: {', '.join(absent)}." if absent else ""
        text.append(f"### On {kind}\n\n{said}" + (f"\n\n{html_table(heads, some)}" if some else ""))
    return "\n\n".join(text)


KINDS = {"loss": "losses", "prediction": "predictions", "other": "others"}  # of a claim that failed, and their plural


def kind_of(claim: str, why: str) -> str:
    """Which of KINDS a failed claim is."""
    if why.startswith("a loss"):
        return "loss"
    return "prediction" if re.search(r", predicted [\d.]+$", claim) else "other"


def claims_of(root: Path, slug: str) -> dict[str, list[tuple[bool, str, str]]]:
    """Device -> (holds, claim, why not) of each claim that was decided there: in the notebook's own outputs, and in
    the recordings of other devices."""
    here = chapters(root)[slug].stamp.get("device", "")
    found = {here: printed(root, slug)}
    for name, path in recordings(root):
        data = json.loads(path.read_text(encoding="utf-8"))
        device = data["shared"].get("device", "unknown")
        if name == slug and device != here:
            decided = [c for c in data["claims"] if "holds" in c]
            found[device] = [(c["holds"], c["claim"], c.get("otherwise", "")) for c in decided]
    return found


def printed(root: Path, slug: str) -> list[tuple[bool, str, str]]:
    """(holds, claim, why not) of the decided claims that a notebook's own outputs print."""
    outputs = [o for c in notebook(root, slug).cells for o in c.get("outputs", [])]
    text = "\n".join(o.text for o in outputs if o.output_type == "stream")
    decided = [m for m in CLAIM.finditer(text) if m[1] in "✓✗" and "hold" in m[2].lower()]
    return [(m[1] == "✓", m[3], m[4].strip().removeprefix("Why: ")) for m in decided]


@cache
def notebook(root: Path, slug: str) -> Any:
    from reflib.lab import notebook as nb

    return nb.read(root / "notebooks" / f"{slug}.ipynb")


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
    colour = COLOURS.get(re.split("[, ]", name)[0], "#555555")
    return (
        f'<div class="reflib-bar"><span class="name">{html.escape(name)}</span><span class="track" aria-hidden="true">'
        f'<span class="fill" style="width:{us / longest:.1%};background:{colour}"></span>'
        f'<span class="limit" style="left:{min(1.0, least / longest):.1%}"></span></span>'
        f'<span class="time">{us:,.0f} µs</span></div>'
    )


def result(root: Path) -> tuple[str, dict[str, float], float, float, str] | None:
    """(the function, case -> µs, the least µs, MB of its input, where), from the recordings; None without them."""
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
    text = next(c.source for c in notebook(root, "start-here").cells if c.source.startswith("def mine("))
    return text.split("\n\n\n")[0], times, least, moved / 2, mine["shared"]["device"]


PAGES = {"standing": standing, "floors": floors, "failed": failed, "landing-question": question}
