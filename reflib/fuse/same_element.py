"""Loads of an input that is updated, at the element that is stored, where a select says that it is the same one.

``c[:, 0] += 1; c *= 2`` is one loop over all of ``c``, which reads ``c[i, 0]`` for a value that matters where j is 0.
That is ``c[i, j]``, which is read as well. Each point then reads the element that it stores, and no other, so that the
loop may store to ``c`` itself: else it stores to a copy, which another kernel copies onto ``c``. So for slices with a
step: ``c[i, 2 * (j // 2)]``, where ``j % 2`` is 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce

from ..ir.expr import Atom, BinOp, Expr, Var, ceildiv, expr
from ..ir.loops import BodyBuilder, Load, LoopNest, Op, Stmt, map_stmt
from ..ir.transforms import eliminate_dead
from ..options import Options
from ..target import Target
from .decided import integer, selected
from .dependencies import dependencies
from .mapping import fresh
from .result import Fused


def same_element(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results."""
    program = fused.program
    updated = {b for b in dependencies(program).writers if program.buffers[b].kind == "input"}
    if not updated:
        return fused
    return fused.mapped(lambda n: _rewritten(n, updated))


def _rewritten(loops: LoopNest, updated: set[str]) -> LoopNest:
    body, stored = loops.body, {s.index for s in loops.stores()}
    if not any(s.buffer in updated and s.index not in stored for s in loops.loads()):
        return loops
    under = selected(body)
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(body):
        found = None
        if isinstance(s, Load) and s.buffer in updated and s.index not in stored:
            found = _equal(body, s, sorted(m for m in under[i] if m < i), stored)
        new = map_stmt(s, ids)
        if found is not None and isinstance(new, Load):  # (elsewhere than where the mask holds, it does not matter)
            at, masks = found
            new = replace(new, index=at, mask=reduce(partial(b.op, "and"), [ids[m] for m in masks]))
        ids[i] = b.add(new)
    return loops if tuple(b.body) == body else replace(loops, body=eliminate_dead(tuple(b.body)))


def _equal(body: Sequence[Stmt], s: Load, under: Sequence[int], stored: set[Expr]) -> tuple[Expr, list[int]] | None:
    """An index that is stored to, and is that of ``s`` where some masks hold, and the masks."""
    own = [] if s.mask is None else [s.mask]
    for some in (*([m] for m in under), under):
        masks = list(dict.fromkeys((*own, *some)))
        known: dict[Atom, Expr] = {}
        for m in masks:
            _collect(body, m, known)
        here = s.index.subs(known)
        if known and (at := next((x for x in stored if x.subs(known) == here), None)) is not None:
            return at, masks
    return None


def _collect(body: Sequence[Stmt], mask: int, known: dict[Atom, Expr]) -> None:
    """What loop variables are, where a mask holds: from ``v == c`` and ``(v + d) % step == c``, joined by ``and``."""
    s = body[mask]
    if not isinstance(s, Op) or s.op not in ("and", "eq"):
        return
    if s.op == "and":
        for a in s.args:
            _collect(body, a, known)
        return
    left, right = (integer(body[a]) for a in s.args)
    if left is None or right is None or left.variables() and right.variables():
        return
    left, right = (left, right) if left.variables() else (right, left)
    if isinstance(left.atom, Var):
        known[left.atom] = right
    elif isinstance(left.atom, BinOp) and left.atom.fn == "%":
        step, c, (v, *more) = left.atom.b.constant, right.constant, left.variables()
        rest = left.atom.a - expr(v)
        if step and not more and v not in known and not rest.variables() and c is not None and 0 <= c < step:
            first = (c - rest) % step
            known[v] = step * expr(fresh(ceildiv(v.size, step))) + first
