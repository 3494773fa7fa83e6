"""Charts of a decision: `lab.candidates` draws the measured candidates, `lab.before_after` what the winner changed."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from reflib.lab.figures import COLOURS, INK, QUIET, Picture, below_each_other, figure, note, plain, style
from reflib.lab.pictures import draw_program, layout, megabytes, moved_bytes, op_names
from reflib.lab.rows import Row, Rows, count, record, short, stamp

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from reflib.ir.decision import Decision
    from reflib.ir.program import Program
    from reflib.observe.explain import Explanation

CHOSEN, OTHER, FAILED = COLOURS[0], "#c9c9c9", "#d55e00"
COLD, WARM, RECORDED = "time", "time, all warm", " (recorded)"


# -- decisions as rows ------------------------------------------------------------------------------
def decision_rows(name: str, decision: Decision, **at: Any) -> Rows:
    """The decision's candidates as rows that can be recorded: the deciding time (µs), the time with warm caches if that
    is another one, the error. `at`: the point in a sweep. The winner's row has the note "chosen"."""
    return record(_rows(name, decision, at))


def _rows(name: str, decision: Decision, at: Mapping[str, Any]) -> Rows:
    shared: dict[str, Any] = {"name": name, "clock": "decision", **stamp()}
    rows = []
    for c in decision.candidates:
        place = {**at, **({"sizes": c.where} if c.where else {})}
        note = "; ".join(filter(None, ("chosen" if c.key in decision.winners else "", c.why)))
        status = "ok" if c.time_us is not None else c.status
        cache = "cold" if c.cold_us is not None else "warm"
        spread = None if c.spread is None or c.time_us is None else c.spread * c.time_us
        rows.append(Row(case=c.name, metric=COLD, value=c.time_us, unit="µs", spread=spread, at=place, cache=cache,
                        status=status, note=note, **shared))  # fmt: skip
        if c.cold_us is not None and c.warm_us is not None:
            rows.append(Row(case=c.name, metric=WARM, value=c.warm_us, unit="µs", at=place, cache="warm", **shared))
        if c.error is not None:
            rows.append(Row(case=c.name, metric="error", value=c.error, unit="", at=place, **shared))
    return Rows(rows)


# -- the candidates ---------------------------------------------------------------------------------
def candidates(
    decision: Decision | Rows, *, caption: str, recorded: Rows | None = None, most: int = 12, title: str = ""
) -> Picture | None:
    """One bar per candidate, fastest on top; those without a time follow with the reason.

    `decision` is one of `e.decisions`, or its rows (`lab.decision_rows`). A hollow mark is the time with warm caches,
    if another time decided. One panel per `at` (sizes) and, with `recorded`, per other device. Beyond `most` timed
    candidates the slowest are only counted.
    """
    rows = decision if isinstance(decision, Rows) else _rows("decision", decision, {})
    panels = _panels(rows, "") + _panels(rows.elsewhere(recorded), RECORDED)
    if not any(r.ok for _, panel in panels for r in panel):
        print("Nothing to draw: no candidate was timed here, and none is recorded yet.")
        return None
    lines = [_lines(panel, most) for _, panel in panels]
    tall = [0.36 * sum(1 + text.count("\n") * 0.5 for _, text in line) + 0.3 for line in lines]
    with style():
        fig, axes = below_each_other(tall, sum(tall) + 0.5 * len(panels))
        for ax, (head, panel), line in zip(axes, panels, lines, strict=True):
            _panel(ax, line, panel)
            ax.set_title(head if len(panels) > 1 or head.endswith(RECORDED) else title)
        axes[-1].set_xlabel("time, µs")
    return figure(fig, caption=caption, alt=_candidates_alt(panels, most))


def _panels(rows: Rows, suffix: str) -> list[tuple[str, Rows]]:
    """(title, rows) per device and `at`; candidates that failed without an `at` are in the first panel."""
    from reflib.lab.plots import nickname

    out = []
    for device in rows.devices:
        own = rows.where(device=device)
        places = list(dict.fromkeys(str(dict(r.at)) for r in own if r.ok)) or [""]
        for i, place in enumerate(places):
            here = own.where(lambda r, p=place, i=i: str(dict(r.at)) == p or (not r.at and not r.ok and i == 0))  # type: ignore[misc]
            at = next((dict(r.at) for r in here if r.ok), {})
            where = ", ".join(f"{v}" if k == "sizes" else f"{k} = {v}" for k, v in at.items())
            out.append((", ".join(filter(None, (nickname(device), where))) + suffix, here))
    return out


