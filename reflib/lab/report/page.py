"""Data -> HTML. Counts and comparisons are made here; the template only arranges them."""

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from reflib.lab.figures import COLOURS
from reflib.lab.gantt_chart import LOOKS
from reflib.lab.pictures import megabytes
from reflib.lab.report import drawing
from reflib.lab.rows import count, short
from reflib.timeline import KINDS

HERE = Path(__file__).parent
TOTALS = {"operators": "ATen operators", "kernels": "kernels", "calls": "calls of PyTorch",
          "bytes_before": "to move before fusion", "bytes_after": "to move",
          "peak_bytes": "temporary at the peak", "decisions": "measured choices"}  # fmt: skip
MOST_RANKED = 200  # rows of the table of kernels
LARGE = 1_500_000  # characters of a page from which its listings are packed
CAPTIONS = {
    "when": "When each stage ran. Rest the pointer on a bar for its name and time.",
    "speed": "Time per call {}: median, with the interquartile range. In brackets: how many times as fast as eager.",
    "after": "After fusion: a box is a kernel or a call of PyTorch (grey), with what flows between them. A click on a "
    "kernel leads to its source.",
    "before": "Before fusion: boxes of one colour and number become one kernel. A dashed line joins two that do not, "
    "with the reason.",
    "memory": "Bytes in temporary buffers while each node runs, outputs among them.",
}


class Listings:
    """Code for the page's listings: as text, or ``packed``: compressed together (kernels repeat each other), equal
    ones once, for page.js to fill in."""

    def __init__(self, packed: bool):
        self.packed = packed
        self.number: dict[str, int] = {}

    def __call__(self, text: str) -> Markup:
        if not self.packed:
            return Markup("<code>{}</code>").format(text)
        return Markup('<code data-text="{}"></code>').format(self.number.setdefault(text, len(self.number)))

    def all(self) -> str:
        """Base64 of gzip of a JSON list; nothing where they are text."""
        made = gzip.compress(json.dumps([*self.number]).encode(), mtime=0)
        return base64.b64encode(made).decode() if self.number else ""


def render(data: dict[str, Any]) -> str:
    """The page as one self-contained file. All text is escaped."""
    page = _rendered(data, Listings(packed=False))
    return page if len(page) <= LARGE else _rendered(data, Listings(packed=True))


