"""With which sizes the program beside an exported model calls it."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence

from ..ir.data import decode
from ..ir.expr import Expr, Sym, expr
from ..wrap.convention import Guard
from .manifest import Argument, Program

TRIES = 5000


def callers(p: Program) -> list[Argument]:
    """Arguments that a caller in C++ gives: tensors and sizes."""
    return [a for a in p.arguments if a.tensor is not None or isinstance(decode(a.value), Sym)]


def sizes(p: Program) -> tuple[dict[str, int], bool]:
    """A small value for each symbol, by name: the least of its range, but 2. Where the program's guards exclude these,
    they are doubled, until all guards hold; they do for the sizes that it was exported with. And whether they hold."""
    guards = [Guard(g.kind, decode(g.what), g.text) for g in p.guards]
    symbols = {s.name: s for a in callers(p) for e in _indices(a) for s in e.symbols()}
    guarded = {s.name for g in guards for s in g.what.symbols()}
    ladders = [_ladder(s, p) if s.name in guarded else _ladder(s, p)[:1] for s in symbols.values()]
    tries = [tuple(r[0] for r in ladders), tuple(r[-1] for r in ladders)]
    if math.prod(map(len, ladders)) <= TRIES:
        tries = sorted(itertools.product(*ladders), key=lambda t: sum(map(abs, t)))
    found = [dict(zip(symbols, t)) for t in tries]
    good = next((f for f in found if _hold(guards, f)), None)
    return good or found[0], good is not None


def _ladder(s: Sym, p: Program) -> list[int]:
    """From the least value to the one that it was exported with."""
    least, most = p.ranges.get(s.name, (s.lo, s.hi))
    least = max(least, 2 if most is None else min(2, most))
    last = s.hint if s.hint is not None else least << 10 if most is None else min(least << 10, most)
    return [least, *(n for k in range(1, 63) if (n := least << k) < last), *([last] if last != least else [])]


def _indices(a: Argument) -> list[Expr]:
    return [*decode(a.tensor.shape), *decode(a.tensor.strides)] if a.tensor is not None else [expr(decode(a.value))]


def _hold(guards: Sequence[Guard], values: dict[str, int]) -> bool:
    with contextlib.suppress(ZeroDivisionError):
        return all(g.holds(values) for g in guards)
    return False
