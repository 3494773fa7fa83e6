"""Tilings of the kind ``row``: one row with weights that are computed as they are read (a decoder's step).

Such a product takes the time of the weights' bytes, if enough of them are on their way. A thread reads 16 bytes of a
row of weights at a time, a warp 512 neighbours; a block has ``EACH`` weights per thread, so that their sums, one per
weight, leave registers for several programs per multiprocessor; the others are copied ahead (``STAGES``). ``a`` is read
again by each program, from L2: several columns per program keep that below the weights' bytes. On an H200, weights of
8192 x 7168 in 8 bits: 20.5 us, 27.2 by ``tl.dot``; four rows took 39.6 so, and 27.1 by ``tl.dot``.
"""

from collections.abc import Iterator

from ..ir.expr import Expr, Var
from ..ir.program import Template, Tiling
from ..target import Target
from .roofline import Problem

EACH = 32  # weights of a thread
WARPS, STAGES = 4, 4
LANES = 32
NEAR = 64  # neighbours along the depth within so many elements: they are read together


def row_tilings(t: Template, p: Problem, target: Target) -> Iterator[Tiling]:
    """The best guess first; none where rows are more, weights are not computed, or lie across the depth."""
    batch, _, n, k = p.sizes
    if target.kind != "cuda" or target.capability < 80 or t.sizes[1].constant != 1:
        return
    if "b" not in p.computed or t.sizes[3] == 0 or not _along_depth(t):
        return
    for elements, stages in ((EACH, STAGES), (EACH, 1), (EACH // 2, STAGES), (2 * EACH, STAGES)):
        block, depth = WARPS * LANES * elements, LANES * 8 * p.denser()
        if k % depth and k % (depth // 2) == 0:
            depth //= 2  # else the last block has less than its depth
        while depth >= 2 * k and depth > LANES:
            depth //= 2
        width = max(1, block // depth)
        while width > 1 and batch * -(-n // width) < 2 * target.units:
            width //= 2
            depth *= 2 if 4 * depth <= k else 1
        yield Tiling("row", 1, width, depth, WARPS, stages)


def _along_depth(t: Template) -> bool:
    """Do neighbours along k lie together, in what a block of weights is computed of?"""
    nest = t.prologue(t.b)
    assert nest is not None
    k, n = (a.var for a in nest.axes[-2:])
    both = [s.index for s in nest.loads() if s.index.has(k) and s.index.has(n)]
    return bool(both) and all(_step(i, k) <= NEAR for i in both)


def _step(index: Expr, v: Var) -> float:
    """By how much the index grows over ``NEAR`` neighbours along ``v``."""
    by = (index.subs({v: NEAR}) - index.subs({v: 0})).constant
    return float("inf") if by is None else abs(by)
