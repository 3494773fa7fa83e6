"""`lab.standings`: one contender's rows beside its peers' rows, a line a case, losses first."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reflib.lab.explorer import kind_of
from reflib.lab.ratio_chart import geometric_mean
from reflib.lab.rows import Row, Rows, html_table, short, text_table

DISTURBED = "disturbed"  # begins the part of a note that says so
ALL_CASES = "all cases"  # the row whose value is how many cases the set has, measured or not
WIDTH = 68  # of a summary's lines: they are read on a page with a margin
Place = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Line:
    """A case. `rows`: the time of each contender that was reached."""

    place: str
    rows: Mapping[str, Row]

    @property
    def at(self) -> Mapping[str, Any]:
        return next(iter(self.rows.values())).at

    def us(self, who: str) -> float | None:
        row = self.rows.get(who)
        return row.value if row and row.ok else None

    def ratio(self, ours: str, against: Sequence[str]) -> float | None:
        """The least of their times over ours. None where one was not reached, or none has a time; where one failed,
        the others count. 0 where ours failed."""
        mine, theirs = self.us(ours), [self.us(who) for who in against]
        if ours in self.rows and mine is None:
            return 0.0
        found = [t for t in theirs if t]
        return min(found) / mine if mine and found and all(who in self.rows for who in against) else None

    @property
    def disturbed(self) -> bool:
        return any(DISTURBED in row.note for row in self.rows.values())


@dataclass(frozen=True)
class Standings:
    """Shows itself as a table of µs and choices; *gain* is the better peer's time over ours. `count`: how many cases
    there are, with those that were not measured."""

    lines: tuple[Line, ...]
    ours: str
    against: tuple[str, ...]
    count: int
    columns: Mapping[str, Callable[[Line], str]]

    @property
    def rows(self) -> Rows:
        """In the order of the table, each `at` its place alone: what `lab.ratios` draws."""
        return Rows(replace(row, at={"case": line.place}) for line in self.lines for row in line.rows.values())

    @property
    def contenders(self) -> list[str]:
        """The peers, then the others as they come, ours last."""
        named = dict.fromkeys([*self.against, *(who for line in self.lines for who in line.rows)])
        return [*(who for who in named if who != self.ours), self.ours]

    def gains(self, who: str, than: Sequence[str]) -> list[float]:
        """How many times as fast `who` is as the better of `than`, where it has a time and they were reached."""
        return [gain for line in self.lines if (gain := line.ratio(who, than))]

    def summary(self) -> str:
        """How many cases were measured, the geometric means, and where from."""
        if not self.lines:
            return "Nothing is recorded."
        parts = [f"{len(self.lines)} of {self.count} cases were measured."]
        for who in [c for c in self.contenders if c not in self.against][::-1]:
            both = self.gains(who, self.against)
            means = [f"{geometric_mean(g):.2f} times as fast as {p}"
                     for p in self.against if (g := self.gains(who, [p]))]  # fmt: skip
            if both:
                parts.append(
                    f"{who}: {', '.join(means)}, {geometric_mean(both):.2f} times as fast as the better of them "
                    f"(geometric means; {min(both):.2f} to {max(both):.2f}); slower than the better of them in "
                    f"{sum(g < 1 for g in both)} of {len(both)}."
                )
        failed = [line.place for line in self.lines if line.us(self.ours) is None]
        disturbed = [line.place for line in self.lines if line.disturbed]
        parts += [f"{self.ours} has no time for: {', '.join(failed)}."] if failed else []
        parts.append(f"Disturbed by others on the device: {', '.join(disturbed) or 'none'}.")
        return "\n".join(textwrap.fill(part, WIDTH) for part in [*parts, self.origin()])

    def origin(self) -> str:
        rows = self.rows
        spreads = [row.spread / 2 / row.value for row in rows if row.ok and row.value and row.spread is not None]
        said = [
            "µs a call: medians" + (f" (middle half within ±{max(spreads):.1%})" if spreads else ""),
            *rows.devices,
            *dict.fromkeys(str(line.at["dtype"]) for line in self.lines if "dtype" in line.at),
            *dict.fromkeys(f"{k} {v}" for row in rows for k, v in row.versions.items() if k in ("torch", "triton")),
            *dict.fromkeys(f"commit {row.commit}" for row in rows),
        ]
        return ", ".join(said) + "."

    def choice(self, line: Line, who: str) -> str:
        """What is named in a row's note: ours by kind, a peer's without the number by which it counts candidates."""
        row = line.rows.get(who)
        name = row.note.split("; ")[0] if row and row.ok else ""
        if not name or name.startswith(DISTURBED):
            return ""
        if who not in self.against:
            return kind_of(name)
        parts = re.fullmatch(r"decompose_k_mm_(\d+)_split\w*", name)
        return f"decompose-K / {parts[1]}" if parts else re.sub(r"_\d+$", "", name)

    def time(self, line: Line, who: str) -> str:
        """`3.38 split-K`"""
        row = line.rows.get(who)
        if row is None or row.value is None:
            return row.status if row else "-"
        return f"{short(row.value)} {self.choice(line, who)}".strip()

    def cells(self) -> tuple[list[str], list[list[str]]]:
        body = []
        for line in self.lines:
            ratio = line.ratio(self.ours, self.against)
            place = line.place + (f" ({DISTURBED})" if line.disturbed else "")
            times = [self.time(line, who) for who in self.contenders]
            more = [column(line) for column in self.columns.values()]
            body.append([place, *times, *more, "-" if ratio is None else f"{ratio:.2f}"])
        return ["case", *self.contenders, *self.columns, "gain"], body

    def __repr__(self) -> str:
        return text_table(*self.cells())

    def _repr_html_(self) -> str:
        return html_table(*self.cells())


def standings(
    rows: Rows,
    *,
    ours: str,
    against: Sequence[str],
    place: Place | None = None,
    columns: Mapping[str, Callable[[Line], str]] | None = None,
) -> Standings:
    """Those rows that are times, a line for each `at`, the least good ratio to the better peer first; what has no
    ratio, for a peer was not reached, last. `place`: how an `at` is named. `columns`: head -> what to say of a line."""
    name = place or (lambda at: " x ".join(str(at.get(k)) for k in ("M", "N", "K")))
    several = len({row.at.get("dtype") for row in rows if "dtype" in row.at}) > 1
    found: dict[tuple[tuple[str, Any], ...], dict[str, Row]] = {}
    for row in rows.where(metric="time"):
        found.setdefault(tuple(sorted(row.at.items())), {})[row.case] = row
    lines = []
    for by in found.values():
        at = next(iter(by.values())).at
        lines.append(Line(name(at) + (f", {at['dtype']}" if several else ""), by))

    def least_first(line: Line) -> tuple[bool, float, str]:
        ratio = line.ratio(ours, against)
        return ratio is None, ratio or 0.0, line.place

    count = sum(int(row.value or 0) for row in rows.where(case=ALL_CASES))
    return Standings(
        tuple(sorted(lines, key=least_first)), ours, tuple(against), max(count, len(lines)), columns or {}
    )

