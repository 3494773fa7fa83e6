"""`lab.explore`: a clickable figure of candidates over shapes; one Vega-Lite spec for Lab and the static book.

    candidate_rows(decision, at, predicted) -> Rows      the measurements of `autotune` as rows
    explore(rows, recorded, caption)                     the figure, drawn by Lab; `book/_ext` turns it into HTML
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reflib.lab.moving import Explorer, emit, pick, stacked
from reflib.lab.plots import RECORDED, nickname
from reflib.lab.rows import Row, Rows, record, short, stamp

if TYPE_CHECKING:
    from reflib.ir.decision import Decision

GREY = "#8a8a8a"  # visible on white and on black
SHOWN = 12  # candidates drawn per shape; always includes the default

# kind of candidate -> (colour, marker of Vega-Lite, marker of matplotlib); no colour of a compiler's (figures.ALWAYS)
KINDS = {
    "ATen": ("#7a7a7a", "square", "s"),
    "tiled": ("#2a8fa8", "circle", "o"),
    "persistent": ("#aa4499", "diamond", "D"),
    "split-K": ("#8a6d00", "triangle-up", "^"),
    "decompose-K": ("#6f63c5", "cross", "P"),
    "other": ("#b07a5a", "triangle-down", "v"),
}
_TILING = re.compile(r"^triton (\w+) (\d+x\d+x\d+)(?:.* splits (\d+))?")
_WORDS = {"eager": "ATen", "tiled": "tiled", "persistent": "persistent", "split": "split-K"}


def kind_of(candidate: str) -> str:
    """`triton split 16x32x128 ...` -> `split-K`.

    >>> kind_of("decompose_k(k_splits=64)"), kind_of("aten"), kind_of("triton tiled 64x64x32 w4 s3")
    ('decompose-K', 'ATen', 'tiled')
    """
    if candidate.startswith("decompose_k"):
        return "decompose-K"
    if candidate.startswith("aten"):
        return "ATen"
    words = candidate.split()
    word = words[1] if words[0] == "triton" and len(words) > 1 else words[0]
    return _WORDS.get(word, "other")


def short_name(candidate: str) -> str:
    """A name short enough for a label beside a bar on a phone.

    >>> short_name("triton split 16x32x128 w2 s5 splits 56 wk2"), short_name("decompose_k(k_splits=64)")
    ('split 16x32x128 / 56', 'decompose-K / 64')
    """
    if found := _TILING.match(candidate):
        kind, blocks, splits = found.groups()
        return f"{kind} {blocks} / {splits}" if splits else f"{kind} {blocks}"
    if found := re.fullmatch(r"decompose_k\w*\(k_splits=(\d+)\)", candidate):
        return f"decompose-K / {found[1]}"
    return candidate if len(candidate) <= 24 else candidate[:23] + "…"


def candidate_rows(decision: Decision, at: Mapping[str, int], predicted: Mapping[str, float] | None = None) -> Rows:
    """The candidates of a decision as rows, also recorded: `time` (µs) and `error` of each, `predicted` (µs) if
    given, and one row `winner` with its speedup over the default (the first candidate)."""
    how = {"clock": "autotune", "cache": "as autotune has it"}
    shared: dict[str, Any] = {"name": "candidates", "at": dict(at), **how, **stamp()}
    rows = []
    for c in decision.candidates:
        ok = c.status == "ok" and c.time_us is not None
        spread = (c.spread or 0.0) * (c.time_us or 0.0) if ok else None
        rows.append(
            Row(case=c.name, metric="time", value=c.time_us if ok else None, unit="µs", spread=spread,
                status="ok" if ok else c.status, note=c.why, **shared)
        )  # fmt: skip
        if ok and c.error is not None:
            rows.append(Row(case=c.name, metric="error", value=c.error, unit="", **shared))
        if ok and predicted and c.name in predicted:
            rows.append(Row(case=c.name, metric="predicted", value=predicted[c.name], unit="µs", **shared))
    times = {r.case: r.value for r in rows if r.metric == "time" and r.value}
    default = times.get(decision.candidates[0].name) if decision.candidates else None
    if decision.winner in times and default:
        rows.append(
            Row(case=decision.winner, metric="winner", value=default / (times[decision.winner] or 1.0), unit="x",
                note=decision.reason, **shared)
        )  # fmt: skip
    return record(rows)


# -- the figure's data ------------------------------------------------------------------------------
def tables(rows: Rows, recorded: Rows | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(one dict per shape, one dict per candidate), those of this device first, then recorded ones."""
    shapes: list[dict[str, Any]] = []
    candidates: list[dict[str, Any]] = []
    for some, mark in ((rows, ""), (rows.elsewhere(recorded), RECORDED)):
        for row in some.where(metric="winner"):
            here = Rows(r for r in some if r.device == row.device and r.at == row.at)
            device = nickname(row.device) + mark
            place = {"device": device, "M": row.at["M"], "N": row.at["N"], "K": row.at["K"]}
            place["shape"] = "{M} x {N} x {K}".format(**place)
            best = here.value(row.case)
            shapes.append(
                {**place, "MN": "{M} x {N}".format(**place), "winner": row.case, "kind": kind_of(row.case),
                 "time": _digits(best), "ratio": _digits(row.value)}
            )  # fmt: skip
            candidates += _candidates(here, row, place)
    return shapes, candidates


