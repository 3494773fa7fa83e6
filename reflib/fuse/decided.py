"""Comparisons of positions that are the same everywhere in a loop nest, and what follows from them.

``stack([a, b, c])[1]``, with its producer computed where it is read, asks of every element whether it is one of a's,
b's or c's. The ranges of the loop variables answer that: two of the three loads, and what was computed from them, go.
Where a mask holds, these ranges are tighter (``narrowed``). What two masks select from is loaded, and computed, once
(``shared_loads``, ``without_selects``).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from math import prod

import torch

from ..ir.expr import Atom, Expr, Var, ceildiv, expr, nonneg
from ..ir.loops import BodyBuilder, Const, Index, Load, Op, Stmt, Store, map_stmt, stmt_args
from ..ir.transforms import eliminate_dead, needed
from .mapping import fresh

Exprs = dict[Atom, Expr]

ORDER = {"lt": (0, 1, 1), "gt": (1, 0, 1), "le": (0, 1, 0), "ge": (1, 0, 0)}  # the less, the more, by how much
OPPOSITE = ({"lt", "ge"}, {"gt", "le"})


def decided(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """``body`` with such comparisons as constants, and without what these make useless."""
    if not any(_comparison(body, s) is not None for s in body):
        return body
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(body):
        new = map_stmt(s, ids)
        known = folded(b, new)
        ids[i] = b.add(new) if known is None else known
    return eliminate_dead(tuple(b.body))


def integer(s: Stmt) -> Expr | None:
    """A position, or a whole number, as an expression."""
    if isinstance(s, Index):
        return s.expr
    return expr(s.value) if isinstance(s, Const) and type(s.value) is int else None


def _comparison(body: Sequence[Stmt], s: Stmt) -> bool | None:
    spare = excess(body, s)
    return None if spare is None else True if nonneg(spare) else False if nonneg(-spare - 1) else None


def excess(body: Sequence[Stmt], s: Stmt) -> Expr | None:
    """For a comparison of positions: what is not negative where it holds."""
    if not isinstance(s, Op) or s.op not in ORDER:
        return None
    low, high, least = ORDER[s.op]
    a, z = integer(body[s.args[low]]), integer(body[s.args[high]])
    return None if a is None or z is None else z - a - least


def folded(b: BodyBuilder, s: Stmt) -> int | None:
    """The statement, in ``b``, that has the value of ``s``."""

    def truth(i: int) -> bool | None:
        known = b.body[i]
        return bool(known.value) if isinstance(known, Const) and known.dtype == torch.bool else None

    if isinstance(s, Load) and s.mask is not None and truth(s.mask) is not None:
        return b.add(replace(s, mask=None)) if truth(s.mask) else b.const(s.other, s.dtype)
    if not isinstance(s, Op):
        return None
    if (answer := _comparison(b.body, s)) is not None:
        return b.const(answer, torch.bool)
    if s.op == "where" and (answer := truth(s.args[0])) is not None:
        return s.args[1 if answer else 2]
    if s.op == "or" and _opposite(b.body, *s.args):
        return b.const(True, torch.bool)
    if s.op in ("and", "or") and s.dtype == torch.bool:
        absorbing = s.op == "or"
        for one, other in (s.args, s.args[::-1]):
            if (answer := truth(one)) is not None:
                return one if answer == absorbing else other
    return None


def _opposite(body: Sequence[Stmt], a: int, z: int) -> bool:
    """Does one comparison of positions hold wherever the other does not?"""
    s, t = body[a], body[z]
    if not (isinstance(s, Op) and isinstance(t, Op) and s.args == t.args and {s.op, t.op} in OPPOSITE):
        return False
    return all(integer(body[i]) is not None for i in s.args)


def narrowed(body: Sequence[Stmt], mask: int | None) -> tuple[Exprs, Exprs]:
    """Where a mask holds, the loop variables it compares have tighter ranges: with ``v >= 4 and v < 8``, v is ``w + 4``
    for some w < 4. Divisions simplify with that; elsewhere the values are wrong, but masked off. Returns v -> w + 4,
    w -> v - 4."""
    bounds: dict[Var, list[Expr]] = {}
    if mask is not None:
        _collect_bounds(body, mask, bounds)
    narrow: Exprs = {}
    widen: Exprs = {}
    for v, (low, high) in bounds.items():
        w = fresh(high - low)
        narrow[v], widen[w] = expr(w) + low, expr(v) - low
    return narrow, widen


def held(body: tuple[Stmt, ...], mask: int | None) -> float:
    """At which part of the points a mask holds; the others cost little."""
    _, there = narrowed(body, mask)
    news = ((w, v) for w, e in there.items() if isinstance(w, Var) for v in e.variables())
    return prod(w.size.hint() / max(1, v.size.hint()) for w, v in news)


def _collect_bounds(body: Sequence[Stmt], value: int, bounds: dict[Var, list[Expr]]) -> None:
    """From comparisons such as ``v + c < e``, joined by ``and``: [low, high) of each variable."""
    s = body[value]
    if not isinstance(s, Op):
        return
    if s.op == "and":
        for a in s.args:
            _collect_bounds(body, a, bounds)
    elif s.op in ("lt", "le", "gt", "ge"):
        left, right = (integer(body[a]) for a in s.args)
        if left is None or right is None:
            return
        op = s.op
        if left.variables() and right.variables():
            return
        if right.variables():
            left, right, op = right, left, {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}[op]
        for v in left.variables():
            c = left.coefficient(v)
            if c is None or c.constant is None or c.constant < 1 or left.variables() != {v}:
                continue
            low, high = bounds.setdefault(v, [expr(0), v.size])
            edge = ceildiv(right - (left - c * expr(v)) + (1 if op in ("le", "gt") else 0), c)  # c*v < right: v < edge
            if op in ("lt", "le"):
                bounds[v][1] = edge if nonneg(high - edge) else high
            else:
                bounds[v][0] = edge if nonneg(edge - low) else low


def shared_loads(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """``body`` with one load for those of one element under several masks that positions decide: where one of these
    holds. Of ``stack([a + b, a - b])``, of which every element is one or the other, a and b are then loaded once."""
    masks: dict[tuple[str, Expr], dict[int | None, None]] = {}
    for s in body:
        if isinstance(s, Load):
            masks.setdefault((s.buffer, s.index), {})[s.mask] = None
    stored = {s.buffer for s in body if isinstance(s, Store)}
    several = {at: [m for m in found if m is not None] for at, found in masks.items() if len(found) > 1}
    several = {at: ms for at, ms in several.items() if at[0] not in stored and all(_by_position(body, m) for m in ms)}
    if not several:
        return body
    b = BodyBuilder()
    ids: dict[int, int] = {}

    def add(i: int) -> int:
        if i not in ids:
            for a in stmt_args(body[i]):
                add(a)
            ids[i] = b.add(map_stmt(body[i], ids))
        return ids[i]

    for i, s in enumerate(body):
        if not isinstance(s, Load) or (s.buffer, s.index) not in several:
            add(i)
            continue
        at = several[s.buffer, s.index]
        mask = None if None in masks[s.buffer, s.index] else reduce(lambda x, y: b.op("or", x, y), map(add, at))
        new = map_stmt(s, ids)
        assert isinstance(new, Load)
        known = None if mask is None else folded(b, b.body[mask])
        if known is not None and b.body[known] == Const(True, torch.bool):
            mask = None
        value = b.add(replace(new, mask=mask, other=0))
        ids[i] = value if new.mask is None else b.op("where", new.mask, value, b.const(s.other, s.dtype))
    return eliminate_dead(tuple(b.body))


def joined(body: Sequence[Stmt], mask: int | None) -> int:
    """Of how many masks ``shared_loads`` made this one: each of them holds in a part of the lanes."""
    s = None if mask is None else body[mask]
    return sum(joined(body, a) for a in s.args) if isinstance(s, Op) and s.op == "or" else 1


def _by_position(body: Sequence[Stmt], mask: int) -> bool:
    return all(isinstance(body[i], (Index, Const, Op)) for i in needed(body, [mask]))


def selected(body: Sequence[Stmt]) -> dict[int, set[int]]:
    """Per statement: the masks that hold wherever its value matters."""
    under: dict[int, set[int]] = {}

    def used(i: int, masks: set[int]) -> None:
        under[i] = under[i] & masks if i in under else set(masks)

    for i in reversed(range(len(body))):
        s, mine = body[i], under.setdefault(i, set())
        if isinstance(s, Op) and s.op == "where":
            m, a, b = s.args
            used(m, mine - {m})
            used(a, mine | {m})
            used(b, mine)
        else:
            for a in stmt_args(s):  # an access is made, and a position checked, whether its value matters or not
                used(a, mine if isinstance(s, (Op, Index)) else set())
    return under


def without_selects(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Without each ``where m ...`` whose value matters only where ``m`` holds, since another selects by ``m`` later."""
    under = selected(body)
    wheres = {i: s.args for i, s in enumerate(body) if isinstance(s, Op) and s.op == "where"}
    same = {i: args[1] for i, args in wheres.items() if args[0] in under[i]}
    if not same:
        return body
    out = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(body):
        ids[i] = ids[same[i]] if i in same else out.add(map_stmt(s, ids))
    return eliminate_dead(tuple(out.body))
