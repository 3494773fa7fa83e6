"""Ranges of a size that are decided separately: which there are, where each is measured, and which end up together.

``register_custom_op_autotuning(dispatch_on=, split_points=)`` says where ranges end (``ir.program.Ranges``). A range is
measured at three sizes inside it (``representatives``); neighbours with one winner become one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ..ir.decision import key_of
from ..ir.expr import Expr, Sym, expr
from ..ir.program import Assume, Choice, Ranges, Variant
from ..logs import get as logger


@dataclass(frozen=True)
class Range:
    """The sizes ``least`` to ``most`` (None: no end). ``points``: values of size symbols to measure at, ascending.
    ``label``: for people; empty if it is all there is."""

    least: int = 1
    most: int | None = None
    points: tuple[dict[str, int], ...] = ({},)
    label: str = ""

    def predicate(self, ranges: Ranges | None) -> tuple[Assume, ...]:
        """The condition on a call's size, if it is in none of the earlier ranges."""
        return () if self.most is None or ranges is None else (Assume("at_most", ranges.size, self.most),)

    def implies(self, guard: Assume, ranges: Ranges | None) -> bool:
        """Does ``guard`` hold for all sizes in the range?"""
        if ranges is None or guard.what != ranges.size:
            return False
        if guard.kind == "at_least":
            return bool(self.least >= guard.value)
        return guard.kind == "at_most" and self.most is not None and bool(self.most <= guard.value)


def ranges_of(choice: Choice) -> list[Range]:
    """The ranges that a call may reach, in ascending order; one, at the traced sizes, where there is nothing to
    dispatch on."""
    dispatch = choice.ranges
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


def merged(
    winners: Sequence[Variant], ranges: Sequence[Range], dispatch: Ranges | None
) -> list[tuple[Variant, Range]]:
    """(winner, range): neighbouring ranges with one winner become one range."""
    out: list[tuple[Variant, Range]] = []
    for winner, r in zip(winners, ranges):
        if out and key_of(out[-1][0]) == key_of(winner) and dispatch is not None:
            before = out.pop()[1]
            r = _labelled(Range(before.least, r.most, before.points + r.points), dispatch)
        out.append((winner, r))
    return out
