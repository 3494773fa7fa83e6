"""`lab.roofline_slider`: a kernel under the roofline, with a slider over its versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from reflib.errors import LabError
from reflib.lab.figures import COLOURS, QUIET
from reflib.lab.moving import Explorer, Spec, by_step, emit, moving, slider, values
from reflib.lab.rows import short

if TYPE_CHECKING:
    from reflib.lab.ceilings import Roofline


TENS = [10.0**e for e in range(-6, 7)]


class Version(NamedTuple):
    """A version: label, FLOPs and bytes per call, and measured µs (None if not measured)."""

    label: str
    flops: float
    bytes: float
    time: float | None


def roofline_slider(
    roof: Roofline, versions: Sequence[Version | tuple[str, float, float, float | None]], *, what: str, caption: str
) -> Explorer | None:
    """Show the two ceilings of a device and a point that a slider moves over the versions (Version, or a 4-tuple).
    ``what``: label of the slider. Prints a line and returns None if nothing was measured."""
    stops = [Version(*v) for v in versions]
    stops = [v for v in stops if v.time]
    if not stops:
        print("Nothing to draw: no version was measured here.")
        return None
    if any(v.flops <= 0 or v.bytes <= 0 for v in stops):
        raise LabError("roofline_slider: a version without FLOPs or bytes has no place under a roofline")
    lines = [_line(roof, i, v) for i, v in enumerate(stops)]
    words = [_words(roof, v, line) for v, line in zip(stops, lines, strict=True)]
    says = [by_step("stop - 1", list(each)) for each in zip(*words, strict=True)]
    spec = moving(
        [_view(roof, lines)],
        params=[slider("stop", f"{what}: version", 1, len(stops), 1, 1)],
        says=says,
        data={"versions": values(lines), "roof": values(_roof(roof, lines))},
        alt=_alt(roof, ["; ".join(each) for each in words]),
        caption=caption,
    )
    return emit(spec)


def _line(roof: Roofline, index: int, v: Version) -> dict[str, Any]:
    intensity = v.flops / v.bytes
    return {
        "stop": index + 1, "version": v.label, "FLOPs per byte": intensity, "TFLOP/s": v.flops / (v.time or 1.0) / 1e6,
        "limit": roof.limit(intensity), "µs": v.time, "µs at least": roof.time(v.bytes, v.flops), "MB": v.bytes / 1e6,
    }  # fmt: skip


def _words(roof: Roofline, v: Version, line: dict[str, Any]) -> tuple[str, str, str]:
    under = "the arithmetic" if line["FLOPs per byte"] > roof.ridge else "the memory"
    share = line["TFLOP/s"] / line["limit"]
    return (
        f"{v.label}: {short(line['MB'])} MB moved",
        f"{short(line['FLOPs per byte'])} FLOPs per byte, under {under}",
        f"{short(line['µs'])} µs, {short(line['TFLOP/s'])} TFLOP/s: {share:.0%} of its limit",
    )


def _roof(roof: Roofline, lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    places = [line["FLOPs per byte"] for line in lines] + [roof.ridge]
    xs = (min(places) / 3, roof.ridge, max(places) * 3)
    return [{"FLOPs per byte": x, "TFLOP/s": roof.limit(x)} for x in xs]


def _view(roof: Roofline, lines: Sequence[dict[str, Any]]) -> Spec:
    low = min(min(line["TFLOP/s"] for line in lines), roof.limit(_roof(roof, lines)[0]["FLOPs per byte"]))
    high = max(max(line["TFLOP/s"] for line in lines), roof.flops)
    log = {"type": "quantitative", "axis": {"labelExpr": "format(datum.value, '~r')", "values": TENS}}
    x = {**log, "field": "FLOPs per byte", "scale": {"type": "log", "nice": False}}
    y = {**log, "field": "TFLOP/s", "title": "TFLOP/s"}
    y["scale"] = {"type": "log", "nice": False, "domain": [low / 1.6, high * 1.6]}
    tooltip = [{"field": f} for f in ("version", "FLOPs per byte", "TFLOP/s", "limit", "µs", "µs at least")]
    here = [{"filter": "datum.stop === stop"}]
    small = {"type": "point", "filled": True, "color": COLOURS[0], "size": 45}
    return {
        "height": 260,
        "data": {"name": "versions"},
        "encoding": {"x": x, "y": y},
        "layer": [
            {"data": {"name": "roof"}, "mark": {"type": "line", "color": QUIET, "strokeWidth": 3}},
            {
                "mark": {"type": "line", "color": COLOURS[0], "opacity": 0.4},
                "encoding": {"order": {"field": "stop", "type": "quantitative"}},
            },
            {"mark": small, "encoding": {"tooltip": tooltip}},
            {
                "transform": here,
                "mark": {"type": "rule", "color": COLOURS[1], "strokeDash": [4, 3], "strokeWidth": 2},
                "encoding": {"y2": {"field": "limit"}},
            },
            {
                "transform": here,
                "mark": {"type": "point", "filled": True, "color": COLOURS[1], "size": 230, "shape": "diamond"},
                "encoding": {"tooltip": tooltip},
            },
        ],
    }  # fmt: skip


def _alt(roof: Roofline, words: Sequence[str]) -> str:
    return (
        f"Roofline of {roof.device}: rises with {short(roof.bandwidth)} GB/s until {short(roof.ridge)} FLOPs per byte, "
        f"then flat at {short(roof.flops)} TFLOP/s. A slider moves a point along: {'. '.join(words)}."
    )
