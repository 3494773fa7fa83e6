"""The loops of a LoopNest on a CPU: which axes are merged, in which order, and which one is vectorised.

``arrange(loops) -> Nest``. The points of a LoopNest may be visited in any order, so these are free choices:

1. axes of size 1 are dropped;
2. axes are sorted by stride, the largest outside, so that the innermost loop is contiguous in memory;
3. neighbours that are stepped through as one become one (``x[i*8 + j]``: a single axis of ``8*n``);
4. of a reduction, the vectorised axis is a reduced one if rows are contiguous (sum over the last dimension), a
   parallel one if columns are (sum over the first).
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ir.expr import Ref
from ..ir.loops import Axis, BodyBuilder, Load, LoopNest, Op, Reduce, Store, map_stmt
from ..ir.transforms import drop_unit_axes, merge_axes, needed, phases, two_passes, varying


@dataclass(frozen=True)
class Nest:
    """``loops``, rearranged. ``outer``: loops over rows (or tiles). ``column``: the parallel axis that is vectorised,
    None if that is one of ``rows`` (the reduced axes; the last is innermost)."""

    loops: LoopNest
    outer: tuple[Axis, ...]
    column: Axis | None
    rows: tuple[Axis, ...]


@dataclass(frozen=True)
class Segment:
    """Statements (positions) that run together: once per row, or in one pass over the reduced axes."""

    over_r: bool
    statements: tuple[int, ...]


def arrange(loops: LoopNest) -> Nest:
    """See the module's docstring. Argmax and argmin become a max or min and then the least position that has it:
    two passes of plain vector code; so is a variance."""
    loops = drop_unit_axes(_without_arg_reductions(two_passes(loops)))
    axes = (*_sorted(loops, loops.parallel), *_sorted(loops, loops.reduced))
    loops = merge_axes(replace(loops, axes=axes))
    p, r = loops.parallel, loops.reduced
    if p and (not r or _columns_lie_along_memory(loops, p[-1], r[-1])):
        return Nest(loops, p[:-1], p[-1], r)
    return Nest(loops, p, None, r)


def _without_arg_reductions(loops: LoopNest) -> LoopNest:
    if not any(isinstance(s, Reduce) and s.kind in ("argmax", "argmin") for s in loops.body):
        return loops
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(loops.body):
        new = map_stmt(s, ids)
        if isinstance(new, Reduce) and new.kind in ("argmax", "argmin"):
            value, position = new.args
            best = b.reduce(new.kind[3:], value, dtype=b.dtype(value))
            found = b.op("eq", value, best)
            if b.dtype(value).is_floating_point:
                found = b.op("or", found, b.op("and", b.op("isnan", value), b.op("isnan", best)))
            elsewhere = b.const(torch.iinfo(torch.int64).max, torch.int64)
            ids[i] = b.reduce("min", b.op("where", found, position, elsewhere), dtype=torch.int64)
        else:
            ids[i] = b.add(new)
    return replace(loops, body=tuple(b.body))


def _sorted(loops: LoopNest, axes: tuple[Axis, ...]) -> list[Axis]:
    accesses = [s for s in loops.body if isinstance(s, (Load, Store))]

    def distance(a: Axis) -> int:
        """The sum of its strides; a store's counts twice."""
        strides = ((1 + isinstance(s, Store), s.index.coefficient(a.var)) for s in accesses)
        return sum(w * min(abs(c.hint()), 1 << 40) for w, c in strides if c is not None)

    out = sorted(axes, key=distance, reverse=True)
    stored = [s.index for s in loops.body if isinstance(s, Store)]
    along = [a for a in out if a.size.hint() >= 16 and any(e.coefficient(a.var) == 1 for e in stored)]
    if along and along[-1].kind == "p":  # stores are made contiguous; loads can be tiled
        out.remove(along[-1])
        out.append(along[-1])
    return out


