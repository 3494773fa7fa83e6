"""Launches of kernels that sort rows: each row in registers, of one warp wherever possible.

A step of a sorting network exchanges elements at a distance that is a power of two: within a thread, between lanes by
shuffles, or between warps through shared memory, with a barrier. So a row of up to 4 elements per lane takes a part of
a warp, and a program has four warps; of longer ones, a program is one warp. Where memory runs across rows, lanes go
along these, and a thread holds as much of its row as its registers allow.
"""

from typing import Any

from ..ir.loops import Scan
from ..ir.program import Assume, Config
from ..ir.traffic import SECTOR
from ..options import Options
from ..target import Target
from .heuristics import READ_BYTES

LANES = 32  # rows that lanes go along
HELD = 32  # elements per thread, at most


def sorts(
    traffic: list[Any], target: Target, options: Options, general: bool
) -> tuple[Config, tuple[Assume, ...]] | None:
    """The launch of a kernel with a sort; None for others. traffic: of each part (``heuristics.Traffic``)."""
    found = [t for t in traffic if any(isinstance(s, Scan) and s.kind == "sort" for s in t.space.body)]
    if not found:
        return None
    t = max(found, key=lambda t: t.space.x.size.hint())
    rows, length = max(1, t.space.x.size.hint()), int(t.space.r.size)
    rblock = 1 << (length - 1).bit_length()
    each = max(4, READ_BYTES // t.width)  # elements per thread
    if t.columns():
        xblock = max(SECTOR // t.width, min(LANES, LANES * HELD // rblock))
        warps = max(1, xblock * rblock // (target.warp * HELD))
    elif rblock <= target.warp * 4:
        xblock, warps = 4 * target.warp * each // rblock, 4
    else:
        xblock, warps = 1, 1
    while xblock > 1 and rows < xblock * target.units * 4:
        xblock, warps = xblock // 2, max(1, warps // 2)
    return Config("persistent", xblock=xblock, rblock=rblock, num_warps=warps), ()
