"""A kernel whose elements are made in different ways along an axis, as one kernel per way.

``cat([a, up(b), up(c)], 1)`` chooses by the channel what an element is. As one kernel over the whole, every lane takes
the instructions of all three ways, each under a mask: 284 per pair of elements of four images enlarged to one size (a
fourth of the result each), where the way that an element needs takes 25 to 40. So for ``where(i < n, f(x), g(x))``, a
rotation of the first half of each row, an axis that is padded around what is computed::

    for c < 270: y[c] = a[c] if c < 18 else up(b)[c - 18] if c < 54 ...     for c < 18: y[c] = a[c]
                                                                            for c < 36: y[c + 18] = up(b)[c] ...

The axis is cut where comparisons with positions cut it, each piece is the body with these decided, and what is dead in
it goes. A kernel takes as long as its instructions or its bytes, whichever is more (``ir.instructions``), and each
piece is a launch more (small ones share it: ``combine``): neighbouring pieces that cost less together stay one. A run
of stored elements is whole lines, and begins at a multiple of 16 bytes, in each piece.

What parts have in common is read once by kernels that store several (``shared_parts``, ``halves``), which come first.
"""

from dataclasses import replace
from itertools import pairwise

from ..ir.expr import Atom, IntLike, expr
from ..ir.instructions import LOAD, PER_BYTE, work_of
from ..ir.loops import Axis, LoopNest, Op, Reduce, Scan
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import merge_axes, rename_axes, substitute
from ..options import Options
from ..target import Target
from .decided import decided, held, integer
from .mapping import fresh
from .places import LAUNCH
from .result import Fused, Group
from .shared_parts import RUN

MOST = 16  # pieces that are looked at
PIECE = 16  # bytes
SKIPPED = 2  # instructions of a load whose mask holds nowhere in a warp


def pieces(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. For GPUs; assumes a legal order."""
    if not target.is_gpu:
        return fused
    nodes, groups = list[Node](), list[Group]()
    for n, g in zip(fused.program.nodes, fused.groups, strict=True):
        found = _cut(n, fused.program) if isinstance(n, LoopNest) else []
        nodes += found or [n]
        groups += [replace(g, name=p.name, members=g.members if p is found[0] else (p.name,)) for p in found] or [g]
    if len(nodes) == len(fused.program.nodes):
        return fused
    return replace(fused, program=replace(fused.program, nodes=tuple(nodes)), groups=tuple(groups))


def _cut(loops: LoopNest, program: Program) -> list[LoopNest]:
    """``loops`` in pieces along one of its axes; none where that does not pay."""
    again = {*loops.reads()} & {*loops.writes()}
    if again or any(isinstance(s, (Reduce, Scan)) for s in loops.body) or any(s.reduce for s in loops.stores()):
        return []
    best, saved = list[LoopNest](), 0
    for a in loops.axes:
        cuts = _cuts(loops, a, program.buffers)
        if not 0 < len(cuts) < MOST:
            continue
        found = _joined(loops, a, cuts, program.buffers)
        less = _time(loops, program.buffers) - sum(_time(p, program.buffers) + LAUNCH[True] for p in found)
        if found and less + LAUNCH[True] > saved:
            best, saved = found, less + LAUNCH[True]
    return [replace(p, name=f"{loops.name}_piece{k}") for k, p in enumerate(best)]


def _joined(loops: LoopNest, a: Axis, cuts: list[int], buffers: dict[str, Buffer]) -> list[LoopNest]:
    """The pieces, neighbours joined as long as that is a gain, the largest first."""
    ends = [0, *cuts, a.size.constant or 0]
    made: dict[tuple[int, int], tuple[LoopNest, int]] = {}

    def time(low: int, high: int) -> int:
        if (low, high) not in made:
            p = _piece(loops, a, low, high)
            made[low, high] = p, _time(p, buffers)
        return made[low, high][1]

    while len(ends) > 2:
        around = zip(ends, ends[1:], ends[2:])
        less = [time(low, at) + time(at, high) + LAUNCH[True] - time(low, high) for low, at, high in around]
        if max(less) < 0:
            break
        del ends[1 + less.index(max(less))]
    return [made[part][0] for part in pairwise(ends)] if len(ends) > 2 else []


def _piece(loops: LoopNest, a: Axis, low: int, high: int) -> LoopNest:
    inner = fresh(expr(high - low))
    env: dict[Atom, IntLike] = {a.var: low + (0 if high - low == 1 else expr(inner))}
    axes = [Axis(inner, "p") if x is a else x for x in loops.axes if x is not a or high - low > 1]
    body = decided(substitute(loops.body, env))
    steps = [loops.stores()[0].index.subs(env).coefficient(x.var) for x in axes]
    if None not in steps:  # the whole's order is one for all that it read
        axes = [x for _, x in sorted(zip(steps, axes), key=lambda at: -abs(at[0].hint()))]  # type: ignore[union-attr]
    return rename_axes(merge_axes(replace(loops, axes=tuple(axes), body=body)))


def _cuts(loops: LoopNest, a: Axis, buffers: dict[str, Buffer]) -> list[int]:
    """Where comparisons with positions along ``a`` cut it, as far as what is stored stays in whole pieces."""
    size, found = a.size.constant, set[int]()
    for s in loops.body if size else ():
        if isinstance(s, Op) and s.op in ("lt", "ge", "le", "gt"):
            one, other = (integer(loops.body[i]) for i in s.args)
            if one is None or other is None or not (one - other).has(a.var):
                continue
            at, step = (other - one).subs({a.var: 0}).constant, (one - other).coefficient(a.var)
            if at is not None and step == 1:
                found.add(at if s.op in ("lt", "ge") else at + 1)
            elif at is not None and step == -1:
                found.add(-at + 1 if s.op in ("lt", "ge") else -at)
    steps = [(s.index.coefficient(a.var), buffers[s.buffer].dtype.itemsize) for s in loops.stores()]
    each = [0 if step is None else abs(step.hint()) * width for step, width in steps]
    ends = [0]
    for at in sorted(found):
        if size and all(at * e % PIECE == 0 and min(at - ends[-1], size - at) * e >= RUN for e in each):
            ends.append(at)
    return ends[1:]


def _time(loops: LoopNest, buffers: dict[str, Buffer]) -> int:
    """Bytes that are moved while a kernel runs."""
    points = loops.numel.hint()
    moved = (buffers[b] for b in {*loops.reads(), *loops.writes()})
    loads = (s for s in loops.loads() if s.mask is not None)
    each = work_of(loops) - sum((1 - held(loops.body, s.mask)) * (LOAD - SKIPPED) for s in loads)
    return max(sum(min(b.nbytes.hint(), points * b.dtype.itemsize) for b in moved), int(points * each) // PER_BYTE)
