"""Tiles of points that share what takes long: a thread computes it once for several of them.

To sample a volume at given places takes 8 weights and 8 positions, some 100 instructions, the same for each of its
channels. A one-dimensional kernel computes them for every element. In a tile whose other side is the channels, what
does not vary with these is an array of one row (``generate`` gives each statement the dimensions that it varies with),
and a thread has several channels of a point.
"""

from collections.abc import Sequence

from ..ir.instructions import INSTRUCTIONS, LOAD
from ..ir.loops import Axis, Const, Load, LoopNest, Op, Store
from ..ir.transforms import varying

MUCH = 64  # instructions per point
LEAST = 4  # points that share them
LONG = 64  # of the side along which memory is contiguous


def sides(loops: LoopNest, order: Sequence[Axis]) -> tuple[Axis, Axis] | None:
    """(x, y): the innermost axis, and the one with which the most of the work does not vary; None where that is little,
    or less than half of it."""
    x = order[-1]
    if x.size.hint() < LONG:
        return None
    work = [_instructions(s) for s in loops.body]
    along = varying(loops.body, {x.var})
    others = {a: varying(loops.body, {a.var}) for a in order[:-1] if a.size.hint() >= LEAST}
    shared = {a: sum(w for w, here, own in zip(work, along, v) if here and not own) for a, v in others.items()}
    y = max(shared, key=lambda a: shared[a], default=None)
    return None if y is None or shared[y] < max(MUCH, sum(work) / 2) else (x, y)


def _instructions(s: object) -> int:
    if isinstance(s, (Const, Store)):
        return 0
    if isinstance(s, Op) and s.dtype.is_floating_point:
        return INSTRUCTIONS.get(s.op, 1)
    return LOAD if isinstance(s, Load) else 1
