"""Rows to tables, and rows to promises kept or broken."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from reflib.lab.rows import text_table as table

from .contenders import EAGER, PEER, PEER_MAX, US

BIG = 64 * 2**20
Row = dict[str, Any]


@dataclass(frozen=True)
class Promise:
    """``value`` should be at least (or at most) ``limit``; a value of None could not be measured."""

    text: str
    value: float | None
    sign: str
    limit: float

    @property
    def kept(self) -> bool:
        if self.value is None:
            return False
        return self.value >= self.limit if self.sign == ">=" else self.value <= self.limit

    def __str__(self) -> str:
        shown = "not measured" if self.value is None else f"{self.value:.3g}"
        return f"{'PASS' if self.kept else 'FAIL'}  {self.text}: {shown} ({self.sign} {self.limit:g})"

    def to_data(self) -> dict[str, Any]:
        return {**asdict(self), "kept": self.kept}


def geomean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.geometric_mean(found) if found else None


def median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def ratio(ours: float | None, theirs: float | None) -> float | None:
    return ours / theirs if ours and theirs else None


def shown(found: Row, *keys: str) -> list[str]:
    """Its numbers, for a table."""
    return [f"{found[k]:.2f}" if found.get(k) else "-" for k in keys]


def errors(found: dict[str, Row]) -> list[str]:
    """A line for each that failed."""
    return [f"  {who}: {f['error']}" for who, f in found.items() if "error" in f]


def pivot(rows: list[Row]) -> dict[str, dict[str, Row]]:
    """{case: {who: row}}, in the order seen; a later row replaces an earlier one."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(row["case"], {})[row["who"]] = row
    return found


def _us(by: dict[str, Row], who: str) -> float | None:
    return by.get(who, {}).get("us")


def _num(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"


# --- kernels ---------------------------------------------------------------------------------
def speedups(cases: dict[str, dict[str, Row]], groups: tuple[str, ...], field: str = "us") -> dict[str, float]:
    """Inductor's time over ours, by case; cases that one of the two could not run are left out."""
    found = {}
    for case, by in cases.items():
        ours, theirs = by.get(US, {}).get(field), by.get(PEER, {}).get(field)
        if ours and theirs and by[US].get("group") in groups:
            found[case] = theirs / ours
    return found


def kernels_table(rows: list[Row], ceiling: float | None) -> str:
    cases = pivot(rows)
    everyone = [w for w in (EAGER, PEER, PEER_MAX, US) if any(w in by for by in cases.values())]
    with_copy = any("copy" in by for by in cases.values())
    heads = ["case", *(f"{w}, µs" for w in everyone), "±", "GB/s", "of copy", *(["of own copy"] if with_copy else [])]
    heads += ["vs Inductor", "vs eager"]
    body, notes = [], []
    for case, by in cases.items():
        ours, theirs, eager, copy = (_us(by, w) for w in (US, PEER, EAGER, "copy"))
        gbps = by.get(US, {}).get("gbps")
        line = [case, *(_num(_us(by, w)) for w in everyone), _num(by.get(US, {}).get("spread"), 2), _num(gbps)]
        line.append(f"{gbps / ceiling:.0%}" if gbps and ceiling else "-")
        if with_copy:
            line.append(f"{copy / ours:.0%}" if copy and ours else "-")
        line += [f"{o / ours:.2f}x" if o and ours else "-" for o in (theirs, eager)]
        body.append(line)
        notes += [f"  {case}, {w}: {r['note']}" for w, r in by.items() if r.get("note")]
    return "\n".join([table(heads, body), *notes])


def kernels_promises(rows: list[Row], ceiling: float | None, device: str) -> list[Promise]:
    cases = pivot(rows)
    forward = speedups(cases, ("pointwise", "reduction"))
    missing = [c for c, by in cases.items() if _us(by, US) is None and by.get(US, {}).get("group") != "extra"]
    where, least = ("CPU", 0.9) if device == "cpu" else ("GPU", 1.0)
    speed = f"{where} kernels: geomean speed against {PEER}, {len(forward)} cases"
    made = [Promise(speed, geomean(forward.values()), ">=", least)]
    if device != "cpu":
        ours = {c: by[US] for c, by in cases.items() if c in forward and ceiling and by[US]["main_bytes"] > BIG}
        shares = {c: row["gbps"] / ceiling for c, row in ours.items() if ceiling}
        text = "GPU kernels over 64 MB: geomean share of the copy bandwidth"
        if under := [c for c, share in shares.items() if share < 0.9]:
            text += f" ({len(under)} of {len(shares)} under 0.9: {'; '.join(under)})"
        made.append(Promise(text, geomean(shares.values()), ">=", 0.9))
    return [*made, Promise(f"{where} kernels: cases wrong or crashed", float(len(missing)), "<=", 0)]


def group_lines(rows: list[Row]) -> str:
    """The geomean of each group, for the reader; promises are elsewhere."""
    cases = pivot(rows)
    lines = []
    for group in ("pointwise", "reduction", "backward", "extra"):
        found = speedups(cases, (group,))
        if found:
            worst = min(found, key=found.__getitem__)
            lines.append(
                f"{group}: {geomean(found.values()):.2f}x {PEER} over {len(found)} cases, "
                f"worst {found[worst]:.2f}x ({worst})"
            )
    best = speedups(cases, ("pointwise", "reduction"), "best")
    if best:
        lines.append(
            f"each contender's fastest round, for a busy machine: {geomean(best.values()):.2f}x {PEER}, "
            f"worst {min(best.values()):.2f}x ({min(best, key=best.__getitem__)})"
        )
    return "\n".join(lines)


# --- small calls, memory ---------------------------------------------------------------------
def wide_table(rows: list[Row], field: str, unit: str) -> str:
    cases = pivot(rows)
    everyone = [w for w in (EAGER, PEER, US) if any(w in by for by in cases.values())]
    body = [[case, *(_num(by.get(w, {}).get(field)) for w in everyone)] for case, by in cases.items()]
    notes = [f"  {c}, {w}: {r['note']}" for c, by in cases.items() for w, r in by.items() if r.get("note")]
    return "\n".join([table(["case", *(f"{w}, {unit}" for w in everyone)], body), *notes])


def memory_promises(rows: list[Row]) -> list[Promise]:
    ratios = {}
    for case, by in pivot(rows).items():
        ratios[case] = ratio(by.get(US, {}).get("mib"), by.get(EAGER, {}).get("mib"))
    return [  # a thousandth: the profiler counts the scalars that a step leaves lying about
        Promise(f"peak memory of a training step against eager: {c}", r, "<=", 1.001) for c, r in ratios.items()
    ]
