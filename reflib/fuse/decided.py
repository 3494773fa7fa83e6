"""Comparisons of positions that are the same everywhere in a loop nest, and what follows from them.

``stack([a, b, c])[1]``, with its producer computed where it is read, asks of every element whether it is one of a's,
b's or c's. The ranges of the loop variables answer that: two of the three loads, and what was computed from them, go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from ..ir.expr import Expr, expr, nonneg
from ..ir.loops import BodyBuilder, Const, Index, Load, Op, Stmt, map_stmt
from ..ir.transforms import eliminate_dead

_ORDER = {"lt": (0, 1, 1), "gt": (1, 0, 1), "le": (0, 1, 0), "ge": (1, 0, 0)}  # the less, the more, by how much


def decided(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """``body`` with such comparisons as constants, and without what these make useless."""
    if not any(_comparison(body, s) is not None for s in body):
        return body
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(body):
        new = map_stmt(s, ids)
        known = _folded(b, new)
        ids[i] = b.add(new) if known is None else known
    return eliminate_dead(tuple(b.body))


def integer(s: Stmt) -> Expr | None:
    """A position, or a whole number, as an expression."""
    if isinstance(s, Index):
        return s.expr
    return expr(s.value) if isinstance(s, Const) and type(s.value) is int else None


def _comparison(body: Sequence[Stmt], s: Stmt) -> bool | None:
    if not isinstance(s, Op) or s.op not in _ORDER:
        return None
    low, high, least = _ORDER[s.op]
    a, z = integer(body[s.args[low]]), integer(body[s.args[high]])
    if a is None or z is None:
        return None
    return True if nonneg(z - a - least) else False if nonneg(a - z - 1 + least) else None


def _folded(b: BodyBuilder, s: Stmt) -> int | None:
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
    if s.op in ("and", "or") and s.dtype == torch.bool:
        absorbing = s.op == "or"
        for one, other in (s.args, s.args[::-1]):
            if (answer := truth(one)) is not None:
                return one if answer == absorbing else other
    return None