def _lines(panel: Rows, most: int) -> list[tuple[Row | None, str]]:
    """(row, text) from top to bottom; the row is None for a remark."""
    times = panel.where(metric=COLD)
    timed = sorted((r for r in times if r.ok), key=lambda r: r.value or 0.0)
    kept = timed[:most] + [r for r in timed[most:] if _chosen(r)]
    out: list[tuple[Row | None, str]] = [(r, _bar_text(r, timed[0])) for r in kept]
    if len(timed) > len(kept):
        out.append((None, f"and {count(len(timed) - len(kept), 'slower candidate')}"))
    for r in times:
        if not r.ok:
            why = textwrap.shorten(f"{r.status}: {r.note}" if r.note else r.status, 110, placeholder=" …")
            out.append((r, textwrap.fill(why, 40)))
    return out


def _chosen(row: Row) -> bool:
    return row.note.split(";")[0] == "chosen"


def _bar_text(row: Row, best: Row) -> str:
    ratio = (row.value or 0.0) / (best.value or 1.0)
    behind = f"  ({ratio:.2f}x)" if row is not best else ""
    return short(row.value or 0.0) + behind + ("  chosen" if _chosen(row) else "")


def _panel(ax: Axes, lines: Sequence[tuple[Row | None, str]], panel: Rows) -> None:
    from matplotlib.ticker import MaxNLocator

    warm = {r.case: r.value for r in panel.where(metric=WARM)}
    values = [(r.value or 0.0) + (r.spread or 0.0) / 2 for r, _ in lines if r is not None and r.ok]
    fastest = min((r.value or 0.0 for r, _ in lines if r is not None and r.ok), default=1.0)
    top = min(max(values, default=1.0), 6 * fastest)  # so that one slow candidate does not flatten the rest
    place, places, names = 0.0, [], []
    for row, text in lines:
        step = 1 + 0.5 * text.count("\n")
        y = place + step / 2
        place += step
        places.append(y)
        names.append(textwrap.shorten(row.case, 30, placeholder=" …") if row is not None else "")
        if row is not None and row.ok:
            _bar(ax, row, y, top, text, warm.get(row.case))
        else:
            colour = QUIET if row is None else FAILED
            mark = "" if row is None else "✗ "
            note(ax, mark + text, (0, y), (4, 0), va="center", color=colour)
    ax.set_yticks(places, names)
    for label, (row, _) in zip(ax.get_yticklabels(), lines, strict=True):
        label.set_fontweight("bold" if row is not None and _chosen(row) else "normal")
    ax.set_ylim(place, 0)
    ax.grid(visible=False, axis="y")
    ax.set_xlim(0, top * 1.7)
    ax.xaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(plain)


def _bar(ax: Axes, row: Row, y: float, top: float, text: str, warm: float | None) -> None:
    value, half = row.value or 0.0, (row.spread or 0.0) / 2
    cut = value > top
    chosen = _chosen(row)
    ax.barh(y, min(value, top), color=CHOSEN if chosen else OTHER, edgecolor=INK, linewidth=0.8, height=0.66,
            hatch="" if chosen else "//")  # fmt: skip
    if not cut:
        right = min(value + half, 1.2 * top)
        ax.plot([max(value - half, 0), right], [y, y], color=INK, linewidth=1.4, solid_capstyle="butt", zorder=4)
    if warm is not None and warm <= top:
        ax.plot([warm], [y], marker="D", markersize=6, markerfacecolor="#ffffff", markeredgecolor=INK, zorder=5)
    edge = top if cut else min(value + half, 1.2 * top)
    weight = "bold" if chosen else "normal"
    note(ax, ("▶ " if cut else "") + text, (edge, y), (5, 0), va="center", fontweight=weight)


def _candidates_alt(panels: list[tuple[str, Rows]], most: int) -> str:
    parts = ["Bar chart of candidates by time in µs, the fastest first."]
    for head, panel in panels:
        said = []
        for row, text in _lines(panel, most):
            name = "" if row is None else f"{row.case}: "
            spread = f", spread {short(row.spread)}" if row is not None and row.ok and row.spread else ""
            said.append(f"{name}{' '.join(text.split())}{spread}")
        parts.append(f"{head}: {'; '.join(said)}.")
    return " ".join(parts)