def _candidates(here: Rows, winner: Row, place: dict[str, Any]) -> list[dict[str, Any]]:
    """The drawn candidates of one shape, fastest first."""
    extra = {(r.case, r.metric): r.value for r in here if r.metric in ("error", "predicted")}
    timed = sorted((r for r in here.where(metric="time") if r.ok), key=lambda r: r.value or 0.0)
    default = here.where(metric="time")[0].case
    drawn = [r for i, r in enumerate(timed) if i < SHOWN or r.case in (default, winner.case)]
    names: list[str] = []
    for r in drawn:  # short names can coincide
        name = short_name(r.case)
        names.append(name if name not in names else f"{name} #{sum(n.startswith(name) for n in names) + 1}")
    return [
        {**place, "name": names[i], "candidate": r.case, "kind": kind_of(r.case), "time": _digits(r.value), "rank": i,
         "low": _digits(max(0.0, (r.value or 0.0) - (r.spread or 0.0) / 2)),
         "high": _digits((r.value or 0.0) + (r.spread or 0.0) / 2), "end": _digits(_end(r)),
         "error": _digits(extra.get((r.case, "error"))),
         "predicted": _digits(extra.get((r.case, "predicted"))), "chosen": r.case == winner.case}
        for i, r in enumerate(drawn)
    ]  # fmt: skip


def _end(r: Row) -> float:
    """The end of the spread line, limited so that an outlier does not compress the axis."""
    time = r.value or 0.0
    return min(time + (r.spread or 0.0) / 2, 1.5 * time)


