"""`lab.lanes_picture`: which lane of a warp reads which bytes; `lab.banks_picture`: where shared memory has a tile."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from reflib.lab.figures import COLOURS, INK, QUIET, Picture, below_each_other, figure, style

SECTOR = 32  # bytes
NARROW = 6  # bytes: the number of a lane is above its bytes, not on them


def lanes_picture(cases: Mapping[str, tuple[Sequence[int], int]], *, caption: str) -> Picture:
    """One strip of memory per case `title: (addresses of lanes 0, 1, .., bytes that each reads)`, cut into sectors.

    Sectors that are moved are hatched where no lane uses them.
    """
    end = max(max(addresses) + size for addresses, size in cases.values())
    end += -end % SECTOR
    with style():
        fig, axes = below_each_other([1] * len(cases), 0.95 * len(cases))
        for ax, (title, (addresses, size)) in zip(axes, cases.items(), strict=True):
            _draw_strip(ax, addresses, size, end)
            ax.set_title(f"{title}: {used_of(addresses, size)}", fontsize=10)
    said = " ".join(f"{title}: {used_of(addresses, size)}." for title, (addresses, size) in cases.items())
    return figure(fig, caption=caption, alt=f"Strips of memory with the bytes that each lane of a warp reads. {said}")


def touched(addresses: Sequence[int], size: int) -> set[int]:
    """The sectors that hold these bytes, by number."""
    return {byte // SECTOR for at in addresses for byte in range(at, at + size)}


def used_of(addresses: Sequence[int], size: int) -> str:
    moved = len(touched(addresses, size))
    used = len({byte for at in addresses for byte in range(at, at + size)})
    sectors = "1 sector" if moved == 1 else f"{moved} sectors"
    return f"{len(addresses)} lanes, {sectors}, {used} of {moved * SECTOR} bytes used"


def _draw_strip(ax: Axes, addresses: Sequence[int], size: int, end: int) -> None:
    moved = touched(addresses, size)
    for n in range(end // SECTOR):
        colour, hatch = ("#eeeeee", "////") if n in moved else ("#ffffff", None)
        box = Rectangle((n * SECTOR, 0), SECTOR, 1, facecolor=colour, edgecolor="#bbbbbb", hatch=hatch, linewidth=0)
        ax.add_patch(box)
    for lane, at in enumerate(addresses):
        ax.add_patch(Rectangle((at, 0), size, 1, facecolor=COLOURS[lane % len(COLOURS)], edgecolor="#ffffff"))
        inside = size >= NARROW
        ax.text(
            at + size / 2, 0.47 if inside else 1.28, str(lane), ha="center", va="center", fontsize=8,
            color="#ffffff" if inside else INK,
        )  # fmt: skip
    for n in range(end // SECTOR):
        ax.add_patch(Rectangle((n * SECTOR, 0), SECTOR, 1, fill=False, edgecolor=INK, linewidth=1.2))
    ax.set_xlim(-1, end + 1)
    ax.set_ylim(-0.05, 1.6)
    ax.axis("off")


Place = Callable[[int, int], int]


def banks_picture(layouts: Mapping[str, Place], *, caption: str, side: int = 8) -> Picture:
    """A tile of `side` x `side` words in a shared memory of `side` banks, per layout `title: (row, column) -> word`.

    A cell has the number of its bank; column 0 is framed, and cells in the bank of its first word are coloured.
    """
    with style():
        fig, axes = plt.subplots(
            1, len(layouts), squeeze=False, layout="constrained", figsize=(5.6, 5.6 / len(layouts) + 0.5)
        )
        for ax, (title, place) in zip(axes[0], layouts.items(), strict=True):
            _draw_banks(ax, place, side)
            ax.set_title(f"{title}:\n{_in_turn(place, side)}", fontsize=10)
    said = " ".join(f"{title}: {_in_turn(place, side)}." for title, place in layouts.items())
    alt = f"Tiles of {side} by {side} words, each marked with its bank of {side}. To read column 0 takes: {said}"
    return figure(fig, caption=caption, alt=alt)


def _in_turn(place: Place, side: int) -> str:
    """How often the busiest bank is asked for a word of column 0."""
    passes = max(Counter(place(i, 0) % side for i in range(side)).values())
    return "1 pass" if passes == 1 else f"{passes} passes"


def _draw_banks(ax: Axes, place: Place, side: int) -> None:
    first = place(0, 0) % side
    for i in range(side):
        for j in range(side):
            bank = place(i, j) % side
            same = bank == first
            colour = COLOURS[1] if same else "#f4f4f4"
            ax.add_patch(Rectangle((j, i), 1, 1, facecolor=colour, edgecolor="#ffffff", linewidth=1))
            ink = "#ffffff" if same else QUIET
            ax.text(j + 0.5, i + 0.52, str(bank), ha="center", va="center", fontsize=7.5, color=ink)
    ax.add_patch(Rectangle((0, 0), 1, side, fill=False, edgecolor=INK, linewidth=2))
    ax.set_xlim(-0.1, side + 0.1)
    ax.set_ylim(side + 0.1, -0.1)
    ax.set_aspect("equal")
    ax.axis("off")
