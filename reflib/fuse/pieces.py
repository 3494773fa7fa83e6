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

Pieces of one length are one kernel, which reads a part for each of its stores. So layers that read all that the layers
before them made (DenseNet: 25 tensors, 256 channels and 24 times 32) make no tensor of it, and choose nothing::

    for c < 1024: y[c] = f(a[c] if c < 256 else b[c - 256] if c < 288 ..)   for c < 32: y[c] = f(a[c])
                                                                              y[c + 32] = f(a[c + 32])   ..
                                                                              y[c + 256] = f(b[c])   ..

All is read before anything is stored: of one element, a thread has up to 32 loads under way. A run of these is whole
sectors. What reduces so many tensors' elements is not cut, and reads what such a kernel stores (``ways_rule``).

NB: TorchInductor makes slices of the whole of more than a few parts (``ConcatKernel``): each is copied there.

What parts have in common is read once by kernels that store several (``shared_parts``, ``halves``), which come first.
"""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from math import gcd

from ..ir.expr import Atom, IntLike, expr
from ..ir.instructions import LOAD, PER_BYTE, weight, work_of
from ..ir.loops import Axis, BodyBuilder, Indirect, Load, LoopNest, Op, Reduce, Scan, Store, map_stmt
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import merge_axes, rename_axes, substitute
from ..options import Options
from ..target import Target
from .combine import MAX_POINTS
from .decided import decided, held, integer
from .legality import Cluster, FusionContext
from .mapping import fresh
from .places import LAUNCH
from .result import Fused, Group, Reason
from .shared_parts import RUN

MOST = 16  # pieces that are looked at
STORES, READ, FEW = 32, 2, 4  # of a kernel that stores several pieces; elements read for each; pieces per part
PIECE, SECTORS = 16, 32  # bytes
SKIPPED = 2  # instructions of a load whose mask holds nowhere in a warp


def pieces(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. For GPUs; assumes a legal order."""
    if not target.is_gpu:
        return fused
    nodes, groups = list[Node](), list[Group]()
    for n, g in zip(fused.program.nodes, fused.groups, strict=True):
        found = _cut(n, fused.program, options.combine_kernels) if isinstance(n, LoopNest) else []
        nodes += found or [n]
        groups += [replace(g, name=p.name, members=g.members if p is found[0] else (p.name,)) for p in found] or [g]
    if all(a is b for a, b in zip(nodes, fused.program.nodes)):
        return fused
    return replace(fused, program=replace(fused.program, nodes=tuple(nodes)), groups=tuple(groups))


def ways_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """A reduction is not cut. So what is chosen from many tensors is stored by a kernel that is, for it to read."""
    if not c.target.is_gpu or a.reduces == b.reduces:
        return None
    for _, loops, _ in (b if a.reduces else a).parts:
        if len({s.buffer for s in loops.loads() if s.mask is not None}) > MOST:
            return Reason("ways", f"more than {MOST} tensors, from which each element that is reduced is chosen")
    return None


