"""Tilings of the kind ``rows``: few rows with weights that are computed as they are read (a decoder's step).

Such a product takes the time of the weights' bytes, if enough of them are on their way. A thread reads 16 bytes of a
row of weights at a time, a warp 512 neighbours; a block has ``EACH`` weights per thread, so that their sums, one per
weight and row, leave registers for several programs per multiprocessor; the others are copied ahead (``STAGES``). ``a``
is read again by each program, from L2: several columns per program keep that below the weights' bytes.
"""

from collections.abc import Iterator

from ..ir.expr import Expr, Var
from ..ir.program import Template, Tiling
from ..target import Target
from .roofline import Problem

ROWS = 4  # at most: with more, tensor cores do in one instruction what is done here in one per row
EACH = 32  # weights of a thread, of one row's product; half as many of more rows
WARPS, STAGES = 4, 4
LANES = 32
NEAR = 64  # neighbours along the depth within so many elements: they are read together


def row_tilings(t: Template, p: Problem, target: Target) -> Iterator[Tiling]:
    """The best guess first; none where rows are many, weights are not computed, or lie across the depth."""
    _, m, n, k = p.sizes
    if target.kind != "cuda" or target.capability < 80 or t.sizes[1].constant is None or m > ROWS:
        return
    if "b" not in p.computed or "a" in p.computed and m > 1 or t.sizes[3] == 0 or not _along_depth(t):
        return
    rows, each = 1 << (m - 1).bit_length(), EACH if m == 1 else EACH // 2
    for elements, stages in ((each, STAGES), (each, 1), (each // 2, STAGES), (2 * each, STAGES)):
        block, depth = WARPS * LANES * elements, LANES * 8 * p.denser()
        if k % depth and k % (depth // 2) == 0:
            depth //= 2  # else the last block has less than its depth
        while depth >= 2 * k and depth > LANES:
            depth //= 2
        width = max(1, block // depth)
        while width > 1 and p.sizes[0] * -(-n // width) < 2 * target.units:
            width //= 2
            depth *= 2 if 4 * depth <= k else 1
        yield Tiling("rows", rows, width, depth, WARPS, stages)


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
