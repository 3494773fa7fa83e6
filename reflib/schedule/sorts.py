"""Launches of kernels that sort or scan rows at length: programs of one warp wherever possible.

A step of a sorting network exchanges elements at a distance that is a power of two: within a thread, between lanes by
shuffles, or between warps through shared memory, with a barrier. So a row of up to 4 elements per lane takes a part of
a warp, and a program has four warps; of longer ones, a program is one warp. But where rows are so few that they leave
schedulers idle, all that counts is how long one row takes: a long row is spread over more warps, which exchange in a
few steps only (3 of 55 for 1,024 elements and 4 warps). Where memory runs across rows, lanes go along these, and a
thread holds as much of its row as its registers allow.

A scan combines twice per element within threads, five times per lane between lanes, and more between warps, which wait
for each other. Where a combination takes long (an exponential), that counts: one block of 16 warps per row of 5,178
takes 2.7 times the instructions of blocks of one warp. Of two scans (a gradient's) registers hold fewer elements.
"""

from ..ir.loops import Scan
from ..ir.program import Assume, Config
from ..ir.traffic import SECTOR
from ..options import Options
from ..target import Target
from .heuristics import READ_BYTES, Traffic, filling

LANES = 32  # rows that lanes go along
HELD = 32  # elements per thread, at most
BUSY = 8  # warps per multiprocessor: two per scheduler, of which one computes while the other waits


def sorts(
    traffic: list[Traffic], target: Target, options: Options, general: bool
) -> tuple[Config, tuple[Assume, ...]] | None:
    """The launch of a kernel with a sort; None for others."""
    found = [t for t in traffic if any(isinstance(s, Scan) and s.kind == "sort" for s in t.space.body)]
    if not found:
        return None
    t = max(found, key=lambda t: t.space.x.size.hint())
    assert t.space.r is not None
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
    xblock, warps = filling(rows, xblock, warps, target)
    while xblock == 1 and rows * warps < BUSY * target.units and warps * target.warp * each < rblock:
        warps *= 2
    return Config("persistent", xblock=xblock, rblock=rblock, num_warps=warps), ()


def scans(
    traffic: list[Traffic], target: Target, options: Options, general: bool
) -> tuple[Config, tuple[Assume, ...]] | None:
    """The launch of a kernel that scans long rows by exponentials, and does nothing else along them; else None."""
    found = [t for t in traffic if any(isinstance(s, Scan) and s.kind == "logsumexp" for s in t.space.body)]
    if len(traffic) != 1 or not found or found[0].passes > 1 or found[0].columns():
        return None
    s = found[0].space
    assert s.r is not None
    rows, length = (max(1, v.size.hint()) for v in (s.x, s.r))
    count = sum(isinstance(i, Scan) for i in s.body)
    block, warps = max(4, HELD // count**2) * target.warp, 1
    if length <= block:
        return None
    while warps < 16 and length > block * warps and rows * warps < 16 * target.units:
        warps *= 2
    rblock = min(block * warps, block * warps // 2, key=lambda n: (-(-length // n) * n, -n))
    return Config("looped", xblock=1, rblock=rblock, num_warps=warps), ()
