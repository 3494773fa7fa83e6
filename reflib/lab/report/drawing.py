"""Numbers -> figures: shapes in pixels and alt text, from which page.html makes SVG with the colours of page.css.

Text and lines have the page's colours, so that they are readable in dark mode and on paper; filled shapes have white
text. Figures have a fixed size and are scrolled on narrow screens, not shrunk.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reflib.lab.figures import COLOURS
from reflib.lab.gantt_chart import LOOKS, words
from reflib.lab.pictures import megabytes
from reflib.lab.rows import count, short
from reflib.timeline import Event, track_order

MOST_NODES = 200  # of a graph; larger ones are unreadable
MOST_BARS, MOST_BOXES = 160, 4000  # of the memory chart
SLOWEST = 6  # times the fastest: bars are cut here, so that one does not compress the rest
ACROSS, DOWN, BOX = 132, 64, (138, 34)  # px between nodes, and size of a node
LETTERS = 19  # per node
AROUND = 96  # px to the left of all nodes, for edges around them
Point = tuple[float, float]


@dataclass
class Shape:
    """An SVG element. `title`: tooltip. `href`: target of a click."""

    tag: str
    attrs: dict[str, Any]
    text: str = ""
    title: str = ""
    href: str = ""


@dataclass
class Figure:
    width: int
    height: int
    alt: str
    caption: str
    shapes: list[Shape] = field(default_factory=list)

    def put(self, tag: str, css: str, text: str = "", title: str = "", href: str = "", **attrs: Any) -> None:
        """Add a shape. Underscores in names of `attrs` become hyphens; floats are rounded to a tenth of a pixel."""
        rounded = {k.replace("_", "-"): round(v, 1) if isinstance(v, float) else v for k, v in attrs.items()}
        self.shapes.append(Shape(tag, {"class": css, **rounded}, text, title, href))

    def line(self, css: str, *points: Point, title: str = "") -> None:
        places = " ".join(f"{round(x, 1)},{round(y, 1)}" for x, y in points)
        self.put("polyline", css, points=places, title=title)


def clipped(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def duration(us: float | None) -> str:
    """`1.25 ms` for 1250; "" for None."""
    if us is None:
        return ""
    unit, size = next((u, s) for u, s in (("s", 1e6), ("ms", 1e3), ("µs", 1.0)) if us >= s or s == 1.0)
    return f"{short(us / size)} {unit}"


# -- fusion -----------------------------------------------------------------------------------------
def graph(
    data: dict[str, Any], caption: str, refused: Sequence[Sequence[str]] = (), hrefs: dict[str, str] | None = None,
    sizes: bool = True,
) -> Figure | None:  # fmt: skip
    """Nodes with one colour and number per group, and the data flow between them. `refused`: pairs joined by a dashed
    line with the reason. None for a graph with more than MOST_NODES nodes."""
    nodes, inputs = data["nodes"], data["inputs"]
    if len(nodes) > MOST_NODES or not nodes:
        return None
    at = {n["name"]: n["at"] for n in (*nodes, *inputs)}
    left, top = (min(p[i] for p in at.values()) for i in (0, 1))
    right, deep = (max(p[i] for p in at.values()) for i in (0, 1))
    width = round((right - left) * ACROSS + BOX[0] + AROUND + 44)
    made = Figure(width, round((deep - top) * DOWN + 2 * BOX[1]), _graph_alt(data, refused), caption)
    zero = AROUND + BOX[0] / 2
    place = {n: (zero + (x - left) * ACROSS, (y - top) * DOWN + BOX[1]) for n, (x, y) in at.items()}
    for edge in data["edges"]:
        _edge(made, place[edge["from"]], place[edge["to"]], edge, sizes)
    _refusals(made, place, refused)
    for n in nodes:
        _node(made, place[n["name"]], n, (hrefs or {}).get(n["name"], ""))
    for n in inputs:
        x, y = place[n["name"]]
        made.put("text", "input mid", clipped(n["name"], LETTERS), title=n["what"], x=x, y=y + 4)
    return made


def _node(made: Figure, place: Point, node: dict[str, Any], href: str) -> None:
    x, y = place
    group, ops = node["group"], ", ".join(node["ops"])
    if node["call"]:
        css, where = "call", "a call of PyTorch"
    elif group is None:
        css, where = "again", "computed again where it is read"
    else:
        css, where = f"c{group % len(COLOURS)}", f"kernel group {group}"
    title = "\n".join(filter(None, (f"{node['name']}: {ops}", where, node["lines"])))
    left, high = x - BOX[0] / 2, y - BOX[1] / 2
    made.put("rect", f"node {css}", title=title, href=href, x=left, y=high, width=BOX[0], height=BOX[1], rx=6)
    number = "" if group is None or node["call"] else f"{group}  "
    made.put("text", "on mid", number + clipped(ops, LETTERS - len(number)), title=title, href=href, x=x, y=y + 4)


def _edge(made: Figure, start: Point, end: Point, edge: dict[str, Any], sizes: bool) -> None:
    """From the bottom of one node to the top of the other, around nodes in between."""
    (x0, y0), (x1, y1) = (start[0], start[1] + BOX[1] / 2), (end[0], end[1] - BOX[1] / 2)
    rows = (end[1] - start[1]) / DOWN
    title = f"{', '.join(edge['buffers'])}, {megabytes(edge['bytes'])}: {edge['from']} → {edge['to']}"
    if rows > 1.5:
        side = min(x0, x1) - BOX[0] / 2 - 12 - min(AROUND - 50.0, 4 * rows)
        path = f"M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + 26:.0f} {side:.0f} {y0:.0f} {side:.0f} {y0 + 40:.0f}"
        path += f"L{side:.0f} {y1 - 40:.0f}C{side:.0f} {y1:.0f} {x1:.0f} {y1 - 26:.0f} {x1:.0f} {y1:.0f}"
        middle = (side, (y0 + y1) / 2)
    else:
        bend = (y1 - y0) / 2
        path = f"M{x0:.0f} {y0:.0f}C{x0:.0f} {y0 + bend:.0f} {x1:.0f} {y1 - bend:.0f} {x1:.0f} {y1:.0f}"
        middle = ((x0 + x1) / 2, (y0 + y1) / 2)
    made.put("path", "edge", title=title, d=path, marker_end="url(#arrow)")
    if sizes and rows > 0.5:
        made.put("text", "small halo mid", megabytes(edge["bytes"]), title=title, x=middle[0], y=middle[1] + 3)


def _refusals(made: Figure, place: dict[str, Point], refused: Sequence[Sequence[str]]) -> None:
    seen = set()
    for producer, consumer, code, why in refused:
        if producer not in place or consumer not in place or (producer, consumer) in seen:
            continue
        seen.add((producer, consumer))
        (x0, y0), (x1, y1) = place[producer], place[consumer]
        right, rows = max(x0, x1) + BOX[0] / 2, abs(y1 - y0) / DOWN
        out = right + min(60.0, 14 + 6 * rows)
        title = f"{producer} and {consumer} not fused ({code}): {why}"
        path = f"M{x0 + BOX[0] / 2:.0f} {y0:.0f}C{out:.0f} {y0:.0f} {out:.0f} {y1:.0f} {x1 + BOX[0] / 2:.0f} {y1:.0f}"
        made.put("path", "refused", title=title, d=path)
        made.put("text", "small why", code, title=title, x=right + 0.75 * (out - right) + 3, y=(y0 + y1) / 2 + 3)


def _graph_alt(data: dict[str, Any], refused: Sequence[Sequence[str]]) -> str:
    nodes = data["nodes"]
    groups = len({n["group"] for n in nodes if n["group"] is not None and not n["call"]})
    calls = sum(n["call"] for n in nodes)
    listed = "; ".join(", ".join(n["ops"]) for n in nodes[:40]) + (" …" if len(nodes) > 40 else "")
    whys = list(dict.fromkeys(f"{p} with {c} ({code})" for p, c, code, _ in refused))[:20]
    made = f"{count(groups, 'kernel group')} and {count(calls, 'call')}"
    text = f"A graph of {count(len(nodes), 'node')}: {made}. {listed}."
    return text + (f" Not fused: {'; '.join(whys)}." if whys else "")


# -- memory -----------------------------------------------------------------------------------------
def memory(data: dict[str, Any], caption: str) -> Figure | None:
    """Stacked bars of the bytes in temporary buffers while each node runs; a line at the peak. Of more than MOST_BARS
    nodes, a bar is the highest of several."""
    if not data["moments"] or not data["peak_bytes"]:
        return None
    number = len(data["moments"])
    each = -(-number // MOST_BARS)
    parted = [data["moments"][i : i + each] for i in range(0, number, each)]
    moments, peak = [max(part, key=lambda m: m["bytes"]) for part in parted], data["peak"] // each
    step = max(14.0, min(90.0, 660 / len(moments)))
    left, high, top = 66.0, 190.0, 30.0
    named = step >= 44
    made = Figure(round(left + step * len(moments) + 12), round(top + high + 28), _memory_alt(data), caption)
    ticks = nice(data["peak_bytes"])
    scale = high / max(ticks[-1], data["peak_bytes"])
    for value in ticks:
        y = top + high - value * scale
        made.line("grid", (left, y), (made.width - 8.0, y))
        made.put("text", "small end", megabytes(value) if value else "0", x=left - 6, y=y + 4)
    colour = {b: i for i, b in enumerate(dict.fromkeys(b for m in moments for b, _ in m["live"]))}
    whole = sum(len(m["live"]) for m in moments) > MOST_BOXES
    for i, m in enumerate(moments):
        x, y = left + i * step + 1, top + high
        parts = [("all buffers", m["bytes"])] if whole else m["live"]
        for name, size in parts:
            tall = size * scale
            y -= tall
            css = f"bar c{colour.get(name, 0) % len(COLOURS)}"
            title = f"{name}, {megabytes(size)}, while {m['label']} runs ({megabytes(m['bytes'])} in all)"
            made.put("rect", css, title=title, x=x, y=y, width=step - 2, height=tall)
            if tall > 15 and step > 60:
                label = clipped(name, int(step / 7))
                made.put("text", "on small mid", label, title=title, x=x + step / 2 - 1, y=y + tall / 2 + 4)
        if named or (i + 1) % 5 == 0:
            text = clipped(_step_name(m), int(step / 6.8)) if named else str((i + 1) * each)
            made.put("text", "small mid", text, title=m["label"], x=x + step / 2 - 1, y=top + high + 15)
    y = top + high - data["peak_bytes"] * scale
    made.line("peak", (left, y), (made.width - 8.0, y))
    text = f"peak {megabytes(data['peak_bytes'])}, step {data['peak'] + 1} of {number}: {_step_name(moments[peak])}"
    long = 7.0 * len(text)
    made.width = max(made.width, round(left + long + 8))
    x = min(max(left, left + (peak + 0.5) * step - long / 2), made.width - long - 4)
    made.put("text", "why strong", text, x=x, y=y - 8)
    return made


def _step_name(moment: dict[str, Any]) -> str:
    return ", ".join(moment["ops"]) or moment["label"]


def _memory_alt(data: dict[str, Any]) -> str:
    moments, peak = data["moments"], data["peak"]
    return (
        f"Stacked bars of the bytes in temporary buffers at each of {count(len(moments), 'step')}. The peak is "
        f"{megabytes(data['peak_bytes'])} at step {peak + 1}, {_step_name(moments[peak])}. "
        f"{count(data['allocations'], 'allocation')}, {count(data['reuses'], 'reuse')} of dead buffers."
    )


def nice(top: float, ticks: int = 4) -> list[float]:
    """Round numbers from 0 up to about `top`."""
    raw = top / ticks
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw)
    return [i * step for i in range(math.floor(top / step) + 1)]


# -- time -------------------------------------------------------------------------------------------
def timeline(data: Sequence[dict[str, Any]], caption: str) -> Figure | None:
    """When each stage ran, one row per stage and graph; below, one row per process that compiled or measured."""
    if not data:
        return None
    events = [(d["graph"], Event(**{k: v for k, v in d.items() if k != "graph"})) for d in data]
    events = [(g, e) for g, e in events if e.kind != "queue"]
    several = len({g for g, _ in events}) > 1
    rows = _rows(events, several)
    whole = max(e.end for _, e in events) or 1e-9
    wide, tall, top = 520.0, 24.0, 22.0
    left = 16 + 7.2 * max(map(len, rows))
    made = Figure(round(left + wide + 90), round(top + tall * len(rows) + 8), words([e for _, e in events]), caption)
    for value in nice(whole * 1e3):
        x = left + value / 1e3 / whole * wide
        made.line("grid", (x, top - 4), (x, top + tall * len(rows)))
        made.put("text", "small mid", duration(value * 1e3) if value else "0", x=x, y=top - 9)
    for i, (label, own) in enumerate(rows.items()):
        y = top + i * tall
        made.put("text", "label end", label, x=left - 8, y=y + tall / 2 + 4)
        for e in own:
            x, w = left + e.start / whole * wide, max(1.5, e.seconds / whole * wide)
            look = LOOKS.get(e.kind, LOOKS["stage"])
            high = tall * look[1] - 4
            failed = e.status not in ("", "ok")
            title = f"{e.name} [{e.region}]" if e.region else e.name
            title += f": {e.kind}, {duration(e.seconds * 1e6)} from {duration(e.start * 1e6)}"
            title += f", {e.status}" if e.status else ""
            css = f"bar k-{e.kind}" + (" failed" if failed else "")
            made.put("rect", css, title=title, x=x, y=y + (tall - high) / 2, width=w, height=high)
        if len(own) == 1:
            e = own[0]
            x = left + e.end / whole * wide + 6
            made.put("text", "small", duration(e.seconds * 1e6), x=x, y=y + tall / 2 + 4)
    return made


def _rows(events: Iterable[tuple[str, Event]], several: bool) -> dict[str, list[Event]]:
    events = list(events)
    rows: dict[str, list[Event]] = {}
    for g, e in events:
        if e.kind == "stage" and e.track == "main":
            rows.setdefault(f"{g}: {e.name}" if several else e.name, []).append(e)
    rest = [e for _, e in events if not (e.kind == "stage" and e.track == "main")]
    for track in track_order(rest):
        rows.setdefault(track if track != "main" else "within a stage", []).extend(e for e in rest if e.track == track)
    return rows


def bars(values: Sequence[tuple[str, float, float, str, int]], caption: str, alt: str) -> Figure:
    """One bar per case: (label, value, spread, text after it, colour), starting at 0. A cut bar ends in ▶."""
    wide, tall = 300.0, 30.0
    left = 16 + 7.2 * max((len(label) for label, *_ in values), default=0)
    made = Figure(round(left + wide + 150), round(tall * len(values) + 8), alt, caption)
    fastest = min((v for _, v, *_ in values), default=1.0)
    top = min(max((v + s / 2 for _, v, s, *_ in values), default=1.0), SLOWEST * fastest) or 1.0
    for i, (label, value, spread, text, colour) in enumerate(values):
        y, w = 4 + i * tall, min(value, top) / top * wide
        title = f"{label}: {text}"
        made.put("text", "label end", label, x=left - 8, y=y + tall / 2 + 4)
        made.put("rect", f"bar c{colour}", title=title, x=left, y=y + 5, width=max(1.5, w), height=tall - 10, rx=3)
        end = w
        if value > top:
            text = f"▶ {text}"
        elif spread:  # with a background, because it overlaps the bar
            low, end = (max(0.0, min(value + side * spread / 2, 1.1 * top)) / top * wide for side in (-1, 1))
            for css in ("whisker ground", "whisker"):
                made.line(css, (left + low, y + tall / 2), (left + end, y + tall / 2))
        made.put("text", "label", text, x=left + end + 8, y=y + tall / 2 + 4)
    return made
