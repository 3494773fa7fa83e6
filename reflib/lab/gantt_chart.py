"""`lab.gantt`: a timeline of processes, as one Vega-Lite figure for Lab and the static book.

One row per track, one bar per event, a mark where a candidate failed or was skipped; below, the number of jobs waiting
for a worker. Alt text and a table are made from the same numbers.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from reflib.lab.moving import Drawn, stacked
from reflib.lab.rows import count, short
from reflib.timeline import KINDS, Event, busy_seconds, first_start, track_order, waiting

# kind of event -> (colour, height in a row of 1). Nested events are lower than the enclosing one.
LOOKS = {
    "stage": ("#7a7a7a", 0.8),
    "start": ("#aa4499", 0.8),
    "compile": ("#0072b2", 0.8),
    "measure": ("#009e73", 0.8),
    "wait": ("#c9c9c9", 0.35),
    "lock": ("#8a6d00", 0.35),
}
# status other than "ok" -> marker
MARKS = {
    "crashed": "cross",
    "hung": "triangle-up",
    "error": "square",
    "failed": "square",
    "wrong": "diamond",
    "pruned": "circle",
    "skipped": "triangle-right",
    "cancelled": "triangle-down",
}
FAILED, DEPTH = "#d55e00", "#8a8a8a"
STEP = 24  # pixels
THINNEST = 1 / 800  # fraction of the total time: shorter events are drawn with this length


def gantt(events: Iterable[Event], *, caption: str) -> Drawn | None:
    """Show the events of a timeline (``e.timeline``, or a sum of several) and a table with one row per track.
    Suitable for several hundred events. Returns the figure; None without events."""
    from reflib.lab.showing import display_thing, table

    events = list(events)
    if not events:
        print("Nothing to draw: the timeline is empty.")
        return None
    alt = words(events)
    found = Drawn(vega_lite(events, alt, caption))
    display_thing(found)
    table(track_rows(events))
    return found


# -- words and numbers ------------------------------------------------------------------------------
def track_rows(events: Sequence[Event]) -> list[dict[str, Any]]:
    """One dict per track: events by kind, events that failed, busy time in seconds and as a share of the total."""
    whole = _whole(events)
    rows = []
    for track in track_order(e for e in events if e.kind != "queue"):
        own = [e for e in events if e.track == track and e.kind != "queue"]
        kinds = (count(sum(e.kind == k for e in own), k) for k in KINDS if any(e.kind == k for e in own))
        busy = busy_seconds(own)
        rows.append(
            {
                "track": track,
                "events": ", ".join(kinds),
                "not ok": ", ".join(f"{sum(e.status == s for e in own)} {s}" for s in _statuses(own)),
                "busy, s": short(busy),
                "of the whole": f"{busy / whole:.0%}" if whole else "",
            }
        )
    return rows


def words(events: Sequence[Event]) -> str:
    """The alt text."""
    parts = [f"Gantt chart of {count(len(events), 'event')} in {short(_whole(events))} s, one row per track."]
    for row in track_rows(events):
        failed = f"; {row['not ok']}" if row["not ok"] else ""
        parts.append(f"{row['track']}: {row['events']}, busy {row['of the whole']} of the time{failed}.")
    if most := max((depth for _, depth in waiting(events)), default=0):
        parts.append(f"At most {count(most, 'job')} waited for a worker.")
    return " ".join(parts)


def _whole(events: Sequence[Event]) -> float:
    return max(e.end for e in events) - first_start(events)


def _statuses(events: Iterable[Event]) -> list[str]:
    """Statuses other than "ok", those of MARKS first and in its order."""
    seen = dict.fromkeys(e.status for e in events if e.status not in ("", "ok"))
    return [s for s in MARKS if s in seen] + [s for s in seen if s not in MARKS]


# -- the figure -------------------------------------------------------------------------------------
def vega_lite(events: Sequence[Event], alt: str, caption: str) -> dict[str, Any]:
    """The specification: bars above the queue depth, with a common zoomable time axis."""
    begin, whole = first_start(events), _whole(events) * 1e3
    drawn = [e for e in events if e.kind != "queue"]
    steps = waiting(events)
    depths = [{"at": _ms(moment - begin), "waiting": depth} for moment, depth in steps]
    x = {"type": "quantitative", "scale": {"domain": [0, _round(whole)], "nice": False}}
    seconds = {"title": "s since the first event", "axis": {"labelExpr": "format(datum.value / 1000, '~g')"}}
    bare = {"title": None, "axis": {"labels": False, "ticks": False}}
    views = [_bars(drawn, {**x, **(bare if depths else seconds)})]
    if depths:
        views.append(_depths({**x, **seconds}, max(depth for _, depth in steps)))
    data = {"events": [_datum(e, begin, whole) for e in drawn], "depths": depths}
    return stacked(views, data=data, alt=alt, caption=caption, resolve={"scale": {"x": "shared"}})


def _ms(seconds: float) -> float:
    return _round(seconds * 1e3)


def _round(ms: float) -> float:
    """To 0.1 ms, which keeps the figure small; whole numbers without a point."""
    value = round(ms, 1)
    return int(value) if value == int(value) else value


def _datum(e: Event, begin: float, whole: float) -> dict[str, Any]:
    start, end = (e.start - begin) * 1e3, (e.end - begin) * 1e3
    shown = {"region": e.region, "status": "" if e.status == "ok" else e.status}
    return {
        "name": e.name, "kind": e.kind, "track": e.track, "start": _round(start), "ms": _round(end - start),
        "end": _round(max(end, start + whole * THINNEST)), **{k: v for k, v in shown.items() if v},
    }  # fmt: skip


def _bars(events: Sequence[Event], x: dict[str, Any]) -> dict[str, Any]:
    kinds = [k for k in LOOKS if any(e.kind == k for e in events)]
    statuses = _statuses(events)
    tooltip = [
        {"field": "name"}, {"field": "kind"}, {"field": "region"}, {"field": "status"},
        {"field": "start", "title": "start, ms"}, {"field": "ms", "title": "took, ms"},
    ]  # fmt: skip
    colour = {"domain": kinds, "range": [LOOKS[k][0] for k in kinds]}
    legend = {"orient": "top", "columns": 3, "title": None}
    layers: list[dict[str, Any]] = []
    for height in sorted({LOOKS[k][1] for k in kinds}, reverse=True):
        own = [k for k in kinds if LOOKS[k][1] == height]
        layers.append(
            {
                "transform": [{"filter": {"field": "kind", "oneOf": own}}],
                "mark": {"type": "bar", "height": round(STEP * height)},
                "encoding": {
                    "x": {**x, "field": "start"}, "x2": {"field": "end"}, "tooltip": tooltip,
                    "color": {"field": "kind", "type": "nominal", "scale": colour, "legend": legend},
                    "stroke": {"condition": {"test": "isValid(datum.status)", "value": FAILED}, "value": None},
                },
            }
        )  # fmt: skip
    if statuses:
        marks = {"domain": statuses, "range": [MARKS.get(s, "circle") for s in statuses]}
        layers.append(
            {
                "transform": [{"filter": "isValid(datum.status)"}],
                "mark": {"type": "point", "filled": True, "size": 90, "color": FAILED, "opacity": 1,
                         "stroke": "#ffffff", "strokeWidth": 1},
                "encoding": {
                    "x": {"field": "end", "type": "quantitative"}, "tooltip": tooltip,
                    "shape": {"field": "status", "type": "nominal", "scale": marks, "legend": legend},
                },
            }
        )  # fmt: skip
    zoom = {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"}
    layers[0]["params"] = [{"name": "zoom", "select": zoom, "bind": "scales"}]
    tracks = track_order(events)
    return {
        "data": {"name": "events"},
        "height": {"step": STEP},
        "encoding": {
            "y": {"field": "track", "type": "nominal", "sort": tracks, "title": None, "axis": {"labelLimit": 110}}
        },
        "layer": layers,
    }


def _depths(x: dict[str, Any], most: int) -> dict[str, Any]:
    return {
        "data": {"name": "depths"},
        "height": 36,
        "mark": {"type": "area", "interpolate": "step-after", "color": DEPTH, "clip": True},
        "encoding": {
            "x": {**x, "field": "at"},
            "y": {"field": "waiting", "type": "quantitative", "title": None,
                  "axis": {"values": [0, most], "labelLimit": 110, "labelExpr": "datum.value + ' waiting'"}},
        },
    }  # fmt: skip
