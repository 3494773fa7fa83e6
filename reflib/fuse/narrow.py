"""Integers computed in 32 bits where they are known to fit, and not at all where they are known.

torch's positions are int64: interpolation reads at ``(x * 0.5).to(int64)``, and to shift an int32 by a number in a
table makes an int64 of it. But from ``x < 224`` follows that positions are small (``ranges``), and a GPU converts and
adds 64-bit integers at a fraction of the rate. What is made of those that stay within 32 bits (an index, a
floating-point or shorter number, a comparison) is computed in these; what one kernel leaves for others is stored as the
shortest integers there are; an index that is known to be inside needs neither wrap nor check; and a comparison that is
always true, or a limit that is never reached, is no statement at all.

A number that a conversion from floating point makes is unknown, but what is clamped to 0 <= x <= TOP is converted to
32 bits right away, from no more than TOP. (Of what is below, and of NaN, a conversion makes something not above 0.)
Where the floating-point number itself is clamped, only NaN is outside: that is put inside for an index, whose check
goes, and what else reads the number still has what a conversion to 64 bits makes of NaN.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import _disable_current_modes

from ..ir.expr import Atom, Expr, IntLike, Ref, expr
from ..ir.loops import BodyBuilder, Const, Index, Indirect, Load, LoopNest, Op, Stmt, Store, map_stmt, stmt_args
from ..ir.program import Node, Program
from ..ir.transforms import needed, select
from ..options import Options
from ..target import Target
from .decided import folded
from .ranges import Range, Ranges, bounds, either, is_float, unless_nan
from .result import Fused

ONCE = "temp", 1  # a buffer of the program, which one node writes
TOP = 2**31 - 128  # the greatest int32 that is a float32
TABLE = 1024  # elements of a tensor in the graph that are looked at
# Of int32 as of int64, if all fits.
SAME = frozenset("add sub mul maximum minimum neg abs and or xor where floordiv truncdiv remainder".split())
LIMITS = "maximum", "minimum"
SIGNS = {"lt": (-1,), "le": (-1, 0), "gt": (1,), "ge": (1, 0), "eq": (0,), "ne": (-1, 1)}  # of what x - y may be


def narrow(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. GPU only: a CPU's 64-bit additions are no slower."""
    if not target.is_gpu:
        return fused
    program, stored = fused.program, _tables(fused.program.constants)
    writers = Counter(b for n in program.nodes for b in n.writes())
    own, shorter = _own(program, writers), dict[str, torch.dtype]()
    nodes: list[Node] = []
    for n in program.nodes:
        if isinstance(n, LoopNest):
            n = _decided(_of_dtypes(n, shorter), stored)
            stored |= {b: r for b, r in _stored(n, stored).items() if (program.buffers[b].kind, writers[b]) == ONCE}
            made = {b: _least(stored.get(b)) for b in n.writes() if b in own}
            n = _narrowed(_of_dtypes(n, made), stored)
            shorter |= made
        nodes.append(n)
    buffers = program.buffers | {b: replace(program.buffers[b], dtype=d) for b, d in shorter.items()}
    return replace(fused, program=replace(program, nodes=tuple(nodes), buffers=buffers))


def _own(program: Program, writers: Mapping[str, int]) -> set[str]:
    """The buffers of int64 that one loop nest writes and other ones read, and nothing else sees."""
    out = {n for n, b in program.buffers.items() if (b.dtype, b.kind, writers.get(n)) == (torch.int64, *ONCE)}
    out -= program.output_buffers()
    for n in program.nodes:
        used = {*n.reads(), *n.writes()}
        out -= {*n.reads()} & {*n.writes()} if isinstance(n, LoopNest) else used
        if isinstance(n, LoopNest):
            out -= {s.buffer for s in n.stores() if s.reduce} | {s.buffer for s in n.loads() if abs(s.other) > 127}
    return out


def _least(r: Range) -> torch.dtype:
    """The shortest dtype for integers in this range."""
    dtypes = (torch.int8, torch.int16, torch.int32)
    fits = (d for d in dtypes if r is not None and torch.iinfo(d).min <= r[0] and r[1] <= torch.iinfo(d).max)
    return next(fits, torch.int64)


def _of_dtypes(loops: LoopNest, shorter: Mapping[str, torch.dtype]) -> LoopNest:
    """``loops``, reading and writing buffers of int64 that have become ``shorter``."""
    if not shorter.keys() & {*loops.reads(), *loops.writes()}:
        return loops
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i, s in enumerate(loops.body):
        new = map_stmt(s, ids)
        if isinstance(new, Load) and new.buffer in shorter:
            ids[i] = b.cast(b.add(replace(new, dtype=shorter[new.buffer])), torch.int64)
        elif isinstance(new, Store) and new.buffer in shorter:
            b.store(new.buffer, new.index, b.cast(new.value, shorter[new.buffer]))
        else:
            ids[i] = b.add(new)
    return replace(loops, body=tuple(b.body))


