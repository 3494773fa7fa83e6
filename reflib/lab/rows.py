"""Tidy rows: one measured number each, with the conditions of its measurement."""

from __future__ import annotations

import dataclasses
import datetime
import html
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reflib.errors import LabError

ROWS_FILE = "REFLIB_LAB_ROWS"  # environment variable: the file to which rows and claims are appended


@dataclass(frozen=True)
class Row:
    """One number. If it could not be measured, `value` is None and `status` is the reason."""

    name: str
    case: str
    metric: str
    value: float | None
    unit: str
    spread: float | None = None  # interquartile range, in the same unit
    at: Mapping[str, Any] = field(default_factory=dict)  # the point in a sweep: {"bytes": 4096}
    clock: str = ""
    cache: str = ""
    status: str = "ok"
    note: str = ""
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    commit: str = ""
    date: str = ""

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def to_data(self) -> dict[str, Any]:
        """The fields that are set; numbers with five significant digits, more than their accuracy."""
        data = dataclasses.asdict(self)
        kept = {k: v for k, v in data.items() if v not in ("", {}, None) or k == "value"}
        return {k: float(f"{v:.5g}") if isinstance(v, float) else v for k, v in kept.items()}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Row:
        names = {f.name for f in dataclasses.fields(Row)}
        return Row(
            **{"value": None, "unit": ""} | {k: v for k, v in data.items() if k in names}
        )  # failures have no number


def stamp() -> dict[str, Any]:
    """The fields shared by all rows of this notebook."""
    from reflib.lab.session import current

    here = current()
    return {
        "device": here.machine.name,
        "versions": dict(here.versions),
        "commit": here.commit,
        "date": datetime.date.today().isoformat(),
    }


def append(records: Iterable[Mapping[str, Any]]) -> None:
    """Append records to the file named by ROWS_FILE, if any."""
    name = os.environ.get(ROWS_FILE)
    if not name:
        return
    with Path(name).open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(record, sort_keys=True) + "\n" for record in records)


def record(rows: Iterable[Row]) -> Rows:
    """The rows, appended to that file too."""
    rows = Rows(rows)
    append({"kind": "row", **row.to_data()} for row in rows)
    return rows


class Rows(tuple[Row, ...]):
    """A tuple of rows, displayed as a table, with simple queries."""

    __slots__ = ()

    def where(self, test: Callable[[Row], bool] | None = None, **fields: Any) -> Rows:
        """The rows with these fields (`case=`, `metric=`, `clock=`...) that pass `test`."""
        return Rows(
            row for row in self if all(getattr(row, k) == v for k, v in fields.items()) and (not test or test(row))
        )

    def value(self, case: str, metric: str = "time", **at: Any) -> float | None:
        """The value of this case and metric, None if it was not measured. LabError unless one row matches."""
        found = [r for r in self.where(case=case, metric=metric) if all(r.at.get(k) == v for k, v in at.items())]
        if len(found) != 1:
            raise LabError(
                f"{len(found)} rows have case {case!r} and metric {metric!r} {at or ''}; "
                f"cases here: {', '.join(self.cases)}"
            )
        return found[0].value

    @property
    def cases(self) -> list[str]:
        return list(dict.fromkeys(row.case for row in self))

    @property
    def devices(self) -> list[str]:
        return list(dict.fromkeys(row.device for row in self))

    def elsewhere(self, recorded: Iterable[Row] | None) -> Rows:
        """The recorded rows of other devices; on the same device, fresh rows replace recorded ones."""
        mine = {row.device for row in self if row.ok}
        return Rows(row for row in recorded or () if row.device not in mine)

    def __add__(self, other: Iterable[Row]) -> Rows:  # type: ignore[override]
        return Rows((*self, *other))

    def __getitem__(self, key: Any) -> Any:
        found = tuple.__getitem__(self, key)
        return Rows(found) if isinstance(key, slice) else found

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The table: one line per case and point of the sweep, one column per metric."""
        metrics = list(dict.fromkeys((r.metric, r.unit) for r in self if r.ok))
        lines: dict[tuple[Any, ...], dict[tuple[str, str], str]] = {}
        notes: dict[tuple[Any, ...], str] = {}
        for row in self:
            key = (row.case, *row.at.values())
            line = lines.setdefault(key, {})
            if row.ok:
                line[row.metric, row.unit] = show_number(row.value, row.spread)
            if row.note or not row.ok:
                notes[key] = ": ".join(p for p in (row.status.replace("ok", ""), row.note) if p)
        places = list(dict.fromkeys(k for row in self for k in row.at))
        heads = ["case", *places, *(f"{m}, {u}" if u else m for m, u in metrics)]
        body = [[key[0], *map(show_plain, key[1:]), *(line.get(m, "") for m in metrics)] for key, line in lines.items()]
        if notes:
            heads.append("note")
            body = [[*b, notes.get(key, "")] for b, key in zip(body, lines, strict=True)]
        return heads, body

    def __repr__(self) -> str:
        return text_table(*self.cells())

    def _repr_html_(self) -> str:
        return html_table(*self.cells())


def count(n: int, what: str) -> str:
    """`1 kernel`, `2 kernels`."""
    return f"{n} {what}" + ("" if n == 1 else "s")


def show_number(value: float | None, spread: float | None = None) -> str:
    """Three significant digits, followed by the spread."""
    if value is None:
        return ""
    text = short(value)
    return f"{text} ±{short(spread / 2)}" if spread is not None else text


def short(value: float) -> str:
    """About three significant digits, without an exponent for everyday sizes."""
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 100:
        return f"{value:,.0f}"
    if size >= 10:
        return f"{value:.1f}"
    if size >= 1:
        return f"{value:.2f}"
    return f"{value:.2g}"


def show_plain(value: Any) -> str:
    """A value of `at`: integers in full."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else short(value)


def text_table(heads: list[str], body: list[list[str]]) -> str:
    if not body:
        return "(no rows)"
    columns = list(zip(heads, *body, strict=True))
    widths = [max(map(len, column)) for column in columns]

    def line(cells: list[str]) -> str:
        first = cells[0].ljust(widths[0])
        rest = (c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(heads), *map(line, body)])


def html_table(heads: list[str], body: list[list[str]]) -> str:
    """A plain table with the class name of pandas, for which notebook themes have a style."""
    if not body:
        return "<p>(no rows)</p>"
    head = "".join(f'<th scope="col">{html.escape(h)}</th>' for h in heads)
    lines = "".join(
        f'<tr><th scope="row">{html.escape(b[0])}</th>' + "".join(f"<td>{html.escape(c)}</td>" for c in b[1:]) + "</tr>"
        for b in body
    )
    return f'<table class="dataframe"><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>'
