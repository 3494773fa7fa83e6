"""Does a store fill a tensor: are its places (``launch_stores``) 0, 1, ..., each once?

The points that its mask leaves and the elements are one to one if each bound is of a number whose digits are points
(``BLOCK*j + e`` counts up to at least ``n``), and the place is written in such numbers as digits (``n*row + i``),
without gaps. All sizes may be symbols. What cannot be proved counts as untrue.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..ir.expr import ONE, ZERO, BinOp, Expr, Var, divide_exact, expr, nonneg, product

UNCLEAR = "it is not clear that it stores every element exactly once"
MOST_PROGRAMS = 1 << 14  # whose places are tried one by one


class NotSimple(Exception):
    """Why nothing can be appended to a store: the rest of a sentence about the kernel."""


@dataclass(frozen=True)
class Number:
    """An integer, or a block of them. ``points``: all that it has an element for, also where its value is the same.
    ``fixed``: Triton knows it when it compiles."""

    value: Expr
    points: frozenset[Var] = frozenset()
    rank: int = 0
    fixed: bool = False


@dataclass
class Stored:
    """The one store to an argument. ``call``: in ``source``'s syntax tree. ``masked``: has it a mask? ``types``:
    expressions that are the type of the argument's elements. ``positive``: of the mask, and of the loops around it."""

    call: ast.Call
    masked: bool
    place: Number
    positive: tuple[Expr, ...]
    points: frozenset[Var]
    types: list[ast.expr] = field(default_factory=list)


def covers(s: Stored, total: Expr) -> None:
    """Are the places 0, 1, ... ``total`` - 1, each once? Raises NotSimple if that is not clear."""
    env = _programs_in_two([s.place.value, *s.positive], s.points)
    place = s.place.value.subs(env)
    points = {p for v in s.points for p in expr(v).subs(env).variables()}
    axes = [p.name.partition("_")[0] for p in points if p.name[0] == "e"]
    if len(set(axes)) < len(axes) or place.variables() - points:
        raise NotSimple(UNCLEAR)
    digits = _bounded([e.subs(env) for e in s.positive], points)
    steps = []
    for d, n in digits:
        unit = next((v for v in sorted(d.variables()) if d.coefficient(v) == 1), None)
        step = place.coefficient(unit) if unit is not None else None
        if step is None:
            raise NotSimple(UNCLEAR)
        place = place - step * d
        steps += [(step, n)] if n != 1 else []
    size = ONE
    while steps:
        found = next((s for s in steps if s[0] == size), None)
        if found is None:
            raise NotSimple(UNCLEAR)
        steps.remove(found)
        size = size * found[1]
    if place != 0 or size != total:
        raise NotSimple(UNCLEAR)


def _programs_in_two(values: Sequence[Expr], points: Iterable[Var]) -> dict[Any, Any]:
    """``pid // n`` and ``pid % n`` are two points."""
    env: dict[Any, Any] = {}
    parts = {a for e in values for a in e.atoms() if isinstance(a, BinOp)}
    for v in points:
        by = {a.b for a in parts if a.a == expr(v) and a.fn in ("//", "%")}
        rest = divide_exact(v.size, next(iter(by))) if len(by) == 1 else None
        if rest is not None:
            (n,) = by
            env[v] = expr(Var(f"{v.name}_high", rest)) * n + expr(Var(f"{v.name}_low", n))
    return env


def _bounded(positive: list[Expr], points: set[Var]) -> list[tuple[Expr, Expr]]:
    """(number, bound): from 0 to the bound, each value at one combination of the number's points. Together they have
    all of ``points``."""
    positive = [e for e in dict.fromkeys(positive) if not nonneg(e - 1)]
    positive = [e for e in positive if not any(o != e and nonneg(e - o) for o in positive)]  # another one implies it
    bounds = [Expr(tuple(t for t in e.terms if not Expr((t,)).variables())) for e in positive]
    out = [(bound - e, bound) for e, bound in zip(positive, bounds)]
    divided = [d for d in out if any(isinstance(a, BinOp) for a in d[0].atoms())]
    free = points - _by_programs(divided, points) if divided else set(points)
    for number, bound in out:
        if (number, bound) in divided:
            continue
        inside = number.variables()
        if not inside or not inside <= free or not _at_least(_count(number), bound):
            raise NotSimple(UNCLEAR)
        free -= inside
    return [*out, *((expr(v), v.size) for v in free)]