def _tables(constants: Mapping[str, Any]) -> Ranges:
    """Of the integers in tensors that the graph holds."""
    short = {n: t for n, t in constants.items() if type(t) is torch.Tensor and 0 < t.numel() <= TABLE}
    whole = {n: t for n, t in short.items() if not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)}
    with unset_fake_temporarily(), _disable_current_modes():
        return {n: (int(t.min()), int(t.max())) for n, t in whole.items()}


def _stored(loops: LoopNest, stored: Ranges) -> Ranges:
    """What is known of the integers in the buffers that it writes."""
    ranges, out = bounds(loops.body, stored, loops.rnumel), Ranges()
    for s in loops.stores():
        r, before = ranges[s.value], out.get(s.buffer, ranges[s.value])
        out[s.buffer] = None if r is None or before is None or s.reduce else either(r, before)
    return out


def _decided(loops: LoopNest, stored: Ranges) -> LoopNest:
    """Without comparisons of integers that have one answer, limits that are never reached, and positions that are made
    of coordinates alone: these are in the index."""
    if not any(isinstance(s, Indirect) or isinstance(s, Op) and s.op in {*SIGNS, *LIMITS} for s in loops.body):
        return loops
    ranges, b = bounds(loops.body, stored, loops.rnumel), BodyBuilder()
    ids: dict[int, int] = {}
    places: dict[Atom, IntLike] = {}
    # where several points may store to one place, as a Ref says
    kept = {a for s in loops.stores() if not s.reduce for a in s.index.atoms()}
    for i, s in enumerate(loops.body):
        new = map_stmt(s, ids, places)
        pair = [ranges[a] for a in s.args] if isinstance(s, Op) and len(s.args) == 2 else []
        signs = _signs(*pair) if len(pair) == 2 and not is_float(loops.body, s.args[0]) else None  # type: ignore
        if signs is not None and s.op in SIGNS and (signs <= {*SIGNS[s.op]} or not signs & {*SIGNS[s.op]}):  # type: ignore
            ids[i] = b.const(signs <= {*SIGNS[s.op]}, torch.bool)  # type: ignore[union-attr]
        elif signs is not None and s.op in LIMITS and not {-1, 1} <= signs:  # type: ignore[union-attr]
            ids[i] = new.args[(1 in signs) == (s.op == "minimum")]  # type: ignore[union-attr]
        elif isinstance(s, Indirect) and Ref(i, s.size) not in kept and _inside(ranges[s.arg], s):
            at = _place(b.body, ids[s.arg])
            ids[i] = b.add(new) if at is None else ids[s.arg]
            places |= {} if at is None else {Ref(i, s.size): at}
        else:
            known = folded(b, new)
            ids[i] = b.add(new) if known is None else known
    return replace(loops, body=_live(b.body))


def _place(body: Sequence[Stmt], i: int) -> Expr | None:
    """The value as an index: a coordinate, or what is added to it."""
    s = body[i]
    if isinstance(s, Index):
        return s.expr
    if isinstance(s, Const) and isinstance(s.value, int) and not isinstance(s.value, bool):
        return expr(s.value)
    if not isinstance(s, Op) or s.op not in ("cast", "add", "sub") or s.dtype not in (torch.int32, torch.int64):
        return None
    parts = [_place(body, a) for a in s.args]
    if any(p is None for p in parts):
        return None
    return parts[0] if s.op == "cast" else parts[0] + parts[1] if s.op == "add" else parts[0] - parts[1]  # type: ignore


