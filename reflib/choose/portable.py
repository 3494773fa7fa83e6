"""Decisions between the store and portable tables (``reflib.tables`` has their format and its checks)."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from .. import atomic
from ..logs import get as logger
from ..tables import (
    BETWEEN,
    LARGEST,
    Entry,
    Table,
    TableError,
    chosen,
    entry_of,
    load_table,
    lookup,
    merge,
    normalize_lookup,
    op_key,
    parse_table,
)
from .store import Store

__all__ = [
    "Table", "chosen", "decided", "export", "load_table", "lookup", "merge", "normalize_lookup", "read_table", "shown",
    "write_table",
]  # fmt: skip


def export(store: Store, device: str | None = None) -> dict[str, Any]:
    """What was decided here, as the data of a portable table; ``device``: on this model alone. Of decisions about the
    same (beside other neighbours, with other versions) the newest. Raises CacheError."""
    found = decided(store)
    return merge([found if device is None else found.on(device)])[0].to_data()


def decided(store: Store, strict: bool = True) -> Table:
    """Every decision as an entry. One whose names a table may not have is left out, and a line in the log says so.
    Raises CacheError where the store cannot be used, if ``strict``."""
    entries = []
    for ruling, facts in store.decisions(strict):
        try:
            entries.append(_entry(ruling, facts))
        except TableError as e:
            logger("tuning").warning("left out: %s", e)
    return Table(tuple(entries))


def _entry(ruling: Mapping[str, Any], facts: Mapping[str, Any]) -> Entry:
    winners, default = ruling["winners"], facts.get("default", "")
    data = {k: facts[k] for k in ("device", "op", "sizes", "dtypes", "epilogue", "versions", "date") if k in facts}
    data |= {"winner": BETWEEN.join(winners), "default": default}
    if len(winners) == 1:  # with several ranges there is no one time
        data |= {"time_us": _time(ruling["rows"], winners[0]), "default_us": _time(ruling["rows"], default)}
    return entry_of(data, f"the decision for {facts.get('op')!r:.80}")


def _time(rows: list[dict[str, Any]], name: str) -> float | None:
    """Microseconds; the geometric mean where it was measured at several sizes; None if it was not."""
    times = [row.get("time_us") for row in rows if row["name"] == name and row["status"] == "ok"]
    known = [float(t) for t in times if isinstance(t, (int, float)) and t > 0]
    if not known or len(known) < len(times):
        return None
    return float(f"{math.exp(sum(map(math.log, known)) / len(known)):.6g}")


# -- files ------------------------------------------------------------------------------------------
def read_table(file: str) -> Table:
    """The table in a file; ``-``: in standard input. Raises TableError."""
    if file == "-":
        return parse_table(sys.stdin.buffer.read(LARGEST + 1), "standard input")
    return load_table(file)


def write_table(table: Table, file: str) -> None:
    """Write a table; ``-``: to standard output. A file is there whole or as it was. Raises TableError."""
    data = table.to_text().encode()
    if file == "-":
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        atomic.write(file, data)
    except OSError as e:
        raise TableError(f"cannot write the table {file}: {e.strerror or e}") from e


# -- for people -------------------------------------------------------------------------------------
_HEADS = ("op", "sizes", "winner", "us", "default", "default us", "device", "date", "from")


def shown(store: Store, op: str = "") -> str:
    """The decisions and imported entries whose op contains ``op``, as a text of aligned columns, sorted. Empty if
    there are none. Raises CacheError."""
    both = [(e, "here") for e in decided(store).entries] + [(e, "import") for e in store.imports().entries]
    lines = [_cells(e, source) for e, source in sorted(both, key=lambda x: x[0].key) if op_key(op) in op_key(e.op)]
    if not lines:
        return ""
    widths = [max(len(line[i]) for line in [_HEADS, *lines]) for i in range(len(_HEADS))]
    return "\n".join("  ".join(f"{c:<{w}}" for c, w in zip(line, widths)).rstrip() for line in [_HEADS, *lines])


def _cells(e: Entry, source: str) -> tuple[str, ...]:
    sizes = " ".join(filter(None, (e.sizes, e.dtypes)))
    times = ("-" if t is None else f"{t:.4g}" for t in (e.time_us, e.default_us))
    us, default_us = times
    return (e.op, sizes, e.winner, us, e.default or "-", default_us, e.device, e.date[:10] or "-", source)
