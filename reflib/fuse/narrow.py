"""Indices computed in 32 bits where they are known to fit.

torch's positions are int64: interpolation reads at ``(x * 0.5).to(int64)``. But from ``x < 224`` follows that they are
small, and a GPU converts and adds 64-bit integers at a fraction of the rate. So what an ``indirect`` is made of is
bounded, statement by statement, from the ranges of the loop variables; what stays within 32 bits is computed in these,
and an index that is known to be inside needs neither wrap nor check. Of a value read from memory the dtype is known.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ..ir.bounds import max_value
from ..ir.expr import ZERO
from ..ir.loops import BodyBuilder, Const, Index, Indirect, Load, LoopNest, Op, Reduce, Stmt, map_stmt, stmt_args
from ..options import Options
from ..target import Target
from .result import Fused

Range = tuple[float, float] | None  # both ends included; None: unknown
Ranges = dict[str, Range]  # by buffer
ONCE = "temp", 1  # a buffer of the program, which one node writes
ROUNDING = 1e-6  # of a float32, relative; generous
LARGE = 1e30  # what is computed from less is no infinity
SAME = frozenset(("add", "sub", "mul", "maximum", "minimum", "neg", "where"))  # of int32 as of int64, if all fits


def narrow(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. GPU only: a CPU's 64-bit additions are no slower."""
    if not target.is_gpu:
        return fused
    program, stored = fused.program, Ranges()
    writers = Counter(b for n in program.nodes for b in n.writes())
    nodes = []
    for n in program.nodes:
        nodes.append(_narrowed(n, stored) if isinstance(n, LoopNest) else n)
        if isinstance(n, LoopNest):
            stored |= {b: r for b, r in _stored(n, stored).items() if (program.buffers[b].kind, writers[b]) == ONCE}
    return replace(fused, program=replace(program, nodes=tuple(nodes)))


def _stored(loops: LoopNest, stored: Ranges) -> Ranges:
    """What is known of the integers in the buffers that it writes."""
    ranges, out = bounds(loops.body, stored), Ranges()
    for s in loops.stores():
        r, before = ranges[s.value], out.get(s.buffer, ranges[s.value])
        out[s.buffer] = None if r is None or before is None or s.reduce else _either(r, before)
    return out


def _narrowed(loops: LoopNest, stored: Ranges) -> LoopNest:
    body = loops.body
    indirect = [s for s in body if isinstance(s, Indirect)]
    if not indirect:
        return loops
    ranges = bounds(body, stored)
    fits = _fitting(body, ranges)
    small = _needed(body, [s.arg for s in indirect if fits[s.arg]])
    b = BodyBuilder()
    ids: dict[int, int] = {}  # as before
    short: dict[int, int] = {}  # in 32 bits
    for i, s in enumerate(body):
        for a in stmt_args(s):
            if a not in ids and not _takes_short(s, i in small):
                ids[a] = b.cast(short[a], torch.int64)
        if i in small:
            short[i] = b.add(_short(s, short, ids))
        elif isinstance(s, Indirect):
            checked = not _inside(ranges[s.arg], s) and s.checked
            ids[i] = b.add(replace(s, arg=short.get(s.arg, ids.get(s.arg, 0)), checked=checked))
        elif isinstance(s, Op) and s.op == "cast" and s.args[0] in short and s.dtype.is_floating_point:
            ids[i] = b.op("cast", short[s.args[0]], dtype=s.dtype)
        else:
            ids[i] = b.add(map_stmt(s, ids))
    return loops if tuple(b.body) == body else replace(loops, body=tuple(b.body))


def _takes_short(s: Stmt, small: bool) -> bool:
    """Does a statement, itself computed in 32 bits if it is ``small``, use the 32-bit values of its arguments?"""
    to_float = isinstance(s, Op) and s.op == "cast" and s.dtype.is_floating_point
    return small or isinstance(s, Indirect) or to_float


def _short(s: Stmt, short: dict[int, int], ids: dict[int, int]) -> Stmt:
    if isinstance(s, Op):
        args = tuple(short.get(a, ids.get(a, 0)) if s.op != "cast" else ids[a] for a in s.args)
        return replace(s, args=args, dtype=torch.int32)
    assert isinstance(s, (Const, Index))
    return replace(s, dtype=torch.int32)


