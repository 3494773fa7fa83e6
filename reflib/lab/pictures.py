"""Charts of one compilation: results per stage, fusion before and after, memory over time, seconds per stage.

Each takes the result of `reflib.explain`, computes its alt text from the same numbers, and emits the figure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from reflib.lab.figures import COLOURS, HATCHES, INK, QUIET, Picture, below_each_other, figure, note, style
from reflib.lab.rows import count, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from reflib.ir.program import Program
    from reflib.observe.explain import Explanation
    from reflib.plan.memory import Memory


def moved_bytes(program: Program, nodes: Iterable[Any] | None = None) -> int:
    """Bytes that these kernels and calls (all of the program's) read and write, each buffer counted once per kernel."""
    touched = (b for node in (program.nodes if nodes is None else nodes) for b in {*node.reads(), *node.writes()})
    return sum(program.buffers[b].nbytes.hint() for b in touched if b in program.buffers)


def megabytes(size: float) -> str:
    return f"{short(size / 1e6)} MB" if size >= 1e5 else f"{short(size / 1e3)} kB" if size >= 1e3 else f"{size:g} B"


# -- what each stage made ---------------------------------------------------------------------------
def stages_picture(e: Explanation, *, caption: str) -> Picture:
    """Draw the stages from top to bottom with their results for this function."""
    rows = stage_results(e)
    return steps_picture(rows, caption=caption, about="The pipeline.")


def steps_picture(rows: Sequence[tuple[str, str]], *, caption: str, about: str) -> Picture:
    """Steps from top to bottom, each (name, what it does) with an arrow to the next. `about` begins the alt text."""
    import matplotlib.pyplot as plt

    with style():
        fig, ax = plt.subplots(figsize=(5.6, 0.62 * len(rows)))
        for i, (stage, made) in enumerate(rows):
            ax.text(
                0.13, -i, stage, ha="center", va="center", color="#ffffff", weight="bold",
                bbox={"boxstyle": "round,pad=0.45", "facecolor": COLOURS[0], "edgecolor": "none"},
            )  # fmt: skip
            ax.text(0.3, -i, made, va="center")
            if i:
                arrow = {"arrowstyle": "-|>", "color": QUIET, "linewidth": 1.2}
                ax.annotate("", (0.13, -i + 0.33), (0.13, -i + 0.67), arrowprops=arrow)
        ax.set_xlim(0, 1)
        ax.set_ylim(-len(rows) + 0.5, 0.5)
        ax.axis("off")
    return figure(fig, caption=caption, alt=f"{about} " + " ".join(f"{s}: {m}." for s, m in rows))


def stage_results(e: Explanation) -> list[tuple[str, str]]:
    """(stage, its result for this function in words)"""
    calls = sum(n.op == "call_function" for n in e.graph.nodes)
    refused = len(e.refusals)
    kernels = len(e.kernels)
    lines = sum(len(k.source.splitlines()) for k in e.kernels)
    language = {"triton": "Triton", "cpp": "C++"}[e.kernels[0].language] if kernels else "code"
    return [
        ("capture", f"a graph of {count(calls, 'ATen call')}"),
        ("lower", f"a program of {count(len(e.program.nodes), 'node')}, {megabytes(moved_bytes(e.program))} moved"),
        (
            "fuse",
            f"{count(len(e.groups), 'group')}, {megabytes(moved_bytes(e.fused))} moved"
            + (f"; {count(refused, 'pair')} refused" if refused else ""),
        ),
        ("schedule", f"{count(len(e.decisions), 'decision')} on how a kernel runs"),
        ("plan", f"{count(len(e.memory.steps), 'step')}, {megabytes(e.memory.peak_bytes)} at the peak"),
        ("generate", f"{count(kernels, 'kernel')}, {count(lines, 'line')} of {language}"),
        ("wrap", f"{count(len(e.wrapper.strip().splitlines()), 'line')} of Python around them"),
    ]


# -- fusion before and after ------------------------------------------------------------------------
def fusion_picture(e: Explanation, *, caption: str) -> Picture:
    """Draw the program before and after fusion: nodes, data flow, one colour and hatch per group.

    A dashed line with the reason's code joins each pair that was not fused.
    """
    import matplotlib.pyplot as plt

    groups = {m: i for i, g in enumerate(e.groups) for m in g.members}
    after = {g.name: i for i, g in enumerate(e.groups)}
    heads = [
        f"{when}: {count(len(p.nodes), 'kernel')}, {megabytes(moved_bytes(p))}"
        for when, p in (("before", e.program), ("after", e.fused))
    ]
    layouts = [layout(e.program), layout(e.fused)]
    deepest = max(y for layout in layouts for _, y in layout.values())
    with style():
        fig, axes = plt.subplots(1, 2, figsize=(5.2, 0.74 * (deepest + 1) + 0.5), layout="constrained")
        for ax, program, places, group in zip(axes, (e.program, e.fused), layouts, (groups, after), strict=True):
            draw_program(ax, program, places, deepest, partial(_box, group))
        _draw_refusals(axes[0], e, layouts[0])
        for ax, head in zip(axes, heads, strict=True):
            ax.set_title(head.replace(": ", ":\n", 1), loc="center")
    return figure(fig, caption=caption, alt=_fusion_alt(e, heads))


Places = dict[str, tuple[float, float]]
SPREAD = 1.25  # distance of two nodes of equal depth


def layout(program: Program) -> Places:
    """Coordinates of each node and each input that is read: y is the depth, x separates nodes of equal depth."""
    depth: dict[str, int] = {}
    made: dict[str, int] = {}
    for node in program.nodes:
        depth[node.name] = 1 + max((made[b] for b in node.reads() if b in made), default=0)
        made.update(dict.fromkeys(node.writes(), depth[node.name]))
    for node in reversed(program.nodes):
        for b in node.reads():
            if program.buffers[b].kind != "temp":
                depth[b] = min(depth[node.name] - 1, depth.get(b, depth[node.name] - 1))
    layers: dict[int, list[str]] = {}
    for name, y in depth.items():
        layers.setdefault(y, []).append(name)
    nodes = {n.name for n in program.nodes}
    reader = {b: n.name for n in reversed(program.nodes) for b in n.reads()}
    places: Places = {}
    for y, names in sorted(layers.items(), reverse=True):
        names.sort(key=lambda n: n not in nodes)
        beside = len(names) == 2 and names[0] in nodes and names[1] not in nodes
        for i, name in enumerate(names):
            x = (i - (len(names) - 1) / 2) * SPREAD
            if beside:  # an input beside a node is placed on its reader's side
                x = i * (-SPREAD if places[reader[names[1]]][0] < 0 else SPREAD)
            places[name] = (x, float(y))
    return places


def flows(program: Program, places: Places) -> Iterator[tuple[str, str, str, int]]:
    """(a node or an input, a node that reads it, the buffer, its bytes), of those that have a place."""
    writer: dict[str, str] = {}
    for node in program.nodes:
        for b in node.reads():
            start = writer.get(b, b)
            if start in places and start != node.name:
                yield start, node.name, b, program.buffers[b].nbytes.hint()
        writer.update(dict.fromkeys(node.writes(), node.name))


def draw_program(
    ax: Axes, program: Program, places: Places, deepest: float, box: Callable[[Any], tuple[str, str, dict[str, Any]]]
) -> None:
    """Nodes, inputs, and the bytes that go between them. `box`: node -> (text, its colour, matplotlib's bbox)."""
    writer = {b: node.name for node in program.nodes for b in node.writes()}
    deep = {places[node.name][1] for node in program.nodes}
    for start, name, b, size in flows(program, places):
        outside = start == b and places[b][1] in deep  # an input with a node beside it
        _edge(ax, places[start], places[name], megabytes(size), outside)
    for b in sorted(program.output_buffers()):
        if b in writer:
            x, y = places[writer[b]]
            _edge(ax, (x, y), (x, y + 1.0), megabytes(program.buffers[b].nbytes.hint()))
    for node in program.nodes:
        text, ink, frame = box(node)
        ax.text(*places[node.name], text, ha="center", va="center", fontsize=9.5, color=ink, zorder=4, bbox=frame)
    for name, place in places.items():
        if name in program.buffers and name not in {n.name for n in program.nodes}:
            name = name if len(name) <= 14 else f"{name[:13]}…"
            ax.text(*place, name, ha="center", va="center", fontsize=9.5, style="italic", color=INK, zorder=5)
    wide = max(1.2, max(abs(x) for x, _ in places.values()) + 0.7)
    ax.set_xlim(-wide, wide)
    ax.set_ylim(deepest + 1.15, -0.4)
    ax.axis("off")


def _box(group: Mapping[str, int], node: Any) -> tuple[str, str, dict[str, Any]]:
    """White text on the group's colour."""
    index = group.get(node.name)
    colour, ink = ("#ffffff", INK) if index is None else (COLOURS[index % len(COLOURS)], "#ffffff")
    names = op_names(node)
    text = names[0] if len(names) == 1 else textwrap.fill(", ".join(names), 15, break_long_words=False)
    return text, ink, {"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": INK, "linewidth": 0.8}


def _edge(
    ax: Axes, start: tuple[float, float], end: tuple[float, float], label: str, outside: bool = False
) -> None:
    """A straight line to the next depth; around the side if it skips one. outside: the label is beside the line."""
    (x0, y0), (x1, y1) = start, end
    bend = 0.0 if y1 - y0 <= 1 or x0 != x1 else 0.55
    look = {
        "arrowstyle": "-|>", "color": QUIET, "linewidth": 1.3, "shrinkA": 11, "shrinkB": 11,
        "connectionstyle": f"arc3,rad={bend}",
    }  # fmt: skip
    ax.annotate("", end, start, arrowprops=look, zorder=1)
    near = 0.5 if x0 == x1 else 0.36 if abs(x0) > abs(x1) else 0.64  # where edges are furthest apart
    x, y = x0 + near * (x1 - x0), y0 + near * (y1 - y0)
    if bend:
        x -= 0.4 * (y1 - y0)
    side = "center" if not outside else "right" if x0 < 0 else "left"
    ax.text(
        x, y, label, fontsize=9, color=INK, ha=side, va="center", zorder=3,
        bbox={"boxstyle": "round,pad=0.1", "facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.85},
    )  # fmt: skip


def _draw_refusals(ax: Axes, e: Explanation, places: Places) -> None:
    for r in e.refusals:
        if r.producer in places and r.consumer in places:
            (x0, y0), (x1, y1) = places[r.producer], places[r.consumer]
            look = {
                "arrowstyle": "-", "color": COLOURS[1], "linewidth": 1.6, "linestyle": "--",
                "connectionstyle": "arc3,rad=-0.45", "shrinkA": 13, "shrinkB": 13,
            }  # fmt: skip
            ax.annotate("", (x1, y1), (x0, y0), arrowprops=look, zorder=2)
            ax.text(
                (x0 + x1) / 2 + 0.36 * (y1 - y0), (y0 + y1) / 2 - 0.16, r.reason.code, fontsize=9.5, color=COLOURS[1],
                ha="left", va="center", zorder=6,
            )  # fmt: skip


def op_names(node: Any) -> list[str]:
    """Ops that a node came from (`add`, `mylib.prod`), without overload and without the namespace `aten`."""
    ops = [".".join(o.op.split(".")[:2]).removeprefix("aten.").strip("_") for o in node.origins]
    return list(dict.fromkeys(ops)) or [node.name]


def _fusion_alt(e: Explanation, heads: list[str]) -> str:
    members = "; ".join(" and ".join(op_names(n)) for n in e.fused.nodes)
    text = f"Two graphs. {heads[0]}. {heads[1]}. The kernels after fusion: {members}."
    refused = [f"{r.producer} with {r.consumer} ({r.reason.code})" for r in e.refusals]
    return text + (f" Refused: {'; '.join(refused)}." if refused else "")


def refusals(e: Explanation) -> list[dict[str, str]]:
    """One dict per pair that was tried and not fused, for `lab.table`: the pair, the reason's code, the reason."""
    named = {n.name: f"{n.name} ({', '.join(op_names(n))})" for p in (e.fused, e.program) for n in p.nodes}
    lines = [
        {
            "producer": named.get(r.producer, r.producer),
            "consumer": named.get(r.consumer, r.consumer),
            "code": r.reason.code,
            "reason": r.reason.text,
        }
        for r in e.refusals
    ]
    return [line for i, line in enumerate(lines) if line not in lines[:i]]


# -- memory over time -------------------------------------------------------------------------------
def memory_picture(plans: Mapping[str, Memory], *, caption: str) -> Picture:
    """Draw the bytes in temporary buffers while each kernel runs, one panel per plan, on a common scale."""
    most = max(len(p.moments) for p in plans.values())
    top = max(p.peak_bytes for p in plans.values())
    with style():
        fig, axes = below_each_other([1] * len(plans), 1.75 * len(plans))
        for ax, (label, plan) in zip(axes, plans.items(), strict=True):
            _memory_panel(ax, plan, top, most)
            ax.set_title(f"{label}: peak {megabytes(plan.peak_bytes)}, {count(plan.allocations, 'allocation')}")
        fig.supylabel("MB in temporary buffers", fontsize=11)
    return figure(fig, caption=caption, alt=_memory_alt(plans))


def _memory_panel(ax: Axes, plan: Memory, top: int, most: int) -> None:
    names = list(dict.fromkeys(b for m in plan.moments for b, _ in m.live))
    for i, moment in enumerate(plan.moments):
        bottom = 0.0
        for name, size in moment.live:
            k = names.index(name)
            ax.bar(
                i, size / 1e6, bottom=bottom, width=0.96, color=COLOURS[k % len(COLOURS)],
                hatch=HATCHES[k % len(HATCHES)], edgecolor="#ffffff", linewidth=0.6,
            )  # fmt: skip
            if size > 0.15 * top:
                ax.text(
                    i, (bottom + size / 2e6), name, ha="center", va="center", fontsize=9,
                    bbox={"boxstyle": "round,pad=0.15", "facecolor": "#ffffff", "edgecolor": "none"},
                )  # fmt: skip
            bottom += size / 1e6
    labels = [m.label.partition("_")[2] or m.label for m in plan.moments]
    ax.set_xticks(range(len(labels)), [s if len(s) <= 24 else s[:23] + "…" for s in labels])
    for tick in ax.get_xticklabels():
        if len(tick.get_text()) > 12:
            tick.set_horizontalalignment("left" if len(labels) == 1 else "center")
    ax.set_xlim(-0.6, max(most, 1) - 0.4)
    ax.set_ylim(0, top / 1e6 * 1.08)
    ax.grid(visible=False, axis="x")


def _memory_alt(plans: Mapping[str, Memory]) -> str:
    parts = ["Stacked bars of the bytes in temporary buffers while each kernel runs."]
    for label, plan in plans.items():
        at_peak = max(plan.moments, key=lambda m: m.bytes, default=None)
        parts.append(
            f"{label}: {count(len(plan.moments), 'kernel')}, peak {megabytes(plan.peak_bytes)}"
            + (f" while {at_peak.label} runs" if at_peak and len(plan.moments) > 1 else "")
            + f", {count(plan.allocations, 'allocation')}."
        )
    return " ".join(parts)


# -- seconds per stage ------------------------------------------------------------------------------
def timeline_picture(e: Explanation, *, caption: str) -> Picture:
    """Draw when each stage ran, in ms since the start of the first. (`lab.gantt` draws all events.)"""
    import matplotlib.pyplot as plt

    stages = e.timeline.only("stage")
    begin = min(s.start for s in stages)
    with style():
        fig, ax = plt.subplots(figsize=(5.6, 0.34 * len(stages) + 0.7))
        end = max(s.end - begin for s in stages) * 1e3
        for i, s in enumerate(stages):
            ax.barh(i, s.seconds * 1e3, left=(s.start - begin) * 1e3, color=COLOURS[0], height=0.65)
            note(ax, f"{short(s.seconds * 1e3)} ms", ((s.end - begin) * 1e3, i), (4, 0), va="center")
        ax.set_yticks(range(len(stages)), [s.name for s in stages])
        ax.invert_yaxis()
        ax.set_xlim(0, end * 1.2)
        ax.set_xlabel("ms since lowering began")
        ax.grid(visible=False, axis="y")
    listed = ", ".join(f"{s.name} {short(s.seconds * 1e3)} ms" for s in stages)
    return figure(fig, caption=caption, alt=f"Bars in time, one per stage: {listed}.")
