"""Rows to tables, and rows to promises kept or broken."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

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


def _num(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"