# -- before and after -------------------------------------------------------------------------------
def before_after(e: Explanation, *, caption: str) -> Picture:
    """Draw two graphs: the fused program with the choice as an opaque node, and the program with the winner inlined
    and fused again. One box per kernel or call, arrows for data flow, a thick edge for parts of the winner."""
    import matplotlib.pyplot as plt

    from reflib.ir.program import Choice

    before, after = _by_default(e.before.program), e.fused
    choices = [n for n in before.nodes if isinstance(n, Choice)]
    ways = {n.name: len(n.variants) for n in e.before.program.nodes if isinstance(n, Choice)}
    winners = _winner_nodes(e)
    both = (("before", before), ("after", after))
    heads = [f"{when}: {_kernels(p)}, {megabytes(moved_bytes(p))}" for when, p in both]
    places = [layout(before), layout(after)]
    deepest = max(y for p in places for _, y in p.values())
    with style():
        fig, axes = plt.subplots(1, 2, figsize=(5.6, 0.86 * (deepest + 1) + 0.6), layout="constrained")
        for ax, program, where, marked, head in (
            (axes[0], before, places[0], {c.name for c in choices}, heads[0]),
            (axes[1], after, places[1], winners, heads[1]),
        ):
            draw_program(ax, program, where, deepest, partial(_frame, marked, ways))
            ax.set_title(head.replace(": ", ":\n", 1), loc="center")
    return figure(fig, caption=caption, alt=_before_after_alt(before, after, heads, winners, ways))


def _by_default(program: Program) -> Program:
    """Every choice reduced to its default, so that the bytes moved are those of the eager op."""
    from reflib.ir.program import Choice

    nodes = (replace(n, variants=n.variants[:1]) if isinstance(n, Choice) else n for n in program.nodes)
    return replace(program, nodes=tuple(nodes))


def _kernels(program: Program) -> str:
    from reflib.ir.program import Choice, Extern

    calls = sum(isinstance(n, Extern | Choice) for n in program.nodes)
    kernels = len(program.nodes) - calls
    said = ([count(kernels, "kernel")] if kernels else []) + ([count(calls, "call")] if calls else [])
    return " and ".join(said)


def _winner_nodes(e: Explanation) -> set[str]:
    """Names of the nodes, after the second fusion, that contain a part of a winner."""
    from reflib.ir.program import Choice

    old = {n.name for n in e.program.nodes}
    choices = {n.name for n in e.program.nodes if isinstance(n, Choice)}
    new = {n.name for n in e.inlined.nodes if n.name not in old or n.name in choices}
    return {g.name for g in e.groups if new & set(g.members)} | (new & {n.name for n in e.fused.nodes})


def _box(node: Any, ways: Mapping[str, int]) -> tuple[str, str, str]:
    """(text, fill colour, text colour): a generated kernel is coloured, a call grey, a choice white."""
    from reflib.ir.program import Choice, Extern, Variants

    if isinstance(node, Choice):
        name = ".".join(p for p in node.op.split(".") if p not in ("aten", "default"))
        return f"? {name}\n{ways[node.name]} ways", "#ffffff", INK
    if isinstance(node, Variants):
        return f"branch\n{len(node.variants)} variants", "#ffffff", INK
    text = textwrap.fill(", ".join(op_names(node)), 16, break_long_words=False)
    if isinstance(node, Extern):
        return f"{_target(node)}\n(a call)", "#dddddd", INK
    return text, COLOURS[0], "#ffffff"


def _frame(marked: set[str], ways: Mapping[str, int], node: Any) -> tuple[str, str, dict[str, Any]]:
    text, colour, ink = _box(node, ways)
    edge = {"edgecolor": "#000000", "linewidth": 2.6} if node.name in marked else {"edgecolor": QUIET, "linewidth": 0.8}
    return text, ink, {"boxstyle": "round,pad=0.4", "facecolor": colour, **edge}


def _target(node: Any) -> str:
    name = str(node.target).removeprefix("aten.")
    return ".".join(p for p in name.split(".") if p not in ("default", "out"))


def _before_after_alt(
    before: Program, after: Program, heads: list[str], winners: set[str], ways: Mapping[str, int]
) -> str:
    def said(nodes: Iterable[Any]) -> str:
        return "; ".join(" ".join(_box(n, ways)[0].split()) for n in nodes)

    holds = said(n for n in after.nodes if n.name in winners)
    return (
        f"Two graphs. {heads[0]}: {said(before.nodes)}. {heads[1]}: {said(after.nodes)}. "
        f"What holds a part of a winner: {holds or 'nothing'}."
    )