def _rendered(data: dict[str, Any], listings: Listings) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters.update(megabytes=megabytes, short=short, us=drawing.duration)
    environment.globals.update(count=count)
    css, js = (Markup((HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    kinds = {v["kind"] for v in data["timeline"] if v["kind"] != "queue"}
    return environment.get_template("page.html").render(
        **data,
        css=css,
        js=js,
        listings=listings,
        colours=COLOURS,
        looks={k: look[0] for k, look in LOOKS.items()},
        legend={k: KINDS[k] for k in LOOKS if k in kinds},
        verdicts=verdicts(data),
        speed=speed(data),
        figures=[figures(g) for g in data["graphs"]],
        total_names=TOTALS,
        most_ranked=MOST_RANKED,
        ranked_by=ranked_by(data["ranking"]),
        when=drawing.timeline(data["timeline"], CAPTIONS["when"]),
        many=len(data["graphs"]) > 1,
    )


# -- the lines on top -------------------------------------------------------------------------------
def verdicts(data: dict[str, Any]) -> list[dict[str, str]]:
    """The headline results. `mood`: good, bad or plain."""
    out = [v for v in (_right(data), _fast(data), _since(data)) if v]
    totals = data["totals"]
    before, after = totals["bytes_before"], totals["bytes_after"]
    if after < before:
        text = f"Fusion leaves {megabytes(after)} of {megabytes(before)} to move, {1 - after / before:.0%} less."
        out.append({"mood": "good", "text": text})
    return out + [{"mood": "plain", "text": n} for n in data["notes"]]


def _right(data: dict[str, Any]) -> dict[str, str] | None:
    found = data["comparison"]
    if found is None:
        return None
    if found["verdict"] == "unknown":
        return {"mood": "plain", "text": f"Not compared with eager: {found['why']}."}
    if found["verdict"] == "wrong":
        return {"mood": "bad", "text": f"The results are not eager's: {found['why']}."}
    largest = max((row["largest"] for row in found["rows"]), default=0.0)
    against = "a float64 reference" if found["reference"] == "float64" else "eager's own results"
    if not largest:
        return {"mood": "good", "text": "The results are eager's, bit for bit."}
    text = f"The results are eager's, but for rounding: largest difference {largest:.2g} (judged by {against})."
    return {"mood": "good", "text": text}


def _fast(data: dict[str, Any]) -> dict[str, str] | None:
    found = {(r["clock"], r["case"]): r for r in data["times"] if r["status"] == "ok"}
    clock = "graph" if ("graph", "reflib") in found and ("graph", "eager") in found else "wall"
    if (clock, "eager") not in found or (clock, "reflib") not in found:
        return None
    eager, ours = found[clock, "eager"], found[clock, "reflib"]
    ratio = eager["us"] / ours["us"]
    noise = (eager["spread_us"] / eager["us"] + ours["spread_us"] / ours["us"]) / 2
    times = f"{drawing.duration(ours['us'])} per call, eager {drawing.duration(eager['us'])}"
    if abs(ratio - 1) <= noise:
        return {"mood": "plain", "text": f"As fast as eager, within the spread of the measurements: {times}."}
    if ratio > 1:
        return {"mood": "good", "text": f"{ratio:.2f} times as fast as eager: {times}."}
    return {"mood": "bad", "text": f"Slower than eager, {1 / ratio:.2f} times the time: {times}."}


def ranked_by(rows: list[dict[str, Any]]) -> str:
    """What the order of the kernels is, and what their floors are."""
    floors = any(r["floor_us"] is not None for r in rows)
    if not any(r["us"] is not None for r in rows):
        what = "the limits on its maker's data sheet" if floors else "no limits: nothing was measured"
        order = "highest floor" if floors else "most bytes"
        return f"Nothing was timed, so those with the {order} come first. Floors are by {what}."
    where = "the bandwidth of a large copy or the rate of a large product, as measured here or on the data sheet"
    return (
        "The floor is the least time for what a kernel reads and writes, or computes, whichever is more: by " + where
        + ". What is above it can be gained at most; on data in a cache a kernel can be faster."
    )  # fmt: skip


def _since(data: dict[str, Any]) -> dict[str, str] | None:
    found = data["changes"]
    if found is None:
        return None
    kernels = [k["how"] for g in found["graphs"] for k in g["kernels"]]
    parts = [f"{count(kernels.count(how), 'kernel')} {how}" for how in ("changed", "new", "gone") if how in kernels]
    ours = [r for r in found["times"] if r["case"] == "reflib" and r["differs"]]
    parts += [f"{drawing.duration(r['before'])} -> {drawing.duration(r['after'])} ({r['clock']})" for r in ours]
    slower = [r["after"] > r["before"] for r in ours]
    mood = "plain" if not ours else "bad" if any(slower) else "good"
    return {"mood": mood, "text": f"Since {found['since']}: {', '.join(parts) or 'the same kernels'}."}


# -- figures ----------------------------------------------------------------------------------------
def speed(data: dict[str, Any]) -> list[drawing.Figure]:
    """One figure per clock."""
    clocks = {"wall": "by the host's clock", "graph": "on the GPU, replayed as a CUDA graph",
              "events": "between two marks in the GPU's queue"}  # fmt: skip
    out = []
    for clock in dict.fromkeys(r["clock"] for r in data["times"] if r["status"] == "ok"):
        rows = [r for r in data["times"] if r["clock"] == clock and r["status"] == "ok"]
        eager = next((r["us"] for r in rows if r["case"] == "eager"), None)
        values = []
        for i, r in enumerate(rows):
            behind = f" ({eager / r['us']:.2f}x)" if eager and r["case"] != "eager" else ""
            colour = {"eager": 6, "reflib": 0}.get(r["case"], 1 + i % 4)
            values.append((r["case"], r["us"], r["spread_us"], drawing.duration(r["us"]) + behind, colour))
        listed = ", ".join(f"{label} {text}" for label, _, _, text, _ in values)
        caption = CAPTIONS["speed"].format(clocks.get(clock, clock))
        out.append(drawing.bars(values, caption, f"Bars of the time per call. {listed}."))
    return out


def figures(graph: dict[str, Any]) -> dict[str, Any]:
    """The figures of one graph; None for empty or too large ones."""
    hrefs = {name: f"#{graph['id']}-{k['name']}" for k in graph["kernels"] if not k["fallback"] for name in k["groups"]}
    fusion = graph["fusion"]
    return {
        "after": drawing.graph(fusion["after"], CAPTIONS["after"], hrefs=hrefs),
        "before": drawing.graph(fusion["before"], CAPTIONS["before"], graph["refused_pairs"], sizes=False),
        "memory": drawing.memory(graph["memory"], CAPTIONS["memory"]),
    }
