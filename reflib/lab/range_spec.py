"""The Vega-Lite form of `lab.range_picture`: pick a size to see all cases at it and which one serves it."""

from collections.abc import Mapping, Sequence
from typing import Any

from reflib.lab.figures import QUIET, colours
from reflib.lab.moving import stacked

Lines = Mapping[str, list[tuple[float, float]]]
Served = Sequence[tuple[int, int, str]]


def range_spec(lines: Lines, served: Served, tuned: Sequence[int], x: str, caption: str, alt: str) -> dict[str, Any]:
    """Three views with a common selection: lines over the size, a strip of the serving cases, bars at one size."""
    xs = sorted({p for points in lines.values() for p, _ in points})
    low, high = xs[0], xs[-1]
    strip = [
        {"least": max(low, a - 0.5), "most": min(high, b + 0.5), "case": case, "sizes": f"{a:,} to {b:,}",
         "middle": (max(low, a - 0.5) * min(high, b + 0.5)) ** 0.5}
        for a, b, case in served if a - 0.5 < high and b + 0.5 > low
    ]  # fmt: skip
    points = [
        {"case": case, "size": p, "time": float(f"{t:.4g}"), "serves": case == _serving(served, p)}
        for case, some in lines.items() for p, t in some
    ]  # fmt: skip
    colour = {
        "field": "case", "type": "nominal", "title": None,
        "scale": colours(list(lines)),
    }  # fmt: skip
    scale = {"type": "log", "base": 2, "domain": [low / 1.1, high * 1.1], "nice": False}
    times = [t for some in lines.values() for _, t in some]
    marks, sizes = [{"size": t} for t in tuned if low <= t <= high], [{"size": p} for p in xs]
    return stacked(
        [_lines(xs, times, scale, colour, x), _strip(scale, colour, x), _bars(colour)],
        data={"points": points, "strip": strip, "tuned": marks, "sizes": sizes},
        alt=alt,
        caption=caption,
    )


def _serving(served: Served, size: float) -> str:
    return next((case for least, most, case in served if least <= size <= most), "")


def _ticks(times: list[float]) -> list[float]:
    """Ticks of a logarithmic axis: 1, 2, 5 times powers of ten on a short one, else powers of ten."""
    low, high = min(times), max(times)
    steps = (1, 2, 5) if high < 1000 * low else (1,)
    return [s * 10.0**e for e in range(-3, 9) for s in steps if low / 2 <= s * 10.0**e <= high * 2]


def _lines(
    xs: list[float], times: list[float], scale: dict[str, Any], colour: dict[str, Any], x: str
) -> dict[str, Any]:
    across = {"field": "size", "type": "quantitative", "scale": scale, "axis": {"labels": False, "title": None}}
    ticks = {"labelExpr": "format(datum.value, ',.4~r')", "values": _ticks(times)}
    up = {
        "field": "time",
        "type": "quantitative",
        "title": "µs per call",
        "scale": {"type": "log", "nice": False},
        "axis": ticks,
    }
    legend = {"orient": "top", "columns": 2, "symbolType": "stroke", "symbolStrokeWidth": 3, "symbolSize": 200}
    pick = {
        "name": "size",
        "select": {"type": "point", "fields": ["size"], "nearest": True, "on": "click", "clear": False},
        "bind": {"input": "select", "options": xs, "name": f"{x} "},
        "value": [{"size": xs[0]}],
    }
    return {
        "height": 220,
        "encoding": {"x": across},
        "layer": [
            {
                "data": {"name": "points"},
                "mark": {"type": "line", "point": True},
                "encoding": {
                    "y": up,
                    "color": {**colour, "legend": legend},
                    "strokeDash": {
                        "field": "case",
                        "type": "nominal",
                        "sort": colour["scale"]["domain"],
                        "legend": None,
                    },
                    "tooltip": [{"field": "case"}, {"field": "size", "title": x}, {"field": "time", "title": "µs"}],
                },
            },
            {
                "data": {"name": "sizes"},
                "params": [pick],
                "mark": {"type": "rule", "color": QUIET, "cursor": "pointer"},
                "encoding": {
                    "opacity": {"condition": {"param": "size", "empty": False, "value": 0.9}, "value": 0.001},
                    "size": {"condition": {"param": "size", "empty": False, "value": 2}, "value": 14},
                },
            },
        ],
    }


def _strip(scale: dict[str, Any], colour: dict[str, Any], x: str) -> dict[str, Any]:
    axis = {"labelExpr": "format(datum.value, ',')", "tickCount": 6, "grid": False}
    across = {"type": "quantitative", "scale": scale, "axis": axis, "title": f"{x}; the strip: which case serves"}
    return {
        "height": 26,
        "layer": [
            {
                "data": {"name": "strip"},
                "mark": {"type": "bar", "height": 22, "stroke": "#ffffff"},
                "encoding": {
                    "x": {"field": "least", **across},
                    "x2": {"field": "most"},
                    "color": {**colour, "legend": None},
                    "tooltip": [{"field": "case", "title": "served by"}, {"field": "sizes", "title": x}],
                },
            },
            {
                "data": {"name": "tuned"},
                "mark": {"type": "point", "shape": "triangle-down", "filled": True, "color": "#ffffff", "size": 35},
                "encoding": {
                    "x": {"field": "size", **across},
                    "y": {"value": 6},
                    "tooltip": [{"field": "size", "title": "tuned at"}],
                },
            },
        ],
    }


def _bars(colour: dict[str, Any]) -> dict[str, Any]:
    y = {"field": "case", "type": "nominal", "sort": list(colour["scale"]["domain"]), "title": None}
    time = {"field": "time", "type": "quantitative", "title": "µs per call at the selected size"}
    label = "format(datum.time, ',.3~r') + (datum.serves ? '  serves' : '')"
    return {
        "data": {"name": "points"},
        "transform": [
            {"filter": {"param": "size"}},
            {"calculate": label, "as": "label"},
            {"calculate": "1.4 * datum.time", "as": "room"},  # makes room for the labels
        ],
        "height": {"step": 22},
        "encoding": {"y": {**y, "axis": {"labelLimit": 150, "labelFontSize": 11}}},
        "layer": [
            {
                "mark": {"type": "point", "opacity": 0},
                "encoding": {"x": {**time, "field": "room"}, "tooltip": None},
            },
            {"mark": {"type": "bar", "height": 15}, "encoding": {"x": time, "color": {**colour, "legend": None}}},
            {
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 10},
                "encoding": {"x": time, "text": {"field": "label", "type": "nominal"}},
            },
        ],
    }
