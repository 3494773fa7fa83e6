"""`lab.trace_picture`: complete events of Chrome traces as bars over time, one row per track and depth of nesting."""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from reflib.lab.figures import COLOURS, HATCHES, INK, Picture, below_each_other, figure, style
from reflib.lab.rows import short

LABELLED = 0.08  # of the width: shorter bars have no text
SAID = 4  # bars of each part that the alt text names

Span = Mapping[str, Any]


def trace_picture(parts: Mapping[str, Sequence[Span]], *, caption: str) -> Picture:
    """Draw each part (title -> events with ``name``, ``cat``, ``tid``, and ``ts`` and ``dur`` in µs) on a time axis of
    its own, which begins with its first event."""
    kinds = list(dict.fromkeys(e["cat"] for events in parts.values() for e in events))
    rows = {title: placed(events) for title, events in parts.items()}
    tall = [1 + max(row for row, _ in found) for found in rows.values()]
    with style():
        fig, axes = below_each_other(tall, 0.42 * sum(tall) + 0.95 * len(parts))
        for ax, (title, found) in zip(axes, rows.items()):
            ax.set_title(title)
            _draw(ax, found, kinds)
        looks = zip(kinds, COLOURS, HATCHES)
        keys = [Patch(facecolor=c, hatch=h, edgecolor="#ffffff", label=kind) for kind, c, h in looks]
        fig.legend(handles=keys, loc="outside lower center", ncols=4)
    return figure(fig, caption=caption, alt=" ".join(_said(title, events) for title, events in parts.items()))


def placed(events: Sequence[Span]) -> list[tuple[int, Span]]:
    """(row, event): a track's events below each other where they nest, the tracks below each other."""
    out: list[tuple[int, Span]] = []
    first = 0
    for tid in sorted({e["tid"] for e in events}):
        ends: list[float] = []
        deepest = 0
        for e in sorted((e for e in events if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])):
            while ends and ends[-1] <= e["ts"]:
                ends.pop()
            out.append((first + len(ends), e))
            deepest = max(deepest, len(ends))
            ends.append(e["ts"] + e["dur"])
        first += deepest + 1
    return out


def _draw(ax: Axes, found: Sequence[tuple[int, Span]], kinds: Sequence[str]) -> None:
    begin, whole = _extent([e for _, e in found])
    scale, unit = (1e3, "ms") if whole >= 1e4 else (1.0, "µs")
    for row, e in found:
        which = kinds.index(e["cat"]) % len(COLOURS)
        start, long = (e["ts"] - begin) / scale, max(e["dur"], whole / 800) / scale
        ax.barh(row, long, 0.8, start, color=COLOURS[which], hatch=HATCHES[which], edgecolor="#ffffff",
                linewidth=0.4)  # fmt: skip
        if e["dur"] >= LABELLED * whole:
            letters = max(3, int(60 * e["dur"] / whole))
            name = e["name"].removeprefix("aten.")
            name = name if len(name) <= letters else name[: letters - 1] + "…"
            box = {"boxstyle": "round,pad=0.1", "facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.85}
            ax.text(start + long / 2, row, name, ha="center", va="center", fontsize=8.5, color=INK, bbox=box,
                    clip_on=True)  # fmt: skip
    ax.set_ylim(max(row for row, _ in found) + 0.6, -0.6)
    ax.set_xlim(0, whole / scale)
    ax.set_yticks([])
    ax.set_xlabel(unit)


def _extent(events: Sequence[Span]) -> tuple[float, float]:
    begin = min(e["ts"] for e in events)
    return begin, max(e["ts"] + e["dur"] for e in events) - begin


def _said(title: str, events: Sequence[Span]) -> str:
    longest = sorted(events, key=lambda e: -e["dur"])[:SAID]
    parts = ", ".join(f"{e['name']} {short(e['dur'])} µs" for e in longest)
    return f"{title}: {len(events)} events in {short(_extent(events)[1])} µs; the longest: {parts}."
