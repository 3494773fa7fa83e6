"""Pictures of a tiled matrix product: `lab.tile_picture`, `lab.order_picture` and `lab.split_picture`.

Each has A at the left, B above and the result C in the corner between them, so that a tile of C lies in the row of A
and the column of B that it needs.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from reflib.lab.figures import COLOURS, INK, QUIET, Picture, figure, style
from reflib.lab.plots import short_bytes

REGISTERS, SHARED, CACHE, MEMORY = COLOURS[1], COLOURS[0], COLOURS[2], "#eeeeee"
Order = Sequence[tuple[int, int]]  # row and column of each tile, in the order of the programs


def tile_picture(
    sizes: tuple[int, int, int], tile: tuple[int, int, int], stages: int, itemsize: int, *, caption: str
) -> Picture:
    """One tile of an M x N x K product and where its data is. `sizes`: M, N, K; `tile`: of C by rows and columns, and
    the depth of a step; `stages`: blocks in shared memory at once."""
    (m, n, k), (bm, bn, bk) = sizes, tile
    shown = {
        f"registers: the sums of one tile of C, {short_bytes(4 * bm * bn)}": REGISTERS,
        f"shared memory: {stages} blocks of A and of B, {short_bytes(stages * bk * (bm + bn) * itemsize)}": SHARED,
        f"L2: a band of A and of B, read by other tiles too, {short_bytes(k * (bm + bn) * itemsize)}": CACHE,
        f"memory: A, B and C, {short_bytes((m * k + k * n + m * n) * itemsize)}": MEMORY,
    }
    fig, ax = _corner(4.6)
    with style():
        _matrices(ax, m, n, k)
        row, column = m * 0.42, n * 0.42
        for x, y, wide, high in ((-k, row, k, bm), (column, -k, bn, k)):
            _box(ax, x, y, wide, high, CACHE)
        for x, y, wide, high in ((-0.62 * k, row, bk, bm), (column, -0.62 * k, bn, bk)):
            _box(ax, x, y, wide, high, SHARED)
        _box(ax, column, row, bn, bm, REGISTERS)
        for label, colour in shown.items():
            ax.scatter([], [], marker="s", s=80, color=colour, edgecolor=INK, linewidth=0.8, label=label)
        ax.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0))
    alt = f"A product of {m:,} x {n:,}, depth {k:,}, with one tile of {bm} x {bn}. " + "; ".join(shown) + "."
    return figure(fig, caption=caption, alt=alt)


def order_picture(orders: Mapping[str, Order], at_once: int, *, caption: str) -> Picture:
    """The tiles that the first ``at_once`` programs compute, numbered, and the bands of A and B that they read."""
    down, across = (1 + max(t[i] for order in orders.values() for t in order) for i in (0, 1))
    parts = [f"A result of {down} x {across} tiles, {at_once} programs at once."]
    with style():
        fig, axes = plt.subplots(1, len(orders), squeeze=False, figsize=(5.8, 3.6), layout="constrained")
        for ax, (title, order) in zip(axes[0], orders.items(), strict=True):
            first = list(order[:at_once])
            rows, columns = sorted({i for i, _ in first}), sorted({j for _, j in first})
            for i in range(down):
                _box(ax, -2.2, i, 1.6, 1, SHARED if i in rows else "#ffffff", line=0.5)
                for j in range(across):
                    _box(ax, j, i, 1, 1, REGISTERS if (i, j) in first else "#ffffff", line=0.5)
            for j in range(across):
                _box(ax, j, -2.2, 1, 1.6, SHARED if j in columns else "#ffffff", line=0.5)
            for number, (i, j) in enumerate(first):
                ax.text(j + 0.5, i + 0.5, str(number), ha="center", va="center", fontsize=6.5, color="#ffffff")
            said = f"{len(rows)} bands of A, {len(columns)} of B"
            ax.set_title(f"{title}:\n{said}", fontsize=10)
            parts.append(f"{title}: they read {said}.")
            _finish(ax, -2.4, across + 0.2, -2.4, down + 0.2)
    return figure(fig, caption=caption, alt=" ".join(parts))


def split_picture(splits: int, *, caption: str) -> Picture:
    """One tile whose depth is cut into ``splits`` parts, a program each, and the sum of their results."""
    with style():
        fig, ax = _corner(3.4)
        wide, deep = 1.6, 6.0
        for s in range(splits):
            colour, step = COLOURS[s % len(COLOURS)], deep / splits
            _box(ax, -deep + s * step, 0, step, wide, colour)
            _box(ax, 0, -deep + s * step, wide, step, colour)
            ax.text(-deep + (s + 0.5) * step, wide / 2, str(s), ha="center", va="center", color="#ffffff")
            ax.text(wide / 2, -deep + (s + 0.5) * step, str(s), ha="center", va="center", color="#ffffff")
            x, y = 3.4, -deep + (s + 0.5) * (deep + wide) / splits - 0.42
            _box(ax, x, y, 0.84, 0.84, colour)
            ax.text(x + 0.42, y + 0.42, str(s), ha="center", va="center", color="#ffffff")
            arrow = {"arrowstyle": "-|>", "color": QUIET, "linewidth": 1.2}
            ax.annotate("", (6.1, -deep / 2 + wide / 2), (x + 0.95, y + 0.42), arrowprops=arrow)
        _box(ax, 0, 0, wide, wide, "#ffffff")
        _box(ax, 6.2, -deep / 2 + wide / 2 - 0.42, 0.84, 0.84, INK)
        for x, y, text in (
            (-deep / 2, wide + 0.55, "A, one band"), (wide / 2, -deep - 0.4, "B, one band"), (wide / 2, wide / 2, "C"),
            (3.9, wide + 0.55, "float32 parts"), (6.62, 0.1 - deep / 2 + wide, "sum"),
        ):  # fmt: skip
            ax.text(x, y, text, ha="center", va="center", fontsize=10)
        _finish(ax, -deep - 0.3, 7.4, -deep - 0.8, wide + 1)
    alt = (
        f"One tile of a product. Its band of A, its band of B are cut along the depth into {splits} parts; a program "
        f"per part makes a float32 result of the tile's size, and the {splits} results are added to one."
    )
    return figure(fig, caption=caption, alt=alt)


def _corner(high: float) -> tuple[Any, Axes]:
    with style():
        return plt.subplots(figsize=(5.6, high), layout="constrained")


def _matrices(ax: Axes, m: int, n: int, k: int) -> None:
    for x, y, wide, high, name in ((-k, 0, k, m, "A"), (0, -k, n, k, "B"), (0, 0, n, m, "C")):
        _box(ax, x, y, wide, high, MEMORY)
        ax.text(x + 0.06 * wide, y + 0.06 * high, name, ha="left", va="top", fontsize=12, fontweight="bold")
    gap = 0.03 * (n + k)
    _finish(ax, -k - gap, n + gap, -k - gap, m + gap)


def _box(ax: Axes, x: float, y: float, wide: float, high: float, colour: str, line: float = 0.8) -> None:
    ax.add_patch(Rectangle((x, y), wide, high, facecolor=colour, edgecolor=INK, linewidth=line))


def _finish(ax: Axes, left: float, right: float, top: float, bottom: float) -> None:
    """Rows count downwards, as in a matrix."""
    ax.set_xlim(left, right)
    ax.set_ylim(bottom, top)
    ax.set_aspect("equal")
    ax.axis("off")
