"""Ranges of a size that are decided separately: which there are, where each is measured, and which end up together.

``register_custom_op_autotuning(dispatch_on=, split_points=)`` says where ranges end (``ir.program.Ranges``). A range is
measured at three sizes inside it (``representatives``); neighbours with one winner become one.

Two sizes (``inner``): each range of the first is divided by the ranges of the second, in this order; a call takes the
first whose ends are not below its sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

from ..ir.decision import Key
from ..ir.expr import Expr, Sym, expr
from ..ir.program import Assume, Choice, Ranges, Template, Variant
from ..logs import get as logger


@dataclass(frozen=True)
class Range:
    """The sizes ``least`` to ``most`` (None: no end). ``points``: values of size symbols to measure at, ascending.
    ``label``: for people; empty if it is all there is. ``inner``: of the second size."""

    least: int = 1
    most: int | None = None
    points: tuple[dict[str, int], ...] = ({},)
    label: str = ""
    inner: Range | None = None

    def predicate(self, ranges: Ranges | None) -> tuple[Assume, ...]:
        """The condition on a call's size, if it is in none of the earlier ranges."""
        more = self.inner.predicate(inner_of(ranges)) if self.inner is not None else ()
        return more if self.most is None or ranges is None else (Assume("at_most", ranges.size, self.most), *more)

    def implies(self, guard: Assume, ranges: Ranges | None) -> bool:
        """Does ``guard`` hold for all sizes in the range?"""
        if self.inner is not None and self.inner.implies(guard, inner_of(ranges)):
            return True
        if ranges is None or guard.what != ranges.size:
            return False
        if guard.kind == "at_least":
            return bool(self.least >= guard.value)
        return guard.kind == "at_most" and self.most is not None and bool(self.most <= guard.value)


def inner_of(ranges: Ranges | None) -> Ranges | None:
    return ranges.inner if ranges is not None else None


def key_of(a: Variant) -> Key:
    """The key follows from the nodes: the name alone, or with the tiling that the Template was given."""
    t = next((n for n in a.nodes if isinstance(n, Template) and n.tiling is not None), None)
    return Key(a.name) if t is None else Key(a.name, t.tiling, t.closed)


def ranges_of(choice: Choice) -> list[Range]:
    """The ranges that a call may reach, in ascending order; one, as traced, where nothing is dispatched on."""
    found, second = _ranges_of(choice.ranges), inner_of(choice.ranges)
    if second is None:
        return found
    if choice.ranges is not None and choice.ranges.size.symbols() & second.size.symbols():
        say_once(f"{choice.ranges.what} and {second.what} depend on one size of the inputs: the first decides alone")
        return found
    return [_within(a, b) for a in found for b in _ranges_of(second)]


def _within(a: Range, b: Range) -> Range:
    """The part of ``a`` in which the second size is in ``b``."""
    count = max(len(a.points), len(b.points))
    pairs = [(r.points[min(i, len(r.points) - 1)] for r in (a, b)) for i in range(count)]
    points = tuple({**first, **second} for first, second in pairs)
    return replace(a, points=points, inner=b, label=", ".join(x for x in (a.label, b.label) if x))


def _ranges_of(dispatch: Ranges | None) -> list[Range]:
    symbol = _symbol(dispatch) if dispatch is not None else None
    if dispatch is None or symbol is None:
        return [Range()]
    first, last = (symbol.lo, symbol.hi) if dispatch.size == expr(symbol) else (1, None)
    out: list[Range] = []
    least = 1
    for end in (*dispatch.splits, None):
        most = dispatch.upper if end is None else end
        if most >= first and (last is None or least <= last):  # other sizes cannot come
            top = most if last is None else min(most, last)
            sizes = representatives(max(least, first), top)
            points = tuple({symbol.name: v} for v in sorted({_symbol_value(dispatch.size, symbol, n) for n in sizes}))
            open_end = end is None or last is not None and most >= last
            out.append(_labelled(Range(least, None if open_end else most, points), dispatch))
        least = most + 1
    return out or [Range()]


