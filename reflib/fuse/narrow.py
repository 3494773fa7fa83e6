"""Integers computed in 32 bits where they are known to fit, and not at all where they are known.

torch's positions are int64: interpolation reads at ``(x * 0.5).to(int64)``, and to shift an int32 by a number in a table
makes an int64 of it. But from ``x < 224`` follows that positions are small, and a GPU converts and adds 64-bit integers
at a fraction of the rate. So integers are bounded, statement by statement, from the ranges of the loop variables, and
of a value read from memory by the dtype. What is made of those that stay within 32 bits (an index, a floating-point or
shorter number, a comparison) is computed in these; an index that is known to be inside needs neither wrap nor check;
and a comparison that is always true, or a limit that is never reached, is no statement at all.

A number that a conversion from floating point makes is unknown, but what is clamped to 0 <= x < 2^31 may be converted
to 32 bits right away: the conversion goes to the nearest integer there is, and of NaN makes 0 as the clamp does.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from ..ir.bounds import max_value
from ..ir.expr import ZERO
from ..ir.loops import (
    BodyBuilder, Const, Index, Indirect, Load, LoopNest, Op, Reduce, Stmt, Store, map_stmt, stmt_args,
)  # fmt: skip
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import eliminate_dead
from ..options import Options
from ..target import Target
from .decided import folded
from .result import Fused

Range = tuple[float, float] | None  # both ends included; None: unknown
Ranges = dict[str, Range]  # by buffer
ONCE = "temp", 1  # a buffer of the program, which one node writes
ROUNDING = 1e-6  # of a float32, relative; generous
LARGE = 1e30  # what is computed from less is no infinity
TABLE = 1024  # elements of a tensor in the graph that are looked at
# Of int32 as of int64, if all fits.
SAME = frozenset("add sub mul maximum minimum neg abs and or xor where floordiv truncdiv remainder".split())
SIGNS = {"lt": (-1,), "le": (-1, 0), "gt": (1,), "ge": (1, 0), "eq": (0,), "ne": (-1, 1)}  # of what x - y may be


def narrow(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. GPU only: a CPU's 64-bit additions are no slower."""
    if not target.is_gpu:
        return fused
    program, stored = fused.program, _tables(fused.program.constants)
    writers = Counter(b for n in program.nodes for b in n.writes())
    buffers, own = dict(program.buffers), _own(program)
    nodes: list[Node] = []
    for n in program.nodes:
        if isinstance(n, LoopNest):
            n = _decided(_of_dtypes(n, buffers), stored)
            stored |= {b: r for b, r in _stored(n, stored).items() if (buffers[b].kind, writers[b]) == ONCE}
            buffers |= {b: replace(buffers[b], dtype=_least(stored.get(b))) for b in n.writes() if b in own}
            n = _narrowed(_of_dtypes(n, buffers), stored)
        nodes.append(n)
    return replace(fused, program=replace(program, nodes=tuple(nodes), buffers=buffers))


def _own(program: Program) -> set[str]:
    """The buffers of int64 that one loop nest writes and other ones read, and nothing else sees."""
    out = {n for n, b in program.buffers.items() if (b.dtype, b.kind) == (torch.int64, "temp")}
    out -= program.output_buffers()
    writers = Counter(b for n in program.nodes for b in n.writes())
    for n in program.nodes:
        used = {*n.reads(), *n.writes()}
        out -= {*n.reads()} & {*n.writes()} if isinstance(n, LoopNest) else used
        if isinstance(n, LoopNest):
            out -= {s.buffer for s in n.stores() if s.reduce} | {s.buffer for s in n.loads() if abs(s.other) > 127}
    return {b for b in out if writers[b] == 1}


def _least(r: Range) -> torch.dtype:
    """The shortest dtype for integers in this range."""
    fits = (d for d in (torch.int8, torch.int16, torch.int32) if r and torch.iinfo(d).min <= r[0] <= r[1] <= torch.iinfo(d).max)
    return next(fits, torch.int64)


def _of_dtypes(loops: LoopNest, buffers: Mapping[str, Buffer]) -> LoopNest:
    """``loops``, reading and writing buffers of integers that have become shorter ones."""
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(loops.body):
        new = map_stmt(s, ids)
        if isinstance(new, (Load, Store)) and not (dtype := buffers[new.buffer].dtype).is_floating_point:
            if isinstance(new, Load) and new.dtype == torch.int64 != dtype:
                ids[i] = b.cast(b.add(replace(new, dtype=dtype)), torch.int64)
                continue
            if isinstance(new, Store) and b.dtype(new.value) == torch.int64 != dtype:
                new = replace(new, value=b.cast(new.value, dtype))
        ids[i] = b.add(new)
    return loops if len(b.body) == len(loops.body) else replace(loops, body=tuple(b.body))


