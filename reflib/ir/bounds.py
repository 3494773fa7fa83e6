"""What can be proved about the range of an index expression: ``nonneg``, ``in_range``, the greatest value."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from .expr import Atom, BinOp, Expr, Ref, Sym, Var, expr

Result = TypeVar("Result")


EFFORT, DEEP = 400, 60  # proofs within one outermost call; one within another (Python's stack)


class _Remembered(threading.local):
    """Results within one outermost call. To prove a bound takes sums, sums are simplified, and that takes proofs of
    bounds, often the same ones again: without this the time grows exponentially with the nesting of // and %. Cleared
    after that call, because atoms are equal by name: another kernel's variable may have another size. What is still
    being decided, and what comes after EFFORT results, counts as not provable: a call takes bounded time."""

    depth = 0

    def __init__(self) -> None:
        self.results: dict[tuple, Any] = {}


_remembered = _Remembered()


def remembered(unknown: Callable[..., Result]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """A function of expressions whose results a ``_Remembered`` keeps; ``unknown``: where nothing is proved."""

    def decorate(fn: Callable[..., Result]) -> Callable[..., Result]:
        @wraps(fn)
        def call(*args: Expr) -> Result:
            r = _remembered
            key = (fn, *(e.terms for e in args))
            if key in r.results:
                return r.results[key]  # type: ignore[no-any-return]
            result = unknown(*args)
            if len(r.results) > EFFORT or r.depth > DEEP:
                return result
            r.results[key] = result
            r.depth += 1
            try:
                r.results[key] = result = fn(*args)
            finally:
                r.depth -= 1
                if not r.depth:
                    r.results = {}
            return result

        return call

    return decorate


@remembered(lambda *_: False)
def in_range(e: Expr, size: Expr) -> bool:
    """Can ``0 <= e < size`` be proved?"""
    if (low := _least(e)) is not None and (n := size.constant) is not None:
        return low >= 0 and _least(e, -1) > -n  # type: ignore[operator]
    return nonneg(e) and nonneg(size - 1 - e)


@remembered(lambda *_: False)
def nonneg(e: Expr) -> bool:
    """Can ``e >= 0`` be proved? Bounded atoms are replaced, one by one, by the end of their range that makes ``e``
    least; size symbols by ``lo + t``; then no coefficient may be negative."""
    if (low := _least(e)) is not None:
        return low >= 0
    if all(c > 0 and all(_atom_nonneg(a) for a in m) for m, c in e.terms):
        return True
    if (bounded := _pick_bounded(e)) is not None:
        atom, c, upper = bounded
        rest = e - c * expr(atom)
        if nonneg(c):
            return nonneg(rest)
        return nonneg(-c) and nonneg(rest + c * upper)
    choices = [a for m, _ in e.terms for a in m if isinstance(a, BinOp) and a.fn in ("max", "min")]
    if choices:
        return any(_nonneg_choice(e, a) for a in choices)
    if any(not isinstance(a, Sym) for m, _ in e.terms for a in m):
        return False
    shifted = e.subs({s: expr(Sym(s.name + "'")) + s.lo for s in e.symbols() if s.lo})
    return all(c >= 0 for _, c in shifted.terms)


def _least(e: Expr, sign: int = 1) -> int | None:
    """The least value of ``sign * e``, if it is a sum of numbers times loop variables of known sizes."""
    least = 0
    for m, c in e.terms:
        if m and (len(m) > 1 or not isinstance(m[0], (Var, Ref)) or m[0].size.constant is None):
            return None
        least += min(0, sign * c) * (m[0].size.constant - 1) if m else sign * c  # type: ignore[attr-defined, operator]
    return least


def _nonneg_choice(e: Expr, a: BinOp) -> bool:
    """max(x, y) is at least x and at least y, min(x, y) at most: enough if ``e`` is >= 0 with either of them."""
    c = e.coefficient(a)
    if c is None or not nonneg(c if a.fn == "max" else -c):
        return False
    rest = e - c * expr(a)
    return nonneg(rest + c * a.a) or nonneg(rest + c * a.b)


def _pick_bounded(e: Expr) -> tuple[Atom, Expr, Expr] | None:
    """A bounded atom in which ``e`` is linear, its coefficient and its upper bound. Loop variables come first: a ``//``
    or ``%`` may contain them."""
    atoms = list(dict.fromkeys(a for m, _ in e.terms for a in m if not isinstance(a, Sym)))
    for a in sorted(atoms, key=lambda a: isinstance(a, BinOp)):
        c = e.coefficient(a)
        upper = None if c is None else _atom_upper(a)
        if c is not None and upper is not None and not upper.has(a):
            return a, c, upper
    return None


def _atom_nonneg(a: Atom) -> bool:
    if isinstance(a, Sym):
        return a.lo >= 0
    if isinstance(a, BinOp):
        if a.fn == "%":
            return True
        if a.fn == "max":
            return nonneg(a.a) or nonneg(a.b)
        return nonneg(a.a) and nonneg(a.b)
    return True


def _atom_upper(a: Atom) -> Expr | None:
    """The greatest value of a bounded atom that is never negative; None if unknown."""
    if isinstance(a, (Var, Ref)):
        return a.size - 1
    if isinstance(a, BinOp) and a.fn == "%":
        return a.b - 1
    if isinstance(a, BinOp) and a.fn == "//" and nonneg(a.a):
        top = upper_bound(a.a)
        return None if top is None else top // a.b
    return None


def upper_bound(e: Expr) -> Expr | None:
    """An expression without loop variables that ``e`` never exceeds; None if none was found."""
    for _ in range(64):
        a = next((a for m, _ in e.terms for a in m if isinstance(a, (Var, Ref, BinOp))), None)
        if a is None:
            return e
        c = e.coefficient(a)
        upper = _atom_upper(a)
        if c is None or upper is None or upper.has(a):
            return None
        rest = e - c * expr(a)
        if nonneg(c):
            e = rest + c * upper
        elif nonneg(-c) and _atom_nonneg(a):
            e = rest
        else:
            return None
    return None


def max_value(e: Expr) -> int | None:
    """The greatest value as an int (symbols at ``hi``), or None when unbounded."""
    if (top := upper_bound(e)) is None:
        return None
    total = 0
    for m, c in top.terms:
        term = c
        for a in m:
            if not isinstance(a, Sym) or a.hi is None or a.lo < 0:
                return None
            term *= a.hi if c > 0 else a.lo
        total += term
    return total
