"""`lab.memory_scrubber`: the live buffers, step by step. (`lab.memory_picture` shows all steps at once.)"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError
from reflib.lab.figures import COLOURS
from reflib.lab.moving import Explorer, Spec, by_step, emit, moving, slider, values
from reflib.lab.pictures import megabytes
from reflib.lab.rows import count

if TYPE_CHECKING:
    from reflib.plan.memory import Memory

PEAK = "#8a8a8a"  # visible on white and on black


def memory_scrubber(plans: Mapping[str, Memory], *, caption: str) -> Explorer:
    """Show the bytes in temporary buffers while one kernel runs, one bar per plan, with a slider over the kernels.
    ``plans``: {label: ``e.memory``}. A vertical line marks the plan's peak. LabError for a plan without kernels."""
    if not plans or not all(plan.moments for plan in plans.values()):
        raise LabError("memory_scrubber: each plan needs at least one kernel that runs")
    most = max(len(plan.moments) for plan in plans.values())
    names = list(dict.fromkeys(b for p in plans.values() for m in p.moments for b, _ in m.live))
    data = [
        {"plan": label, "step": i + 1, "kernel": m.label, "buffer": buffer, "MB": size / 1e6}
        for label, plan in plans.items()
        for i, m in enumerate(plan.moments)
        for buffer, size in m.live
    ]
    peaks = [{"plan": label, "peak, MB": plan.peak_bytes / 1e6} for label, plan in plans.items()]
    spec = moving(
        [_view(list(plans), names)],
        params=[slider("step", "step", 1, most, 1, 1)],
        says=[by_step("step - 1", _words(label, plan, most)) for label, plan in plans.items()],
        data={"buffers": values(data), "peaks": values(peaks)},
        alt=_alt(plans),
        caption=caption,
    )
    return emit(spec)


def _words(label: str, plan: Memory, most: int) -> list[str]:
    said = [f"{label}: {m.label}, {megabytes(m.bytes)} in {count(len(m.live), 'buffer')}" for m in plan.moments]
    return said + [f"{label}: done after {count(len(said), 'kernel')}"] * (most - len(said))


def _view(plans: list[str], names: list[str]) -> Spec:
    y = {"field": "plan", "type": "nominal", "sort": plans, "title": None, "axis": {"labelLimit": 150}}
    x = {"type": "quantitative", "title": "MB in temporary buffers", "scale": {"zero": True}}
    colour: dict[str, Any] = {"domain": names, "range": [COLOURS[i % len(COLOURS)] for i in range(len(names))]}
    return {
        "height": {"step": 34},
        "encoding": {"y": {**y, "scale": {"domain": plans}}},
        "layer": [
            {
                "data": {"name": "peaks"},
                "mark": {"type": "tick", "color": PEAK, "thickness": 3, "height": 28},
                "encoding": {"x": {"field": "peak, MB", **x}, "tooltip": [{"field": "plan"}, {"field": "peak, MB"}]},
            },
            {
                "data": {"name": "buffers"},
                "transform": [{"filter": "datum.step === step"}],
                "mark": {"type": "bar", "height": 20, "stroke": "#ffffff", "strokeWidth": 1.5},
                "encoding": {
                    "x": {"field": "MB", "stack": "zero", **x},
                    "color": {"field": "buffer", "type": "nominal", "scale": colour,
                              "legend": {"orient": "bottom", "columns": 4, "title": None}},
                    "tooltip": [{"field": f} for f in ("plan", "kernel", "buffer", "MB")],
                },
            },
        ],
    }  # fmt: skip


def _alt(plans: Mapping[str, Memory]) -> str:
    parts = ["The buffers alive while a kernel runs, one bar per plan, with a slider over the kernels."]
    for label, plan in plans.items():
        steps = "; ".join(f"{m.label} {megabytes(m.bytes)}" for m in plan.moments)
        parts.append(f"{label}, peak {megabytes(plan.peak_bytes)}: {steps}.")
    return " ".join(parts)
