"""How a Loops becomes a loop nest on a CPU: which axes are joined, in which order, and which one is vectorised.

``arrange(loops) -> Nest``. The points of a Loops may be visited in any order, so this is free to choose:

1. axes of size 1 go;
2. axes are sorted by stride, the largest outside, so that the innermost loop walks along memory;
3. neighbours that together walk like one axis become one (``x[i*8 + j]``: a single axis of ``8*n``);
4. of a reduction, the vectorised axis is a reduced one if rows lie along memory (sum over the last dimension),
   a parallel one if columns do (sum over the first).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..ir.expr import ZERO, Atom, Expr, IntLike, Ref, Var, expr
from ..ir.loops import (
    Axis,
    BodyBuilder,
    Load,
    Loops,
    Op,
    Reduce,
    Store,
    map_stmt,
    phases,
    stmt_args,
    stmt_exprs,
    varies_with_r,
)


@dataclass(frozen=True)
class Nest:
    """``loops``, rearranged. ``outer``: loops over rows (or tiles). ``column``: the parallel axis that is vectorised,
    None if ``rows`` (the reduced axes; the last is innermost) hold the vectorised one."""

    loops: Loops
    outer: tuple[Axis, ...]
    column: Axis | None
    rows: tuple[Axis, ...]


@dataclass(frozen=True)
class Segment:
    """Statements (positions) that run together: once per row, or in one pass over the reduced axes."""

    over_r: bool
    statements: tuple[int, ...]


def arrange(loops: Loops) -> Nest:
    """See the module's docstring. Argmax and argmin become a max or min and then the least position that has it:
    two passes of plain vector code."""
    loops = _without_unit_axes(_without_arg_reductions(loops))
    axes = (*_sorted(loops, loops.parallel), *_sorted(loops, loops.reduced))
    loops = _joined(replace(loops, axes=axes))
    p, r = loops.parallel, loops.reduced
    if p and (not r or _columns_lie_along_memory(loops, p[-1], r[-1])):
        return Nest(loops, p[:-1], p[-1], r)
    return Nest(loops, p, None, r)


def _without_arg_reductions(loops: Loops) -> Loops:
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


def substitute(loops: Loops, axes: Iterable[Axis], env: dict[Atom, IntLike]) -> Loops:
    ids = {i: i for i in range(len(loops.body))}
    return replace(loops, axes=tuple(axes), body=tuple(map_stmt(s, ids, env) for s in loops.body))


def _without_unit_axes(loops: Loops) -> Loops:
    env: dict[Atom, IntLike] = {a.var: ZERO for a in loops.axes if a.size == 1}
    return substitute(loops, (a for a in loops.axes if a.var not in env), env) if env else loops


def _strides(loops: Loops, axis: Axis) -> list[tuple[int, Expr | None]]:
    """(weight, stride) of ``axis`` in every load and store; a store counts twice."""
    accesses = [s for s in loops.body if isinstance(s, (Load, Store))]
    return [(1 + isinstance(s, Store), s.index.coefficient(axis.var)) for s in accesses]


def _sorted(loops: Loops, axes: tuple[Axis, ...]) -> list[Axis]:
    def distance(a: Axis) -> int:
        return sum(w * min(abs(c.hint()), 1 << 40) for w, c in _strides(loops, a) if c is not None)

    out = sorted(axes, key=distance, reverse=True)
    stored = [s.index for s in loops.body if isinstance(s, Store)]
    along = [a for a in out if a.size.hint() >= 16 and any(e.coefficient(a.var) == 1 for e in stored)]
    if along and along[-1].kind == "p":  # what is stored is walked along; what is loaded can be tiled
        out.remove(along[-1])
        out.append(along[-1])
    return out


def _joined(loops: Loops) -> Loops:
    """Merge neighbouring axes of one kind while that is possible, innermost first."""
    k = len(loops.axes) - 1
    while k > 0:
        a, b = loops.axes[k - 1], loops.axes[k]
        if a.kind == b.kind and _walk_as_one(loops, a.var, b.var):
            var = Var(f"{a.var.name}_{b.var.name}", a.size * b.size)  # type: ignore[call-arg]
            axes = (*loops.axes[: k - 1], Axis(var, a.kind), *loops.axes[k + 1 :])
            loops = substitute(loops, axes, {a.var: ZERO, b.var: expr(var)})
        k -= 1
    return loops


def _walk_as_one(loops: Loops, a: Var, b: Var) -> bool:
    for s in loops.body:
        for e in stmt_exprs(s):
            ca, cb = e.coefficient(a), e.coefficient(b)
            if ca is None or cb is None or ca != cb * b.size:
                return False
    return True


def _columns_lie_along_memory(loops: Loops, p: Axis, r: Axis) -> bool:
    """Is ``p``, rather than ``r``, the axis that loads inside the reduction step along by one element?"""
    inside = [s for s, v in zip(loops.body, varies_with_r(loops), strict=True) if v and isinstance(s, Load)]
    by_p = sum(s.index.coefficient(p.var) == 1 for s in inside)
    by_r = sum(s.index.coefficient(r.var) == 1 for s in inside)
    return by_p > by_r


# -- passes -----------------------------------------------------------------------------------------
def segments(loops: Loops, kept: Collection[int] = ()) -> list[Segment]:
    """The passes in order: what a row needs, a pass over r, what the row needs from its result, another pass ...

    A pass computes what its reductions and stores need, again where an earlier pass had it. A store into a buffer
    that a later pass still reads (in place) waits for that pass. A value in ``kept`` is computed in the first
    pass that needs it only.
    """
    body: tuple[Any, ...] = loops.body
    inside, phase = varies_with_r(loops), phases(loops)
    wanted: dict[int, list[int]] = {}
    for i, s in enumerate(body):
        if isinstance(s, Reduce) or (inside[i] and isinstance(s, Store)):
            wanted.setdefault(phase[i], []).append(i)
    last = max([*wanted, *phase], default=0)
    reads: dict[str, int] = {}
    for k, targets in wanted.items():
        for i in _needed(loops, targets, inside):
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
            now = _needed(loops, wanted[k], inside, have)
            out.append(Segment(True, tuple(now)))
            have |= set(now) & set(kept)
    return [s for s in out if s.statements]


def _needed(loops: Loops, targets: list[int], inside: list[bool], have: Collection[int] = ()) -> list[int]:
    """``targets`` and every statement in the r loops that they need, in order, but for what is there already."""
    found = set(targets)
    for i in reversed(range(len(loops.body))):
        if i in found:
            found |= {a for a in stmt_args(loops.body[i]) if inside[a] and a not in have}
    return sorted(found)


def repeated(loops: Loops, worth: Collection[str]) -> list[int]:
    """Results of operations in ``worth`` that more than one pass over r would compute."""
    passes = [set(s.statements) for s in segments(loops) if s.over_r]
    body = enumerate(loops.body)
    return [i for i, s in body if isinstance(s, Op) and s.op in worth and sum(i in p for p in passes) > 1]


def crossing_axis(nest: Nest) -> tuple[Axis | None, list[int]]:
    """Of a pointwise nest: the axis along which some plain loads lie in memory while they jump along the column
    (a transposition), and these loads. (None, []) if there is none."""
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


def depends_on(loops: Loops, axis: Axis | None) -> list[bool]:
    """For each statement: does its value change along ``axis``? A reduction's result does along every parallel
    axis (the vectorised one gets an accumulator for each column), and along no reduced one."""
    out: list[bool] = []
    for s in loops.body:
        if axis is None or isinstance(s, Reduce):
            out.append(axis is not None and axis.kind == "p")
        else:
            own = any(e.has(axis.var) for e in stmt_exprs(s))
            out.append(own or any(out[a] for a in stmt_args(s)))
    return out