def _cut(loops: LoopNest, program: Program, combine: bool) -> list[LoopNest]:
    """``loops`` in pieces along an axis; none where that does not pay. ``combine``: small kernels share a launch."""
    again, whole = {*loops.reads()} & {*loops.writes()}, _time(loops, program.buffers)
    if again or any(isinstance(s, (Reduce, Scan)) for s in loops.body) or any(s.reduce for s in loops.stores()):
        return []
    if whole == _moved(loops, program.buffers):
        return []
    best, saved = list[LoopNest](), 0
    for a in loops.axes:
        for cut, least in ((_alike, whole // 4), (_joined, 0)):
            found = cut(loops, a, program.buffers)
            one = combine and cut is _alike and all(p.numel.hint() <= MAX_POINTS for p in found)
            more = 0 if one else LAUNCH[True] * (len(found) - 1)
            less = whole - sum(_time(p, program.buffers) for p in found) - more
            if found and less > max(least, saved):
                best, saved = found, less
                break
    names = [f"{loops.name}_piece{k}" for k in range(len(best))] if len(best) > 1 else [loops.name]
    return [replace(p, name=name) for p, name in zip(best, names)]


def _alike(loops: LoopNest, a: Axis, buffers: dict[str, Buffer]) -> list[LoopNest]:
    """A kernel per length of the pieces, that stores all of one length; one kernel, where a few shorter pieces of one
    length make up all of them. None where no two have one length, or places are computed."""
    ends, stores = _ends(loops, a, buffers, SECTORS), len(loops.stores())
    unit = gcd(*ends)
    if len(ends) > 2 and ends[-1] <= min(STORES // stores, FEW * (len(ends) - 1)) * unit:
        ends = [*range(0, ends[-1] + 1, unit)]
    lengths = [high - low for low, high in pairwise(ends)]
    if len({*lengths}) == len(lengths) or any(isinstance(s, Indirect) for s in loops.body):
        return []
    alike: dict[int, list[LoopNest]] = {}
    for n, p in zip(lengths, _each(loops, a, ends), strict=True):
        alike.setdefault(n, []).append(p)
    read = max(sum(weight(s) == LOAD for s in p.loads()) for ps in alike.values() for p in ps)
    most = max(1, STORES // max(stores, read // READ))
    return [_beside(ps[i : i + most]) for ps in alike.values() for i in range(0, len(ps), most)]


def _each(loops: LoopNest, a: Axis, ends: list[int]) -> list[LoopNest]:
    """A loop nest per part of the axis, which begins at the first end: of its halves, whose bodies are shorter."""
    if len(ends) == 2:
        return [loops]
    middle, out = len(ends) // 2, list[LoopNest]()
    for part in (ends[: middle + 1], ends[middle:]):
        half, inner = _within(loops, a, part[0] - ends[0], part[-1] - ends[0])
        out += _each(half, inner, part)
    return out


def _beside(parts: list[LoopNest]) -> LoopNest:
    """One loop nest that stores what each of ``parts`` does, over axes of the same sizes, after all of them are read
    (a load that follows a store would wait for it)."""
    b, stores = BodyBuilder(), list[Store]()
    for p in parts:
        env: dict[Atom, IntLike] = {x.var: expr(y.var) for x, y in zip(p.axes, parts[0].axes, strict=True)}
        ids: dict[int, int] = {}
        for i, s in enumerate(p.body):
            new = map_stmt(s, ids, env)
            if isinstance(new, Store):
                stores.append(new)
            else:
                ids[i] = b.add(new)
    return _ordered(replace(parts[0], body=(*b.body, *stores)))


def _joined(loops: LoopNest, a: Axis, buffers: dict[str, Buffer]) -> list[LoopNest]:
    """The pieces, neighbours joined as long as that is a gain, the largest first."""
    ends = _ends(loops, a, buffers, RUN)
    if not 1 < len(ends) - 1 <= MOST:
        return []
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
    return _ordered(_within(loops, a, low, high)[0])


def _within(loops: LoopNest, a: Axis, low: int, high: int) -> tuple[LoopNest, Axis]:
    """``loops`` over a part of an axis, and what that is now."""
    inner = Axis(fresh(expr(high - low)), "p")
    env: dict[Atom, IntLike] = {a.var: low + (0 if high - low == 1 else expr(inner.var))}
    axes = tuple(inner if x is a else x for x in loops.axes if x is not a or high - low > 1)
    return replace(loops, axes=axes, body=decided(substitute(loops.body, env))), inner


def _ordered(loops: LoopNest) -> LoopNest:
    axes, index = loops.axes, loops.stores()[0].index
    steps = [index.coefficient(x.var) for x in axes]
    if None not in steps:  # the whole's order is one for all that it read
        axes = tuple(x for _, x in sorted(zip(steps, axes), key=lambda at: -abs(at[0].hint())))  # type: ignore[union-attr]
    return rename_axes(merge_axes(replace(loops, axes=axes)))


def _ends(loops: LoopNest, a: Axis, buffers: dict[str, Buffer], run: int) -> list[int]:
    """Where comparisons with positions along ``a`` cut it, as far as runs of what is stored have ``run`` bytes; first
    and last its own ends."""
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
        if size and all(at * e % PIECE == 0 and min(at - ends[-1], size - at) * e >= run for e in each):
            ends.append(at)
    return [*ends, size or 0]


def _time(loops: LoopNest, buffers: dict[str, Buffer]) -> int:
    """Bytes that are moved while a kernel runs."""
    loads = (s for s in loops.loads() if s.mask is not None)
    each = work_of(loops) - sum((1 - held(loops.body, s.mask)) * (LOAD - SKIPPED) for s in loads)
    return max(_moved(loops, buffers), int(loops.numel.hint() * each) // PER_BYTE)


def _moved(loops: LoopNest, buffers: dict[str, Buffer]) -> int:
    """Bytes that it moves."""
    points, used = loops.numel.hint(), list[Load | Store]([*loops.loads(), *loops.stores()])
    each = Counter(b for b, _ in {(s.buffer, s.index) for s in used})
    return sum(min(buffers[b].nbytes.hint(), n * points * buffers[b].dtype.itemsize) for b, n in each.items())