def _by_programs(bounded: list[tuple[Expr, Expr]], points: set[Var]) -> set[Var]:
    """The points that these numbers have. Each is a function of the program plus an element's place in a block: all
    blocks together are one to one with the programs? (Programs in another order than that of rows and columns, for the
    cache: all of them are tried.)"""
    programs = [v for v in sorted(points) if v.name[0] == "p"]
    grid = product(v.size for v in programs).constant
    if grid is None or not 0 < grid <= MOST_PROGRAMS:
        raise NotSimple(UNCLEAR)
    taken = set(programs)
    where, count = [0] * grid, 1  # the number of each program's block
    for e, bound in bounded:
        inside = e.variables() - set(programs)
        first = e.subs(dict.fromkeys(inside, 0))
        size = _count(e - first).constant
        if not size or first.symbols() or taken & inside or not inside <= points:
            raise NotSimple(UNCLEAR)
        values = [first.evaluate(env) for env in _places(programs)]
        several = max(values) // size + 1
        if min(values) < 0 or any(v % size for v in values) or not nonneg(size * several - bound):
            raise NotSimple(UNCLEAR)
        where, count = [w * several + v // size for w, v in zip(where, values)], count * several
        taken |= inside
    if count != grid or len(set(where)) != grid:
        raise NotSimple(UNCLEAR)
    return taken


def _places(programs: list[Var]) -> Iterator[dict[Var, int]]:
    for at in itertools.product(*(range(int(v.size)) for v in programs)):
        yield dict(zip(programs, at))


def _count(number: Expr) -> Expr:
    """How far ``number`` counts, whose digits are its points; 0 if it does not count."""
    found = digits(number, number.variables())
    return ZERO if found is None else product(v.size for v in found)


def digits(number: Expr, points: Iterable[Var]) -> list[Var] | None:
    """``points`` as the digits of ``number``, the lowest first; None if they are not."""
    left, step, rest, found = list(points), ONE, number, list[Var]()
    while left:
        v = next((v for v in left if rest.coefficient(v) == step), None)
        if v is None:
            return None
        left.remove(v)
        found.append(v)
        rest = rest - step * expr(v)
        step = step * v.size
    return found if rest == 0 else None


def _at_least(count: Expr, bound: Expr) -> bool:
    """``count >= bound``? The rounded-up quotients in it are at least what they round."""
    if nonneg(count - bound):
        return True
    for a in count.atoms():
        if isinstance(a, BinOp) and a.fn == "//" and (k := count.coefficient(a)) is not None and nonneg(k):
            rest = count - k * expr(a)  # a >= (a.a - a.b + 1) / a.b
            if nonneg(a.b * rest + k * (a.a - a.b + 1) - a.b * bound):
                return True
    return False


def at_least_0(e: Expr) -> bool:
    """``e >= 0``? A minimum is, where both of its operands are."""
    if nonneg(e):
        return True
    a = next((a for a in sorted(e.atoms()) if isinstance(a, BinOp) and a.fn == "min"), None)
    c = e.coefficient(a) if a is not None else None
    if a is None or c is None or not nonneg(c) or c == 0:
        return False
    return all(at_least_0(e - c * expr(a) + c * operand) for operand in (a.a, a.b))


def positive(e: Expr) -> bool:
    """``e > 0``? (A quotient is, where there is as much as is divided by.)"""
    a = e.atom
    return at_least_0(e - 1) or isinstance(a, BinOp) and a.fn == "//" and nonneg(a.a - a.b)