def _tables(constants: Mapping[str, Any]) -> Ranges:
    """Of the integers in tensors that the graph holds."""
    short = {n: t for n, t in constants.items() if type(t) is torch.Tensor and 0 < t.numel() <= TABLE}
    whole = {n: t for n, t in short.items() if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)}
    with unset_fake_temporarily(), _disable_current_modes():
        return {n: (int(t.min()), int(t.max())) for n, t in whole.items()}


def _stored(loops: LoopNest, stored: Ranges) -> Ranges:
    """What is known of the integers in the buffers that it writes."""
    ranges, out = bounds(loops.body, stored), Ranges()
    for s in loops.stores():
        r, before = ranges[s.value], out.get(s.buffer, ranges[s.value])
        out[s.buffer] = None if r is None or before is None or s.reduce else _either(r, before)
    return out


def _decided(loops: LoopNest, stored: Ranges) -> LoopNest:
    """Without comparisons of integers that have one answer, and limits that are never reached."""
    ranges, b = bounds(loops.body, stored), BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(loops.body):
        new = map_stmt(s, ids)
        pair = [ranges[a] for a in s.args] if isinstance(s, Op) and len(s.args) == 2 else []
        signs = _signs(*pair) if len(pair) == 2 and not _is_float(loops.body, s.args[0]) else None  # type: ignore
        if signs is not None and s.op in SIGNS and (signs <= {*SIGNS[s.op]} or not signs & {*SIGNS[s.op]}):  # type: ignore
            ids[i] = b.const(signs <= {*SIGNS[s.op]}, torch.bool)  # type: ignore[union-attr]
        elif signs is not None and s.op in ("maximum", "minimum") and not {-1, 1} <= signs:  # type: ignore[union-attr]
            ids[i] = new.args[(1 in signs) == (s.op == "minimum")]  # type: ignore[union-attr]
        else:
            known = folded(b, new)
            ids[i] = b.add(new) if known is None else known
    body = eliminate_dead(tuple(b.body))
    return loops if body == loops.body else replace(loops, body=body)


def _signs(x: Range, y: Range) -> set[int] | None:
    """Of x - y."""
    if x is None or y is None:
        return None
    may = {-1: x[0] < y[1], 0: x[0] <= y[1] and y[0] <= x[1], 1: x[1] > y[0]}
    return {sign for sign, is_so in may.items() if is_so}


def _narrowed(loops: LoopNest, stored: Ranges) -> LoopNest:
    body, ranges = loops.body, bounds(loops.body, stored)
    fits, near = _fitting(body, ranges)
    ends = {i for i, s in enumerate(body) if _takes_short(s, body, fits)}
    small = _needed(body, (a for i in ends for a in stmt_args(body[i])))
    b = BodyBuilder()
    ids: dict[int, int] = {}  # as before
    short: dict[int, int] = {}  # in 32 bits
    for i, s in enumerate(body):
        for a in stmt_args(s):
            if a not in ids and (i not in small | ends or isinstance(s, Load)):
                ids[a] = b.cast(short[a], torch.int64)
        args = {a: short[a] if a in short else ids[a] for a in stmt_args(s)} if i in small | ends else ids
        if i in small and (isinstance(s, Load) or isinstance(s, Op) and s.op == "cast"):
            ids |= {i: b.add(map_stmt(s, ids))} if isinstance(s, Load) else {}
            short[i] = b.cast(ids[i] if isinstance(s, Load) else ids[stmt_args(s)[0]], torch.int32)
        elif i in small:
            short[i] = b.add(replace(map_stmt(s, args), dtype=torch.int32))  # type: ignore[call-arg]
        elif isinstance(s, Indirect):
            checked = not _inside(ranges[s.arg], s) and s.checked
            ids[i] = b.add(replace(s, arg=args[s.arg], checked=checked))
        elif i in ends and isinstance(s, Op) and s.op == "cast":
            ids[i] = b.cast(args[s.args[0]], s.dtype)
        else:
            ids[i] = b.add(map_stmt(s, args))
    return loops if tuple(b.body) == body else replace(loops, body=tuple(b.body))


