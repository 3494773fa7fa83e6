"""`lab.side_by_side`: a table of rows with a column per case, and `lab.no_slower`: a claim for each of its lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from reflib.lab.claims import claim
from reflib.lab.rows import Row, Rows, short
from reflib.lab.showing import table

SLOWER = 1.05  # times a peer's: a loss


def side_by_side(
    rows: Rows, key: str, cases: Sequence[str], *, columns: Mapping[str, Mapping[str, Any]] | None = None
) -> None:
    """One line for each value of ``at[key]``, one column per case. ``columns``: more of them, before these, from their
    heading to {value of ``at[key]``: cell}. A case that was not measured is "-", one that failed says why."""
    more = columns or {}
    lines = []
    for place in _places(rows, key):
        found = {r.case: r for r in rows if r.metric == "time" and r.at.get(key) == place}
        lines.append([place, *(c.get(place, "-") for c in more.values()), *(_cell(found.get(c)) for c in cases)])
    if not lines:
        print("Nothing was measured here.")
        return
    unit = next((r.unit for r in rows if r.metric == "time"), "")
    table(lines, key, *more, *(f"{case}, {unit}" for case in cases))


def no_slower(rows: Rows, key: str, ours: str, than: Sequence[str]) -> None:
    """For each value of ``at[key]`` and each peer that was measured: a claim that ours takes no longer."""
    for place in _places(rows, key):
        us = {r.case: r.value for r in rows.where(metric="time") if r.at.get(key) == place and r.ok}
        for peer in than:
            mine, theirs = us.get(ours), us.get(peer)
            if mine and theirs:
                claim(
                    f"{place}: {ours} takes {mine / theirs:.2f} of the time of {peer}",
                    mine <= SLOWER * theirs,
                    otherwise="a loss, and it stays in the table",
                )


def _places(rows: Rows, key: str) -> list[str]:
    return list(dict.fromkeys(r.at[key] for r in rows if key in r.at))


def _cell(row: Row | None) -> str:
    if row is None:
        return "-"
    return short(row.value) if row.ok and row.value is not None else row.status
