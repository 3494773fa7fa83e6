"""`lab.fusion_graph`: the program before fusion as a Vega-Lite figure.

Hovering over a dashed edge, or selecting the pair from a list, shows why the pair was not fused.
`lab.fusion_picture` is the static version. Both, and the table, come from the same `reflib.explain`.
"""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

from reflib.lab.figures import COLOURS
from reflib.lab.moving import SCHEMA, Drawn, pick
from reflib.lab.pictures import Places, flows, layout, megabytes, op_names

if TYPE_CHECKING:
    from reflib.observe.explain import Explanation

EDGE, REFUSED = "#8a8a8a", "#d55e00"  # readable on light and dark backgrounds
HALF_WIDTH, HALF_HEIGHT = 0.42, 0.24
PIXELS = (130, 66)  # per step across and per step down
NO_PAIR = "pick a pair"


def fusion_graph(e: Explanation, *, caption: str) -> Drawn:
    """Display and return the graph of the program before fusion: one colour and number per kernel, solid edges
    labelled with bytes, dashed edges between pairs that were not fused."""
    from reflib.lab.showing import display_thing

    places = layout(e.program)
    nodes = _nodes(e, places)
    edges = _edges(e, places)
    refused = _refused(e, places)
    wide = 2 * max((abs(x) for x, _ in places.values()), default=0.0) + 2.2
    deep = max((y for _, y in places.values()), default=0.0) + 1.2
    chart = Drawn(
        {
            "$schema": SCHEMA,
            "description": _alt(e, refused),
            "title": {
                "text": textwrap.wrap(caption, 72), "anchor": "start", "orient": "bottom", "fontWeight": "normal",
                "fontSize": 13,
            },
            "width": round(wide * PIXELS[0]),
            "height": round(deep * PIXELS[1]),
            "view": {"stroke": None},
            **_why_list(refused),
            "encoding": {
                "x": {"field": "x", "type": "quantitative", "axis": None, "scale": {"domain": [-wide / 2, wide / 2]}},
                "y": {
                    "field": "y", "type": "quantitative", "axis": None,
                    "scale": {"domain": [-0.6, deep - 0.6], "reverse": True},
                },
            },
            "layer": [*_edge_layers(edges, refused), *_node_layers(nodes), *_why_layer(refused)],
        }
    )  # fmt: skip
    display_thing(chart)
    return chart


def _nodes(e: Explanation, places: Places) -> list[dict[str, Any]]:
    kernel = {m: i for i, g in enumerate(e.groups) for m in g.members}
    out = []
    for node in e.program.nodes:
        x, y = places[node.name]
        number = kernel.get(node.name)
        where = f"kernel {number}" if number is not None else "computed again where it is read"
        label = ", ".join(op_names(node))
        out.append(
            {
                "x": x - HALF_WIDTH, "x2": x + HALF_WIDTH, "y": y - HALF_HEIGHT, "y2": y + HALF_HEIGHT,
                "cx": x, "cy": y, "label": label if len(label) <= 16 else label[:15] + "…",
                "kernel": where, "node": node.name, "ops": label,
                "colour": EDGE if number is None else COLOURS[number % len(COLOURS)],
                "badge": "" if number is None else str(number),
            }
        )  # fmt: skip
    inputs = [
        {"cx": x, "cy": y, "label": name, "node": name, "ops": "", "kernel": "an input", "colour": None, "badge": ""}
        for name, (x, y) in places.items()
        if name in e.program.buffers and name not in {n.name for n in e.program.nodes}
    ]
    return out + inputs


def _edges(e: Explanation, places: Places) -> list[dict[str, Any]]:
    """Each edge as a line from the bottom of the producer to the top of the consumer."""
    out = []
    for start, end, b, size in flows(e.program, places):
        (x0, y0), (x1, y1) = places[start], places[end]
        bent = [(x0, y0 + 0.25), (x1, y1 - 0.25)]
        if x0 == x1 and y1 - y0 > 1:  # around the nodes in between
            bent[1:1] = [(x0 - 0.58, y0 + 0.5), (x0 - 0.58, y1 - 0.5)]
        out += _line(f"{start} → {end}", bent, {"carries": f"{b}, {megabytes(size)}"})
    return out


def _refused(e: Explanation, places: Places) -> list[dict[str, Any]]:
    """Each refused pair of drawn nodes, as an arc to the right of them."""
    out: list[dict[str, Any]] = []
    seen = set()
    for r in e.refusals:
        pair = (r.producer, r.consumer)
        if pair in seen or not set(pair) <= set(places):
            continue
        seen.add(pair)
        (x0, y0), (x1, y1) = places[r.producer], places[r.consumer]
        words = {"reason": r.reason.code, "because": r.reason.text}
        if y0 == y1:
            arc = ((x0, y0 + 0.25), ((x0 + x1) / 2, y0 + 0.62), (x1, y1 + 0.25))
        else:
            right = max(x0, x1) + HALF_WIDTH + 0.12 * (1 + abs(y1 - y0))
            arc = ((x0 + HALF_WIDTH, y0), (right, (y0 + y1) / 2), (x1 + HALF_WIDTH, y1))
        out += _line(f"{r.producer} ⇢ {r.consumer}", arc, words)
    return out