def _fitting(body: Sequence[Stmt], ranges: Sequence[Range]) -> list[bool]:
    """For each statement: is it an int64 that can be computed in 32 bits?"""
    out: list[bool] = []
    for s, r in zip(body, ranges, strict=True):
        ok = r is not None and -(2**31) <= r[0] <= r[1] < 2**31 and getattr(s, "dtype", None) == torch.int64
        if ok and isinstance(s, Op):
            if s.op == "cast":
                ok = body[s.args[0]].dtype.is_floating_point  # type: ignore[union-attr]
            else:
                ok = s.op in SAME and all(out[a] for a in s.args[s.op == "where" :])
        out.append(ok and isinstance(s, (Op, Const, Index)))
    return out


def _needed(body: Sequence[Stmt], roots: Sequence[int]) -> set[int]:
    """``roots``, and the integers that they are made of."""
    out: set[int] = set()
    todo = list(roots)
    while todo:
        i = todo.pop()
        s = body[i]
        if i not in out:
            out.add(i)
            if isinstance(s, Op) and s.op != "cast":
                todo += s.args[s.op == "where" :]
    return out


def _inside(r: Range, s: Indirect) -> bool:
    size = s.size.constant
    return r is not None and size is not None and r[0] >= 0 and r[1] < size


# -- ranges of values ----------------------------------------------------------------------------------------
def bounds(body: Sequence[Stmt], stored: Ranges | None = None) -> list[Range]:
    """What is known of each statement's value; ``stored``: of what is read."""
    out: list[Range] = []
    for s in body:
        r = _loaded(s, stored or {}) if isinstance(s, Load) else _range(s, body, out)
        if r is not None and getattr(s, "dtype", torch.int64).is_floating_point:
            slack = ROUNDING * max(abs(r[0]), abs(r[1]))
            r = (r[0] - slack, r[1] + slack) if isinstance(s, Op) else r
        elif r is not None and (dtype := getattr(s, "dtype", torch.int64)) != torch.bool:
            limits = torch.iinfo(dtype)
            r = r if limits.min <= r[0] and r[1] <= limits.max else None  # it wraps around
        out.append(r if r is not None and max(abs(r[0]), abs(r[1])) < LARGE else None)
    return out


def _loaded(s: Load, stored: Ranges) -> Range:
    if s.dtype.is_floating_point or s.dtype == torch.bool:  # there may be a NaN
        return None
    r = stored.get(s.buffer) or (torch.iinfo(s.dtype).min, torch.iinfo(s.dtype).max)
    return r if s.mask is None else _either(r, (s.other, s.other))


def _range(s: Stmt, body: Sequence[Stmt], out: Sequence[Range]) -> Range:
    if isinstance(s, Reduce) and s.kind in ("argmax", "argmin"):
        return out[s.args[1]]
    if isinstance(s, Const):
        return (s.value, s.value)
    if isinstance(s, Index):
        top, bottom = max_value(s.expr), max_value(ZERO - s.expr)
        return None if top is None or bottom is None else (-bottom, top)
    if not isinstance(s, Op):
        return None
    args = [out[a] for a in s.args[s.op == "where" :]]
    known = [r for r in args if r is not None]
    if len(known) < len(args):
        return None
    if s.op == "cast":
        whole = body[s.args[0]].dtype.is_floating_point and not s.dtype.is_floating_point  # type: ignore[union-attr]
        (low, high), integer = known[0], s.dtype in (torch.int32, torch.int64)
        if not (integer or s.dtype.is_floating_point and s.dtype.itemsize >= 4):
            return None
        return (math.trunc(low), math.trunc(high)) if whole else (low, high)
    formula = _RANGES.get(s.op)
    return None if formula is None else formula(*known)


def _either(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return min(a[0], b[0]), max(a[1], b[1])


def _product(a: tuple[float, float], b: tuple[float, float]) -> Range:
    ends = [x * y for x in a for y in b]
    return min(ends), max(ends)


_RANGES: dict[str, Callable[..., Range]] = {
    "add": lambda a, b: (a[0] + b[0], a[1] + b[1]),
    "sub": lambda a, b: (a[0] - b[1], a[1] - b[0]),
    "mul": _product,
    "neg": lambda a: (-a[1], -a[0]),
    "remainder": lambda a, b: (0, b[1] - isinstance(b[1], int)) if b[0] > 0 else None,
    "maximum": lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
    "minimum": lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    "where": _either,
    "floor": lambda a: (math.floor(a[0]), math.floor(a[1])),
    "ceil": lambda a: (math.ceil(a[0]), math.ceil(a[1])),
    "round": lambda a: (math.floor(a[0]), math.ceil(a[1])),
    "trunc": lambda a: (math.trunc(a[0]), math.trunc(a[1])),
}
