"""`lab.measure_peer`: a peer at several places of a sweep, in one child process.

Imports and the first compilation take seconds, so one child measures all places. A place at which it crashes becomes a
labelled row.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reflib.lab.measuring import result_rows
from reflib.lab.peers import run_at_places
from reflib.lab.rows import Row, Rows, record, stamp

Place = Mapping[str, Any]


def measure_peer(
    name: str,
    case: str,
    source: str,
    places: Sequence[Place],
    *,
    bytes: Callable[[Place], float] | None = None,
    cache: str = "warm",
    clock: str = "auto",
    rounds: int = 30,
    budget_s: float = 0.5,
    timeout_s: float = 180.0,
) -> Rows:
    """Rows as from `lab.measure`, with `at` each place. `source` defines `make(device, dtype, **place)`, as for
    `lab.peer`. `bytes`: moved per call, by place. `timeout_s` is for all places; the rest are rows with that status."""
    rows: list[Row] = []
    how = {"clock": clock, "cache": cache, "rounds": rounds, "budget_s": budget_s}
    found = run_at_places(source, places, {"timing": how}, timeout_s)
    for place, result in zip(places, found, strict=True):
        shared = {"name": name, "at": dict(place), "cache": cache, "clock": clock, **stamp()}
        rows += result_rows(case, result, bytes(place) if bytes else None, None, shared)
    return record(rows)
