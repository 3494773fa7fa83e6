"""`lab.over_time` and `lab.race`: lanes of segments over time, with a slider for the current time.

Segments are solid up to that time and faint after it; the title states what each lane does at that time.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from reflib.errors import LabError
from reflib.lab.figures import colours
from reflib.lab.moving import FAINT, Explorer, Spec, emit, moving, slider, text, values
from reflib.lab.rows import Rows, short

STOPS = 200  # positions of the slider
NOW = "#8a8a8a"  # visible on white and on black


class Segment(NamedTuple):
    """What a lane does from ``start`` to ``end``. ``kind`` sets the colour and is named in the legend."""

    name: str
    start: float
    end: float
    kind: str = "work"


def over_time(
    lanes: Mapping[str, Sequence[Segment]], *, caption: str, unit: str = "µs", until: float | None = None
) -> Explorer | None:
    """Show lanes with a time slider. ``lanes``: {name: its segments in order, without overlap}; times are in ``unit``,
    from 0. ``until``: end of the slider (default: the last end). Returns None without lanes; LabError on overlap."""
    if not any(lanes.values()):
        print("Nothing to draw: there is nothing in any lane.")
        return None
    for lane, own in lanes.items():
        if any(b.start < a.end - 1e-9 * abs(a.end) for a, b in pairwise(own)):
            raise LabError(f"over_time: segments of lane {lane!r} overlap; a lane does one thing at a time")
    end = until or max(s.end for own in lanes.values() for s in own)
    kinds = list(dict.fromkeys(s.kind for own in lanes.values() for s in own))
    data = [{"lane": lane, **s._asdict()} for lane, own in lanes.items() for s in own]
    data = values([{**line, "end": min(line["end"], end)} for line in data if line["start"] < end])
    stop = float(f"{end:.4g}")
    spec = moving(
        [_lanes(list(lanes), kinds, stop, unit)],
        params=[slider("now", f"clock, {unit}", 0, stop, float(f"{stop / STOPS:.2g}"), 0)],
        says=[f"'At ' + format(now, ',.3~r') + {text(f' {unit}')}", *(_says(n, own) for n, own in lanes.items())],
        data={"segments": data},
        alt=_alt(lanes, unit),
        caption=caption,
    )
    return emit(spec)


def race(rows: Rows, first: str, second: str, *, caption: str, metric: str = "time", **at: Any) -> Explorer | None:
    """Compare two cases of ``rows`` over time: both start at 0, the slider ends with one call of the slower case, and
    the faster one repeats until then. ``at`` selects a point of a sweep. Prints a line and returns None if one of them
    has no number."""
    times = {case: rows.value(case, metric, **at) if case in rows.cases else None for case in (first, second)}
    if not all(times.values()):
        lacking = ", ".join(case for case, time in times.items() if not time)
        print(f"Nothing to race: there is no {metric} of {lacking} here.")
        return None
    end = max(time for time in times.values() if time)
    lanes = {case: _laps(time, end) for case, time in times.items() if time}
    unit = next(row.unit for row in rows.where(metric=metric) if row.unit)
    return over_time(lanes, caption=caption, unit=unit, until=end)


def _laps(time: float, end: float) -> list[Segment]:
    """Repeated calls until `end`; at most 40 separate segments."""
    laps = min(40, int(end / time + 1e-9) + 1)
    kinds = ("odd calls", "even calls")
    every = [Segment(f"call {i + 1}", i * time, (i + 1) * time, kinds[i % 2]) for i in range(laps)]
    return [s for s in every if s.start < end * (1 - 1e-9)]


def _says(lane: str, own: Sequence[Segment]) -> str:
    """The Vega expression for what a lane does at `now`."""
    out = text(f"{lane}: done at {short(own[-1].end)}" if own else f"{lane}: nothing")
    for s in reversed(own):
        out = f"now < {s.end:.6g} ? {text(f'{lane}: {s.name}')} : {out}"
        if s.start > 0:
            out = f"now < {s.start:.6g} ? {text(f'{lane}: waits')} : {out}"
    return f"({out})"


def _lanes(lanes: list[str], kinds: list[str], end: float, unit: str) -> Spec:
    scale = colours(kinds)
    legend = {"orient": "bottom", "columns": 2, "title": None} if len(kinds) > 1 else None
    x = {"type": "quantitative", "title": unit, "scale": {"domain": [0, end], "nice": False}}
    bar = {
        "x": {"field": "start", **x}, "x2": {"field": "end"},
        "color": {"field": "kind", "type": "nominal", "scale": scale, "legend": legend},
        "tooltip": [{"field": f} for f in ("lane", "name", "kind", "start", "end")],
    }  # fmt: skip
    mark = {"type": "bar", "height": 20, "stroke": "#ffffff", "strokeWidth": 1}
    lane = {"field": "lane", "type": "nominal", "sort": lanes, "title": None, "axis": {"labelLimit": 150}}
    return {
        "data": {"name": "segments"},
        "height": {"step": 32},
        "encoding": {"y": lane},
        "layer": [
            {"mark": {**mark, "opacity": FAINT}, "encoding": bar},
            {
                "transform": [
                    {"filter": "datum.start < now"},
                    {"calculate": "min(datum.end, now)", "as": "so far"},
                ],
                "mark": mark,
                "encoding": {**bar, "x2": {"field": "so far"}},
            },
            {
                "data": {"values": [{}]},
                "mark": {"type": "rule", "color": NOW, "strokeWidth": 2},
                "encoding": {"x": {"datum": {"expr": "now"}, **x}, "y": {"value": 0}, "y2": {"value": "height"}},
            },
        ],
    }  # fmt: skip


def _alt(lanes: Mapping[str, Sequence[Segment]], unit: str) -> str:
    parts = [f"{len(lanes)} lanes over time, with a clock to move."]
    for lane, own in lanes.items():
        said = "; ".join(f"{s.name} from {short(s.start)} to {short(s.end)}" for s in own[:12])
        more = f"; and {len(own) - 12} more, until {short(own[-1].end)}" if len(own) > 12 else ""
        parts.append(f"{lane}, in {unit}: {said}{more}.")
    return " ".join(parts)
