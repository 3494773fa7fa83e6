"""Rows of a few equal parts that are computed in different ways: written out by part, so that a thread has one of each.

Rotary embeddings add to each half of a row the other half, times a sine::

    y[r] = x[r] * cos[r] + (-x[r + 64] if r < 64 else x[r - 64]) * sin[r]

As written, each element is loaded three times, twice under a mask, and whatever is computed of it (a norm of the row,
a rounding, a weight) three times as well; the warp has all of that, since it takes instructions whether a lane's mask
holds or not. Written out along the parts, the axis is half as long, and both halves of a row are values of one thread::

    y[r] = x[r] * cos[r] - x[r + 64] * sin[r];   y[r + 64] = x[r + 64] * cos[r + 64] + x[r] * sin[r + 64]

A norm of heads of 128 and the rotation of what it gives take 32 instructions per element so, and memory 28 (``generate.
triton_half``); now 14. What reduces the row adds up (or compares) the parts first. Where a row is cut is what its
comparisons of positions say; parts are whole pieces of 16 bytes of half precision. (Sums of columns are sums of each
part's columns.)

**Rows that are read at the same places** (interpolation, of all channels): where that is, and with which weights, is
loaded or computed for each element. Four rows at once, a quarter of the tensor apart, share it: 15 instructions per
element for 34, where a point lies between two of 800 (16,384 rows of 1,601).
"""

from math import gcd

from ..ir.expr import Ref
from ..ir.instructions import work_of
from ..ir.loops import Axis, Load, LoopNest, Op, Reduce, Scan, Store
from ..ir.program import Buffer
from ..ir.traffic import WARP, accesses, cheapest_last, neighbours
from ..ir.transforms import needed, two_passes, varying
from ..options import Options
from ..target import Target
from .decided import integer
from .inline_loads import MAX_BODY
from .result import Fused
from .unroll import FILLED, by_parts

PARTS = 4  # of a row, at most
LONGEST = 1024  # elements of a row; of elementwise kernels only, longer ones whose parts read something in common
PIECE, SHORTEST = 8, 16  # elements of a part: a multiple of the first, at least the second
LESS = 0.75  # of the instructions: what is left
SHARED = 0.6  # ... where rows share them
ROWS = (4, 3, 2)  # at once


def halves(fused: Fused, options: Options, target: Target) -> Fused:
    """The same kernels, on a GPU, such rows written out by part. Not with ``batch_invariant`` where they are reduced:
    the order of additions is another one."""
    if not target.is_gpu:
        return fused

    def new(n: LoopNest) -> LoopNest:
        scans = any(isinstance(s, Scan) for s in n.body)
        return n if scans else _written_out(n, target, options.batch_invariant)

    return fused.mapped(new)


def together(fused: Fused, options: Options, target: Target) -> Fused:
    """The same kernels, on a GPU, several rows at once that are read at the same places."""
    if not target.is_gpu:
        return fused

    def new(n: LoopNest) -> LoopNest:
        alone = not n.reduced and not any(isinstance(s, Scan) for s in n.body)
        return _together(n, target, fused.program.buffers) if alone else n

    return fused.mapped(new)


def _written_out(loops: LoopNest, target: Target, invariant: bool) -> LoopNest:
    for a in loops.axes:
        n = _parts(loops, a)
        rows = loops.numel.hint() * (a.size.hint() if a.kind == "r" else 1)
        if n < 2 or (a.kind == "r" and invariant) or rows < n * FILLED * target.units:
            continue
        out = by_parts(two_passes(loops) if a.kind == "r" else loops, a, n)
        less = len(out.body) <= MAX_BODY and work_of(out) <= LESS * n * work_of(loops)
        if less and (a.size.hint() <= LONGEST or _in_common(out, out.axes[loops.axes.index(a)], n)):
            return out
    return loops


def _in_common(out: LoopNest, a: Axis, n: int) -> bool:
    """Do two of the ``n`` parts, of what varies along ``a``, read the same element?"""
    level = varying(out.body, [a.var])
    reads = [set[int]() for _ in range(n)]
    for k, store in enumerate(i for i, s in enumerate(out.body) if isinstance(s, Store)):
        reads[k % n] |= {i for i in needed(out.body, [store]) if level[i] and isinstance(out.body[i], Load)}
    return len(set[int]().union(*reads)) < sum(map(len, reads))


def _together(loops: LoopNest, target: Target, buffers: dict[str, Buffer]) -> LoopNest:
    """``loops``, elementwise, several rows at once, if what they are made of lies at the same places of each."""
    order = cheapest_last(loops.axes, accesses(loops.body, buffers))
    for a in order if not any(s.reduce for s in loops.stores()) else ():
        n = next((n for n in ROWS if a.size.constant and a.size.constant % n == 0), 1)
        if n == 1 or a.var in neighbours(order, WARP) or loops.numel.hint() < 4 * n * FILLED * target.units:
            continue
        level = varying(loops.body, [a.var])
        places = (r for s in loops.loads() if s.index.has(a.var) for r in s.index.atoms() if isinstance(r, Ref))
        if any(not level[r.id] for r in places):
            out = by_parts(loops, a, n)
            if len(out.body) <= MAX_BODY and work_of(out) <= SHARED * n * work_of(loops):
                return out
    return loops


def _parts(loops: LoopNest, a: Axis) -> int:
    """Into how many equal parts the comparisons with positions along ``a`` cut it; 1: none, or too many."""
    size, added = a.size.constant, {s.reduce for s in loops.stores()}
    picks = any(len(s.args) > 1 for s in loops.body if isinstance(s, Reduce))
    if size is None or picks or (size > LONGEST and loops.reduced):
        return 1
    if "atomic" in added or ("sum" in added and loops.reduced != (a,)):
        return 1
    part = size
    for s in loops.body:
        if isinstance(s, Op) and s.op in ("lt", "ge", "le", "gt"):
            one, other = (integer(loops.body[i]) for i in s.args)
            if one is None or other is None or not (one - other).has(a.var):
                continue
            at, step = (other - one).subs({a.var: 0}).constant, (one - other).coefficient(a.var)
            if at is None or step != 1:
                return 1
            part = gcd(part, at if s.op in ("lt", "ge") else at + 1)
    whole = part % PIECE == 0 and part >= SHORTEST and size // part <= PARTS
    return size // part if whole else 1