def _symbol(dispatch: Ranges) -> Sym | None:
    """The one symbol to dispatch on; None, and a line in the log where it matters, if there is no such."""
    symbols, now = dispatch.size.symbols(), dispatch.size.constant
    if now is not None and now > dispatch.upper:
        message = "%s = %d is outside the sizes that were tuned, 1 to %d: the nearest range serves"
        logger("autotune").warning(message, dispatch.what, now, dispatch.upper)
    if len(symbols) > 1:
        size = f"{dispatch.what} = {dispatch.size}"
        say_once(f"{size} depends on several sizes of the inputs: one decision for all of them")
    return next(iter(symbols)) if now is None and len(symbols) == 1 else None


@cache
def say_once(message: str) -> None:
    logger("autotune").warning(message)


def _labelled(r: Range, dispatch: Ranges) -> Range:
    end = f"{dispatch.what} >= {r.least}" if r.most is None else f"{r.least} <= {dispatch.what} <= {r.most}"
    return replace(r, label=end)


def representatives(least: int, most: int) -> list[int]:
    """Three sizes inside least..most: a third and two thirds of the way up on a logarithmic scale, and the top. Those
    inside are round where there is room (three binary digits), as the sizes are that people use: a size that nothing
    divides would rule out every candidate that needs a divisor.

    >>> representatives(5, 128), representatives(129, 4096)
    ([14, 40, 128], [384, 1280, 4096])
    """
    if most <= least:
        return [least]
    inside = (_rounded(least * (most / least) ** f) for f in (1 / 3, 2 / 3))
    return sorted({*(min(max(least, size), most) for size in inside), most})


def _rounded(size: float) -> int:
    unit = 1 << max(0, int(size).bit_length() - 3)
    return round(size / unit) * unit


def _symbol_value(size: Expr, symbol: Sym, value: int) -> int:
    """The symbol's value for which ``size`` (linear in it) is about ``value``."""
    zero, one = (int(size.evaluate({symbol.name: v})) for v in (0, 1))
    return max(1, symbol.lo, (value - zero) // max(1, one - zero))


def merged(winners: Sequence[Variant], ranges: Sequence[Range], dispatch: Ranges | None) -> list[tuple[Variant, Range]]:
    """(winner, range): neighbouring ranges with one winner become one range; of two sizes, those of the second do in
    each range of the first, and then ranges of the first that are divided in the same way."""
    second = inner_of(dispatch)
    if dispatch is None or second is None or any(r.inner is None for r in ranges):
        return _joined(list(zip(winners, ranges)), dispatch)
    rows: list[list[tuple[Variant, Range]]] = []
    for _, group in groupby(zip(winners, ranges), lambda pair: pair[1].least):
        parts = list(group)
        inner = _joined([(w, replace(r.inner, points=r.points)) for w, r in parts if r.inner is not None], second)
        row = [(w, replace(parts[0][1], points=i.points, inner=i)) for w, i in inner]
        if rows and _divided(rows[-1]) == _divided(row):
            both = zip(row, rows.pop())
            row = [(w, replace(r, least=before.least, points=before.points + r.points)) for (w, r), (_, before) in both]
        rows.append(row)
    return [(w, replace(r, label=_label_of_both(r, dispatch, second))) for row in rows for w, r in row]


def _divided(row: Sequence[tuple[Variant, Range]]) -> list[Any]:
    return [(key_of(w), r.inner.most if r.inner is not None else None) for w, r in row]


def _label_of_both(r: Range, first: Ranges, second: Ranges) -> str:
    parts = ((x, d) for x, d in ((r, first), (r.inner, second)) if x is not None and (x.least, x.most) != (1, None))
    return ", ".join(_labelled(x, d).label for x, d in parts)


def _joined(served: Sequence[tuple[Variant, Range]], dispatch: Ranges | None) -> list[tuple[Variant, Range]]:
    out: list[tuple[Variant, Range]] = []
    for winner, r in served:
        if out and key_of(out[-1][0]) == key_of(winner) and dispatch is not None:
            before = out.pop()[1]
            r = _labelled(replace(r, least=before.least, points=before.points + r.points), dispatch)
        out.append((winner, r))
    return out
