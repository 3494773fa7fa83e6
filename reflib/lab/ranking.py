"""`lab.standings`: compares one contender with its peers, one line per case, losses first."""

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reflib.lab.explorer import kind_of
from reflib.lab.ratio_chart import geometric_mean
from reflib.lab.rows import Row, Rows, html_table, short, text_table

DISTURBED = "disturbed"  # prefix of that part of a note
ALL_CASES = "all cases"  # name of the row with the number of cases, measured or not
WIDTH = 68  # of a summary's lines, in characters
FOLDED = 24  # lines of a table: the others fold
Place = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Line:
    """One case. `rows`: the time row of each contender that was measured."""

    place: str
    rows: Mapping[str, Row]

    @property
    def at(self) -> Mapping[str, Any]:
        return next(iter(self.rows.values())).at

    def us(self, contender: str) -> float | None:
        row = self.rows.get(contender)
        return row.value if row and row.ok else None

    def ratio(self, ours: str, against: Sequence[str]) -> float | None:
        """The least of the peers' times over ours. None if a peer was not measured or none has a time; failed
        peers are ignored. 0 if ours failed."""
        mine, theirs = self.us(ours), [self.us(contender) for contender in against]
        if ours in self.rows and mine is None:
            return 0.0
        found = [t for t in theirs if t]
        return min(found) / mine if mine and found and all(contender in self.rows for contender in against) else None

    @property
    def disturbed(self) -> bool:
        return any(DISTURBED in row.note for row in self.rows.values())


@dataclass(frozen=True)
class Standings:
    """Displayed as a table of µs and chosen kernels; *gain* is the better peer's time over ours. `count`: number of
    cases, including those not measured."""

    lines: tuple[Line, ...]
    ours: str
    against: tuple[str, ...]
    count: int
    columns: Mapping[str, Callable[[Line], str]]

    @property
    def rows(self) -> Rows:
        """The rows in the order of the table, with `at` reduced to the case, as `lab.ratios` needs them."""
        return Rows(replace(row, at={"case": line.place}) for line in self.lines for row in line.rows.values())

    @property
    def contenders(self) -> list[str]:
        """The peers, then the others in order of appearance, ours last."""
        named = dict.fromkeys([*self.against, *(contender for line in self.lines for contender in line.rows)])
        return [*(contender for contender in named if contender != self.ours), self.ours]

    def gains(self, contender: str, than: Sequence[str]) -> list[float]:
        """Speedups of `contender` over the better of `than`, for cases that all of them have."""
        return [gain for line in self.lines if (gain := line.ratio(contender, than))]

    def summary(self) -> str:
        """Number of measured cases, geometric means, and the origin of the rows."""
        if not self.lines:
            return "Nothing is recorded."
        parts = [f"{len(self.lines)} of {self.count} cases were measured."]
        for contender in [c for c in self.contenders if c not in self.against][::-1]:
            both = self.gains(contender, self.against)
            means = [f"{geometric_mean(g):.2f} times as fast as {p} (slower in {sum(r < 1 for r in g)} of {len(g)})"
                     for p in self.against if (g := self.gains(contender, [p]))]  # fmt: skip
            if both:
                parts.append(
                    f"{contender}: {', '.join(means)}, {geometric_mean(both):.2f} times as fast as the better of them "
                    f"(geometric means; {min(both):.2f} to {max(both):.2f}); slower than the better of them in "
                    f"{sum(g < 1 for g in both)} of {len(both)}."
                )
            elif means:
                parts.append(f"{contender}: {', '.join(means)} (geometric means).")
        failed = [line.place for line in self.lines if line.us(self.ours) is None]
        disturbed = [line.place for line in self.lines if line.disturbed]
        parts += [f"{self.ours} has no time for: {', '.join(failed)}."] if failed else []
        parts.append(f"Disturbed by others on the device: {', '.join(disturbed) or 'none'}.")
        return "\n".join(textwrap.fill(part, WIDTH) for part in [*parts, self.origin()])

    def origin(self) -> str:
        rows = self.rows
        spreads = [row.spread / 2 / row.value for row in rows if row.ok and row.value and row.spread is not None]
        parts = [
            "µs per call: medians" + (f" (middle half within ±{max(spreads):.1%})" if spreads else ""),
            *rows.devices,
            *dict.fromkeys(str(line.at["dtype"]) for line in self.lines if "dtype" in line.at),
            *dict.fromkeys(f"{k} {v}" for row in rows for k, v in row.versions.items() if k in ("torch", "triton")),
            *dict.fromkeys(f"commit {row.commit}" for row in rows),
        ]
        return ", ".join(parts) + "."

    def choice(self, line: Line, contender: str) -> str:
        """The chosen kernel from a row's note: its kind for ours, for a peer the name without its counter."""
        row = line.rows.get(contender)
        name = row.note.split("; ")[0] if row and row.ok else ""
        if not name or name.startswith(DISTURBED):
            return ""
        if contender not in self.against:
            return kind_of(name)
        parts = re.fullmatch(r"decompose_k_mm_(\d+)_split\w*", name)
        return f"decompose-K / {parts[1]}" if parts else re.sub(r"_\d+$", "", name)

    def time(self, line: Line, contender: str) -> str:
        """`3.38 split-K`"""
        row = line.rows.get(contender)
        if row is None or row.value is None:
            return row.status if row else "-"
        return f"{short(row.value)} {self.choice(line, contender)}".strip()

    def cells(self) -> tuple[list[str], list[list[str]]]:
        body = []
        for line in self.lines:
            ratio = line.ratio(self.ours, self.against)
            place = line.place + (f" ({DISTURBED})" if line.disturbed else "")
            times = [self.time(line, contender) for contender in self.contenders]
            more = [column(line) for column in self.columns.values()]
            body.append([place, *times, *more, "-" if ratio is None else f"{ratio:.2f}"])
        return ["case", *self.contenders, *self.columns, "gain"], body

    def __repr__(self) -> str:
        return text_table(*self.cells())

    def _repr_html_(self) -> str:
        heads, body = self.cells()
        if len(body) <= FOLDED:
            return html_table(heads, body)
        rest = f"<details><summary>The other {len(body) - FOLDED // 2} cases</summary>"
        return html_table(heads, body[: FOLDED // 2]) + rest + html_table(heads, body[FOLDED // 2 :]) + "</details>"


def standings(
    rows: Rows,
    *,
    ours: str,
    against: Sequence[str],
    place: Place | None = None,
    columns: Mapping[str, Callable[[Line], str]] | None = None,
) -> Standings:
    """Standings of the time rows, one line per `at`, lowest ratio to the better peer first, cases that lack a peer
    last, by the peers that they have. `place`: the label of an `at`. `columns`: heading -> function of a line, for
    further columns."""
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
        there = [contender for contender in against if contender in line.rows]
        return ratio is None, (line.ratio(ours, there) if ratio is None else ratio) or 0.0, line.place

    count = sum(int(row.value or 0) for row in rows.where(case=ALL_CASES))
    return Standings(
        tuple(sorted(lines, key=least_first)), ours, tuple(against), max(count, len(lines)), columns or {}
    )

