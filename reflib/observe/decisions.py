"""Decisions as tables, in text and HTML."""

from collections.abc import Iterable
from html import escape
from typing import Any

from ..ir.decision import Candidate, Decision


class Decisions(list[Decision]):
    """A list of decisions, displayed as one table per measured choice and one for the rest."""

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        return Decisions(found) if isinstance(key, slice) else found

    def __repr__(self) -> str:
        return "\n".join(decision_text(d) for d in self)

    def _repr_html_(self) -> str:
        measured = [d for d in self if len(d.candidates) > 1]
        rest = [d for d in self if len(d.candidates) <= 1]
        rows = [(d.region, chosen(d), d.reason) for d in rest]
        return "".join(map(decision_html, measured)) + (html_table(("kernel", "chosen", "why"), rows) if rows else "")


def chosen(d: Decision) -> str:
    return d.winner if isinstance(d.winner, str) else d.candidates[0].name


def decision_text(d: Decision) -> str:
    """The reason, then one line per candidate, the fastest first."""
    head = f"{d.region}{f' ({d.op})' if d.op else ''}: {chosen(d)}: {d.reason}"
    lines = ["  " + "  ".join(filter(None, row)) for row in map(_row, _sorted(d))] if len(d.candidates) > 1 else []
    return "\n".join([head, *lines])


def decision_html(d: Decision) -> str:
    rows = [(_row(c), c.key in d.winners) for c in _sorted(d)]
    names = ("candidate", "status", "time", "spread", "warm", "weights cold", "error", "note")
    title = f"<p><b><code>{escape(d.op or d.region)}</code></b> {escape(d.sizes)}<br>{escape(d.reason)}"
    with_it = f"<br>measured together with {escape(', '.join(d.members))}" if d.members else ""
    return f"{title}{with_it}</p>" + candidates_html(names, rows)


def candidates_html(names: tuple[str, ...], rows: list[tuple[tuple[str, ...], bool]]) -> str:
    """``rows``: cells, and whether it is a winner. Empty columns are omitted; the last one is below the first."""
    kept = [i for i in range(1, len(names) - 1) if any(row[i] for row, _ in rows)]
    head = "".join(f"<th>{escape(names[i])}</th>" for i in (0, *kept))
    body = ""
    for row, won in rows:
        name = f"<b>{escape(row[0])}</b>" if won else escape(row[0])
        note = f'<br><span style="font-size: 0.85em">{escape(row[-1])}</span>' if row[-1] else ""
        cells = "".join(f'<td style="white-space: nowrap">{escape(row[i])}</td>' for i in kept)
        body += f'<tr><td style="text-align: left">{name}{note}</td>{cells}</tr>'
    return f'<table style="font-size: 0.85em"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def _sorted(d: Decision) -> list[Candidate]:
    return sorted(d.candidates, key=lambda c: (c.where, c.time_us is None, c.time_us or 0.0, c.name))


def _row(c: Candidate) -> tuple[str, ...]:
    def us(t: float | None) -> str:
        return "" if t is None else f"{t:.2f} us"

    spread = "" if c.spread is None else f"±{c.spread:.1%}"
    error = "" if c.error is None else f"{c.error:.1e}"
    name = f"{c.name} [{c.where}]" if c.where else c.name
    return name, c.status, us(c.time_us), spread, us(c.warm_us), us(c.cold_us), error, c.why


def html_table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{escape(n)}</th>" for n in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(x)}</td>" for x in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
