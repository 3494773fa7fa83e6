"""What the values of statements can be: the least and the greatest number.

A position is within the ranges of its loop variables, an integer that is read within its dtype, and from there it goes
statement by statement. Of floating-point numbers only those are known that integers were made into: others may be NaN.
(``unless_nan``: what they are if they are not.)
"""

import ctypes
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..ir.bounds import max_value
from ..ir.expr import ZERO, Expr
from ..ir.loops import Const, Index, Load, Op, Reduce, Scan, Stmt

Range = tuple[float, float] | None  # both ends included; None: unknown
Ranges = dict[str, Range]  # by buffer
ROUNDING = 1e-6  # of a float32, relative; generous
EXACT = frozenset("maximum minimum floor ceil round trunc neg abs where".split())  # nothing is rounded
LARGE = 1e30  # what is computed from less is no infinity


def bounds(body: Sequence[Stmt], stored: Ranges | None = None, points: Expr = ZERO) -> list[Range]:
    """What is known of each statement's value. ``stored``: of what is read; ``points``: how many are reduced, or 0."""
    out: list[Range] = []
    for s in body:
        r = _loaded(s, stored or {}) if isinstance(s, Load) else _range(s, body, out, points.constant or 0)
        if r is not None and getattr(s, "dtype", torch.int64).is_floating_point:
            slack = ROUNDING * max(abs(r[0]), abs(r[1]))
            r = (r[0] - slack, r[1] + slack) if isinstance(s, Op) and s.op not in EXACT else r
        elif r is not None and (dtype := getattr(s, "dtype", torch.int64)) != torch.bool:
            limits = torch.iinfo(dtype)
            r = r if limits.min <= r[0] and r[1] <= limits.max else None  # it wraps around
        out.append(r if r is not None and max(abs(r[0]), abs(r[1])) < LARGE else None)
    return out


def unless_nan(body: Sequence[Stmt], known: Sequence[Range]) -> list[Range]:
    """``known``, and the ranges of clamped numbers, and of int64 made of these, for all but NaN."""
    out: list[Range] = []
    for s, r in zip(body, known, strict=True):
        if r is None and isinstance(s, Op):
            args = [out[a] or (is_float(body, a) and (-math.inf, math.inf)) or _any_of(body[a]) for a in s.args]
            whole = s.op == "cast" and is_float(body, s.args[0]) and s.dtype == torch.int64
            if s.op in EXACT or whole or not s.dtype.is_floating_point and s.op in ("add", "sub", "mul"):
                r = _trunc(*args) if whole else _RANGES[s.op](*args[s.op == "where" :])  # type: ignore[arg-type]
            if r is not None and s.dtype == torch.int64 and not -(2**63) <= r[0] <= r[1] < 2**63:
                r = None
        out.append(r)
    return out


def is_float(body: Sequence[Stmt], i: int) -> bool:
    return body[i].dtype.is_floating_point  # type: ignore[union-attr]


def _loaded(s: Load, stored: Ranges) -> Range:
    if s.dtype.is_floating_point or s.dtype == torch.bool:  # there may be a NaN
        return None
    r = stored.get(s.buffer) or _any_of(s)
    return r if s.mask is None or r is None else either(r, (s.other, s.other))


def _range(s: Stmt, body: Sequence[Stmt], out: Sequence[Range], points: int) -> Range:
    if isinstance(s, (Reduce, Scan)):
        r = out[s.args[-1]]
        if s.kind == "sum" and points and r is not None and not is_float(body, s.args[0]):
            return min(0, points * r[0]), max(0, points * r[1])
        return r if s.kind in ("argmax", "argmin", "max", "min", "sort") else None
    if isinstance(s, Const):
        value = ctypes.c_float(s.value).value if s.dtype == torch.float32 else s.value
        return value, value
    if isinstance(s, Index):
        top, bottom = max_value(s.expr), max_value(ZERO - s.expr)
        return None if top is None or bottom is None else (-bottom, top)
    if not isinstance(s, Op):
        return None
    args = [out[a] or _any_of(body[a]) for a in s.args[s.op == "where" :]]
    known = [r for r in args if r is not None]
    if len(known) < len(args):
        return None
    if s.op == "cast":
        whole = body[s.args[0]].dtype.is_floating_point and not s.dtype.is_floating_point  # type: ignore[union-attr]
        if s.dtype == torch.bool or s.dtype.is_floating_point and s.dtype.itemsize < 4:
            return None
        return _trunc(known[0]) if whole else known[0]
    formula = _RANGES.get(s.op)
    return None if formula is None else formula(*known)


def _any_of(s: Stmt) -> Range:
    """All integers of the dtype of an unknown one."""
    dtype = getattr(s, "dtype", torch.float32)
    if dtype.is_floating_point or dtype == torch.bool:
        return None if dtype.is_floating_point else (0, 1)
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def either(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return min(a[0], b[0]), max(a[1], b[1])


def _ends(op: Callable[[Any, Any], float]) -> Callable[..., Range]:
    """Of a function that grows or falls with each of two numbers: what it is at the ends of their ranges."""

    def formula(a: tuple[float, float], b: tuple[float, float]) -> Range:
        values = [op(x, y) for x in a for y in b]
        return min(values), max(values)

    return formula


def _whole(op: Callable[[float], int]) -> Callable[[tuple[float, float]], tuple[float, float]]:
    return lambda a: tuple(op(x) if math.isfinite(x) else x for x in a)  # type: ignore[return-value]


def _common(a: tuple[float, float], b: tuple[float, float]) -> Range:
    """Bits in both."""
    tops = [int(r[1]) for r in (a, b) if r[0] >= 0]
    return (0, min(tops)) if tops else None


def _shift(op: Callable[[int, int], int]) -> Callable[..., Range]:
    return lambda a, b: _ends(op)(a, b) if b[0] >= 0 and b[1] < 64 else None


_RANGES: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _ends(operator.mul),
    "and": _common,
    "shl": _shift(operator.lshift),
    "shr": _shift(operator.rshift),
    "abs": lambda a: (max(0, a[0], -a[1]), max(-a[0], a[1])),
    "floordiv": lambda a, b: _ends(operator.floordiv)(a, b) if b[0] > 0 and isinstance(b[0], int) else None,
    "neg": lambda a: (-a[1], -a[0]),
    "remainder": lambda a, b: (0, b[1] - isinstance(b[1], int)) if b[0] > 0 else None,
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "where": either,
    "floor": _whole(math.floor),
    "ceil": _whole(math.ceil),
    "round": lambda a: (_whole(math.floor)(a)[0], _whole(math.ceil)(a)[1]),
    "trunc": (_trunc := _whole(math.trunc)),
}
