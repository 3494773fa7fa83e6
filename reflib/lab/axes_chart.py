"""`lab.axes_picture`: the common pieces of two loop nests' axes; `lab.copies_picture`: a block copied by lanes or TMA.

An axis is a digit of the element's number, of as many values as its size, as hours and minutes are of a time. On a
logarithmic scale digits lie side by side, the innermost at the right, and the cuts of both nests are the places that
common pieces need.
"""

import itertools
import math
from collections.abc import Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from reflib.lab.figures import COLOURS, INK, QUIET, Picture, below_each_other, figure, style

Sizes = Sequence[int]  # of the axes, the outermost first


def axes_picture(pairs: Mapping[str, tuple[Sizes, Sizes]], *, caption: str) -> Picture:
    """A panel per pair of nests over equally many elements: the axes of both, and the pieces that both consist of."""
    said = []
    with style():
        fig, panels = below_each_other([1] * len(pairs), 1.55 * len(pairs))
        for ax, (title, (one, other)) in zip(panels, pairs.items(), strict=True):
            found = pieces(one, other)
            shown = "no common pieces" if found is None else f"common pieces: {_times(found)}"
            _draw_axes(ax, one, other, found)
            ax.set_title(f"{title}: {shown}", fontsize=10)
            said.append(f"{title}: axes {_times(one)} and {_times(other)}, {shown}.")
    return figure(fig, caption=caption, alt="Axes of loop nests on one scale. " + " ".join(said))


def cuts(sizes: Sizes) -> list[int]:
    """Where axes end, in elements from the innermost outwards.

    >>> cuts((4, 3, 12))
    [12, 36, 144]
    """
    return list(itertools.accumulate(reversed(sizes), int.__mul__))


def pieces(one: Sizes, other: Sizes) -> list[int] | None:
    """The coarsest axes of which both consist, the outermost first; None if a cut does not divide the next.

    >>> pieces((12, 12), (4, 3, 12)), pieces((12, 12), (18, 8))
    ([4, 3, 12], None)
    """
    ends = sorted({1, *cuts(one), *cuts(other)})
    if any(b % a for a, b in itertools.pairwise(ends)):
        return None
    return [b // a for a, b in itertools.pairwise(ends)][::-1]


def _times(sizes: Sizes) -> str:
    return " x ".join(map(str, sizes))


def _draw_axes(ax: Axes, one: Sizes, other: Sizes, found: list[int] | None) -> None:
    whole = math.log(math.prod(one))
    for row, (sizes, colour) in enumerate(((one, COLOURS[4]), (other, COLOURS[3]), (found or (), COLOURS[5]))):
        ends = [0.0, *(math.log(end) for end in cuts(sizes))]
        for size, (begin, end) in zip(reversed(sizes), itertools.pairwise(ends), strict=True):
            ax.add_patch(Rectangle((-end, -row), end - begin, 0.72, facecolor=colour, edgecolor="#ffffff", linewidth=2))
            ax.text(-(begin + end) / 2, 0.36 - row, str(size), ha="center", va="center", color="#ffffff", fontsize=10)
    for end in {*cuts(one), *cuts(other)}:
        ax.plot([-math.log(end)] * 2, [-2.05 if found else -1.05, 0.8], color=QUIET, linewidth=1, linestyle=":")
    if found is None:
        ends = sorted({*cuts(one), *cuts(other)})
        a, b = next((a, b) for a, b in itertools.pairwise(ends) if b % a)
        ax.text(-whole / 2, -1.64, f"{b} elements are no multiple of {a}", ha="center", va="center", fontsize=10)
    ax.set_xlim(-whole - 0.05, 0.05)
    ax.set_ylim(-2.1, 0.85)
    ax.axis("off")


def copies_picture(lanes: int = 8, *, caption: str) -> Picture:
    """A block on its way from memory to shared memory: by the lanes of warps, and by the Tensor Memory Accelerator."""
    with style():
        fig, panels = plt.subplots(1, 2, figsize=(5.8, 3.1), layout="constrained")
        titles = "cp.async: each lane computes\nan address and a mask", "TMA: one lane asks, the\nunit computes all"
        for by_unit, (ax, title) in enumerate(zip(panels, titles, strict=True)):
            ax.set_title(title, fontsize=10)
            _draw_copy(ax, lanes, bool(by_unit))
    alt = (
        f"Two ways to copy a block. cp.async: {lanes} lanes, each with an arrow from its own row in memory to its own "
        "place in shared memory. TMA: one lane asks the unit, which has a descriptor and copies all rows of the block."
    )
    return figure(fig, caption=caption, alt=alt)


def _draw_copy(ax: Axes, lanes: int, by_unit: bool) -> None:
    for i in range(lanes):
        for x, wide, colour in ((0, 2.6, "#eeeeee"), (0.7, 1.3, COLOURS[4]), (8.2, 1.3, COLOURS[4])):
            ax.add_patch(Rectangle((x, -i), wide, 0.8, facecolor=colour, edgecolor="#ffffff"))
        if not by_unit:
            _lane(ax, i, asks=True)
            _arrow(ax, (2.1, 0.4 - i), (4.3, 0.4 - i))
            _arrow(ax, (5.3, 0.4 - i), (8.1, 0.4 - i))
    if by_unit:
        middle = 0.4 - lanes / 2
        for i in range(3):
            _lane(ax, i, asks=i == 0)
        ax.text(4.8, -2.6, "...", ha="center", va="center", fontsize=10, color=QUIET)
        ax.add_patch(Rectangle((5.9, middle - 1.1), 1.5, 2.2, facecolor=COLOURS[3], edgecolor="#ffffff"))
        ax.text(6.65, middle, "TMA", ha="center", va="center", fontsize=9, color="#ffffff")
        _arrow(ax, (5.25, 0.3), (6.5, middle + 1.15))
        _arrow(ax, (2.1, middle), (5.85, middle))
        _arrow(ax, (7.45, middle), (8.1, middle))
    for x, text in ((1.3, "memory"), (4.8, "lanes"), (8.85, "shared")):
        ax.text(x, -lanes + 0.3, text, ha="center", va="center", fontsize=9, color=INK)
    ax.set_xlim(-0.1, 9.7)
    ax.set_ylim(-lanes - 0.1, 1.0)
    ax.axis("off")


def _lane(ax: Axes, i: int, asks: bool) -> None:
    ax.add_patch(Rectangle((4.4, -i), 0.8, 0.8, facecolor=COLOURS[5] if asks else "#dddddd", edgecolor="#ffffff"))
    ax.text(4.8, 0.38 - i, str(i), ha="center", va="center", fontsize=8, color="#ffffff" if asks else QUIET)


def _arrow(ax: Axes, begin: tuple[float, float], end: tuple[float, float]) -> None:
    ax.annotate("", end, begin, arrowprops={"arrowstyle": "-|>", "color": QUIET, "linewidth": 1, "mutation_scale": 8})