def _takes_short(s: Stmt, body: Sequence[Stmt], fits: Sequence[bool]) -> bool:
    """Does a statement, itself no int64, take 32-bit integers as well, and is there one? (Of a mere position a compiler
    sees that.)"""
    if isinstance(s, Indirect):
        return fits[s.arg]
    takes = isinstance(s, Op) and (s.op in SIGNS or s.op == "cast" and s.dtype != torch.int64)
    return takes and all(fits[a] for a in stmt_args(s)) and any(isinstance(body[a], Op) for a in stmt_args(s))


def _fitting(body: Sequence[Stmt], ranges: Sequence[Range]) -> tuple[list[bool], list[bool]]:
    """For each statement: is it an int64 that can be computed in 32 bits? Or one of which the nearest 32-bit integer
    can?"""
    fits: list[bool] = []
    near: list[bool] = []
    for s, r in zip(body, ranges, strict=True):
        ok = r is not None and -(2**31) <= r[0] <= r[1] < 2**31
        close = False
        if isinstance(s, Op):
            args = s.args[s.op == "where" :]
            exact = all(fits[a] for a in args)
            if s.op == "cast":
                source = body[s.args[0]].dtype  # type: ignore[union-attr]
                close, exact = source == torch.float32, source.is_floating_point or source.itemsize <= 4
            elif s.op in ("maximum", "minimum"):
                close = all(fits[a] or near[a] for a in args)
                exact |= close and ok and r[0] >= 0  # type: ignore[index]
            elif s.op in ("shl", "shr"):
                exact = exact and ranges[args[1]][1] < 32  # type: ignore[index]
            else:
                exact = exact and s.op in SAME
            ok = ok and exact
        whole = getattr(s, "dtype", None) == torch.int64
        fits.append(ok and whole and isinstance(s, (Op, Const, Index, Load)))
        near.append(close and whole and not ok)
    return fits, near


def _needed(body: Sequence[Stmt], roots: Iterable[int]) -> set[int]:
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


def _is_float(body: Sequence[Stmt], i: int) -> bool:
    return body[i].dtype.is_floating_point  # type: ignore[union-attr]


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
    r = stored.get(s.buffer) or _any_of(s)
    return r if s.mask is None or r is None else _either(r, (s.other, s.other))


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
    args = [out[a] or _any_of(body[a]) for a in s.args[s.op == "where" :]]
    known = [r for r in args if r is not None]
    if len(known) < len(args):
        return None
    if s.op == "cast":
        whole = body[s.args[0]].dtype.is_floating_point and not s.dtype.is_floating_point  # type: ignore[union-attr]
        low, high = known[0]
        if s.dtype == torch.bool or s.dtype.is_floating_point and s.dtype.itemsize < 4:
            return None
        return (math.trunc(low), math.trunc(high)) if whole else (low, high)
    formula = _RANGES.get(s.op)
    return None if formula is None else formula(*known)


def _any_of(s: Stmt) -> Range:
    """All integers of the dtype of an unknown one."""
    dtype = getattr(s, "dtype", torch.bool)
    if dtype.is_floating_point or dtype == torch.bool:
        return None
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _either(a: tuple[float, float], b: tuple[float, float]) -> tuple[float, float]:
    return min(a[0], b[0]), max(a[1], b[1])


def _ends(op: Callable[[Any, Any], float]) -> Callable[..., Range]:
    """Of a function that grows or falls with each of two numbers: what it is at the ends of their ranges."""

    def formula(a: tuple[float, float], b: tuple[float, float]) -> Range:
        values = [op(x, y) for x in a for y in b]
        return min(values), max(values)

    return formula


def _common(a: tuple[float, float], b: tuple[float, float]) -> Range:
    """Bits in both."""
    tops = [int(r[1]) for r in (a, b) if r[0] >= 0]
    return (0, min(tops)) if tops else None


def _shift(op: Callable[[int, int], int]) -> Callable[..., Range]:
    return lambda a, b: _ends(op)(a, b) if 0 <= b[0] and b[1] < 64 else None


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
    "where": _either,
    "floor": lambda a: (math.floor(a[0]), math.floor(a[1])),
    "ceil": lambda a: (math.ceil(a[0]), math.ceil(a[1])),
    "round": lambda a: (math.floor(a[0]), math.ceil(a[1])),
    "trunc": lambda a: (math.trunc(a[0]), math.trunc(a[1])),
}
