"""How a Loops becomes a loop nest on a CPU: which axes are joined, in which order, and which one is vectorised.

``arrange(loops) -> Nest``. The points of a Loops may be visited in any order, so this is free to choose:

1. axes of size 1 go;
2. axes are sorted by stride, the largest outside, so that the innermost loop walks along memory;
3. neighbours that together walk like one axis become one (``x[i*8 + j]``: a single axis of ``8*n``);
4. of a reduction, the vectorised axis is a reduced one if rows lie along memory (sum over the last dimension),
   a parallel one if columns do (sum over the first).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..ir.expr import ZERO, Atom, Expr, IntLike, Var, expr
from ..ir.loops import (
    Axis,
    Load,
    Loops,
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
    """See the module's docstring."""
    loops = _without_unit_axes(loops)
    p = _sorted(loops, loops.parallel)
    r = _sorted(loops, loops.reduced)
    loops = _joined(replace(loops, axes=(*p, *r)))
    p, r = loops.parallel, loops.reduced
    if p and (not r or _columns_lie_along_memory(loops, p[-1], r[-1])):
        return Nest(loops, p[:-1], p[-1], r)
    return Nest(loops, p, None, r)


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

    return sorted(axes, key=distance, reverse=True)


def _joined(loops: Loops) -> Loops:
    """Merge neighbouring axes of one kind while that is possible, innermost first."""
    k = len(loops.axes) - 1
    while k > 0:
        a, b = loops.axes[k - 1], loops.axes[k]
        if a.kind == b.kind and _walk_as_one(loops, a.var, b.var):
            var = Var(f"{a.var.name}_{b.var.name}", a.size * b.size)
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
def segments(loops: Loops) -> list[Segment]:
    """The passes in order: what a row needs, a pass over r, what the row needs from its result, another pass ...

    A pass computes what its reductions and stores need, again where an earlier pass had it. A store into a buffer
    that a later pass still reads (in place) waits for that pass.
    """
    body = loops.body
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
    for k in range(last + 1):
        row = [i for i, s in enumerate(body) if not inside[i] and not isinstance(s, Reduce) and phase[i] == k]
        out.append(Segment(False, tuple(row)))
        late = [
            i for i in wanted.get(k, []) if isinstance(body[i], Store) and reads.get(body[i].buffer, 0) > k
        ]
        for i in late:
            wanted[k].remove(i)
            wanted.setdefault(reads[body[i].buffer], []).append(i)
        if wanted.get(k):
            out.append(Segment(True, tuple(_needed(loops, wanted[k], inside))))
    return [s for s in out if s.statements]


def _needed(loops: Loops, targets: list[int], inside: list[bool]) -> list[int]:
    """``targets`` and every statement in the r loops that they need, in order."""
    found = set(targets)
    for i in reversed(range(len(loops.body))):
        if i in found:
            found |= {a for a in stmt_args(loops.body[i]) if inside[a]}
    return sorted(found)


def depends_on(loops: Loops, axis: Axis | None) -> list[bool]:
    """For each statement: does its value change along ``axis``? A reduction's result does not along its r axes."""
    out: list[bool] = []
    for s in loops.body:
        along = axis is not None and any(e.has(axis.var) for e in stmt_exprs(s))
        along = along or any(out[a] for a in stmt_args(s))
        out.append(along and not (axis is not None and axis.kind == "r" and isinstance(s, Reduce)))
    return out