def _columns_lie_along_memory(loops: LoopNest, p: Axis, r: Axis) -> bool:
    """Is ``p``, rather than ``r``, the axis along which loads inside the reduction step by one element?"""
    level = varying(loops.body, loops.reduced_vars)
    inside = [s for s, v in zip(loops.body, level, strict=True) if v and isinstance(s, Load)]
    by_p = sum(s.index.coefficient(p.var) == 1 for s in inside)
    by_r = sum(s.index.coefficient(r.var) == 1 for s in inside)
    return by_p > by_r


# -- passes -----------------------------------------------------------------------------------------
def segments(loops: LoopNest, kept: Collection[int] = ()) -> list[Segment]:
    """The passes in order: what a row needs, a pass over r, what the row needs from its result, another pass ...

    A pass computes what its reductions and stores need, again where an earlier pass had it. A store into a buffer
    that a later pass reads (in place) is moved to that pass. A value in ``kept`` is computed only in the first pass
    that needs it.
    """
    body: tuple[Any, ...] = loops.body
    inside, phase = varying(body, loops.reduced_vars), phases(body)
    wanted: dict[int, list[int]] = {}
    for i, s in enumerate(body):
        if isinstance(s, Reduce) or (inside[i] and isinstance(s, Store)):
            wanted.setdefault(phase[i], []).append(i)
    last = max([*wanted, *phase], default=0)
    reads: dict[str, int] = {}
    for k, targets in wanted.items():
        for i in needed(body, targets, inside.__getitem__):
            s = body[i]
            if isinstance(s, Load):
                reads[s.buffer] = max(reads.get(s.buffer, 0), k)
    out: list[Segment] = []
    have: set[int] = set()
    for k in range(last + 1):
        row = [i for i, s in enumerate(body) if not inside[i] and not isinstance(s, Reduce) and phase[i] == k]
        out.append(Segment(False, tuple(row)))
        late = [i for i in wanted.get(k, []) if isinstance(body[i], Store) and reads.get(body[i].buffer, 0) > k]
        for i in late:
            wanted[k].remove(i)
            wanted.setdefault(reads[body[i].buffer], []).append(i)
        if wanted.get(k):
            again = [v and i not in have for i, v in enumerate(inside)]
            now = needed(body, wanted[k], again.__getitem__)
            out.append(Segment(True, tuple(now)))
            have |= set(now) & set(kept)
    return [s for s in out if s.statements]


def repeated(loops: LoopNest, worth: Collection[str]) -> list[int]:
    """Results of operations in ``worth`` that more than one pass over r would compute."""
    passes = [set(s.statements) for s in segments(loops) if s.over_r]
    body = enumerate(loops.body)
    return [i for i, s in body if isinstance(s, Op) and s.op in worth and sum(i in p for p in passes) > 1]


def crossing_axis(nest: Nest) -> tuple[Axis | None, list[int]]:
    """Of a pointwise nest: the axis along which some unmasked loads are contiguous while they are strided along the
    column (a transposition), and these loads. (None, []) if there is none."""
    column, written = nest.column, nest.loops.writes()
    for a in reversed(nest.outer):
        found = []
        for i, s in enumerate(nest.loops.body):
            if not isinstance(s, Load) or s.mask is not None or s.buffer in written:
                continue
            if not any(isinstance(x, Ref) for x in s.index.atoms()):
                jump = s.index.coefficient(column.var) if column else None
                if jump is not None and jump != 0 and jump != 1 and s.index.coefficient(a.var) == 1:
                    found.append(i)
        if found:
            return a, found
    return None, []


def depends_on(loops: LoopNest, axis: Axis | None) -> list[bool]:
    """For each statement: does its value change along ``axis``? A reduction's result does along every parallel
    axis (the vectorised one gets an accumulator for each column), and along no reduced one."""
    if axis is None:
        return [False] * len(loops.body)
    return varying(loops.body, [axis.var], reduces=axis.kind == "p")