def _line(pair: str, points: Any, words: dict[str, str]) -> list[dict[str, Any]]:
    return [{"pair": pair, "x": x, "y": y, "turn": turn, **words} for turn, (x, y) in enumerate(points)]


def _why_list(refused: list[dict[str, Any]]) -> dict[str, Any]:
    """A select list of the refused pairs; the text for the selected one is shown below the graph."""
    pairs = list(dict.fromkeys(line["pair"] for line in refused))
    said = {line["pair"]: f"{line['pair']}, {line['reason']}: {line['because']}" for line in refused}
    says = {"name": "says", "expr": f"({json.dumps(said, ensure_ascii=False)})[why] || ''"}
    listed = pick("why", "why not fused?", [NO_PAIR, *pairs])
    return {"params": [listed, says] if pairs else [{"name": "why", "value": NO_PAIR}]}


def _why_layer(refused: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reason for the selected pair, along the upper edge."""
    once = [line for line in refused if line["turn"] == 1]
    lines = [{**line, "why not": "\n".join(textwrap.wrap(line["because"], 60))} for line in once]
    mark = {"type": "text", "align": "left", "baseline": "top", "fontSize": 12, "fontWeight": "bold", "color": REFUSED}
    where = {"x": {"value": 4}, "y": {"value": 4}, "text": {"field": "why not", "type": "nominal"}}
    shown = {"transform": [{"filter": "datum.pair === why"}], "mark": {**mark, "lineBreak": "\n"}, "encoding": where}
    return [{"data": {"values": lines}, **shown}] if lines else []


def _edge_layers(edges: list[dict[str, Any]], refused: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def tips(*fields: str) -> list[dict[str, str]]:
        return [{"field": f, "type": "nominal"} for f in fields]

    along = {"detail": {"field": "pair", "type": "nominal"}, "order": {"field": "turn", "type": "quantitative"}}
    why = tips("pair", "reason", "because")
    smooth = {"type": "line", "interpolate": "monotone", "strokeCap": "round"}
    return [
        {
            "data": {"values": edges},
            "mark": {"type": "line", "color": EDGE, "strokeWidth": 2},
            "encoding": {**along, "tooltip": tips("pair", "carries")},
        },
        {
            "data": {"values": refused},
            "mark": {**smooth, "interpolate": "basis", "color": REFUSED, "strokeWidth": 2.5, "strokeDash": [6, 4]},
            "encoding": {**along, "tooltip": why},
        },
        {
            "data": {"values": refused},
            "transform": [{"filter": "datum.pair === why"}],
            "mark": {**smooth, "interpolate": "basis", "color": REFUSED, "strokeWidth": 6},
            "encoding": along,
        },
        {
            "data": {"values": [line for line in refused if line["turn"] == 1]},
            "mark": {"type": "text", "color": REFUSED, "fontSize": 13, "fontWeight": "bold", "align": "left", "dx": 2},
            "encoding": {"text": {"field": "reason", "type": "nominal"}, "tooltip": why},
        },
    ]


def _node_layers(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    boxes = [n for n in nodes if n["colour"]]
    tips = [{"field": f, "type": "nominal"} for f in ("node", "ops", "kernel")]
    centre = {"x": {"field": "cx", "type": "quantitative"}, "y": {"field": "cy", "type": "quantitative"}}
    corner = {"x": {"field": "x", "type": "quantitative"}, "y": {"field": "y", "type": "quantitative"}}
    box = {**corner, "x2": {"field": "x2"}, "y2": {"field": "y2"}}
    colour = {"field": "colour", "type": "nominal", "scale": None}
    return [
        {
            "data": {"values": boxes},
            "mark": {"type": "rect", "cornerRadius": 5},
            "encoding": {**box, "color": colour, "tooltip": tips},
        },
        {
            "data": {"values": boxes},
            "mark": {"type": "text", "color": "#ffffff", "fontSize": 12},
            "encoding": {**centre, "text": {"field": "label", "type": "nominal"}, "tooltip": tips},
        },
        {
            "data": {"values": boxes},
            "mark": {"type": "text", "color": "#ffffff", "fontSize": 10, "dx": -48, "dy": -9},
            "encoding": {**centre, "text": {"field": "badge", "type": "nominal"}},
        },
        {
            "data": {"values": [n for n in nodes if not n["colour"]]},
            "mark": {"type": "text", "color": EDGE, "fontSize": 12, "fontStyle": "italic"},
            "encoding": {**centre, "text": {"field": "label", "type": "nominal"}},
        },
    ]


def _alt(e: Explanation, refused: list[dict[str, Any]]) -> str:
    kernels = "; ".join(" and ".join(op_names(n)) for n in e.fused.nodes)
    parts = [f"A graph of {len(e.program.nodes)} nodes in {len(e.groups)} kernels: {kernels}."]
    whys = [f"{r['pair']}, {r['reason']}: {r['because']}" for r in refused if r["turn"] == 1]
    return " ".join(parts + ([f"Refused: {'; '.join(whys)}."] if whys else ["No pair was refused."]))
