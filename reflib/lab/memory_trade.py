"""Two figures of what a forward saves: `lab.cut_picture` of a graph, `lab.trade` of memory against step time."""

import itertools
import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from reflib.errors import LabError
from reflib.lab.figures import COLOURS, INK, QUIET, Picture, below_each_other, figure, note, plain, series_style, style
from reflib.lab.plots import RECORDED, nickname, short_bytes
from reflib.lab.rivals import ORDER
from reflib.lab.rows import Rows, short

Points = list[tuple[str, float, float]]  # (budget, MB, ms)
BUDGET = ", budget "


def trade(
    rows: Rows, *, caption: str, recorded: Rows | None = None, floor: tuple[str, float] | None = None
) -> Picture | None:
    """Draw each case's peak memory (metric "memory", in bytes) against its step time, one panel per device. Of a case
    with a name such as "reflib, budget 0.1" the number is written beside the point, and all of "reflib" are joined in
    the order of their rows. ``floor``: a label and the µs that a step takes at least, here."""
    both = ((rows, ""), (rows.elsewhere(recorded), RECORDED))
    panels = [(nickname(d) + mark, _points(some.where(device=d))) for some, mark in both for d in some.devices]
    panels = [(name, found) for name, found in panels if found]
    if not panels:
        print("Nothing to draw: no memory was measured here, and none is recorded yet.")
        return None
    found_cases = dict.fromkeys(case for _, found in panels for case in found)
    cases = list(dict.fromkeys((*ORDER, *found_cases)))  # the same colours as everywhere
    with style():
        fig, axes = below_each_other([1] * len(panels), 3.4 * len(panels) + 0.5)
        for ax, (name, found) in zip(axes, panels, strict=True):
            for case, points in found.items():
                look = series_style(cases.index(case))
                ax.plot([x for _, x, _ in points], [y for *_, y in points], label=case, markersize=7, **look)
            ax.margins(0.12)
            places = [p for points in found.values() for p in points]
            ax.set_xlim(left=0.85 * min(x for _, x, _ in places))
            ax.set_ylim(bottom=0.85 * min(y for *_, y in places))
            if floor and not name.endswith(RECORDED):
                ax.set_ylim(bottom=min(0.9 * floor[1] / 1e3, ax.get_ylim()[0]))
                ax.axhline(floor[1] / 1e3, color=INK, linewidth=1, linestyle=(0, (1, 2)))
                note(ax, floor[0], (0.01, floor[1] / 1e3), (0, 3), xycoords=("axes fraction", "data"))
            _name_points(ax, {series_style(cases.index(case))["color"]: points for case, points in found.items()})
            ax.xaxis.set_major_formatter(plain)
            ax.set_ylabel("ms per step")
            ax.set_title(name if len(panels) > 1 or name.endswith(RECORDED) else "")
        axes[-1].set_xlabel("MB at the peak of a step")
        handles = {h: label for ax in axes for h, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        only = {label: h for h, label in reversed(handles.items())}
        shown = [c for c in cases if c in only]
        fig.legend([only[c] for c in shown], shown, loc="outside upper left", ncols=2)
    alt = _trade_alt(panels) + (f" A line at {short(floor[1] / 1e3)} ms: {floor[0]}." if floor else "")
    return figure(fig, caption=caption, alt=alt)


SIDES = ((5, 5, "left"), (-5, -12, "right"), (5, -12, "left"), (-5, 5, "right"))  # of a point, in points


def _name_points(ax: Axes, found: Mapping[str, Points]) -> None:
    """Write each point's label in its colour, on that side of it that is furthest from points, lines and labels."""
    at = ax.transData.transform
    ways = [[at((x, y)) for _, x, y in points] for points in found.values()]
    taken = [p for way in ways for p in way]
    taken += [a + (b - a) * k / 10 for way in ways for a, b in itertools.pairwise(way) for k in range(1, 10)]
    scale = ax.figure.dpi / 72
    for colour, points in found.items():
        for label, x, y in points:
            here = at((x, y))
            others = [p for p in taken if tuple(p) != tuple(here)]
            middles = [here + (scale * (dx + (8 if dx > 0 else -8)), scale * (dy + 3)) for dx, dy, _ in SIDES]
            room = [min((math.dist(m, p) for p in others), default=0.0) for m in middles]
            best = room.index(max(room))
            dx, dy, side = SIDES[best]
            note(ax, label, (x, y), (dx, dy), ha=side, color=colour)
            taken += [middles[best]] if label else []


def _points(rows: Rows) -> dict[str, Points]:
    """case, without its budget -> its points."""
    value = {(r.case, r.metric): r.value for r in rows if r.ok and r.value is not None}
    found: dict[str, Points] = {}
    for case in rows.cases:
        who, _, budget = case.partition(BUDGET)
        size, us = (value.get((case, metric)) for metric in ("memory", "time"))
        if size is not None and us is not None:
            found.setdefault(who, []).append((budget, size / 1e6, us / 1e3))
    return found


def _trade_alt(panels: Sequence[tuple[str, Mapping[str, Points]]]) -> str:
    parts = ["Peak memory of a step, across, and its time, upwards."]
    for name, found in panels:
        for case, points in found.items():
            listed = ", ".join(
                f"{f'budget {label}: ' if label else ''}{short(x)} MB, {short(y)} ms" for label, x, y in points
            )
            parts.append(f"{name}, {case}: {listed}.")
    return " ".join(parts)


LOOKS = {"saved": COLOURS[0], "computed again": COLOURS[1], "forward only": "#ffffff"}


def cut_picture(
    values: Mapping[str, tuple[float, Sequence[str]]], fate: Mapping[str, str], wanted: Sequence[str], *, caption: str
) -> Picture:
    """Draw a forward's values: {name: (bytes, made of)}, left to right. ``fate``: name -> "saved", "computed again" or
    "forward only". ``wanted``: those that the backward reads, an arrow each."""
    if unknown := set(fate.values()) - set(LOOKS):
        raise LabError(f"cut_picture: {', '.join(sorted(unknown))} is not one of {', '.join(LOOKS)}")
    places = _places(values)
    wide, tall = (max(p[i] for p in places.values()) for i in (0, 1))
    arrow = {"arrowstyle": "-|>", "color": QUIET, "linewidth": 1.3, "shrinkA": 20, "shrinkB": 20}
    with style():
        fig, ax = plt.subplots(figsize=(min(5.8, 1.05 * (wide + 1)), 1.0 * (tall + 2)), layout="constrained")
        for name, (size, made_of) in values.items():
            x, y = places[name]
            for other in made_of:
                ax.annotate("", (x, y), places[other], arrowprops=arrow, zorder=1)
            colour = LOOKS[fate[name]]
            ax.text(
                x, y, f"{name}\n{short_bytes(size)}", ha="center", va="center", fontsize=9.5, zorder=3,
                color=INK if colour == "#ffffff" else "#ffffff", linespacing=1.3,
                bbox={"boxstyle": "round,pad=0.35", "facecolor": colour, "edgecolor": INK, "linewidth": 0.8},
            )  # fmt: skip
            if name in wanted:
                ax.annotate("", (x, -0.95), (x, y), arrowprops={**arrow, "color": INK, "shrinkB": 0}, zorder=1)
        ax.text(
            wide / 2, -1.15, "backward", ha="center", va="center", fontsize=10,
            bbox={"boxstyle": "round,pad=0.3", "facecolor": "#eeeeee", "edgecolor": INK, "linewidth": 0.8},
        )  # fmt: skip
        ax.axhline(-0.95, color=INK, linewidth=0.8)
        for label, colour in LOOKS.items():
            if label in fate.values():
                ax.scatter([], [], marker="s", s=80, color=colour, edgecolor=INK, linewidth=0.8, label=label)
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3)
        ax.set_xlim(-0.55, wide + 0.55)
        ax.set_ylim(-1.4, tall + 0.45)
        ax.axis("off")
    said = [f"{n}, {short_bytes(size)}: {fate[n]}{', read' * (n in wanted)}" for n, (size, _) in values.items()]
    alt = f"A graph of {len(values)} values and the backward that reads some of them. {'; '.join(said)}."
    return figure(fig, caption=caption, alt=alt)


def _places(values: Mapping[str, tuple[float, Sequence[str]]]) -> dict[str, tuple[float, float]]:
    """x: how many steps a value is from the inputs; y: its place among those of equal depth."""
    depth: dict[str, int] = {}
    for name, (_, made_of) in values.items():
        depth[name] = 1 + max((depth[n] for n in made_of), default=-1)
    level: dict[int, list[str]] = {}
    for name, d in depth.items():
        level.setdefault(d, []).append(name)
    most = max(len(names) for names in level.values())
    return {n: (float(d), i + (most - len(names)) / 2) for d, names in level.items() for i, n in enumerate(names)}