def _digits(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


# -- the figure -------------------------------------------------------------------------------------
def explore(rows: Rows, *, caption: str, recorded: Rows | None = None) -> Explorer | None:
    """Show shapes with their winners, and the candidates of the shape selected by a click or from a list.

    ``rows``: from ``candidate_rows``. ``recorded``: rows of other devices, also selectable. None without candidates.
    """
    shapes, candidates = tables(rows, recorded)
    if not shapes:
        print("Nothing to draw: no candidates were measured here, and none are recorded yet.")
        return None
    return emit(vega_lite(shapes, candidates, words(shapes), caption))


def words(shapes: list[dict[str, Any]]) -> str:
    """The alt text."""
    parts = ["Shapes of matrix products, by M x N and K, with the kind of candidate that won each."]
    for device in dict.fromkeys(s["device"] for s in shapes):
        listed = "; ".join(
            f"{s['shape']}: {s['winner']}, {short(s['time'])} µs, {short(s['ratio'])} times as fast as the default"
            for s in shapes if s["device"] == device
        )  # fmt: skip
        parts.append(f"{device}: {listed}.")
    return " ".join(parts)


def vega_lite(
    shapes: list[dict[str, Any]], candidates: list[dict[str, Any]], alt: str, caption: str
) -> dict[str, Any]:
    """The specification: a map of shapes above the bars of one shape's candidates, linked by a selection."""
    devices = list(dict.fromkeys(s["device"] for s in shapes))
    listed = list(dict.fromkeys(s["shape"] for s in sorted(shapes, key=_size)))
    first = next((s["shape"] for s in shapes if s["device"] == devices[0]), listed[0])
    return stacked(
        [_map(shapes, listed, first), _bars()],
        data={"shapes": shapes, "candidates": candidates},
        alt=alt,
        caption=caption,
        spacing=18,
        params=[pick("device", "device", devices)],
        resolve={"scale": {"color": "shared"}},
    )


def _size(s: Mapping[str, Any]) -> tuple[int, int]:
    return s["M"] * s["N"], s["K"]


def _colour(shown: list[str], legend: Any) -> dict[str, Any]:
    scale = {"domain": shown, "range": [KINDS[k][0] for k in shown]}
    return {"field": "kind", "type": "nominal", "scale": scale, "legend": legend, "title": "winner"}


def _map(shapes: list[dict[str, Any]], listed: list[str], first: str) -> dict[str, Any]:
    """K across, M x N down, one mark per measured shape in the winner's colour and marker."""
    kinds = list(KINDS)
    outputs = list(dict.fromkeys(s["MN"] for s in sorted(shapes, key=_size)))
    picked = {"param": "shape", "empty": False}
    depths = sorted({s["K"] for s in shapes})
    legend = {"orient": "top", "columns": 3, "title": "the winner is"}
    return {
        "data": {"name": "shapes"},
        "transform": [{"filter": "datum.device === device"}],
        "height": {"step": 26},
        "title": {"text": "Which candidate won (click one)", "anchor": "start", "fontSize": 12},
        "params": [
            {
                "name": "shape",
                "select": {"type": "point", "fields": ["shape"], "on": "click", "clear": False},
                "bind": {"input": "select", "options": listed, "name": "M x N x K "},
                "value": [{"shape": first}],
            }
        ],
        "mark": {"type": "point", "filled": True, "size": 210, "cursor": "pointer"},
        "encoding": {
            "x": {
                "field": "K", "type": "quantitative", "title": "K, summed over",
                "scale": {"type": "log", "base": 2, "domain": [depths[0] / 1.5, depths[-1] * 1.5], "nice": False},
                "axis": {"values": _powers(depths), "labelExpr": "format(datum.value, ',')", "labelOverlap": True},
            },
            "y": {"field": "MN", "type": "ordinal", "sort": outputs, "title": "M x N", "axis": {"grid": True}},
            "color": _colour(kinds[:-1], legend),
            "shape": {
                "field": "kind", "type": "nominal", "legend": legend,
                "scale": {"domain": kinds[:-1], "range": [KINDS[k][1] for k in kinds[:-1]]},
            },
            "opacity": {"condition": {**picked, "value": 1}, "value": 0.55},
            "size": {"condition": {**picked, "value": 420}, "value": 170},
            "tooltip": [
                {"field": "shape", "title": "M x N x K"}, {"field": "winner"},
                {"field": "time", "title": "µs"}, {"field": "ratio", "title": "times as fast as the default"},
            ],
        },
    }  # fmt: skip


def _powers(depths: list[int]) -> list[int]:
    """Ticks at powers of two: every fourth, and at least two."""
    low, high = depths[0], depths[-1]
    ticks = [2**i for i in range(24) if low / 1.5 <= 2**i <= high * 1.5]
    return ticks[:: max(1, len(ticks) // 4)]


def _bars() -> dict[str, Any]:
    """The candidates of the selected shape, fastest first; a tick at each predicted time."""
    y = {"field": "name", "type": "nominal", "sort": {"field": "rank", "op": "min"}, "title": None}
    tooltip = [
        {"field": "candidate"}, {"field": "time", "title": "µs"}, {"field": "low", "title": "middle half from"},
        {"field": "high", "title": "to"}, {"field": "predicted", "title": "predicted, µs"},
        {"field": "error", "title": "error"}, {"field": "chosen", "title": "chosen"},
    ]  # fmt: skip
    time = {"type": "quantitative", "title": "µs per call"}
    return {
        "data": {"name": "candidates"},
        "transform": [{"filter": "datum.device === device"}, {"filter": {"param": "shape"}}],
        "height": {"step": 20},
        "title": {"text": "Its candidates, the fastest first", "anchor": "start", "fontSize": 12},
        "encoding": {"y": {**y, "axis": {"labelLimit": 170, "labelFontSize": 10}}},
        "layer": [
            {
                "mark": {"type": "bar", "height": 13},
                "encoding": {
                    "x": {"field": "time", **time}, "color": _colour(list(KINDS)[:-1], None), "tooltip": tooltip,
                    "opacity": {"condition": {"test": "datum.chosen", "value": 1}, "value": 0.6},
                },
            },
            {
                "mark": {"type": "rule", "color": GREY, "strokeWidth": 2},
                "encoding": {"x": {"field": "low", "type": "quantitative"}, "x2": {"field": "end"}},
            },
            {
                "transform": [{"filter": "isValid(datum.predicted)"}],
                "mark": {"type": "tick", "thickness": 2, "height": 17, "color": GREY},
                "encoding": {"x": {"field": "predicted", "type": "quantitative"}, "tooltip": tooltip},
            },
            {
                "mark": {"type": "text", "align": "left", "dx": 4, "fontSize": 10},
                "encoding": {
                    "x": {"field": "end", "type": "quantitative"},
                    "text": {"field": "label", "type": "nominal"},
                },
                "transform": [
                    {"calculate": "format(datum.time, '.3~s') + (datum.chosen ? '  chosen' : '')", "as": "label"}
                ],
            },
        ],
    }  # fmt: skip