def _live(body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Without what no store and no check of an index needs."""
    live = needed(body, (i for i, s in enumerate(body) if isinstance(s, Store) or getattr(s, "checked", False)))
    return tuple(body) if len(live) == len(body) else select(body, live)


def _signs(x: Range, y: Range) -> set[int] | None:
    """Of x - y."""
    if x is None or y is None:
        return None
    may = {-1: x[0] < y[1], 0: x[0] <= y[1] and y[0] <= x[1], 1: x[1] > y[0]}
    return {sign for sign, is_so in may.items() if is_so}


def _narrowed(loops: LoopNest, stored: Ranges) -> LoopNest:
    body, sure = loops.body, bounds(loops.body, stored, loops.rnumel)
    ranges = unless_nan(body, sure)
    fits, near, cut = _fitting(body, ranges, sure)
    always = [f and r is not None for f, r in zip(fits, sure, strict=True)]
    near = [n or f and not a for n, f, a in zip(near, fits, always, strict=True)]
    ends = {i for i, s in enumerate(body) if _takes_short(s, body, fits if isinstance(s, Indirect) else always)}
    if not ends:
        return loops
    small = _needed(body, (a for i in ends for a in stmt_args(body[i])), cut)
    b = BodyBuilder()
    ids: dict[int, int] = {}  # as before
    short: dict[int, int] = {}  # in 32 bits
    for i, s in enumerate(body):
        for a in stmt_args(s):
            if a not in ids and (i not in small | ends or cut[i] or near[i]):
                mere = isinstance(body[a], (Const, Index))
                ids[a] = b.add(map_stmt(body[a], ids)) if mere else b.cast(short[a], torch.int64)
        if i in small and near[i]:  # what else needs it needs all of it
            ids[i] = b.add(map_stmt(s, ids))
        args = {a: short[a] if a in short else ids[a] for a in stmt_args(s)} if i in small | ends else ids
        if i in small and cut[i]:
            ids[i] = b.add(map_stmt(s, ids))
            short[i] = b.cast(ids[i], torch.int32)
        elif i in small and isinstance(s, Op) and s.op == "cast":
            source = ids[s.args[0]]
            most = source if fits[i] else b.op("minimum", source, b.const(TOP, torch.float32))
            short[i] = b.cast(most, torch.int32)
            if fits[i] and not always[i]:
                low, high = map(int, ranges[i])  # type: ignore[arg-type]
                short[i] = b.op("maximum", short[i], b.const(low, torch.int32))
                if high < 0:  # (of NaN, a GPU makes 0)
                    short[i] = b.op("minimum", short[i], b.const(high, torch.int32))
        elif i in small:
            short[i] = b.add(replace(map_stmt(s, args), dtype=torch.int32))  # type: ignore[call-arg]
        elif isinstance(s, Indirect):
            checked = not _inside((ranges if i in ends else sure)[s.arg], s) and s.checked
            ids[i] = b.add(replace(s, arg=args[s.arg], checked=checked))
        elif i in ends and isinstance(s, Op) and s.op == "cast":
            ids[i] = b.cast(args[s.args[0]], s.dtype)
        else:
            ids[i] = b.add(map_stmt(s, args))
    return replace(loops, body=_live(b.body))


def _takes_short(s: Stmt, body: Sequence[Stmt], fits: Sequence[bool]) -> bool:
    """Does a statement, itself no int64, take 32-bit integers as well, and is there one? (Of a mere position a compiler
    sees that.)"""
    if isinstance(s, Indirect):
        return fits[s.arg]
    takes = isinstance(s, Op) and (s.op in SIGNS or s.op == "cast" and s.dtype != torch.int64)
    return takes and all(fits[a] for a in stmt_args(s)) and any(isinstance(body[a], Op) for a in stmt_args(s))


def _fitting(
    body: Sequence[Stmt], ranges: Sequence[Range], sure: Sequence[Range]
) -> tuple[list[bool], list[bool], list[bool]]:
    """For each statement: is it an int64 that fits 32 bits? Or one of which the nearest 32-bit integer can be computed
    in these? Of those that fit: must it be computed in 64 bits, and cut? (What may be made of NaN as well cannot.)"""
    fits: list[bool] = []
    near: list[bool] = []
    cut: list[bool] = []
    for s, r, always in zip(body, ranges, sure, strict=True):
        ok = r is not None and -(2**31) <= r[0] <= r[1] < 2**31
        close, exact = False, isinstance(s, (Const, Index))
        if isinstance(s, Op):
            args = s.args[s.op == "where" :]
            exact = all(fits[a] for a in args)
            if s.op == "cast":
                source = body[s.args[0]].dtype  # type: ignore[union-attr]
                close, exact = source == torch.float32, source.is_floating_point or source.itemsize <= 4
            elif s.op in LIMITS:
                close = all(fits[a] or near[a] for a in args)
                exact |= close and ok and r[0] >= 0 and r[1] <= TOP  # type: ignore[index]
            elif s.op in ("shl", "shr"):
                exact = exact and ranges[args[1]][1] < 32  # type: ignore[index]
            else:
                exact = exact and s.op in SAME
        ok = ok and getattr(s, "dtype", None) == torch.int64 and not isinstance(s, (Indirect, Store))
        ok = ok and (exact or always is not None)
        fits.append(ok)
        near.append(close and not ok and getattr(s, "dtype", None) == torch.int64)
        cut.append(ok and not exact)
    return fits, near, cut


def _needed(body: Sequence[Stmt], roots: Iterable[int], cut: Sequence[bool]) -> set[int]:
    """``roots``, and the integers that they are made of in 32 bits."""
    out: set[int] = set()
    todo = list(roots)
    while todo:
        i = todo.pop()
        s = body[i]
        if i not in out:
            out.add(i)
            if isinstance(s, Op) and s.op != "cast" and not cut[i]:
                todo += s.args[s.op == "where" :]
    return out


def _inside(r: Range, s: Indirect) -> bool:
    size = s.size.constant
    return r is not None and size is not None and r[0] >= 0 and r[1] < size
