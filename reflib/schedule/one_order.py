"""Launches of reductions whose sums must not depend on the number of rows (``Options.batch_invariant``).

A program adds up LANES elements of a row at a time, lane by lane, and then the lanes in pairs of neighbours
(``generate.triton_one_order``). So a row's sum depends on LANES alone; rows per program and warps are free, and chosen
as ever. A row of no more than LANES elements stays in registers: absent lanes are zeros, so that its sum is what a loop
would give, and static and symbolic lengths agree. Where memory runs across rows there are fewer lanes, because a
program holds as many rows as fill a sector; which of the two it is depends on strides along the row, and on no size.
"""

from ..fuse.one_order import LANES as COLUMN_LANES
from ..ir.program import Assume, Config
from ..options import Options
from ..target import Target
from .axes import step
from .heuristics import Traffic, nearest_pow2

LANES = 1024  # of a row that is contiguous
FULL = 4096  # elements of a program


def one_order(
    traffic: list[Traffic], target: Target, options: Options, general: bool
) -> tuple[Config, tuple[Assume, ...]] | None:
    """The launch of a kernel that reduces, of parts with rows of one length; None for others."""
    rows = [t for t in traffic if t.space.mode == "reduction" and options.batch_invariant]
    if not rows:
        return None
    main = max(rows, key=lambda t: t.space.x.size.hint())
    r = main.space.r
    assert r is not None
    along = any(step(a.index, r) == 1 for a in main.space.loads if a.index.has(r))  # a row is contiguous
    lanes = LANES if along else COLUMN_LANES
    length = r.size.constant
    if length is not None:
        lanes = min(lanes, 1 << max(0, length - 1).bit_length())
    looped = length is None or length > lanes
    xblock = 1 if along and looped else FULL // lanes
    count = max(1, main.space.x.size.hint())
    while xblock > 1 and count < xblock * target.units:
        xblock //= 2
    warps = nearest_pow2(min(8, max(1, xblock * lanes / (target.warp * 8))))
    return Config("one_order", xblock, lanes, warps), ()
