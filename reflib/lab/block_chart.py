"""`lab.blocks_picture`: which program of a GPU kernel computes which element, and which lanes are masked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from reflib.lab.figures import COLOURS, INK, Picture, below_each_other, figure, style

if TYPE_CHECKING:
    from reflib.ir.program import Config


class Block(NamedTuple):
    """A rectangle of elements (first and one past the last) that one program holds in registers at one step."""

    program: int
    step: int
    rows: tuple[int, int]
    columns: tuple[int, int]


def blocks_picture(cases: Mapping[str, tuple[int, int, Config]], *, caption: str) -> Picture:
    """One panel per case `title: (rows, columns, config)`: the matrix, the blocks on it, the masked lanes.

    The block of a reduction is XBLOCK rows by RBLOCK columns, that of a tiled kernel YBLOCK rows by XBLOCK columns.
    Other kernels take XBLOCK consecutive elements; ValueError unless XBLOCK divides the row.
    """
    laid = {title: (rows, columns, blocks(rows, columns, config)) for title, (rows, columns, config) in cases.items()}
    heights = [max(b.rows[1] for b in found) for _, _, found in laid.values()]
    widest = max(b.columns[1] for _, _, found in laid.values() for b in found)
    with style():
        fig, axes = below_each_other(heights, sum(5.2 * h / widest + 0.42 for h in heights))
        for ax, (title, (rows, columns, found)) in zip(axes, laid.items(), strict=True):
            _draw(ax, rows, columns, found, widest)
            ax.set_title(title, fontsize=10.5)
    return figure(fig, caption=caption, alt=_alt(laid))


def blocks(rows: int, columns: int, config: Config) -> list[Block]:
    """All blocks of the kernel, ordered by program."""
    yblock = dict(config.extras).get("yblock")
    if config.reduction != "none":
        high, wide = config.xblock, config.rblock
    elif yblock:
        high, wide = yblock, config.xblock
    elif columns % config.xblock:
        raise ValueError(f"a row of {columns} is not a whole number of blocks of {config.xblock}")
    else:
        high, wide = 1, config.xblock
    across = -(-columns // wide)
    out = []
    for down in range(-(-rows // high)):
        for along in range(across):
            one_row = config.reduction != "none"
            program, step = (down, along) if one_row else (down * across + along, 0)
            corner = down * high, along * wide
            out.append(Block(program, step, (corner[0], corner[0] + high), (corner[1], corner[1] + wide)))
    return out


def masked(rows: int, columns: int, found: list[Block]) -> int:
    """Number of lanes outside the matrix."""
    lanes = sum((b.rows[1] - b.rows[0]) * (b.columns[1] - b.columns[0]) for b in found)
    return lanes - rows * columns


def _draw(ax: Axes, rows: int, columns: int, found: list[Block], widest: int) -> None:
    for b in found:
        (top, bottom), (left, right) = b.rows, b.columns
        box = Rectangle((left, top), right - left, bottom - top, facecolor="#eeeeee", edgecolor="#999999", hatch="////")
        box.set_linewidth(0)
        ax.add_patch(box)
        inside = (min(right, columns) - left, min(bottom, rows) - top)
        ax.add_patch(Rectangle((left, top), *inside, facecolor="#ffffff", linewidth=0))
        colour = COLOURS[b.program % len(COLOURS)]
        ax.add_patch(Rectangle((left, top), *inside, facecolor=colour, alpha=0.28, linewidth=0))
        ax.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=INK, linewidth=1))
        label = f"program {b.program}" if b.step == 0 else ""
        if any(o.step for o in found):
            label = f"program {b.program}, step {b.step}"
        small = (right - left) / widest < 0.3
        label = label.replace("program ", "p").replace(", step ", "/") if small else label
        size = 7.5 if small else 9
        ax.text(left + inside[0] / 2, top + inside[1] / 2, label, ha="center", va="center", fontsize=size)
    for i in range(rows + 1):
        ax.plot([0, columns], [i, i], color="#ffffff", linewidth=0.5, zorder=0.5)
    ax.add_patch(Rectangle((0, 0), columns, rows, fill=False, edgecolor=INK, linewidth=2.2))
    ax.set_xlim(-0.2, widest + 0.2)
    ax.set_ylim(max(b.rows[1] for b in found) + 0.15, -0.15)
    ax.set_aspect("equal")
    ax.axis("off")


def _alt(laid: Mapping[str, tuple[int, int, list[Block]]]) -> str:
    parts = ["Matrices with the blocks of a kernel's programs drawn on them."]
    for title, (rows, columns, found) in laid.items():
        programs, steps = len({b.program for b in found}), 1 + max(b.step for b in found)
        high, wide = found[0].rows[1], found[0].columns[1]
        text = f"{title}: {rows} by {columns} elements, {programs} programs, blocks of {high} by {wide}"
        text += f", {steps} steps each" if steps > 1 else ""
        parts.append(f"{text}; {masked(rows, columns, found)} lanes are masked, beyond the edge.")
    return " ".join(parts)
