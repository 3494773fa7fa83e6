"""Large products with rows that begin at no multiple of 16 bytes: without a padded copy of all of them.

A padded result of the logits' size is as much memory as the logits once more (``padding``), and so is a padded copy of
their gradient. But of rows that are N halves long, each ``g = 8 / gcd(N, 8)``-th lies at the same place between two
multiples of 16 bytes, and has a first element that lies at one. So there are three forms, for each place of the
matrix::

    result    out[i::g, c:] = a[i::g] @ b[:, c:]     for i in range(g): a matrix of aligned rows, g times as far apart;
                                                     the first and the last columns are a product of their own
    left      a[i::g, c:] @ b[c:] + rest             so read where it is; the rest is few columns times few rows
    left, by columns                                 (its rows are the result's): a part of them at a time is copied

Each reads the other operand ``g`` times, as a product does for each block of rows anyway.

**When**: where padding pays, and what is padded is more than a cache holds; where each product has ``ROWS`` left; and
for a result that no kernel reads, which would read the padded one.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import expr
from reflib.ir.program import Extern, View

from .body import NestBuilder, Value
from .context import LoweringContext, contiguous_strides
from .extern import OUT_VARIANTS
from .padding import BYTES, LONG, Sizes, _by_columns, _copy, _fill, _int, _is_copied, _is_moved, _up

aten = torch.ops.aten
LARGE = 32 << 20  # bytes: about what a cache holds
PART = 16 << 20  # ... and half of that
ROWS = 64  # of a product, for all of a GPU's cores to have some
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default)
_ADD = {aten.mm.default: aten.addmm.default, aten.addmm.default: aten.addmm.default}


def unpadded_product(
    cx: LoweringContext, target: Any, args: tuple[View, ...], scale: dict[str, Any], sizes: Sizes
) -> View | None:
    """``target([bias,] a, b)`` in one of the three forms, with eager's strides; None if none is for it."""
    *bias, a, b = args
    if scale or target not in _ADD or any(v.dtype != cx.dtype for v in args):
        return None
    m, k, n = _int(a.shape[0]), _int(a.shape[1]), _int(b.shape[1])
    rows = cx.low.symbols.exprs(cx.fakes[0].stride()) == contiguous_strides(cx.shape) and not _by_columns(a)
    if rows and _fine(a, (m, k)) and _by_columns(b) and _fine(b, (k, n), but=1) and _returned(cx.node):
        one_row = all(v.shape in ((b.shape[1],), (expr(1), b.shape[1])) for v in bias)
        return _result(cx, bias, a, b) if one_row and _large(cx, m * n) and m // _apart(a, n) >= ROWS else None
    if bias or not _large(cx, m * k) or not _fine(b, (k, n), but=0) or _by_columns(b) or k < LONG * BYTES:
        return None
    if _by_columns(a) and _fine(b, (k, n)) and _is_moved(cx, a, (sizes[0], k)):
        return _in_parts(cx, a, b)
    if not _by_columns(a) and a.strides[1] == 1 and cx.dtype != torch.float16 and _is_moved(cx, a, (m, sizes[2])):
        return _left(cx, a, b) if m // _apart(a, _int(a.strides[0])) >= ROWS else None  # (float16: see padding)
    return None


def _large(cx: LoweringContext, elements: int) -> bool:
    return elements * cx.dtype.itemsize > LARGE


def _fine(v: View, shape: tuple[int, int], but: int | None = None) -> bool:
    """May it be read where it is? ``but``: whatever the size of that dimension, of which a part is read."""
    if but is not None:
        step = BYTES // v.dtype.itemsize
        shape = tuple(n - n % step if d == but else n for d, n in enumerate(shape))  # type: ignore[assignment]
        v = replace(v, shape=tuple(expr(n) for n in shape))
    return not _is_copied(v, shape)


def _apart(v: View, row: int) -> int:
    """How many rows further on is one that begins as this one does?"""
    step = BYTES // v.dtype.itemsize
    return step // math.gcd(row, step)


def _returned(node: torch.fx.Node) -> bool:
    """Is it, or a view of it, a result, and read by nothing?"""
    return all(u.op == "output" or u.target in _VIEWS and _returned(u) for u in node.users)


def _aligned_rows(v: View, row: int) -> list[tuple[View, int]]:
    """``v`` as matrices of aligned rows, ``row`` elements apart in it, and how many columns each leaves out first."""
    step, apart, found = BYTES // v.dtype.itemsize, _apart(v, row), []
    rows, columns = _int(v.shape[0]), _int(v.shape[1])
    for i in range(min(apart, rows)):
        at = _int(v.offset) + i * row
        c = -at % step
        shape = -(-(rows - i) // apart), (columns - c) // step * step
        part = replace(v, shape=tuple(map(expr, shape)), strides=(expr(apart * row), expr(1)), offset=expr(at + c))
        found.append((part, c))
    return found


def _every(v: View, i: int, apart: int) -> View:
    """``v[i::apart]``"""
    rows = -(-(_int(v.shape[0]) - i) // apart)
    return replace(v, shape=(expr(rows), *v.shape[1:]), strides=(v.strides[0] * apart, *v.strides[1:]),
                   offset=v.offset + v.strides[0] * i)  # fmt: skip


def _cut(v: View, dim: int, first: int, size: int) -> View:
    """``v`` from ``first`` on in a dimension."""
    shape = tuple(expr(size) if d == dim else n for d, n in enumerate(v.shape))
    return replace(v, shape=shape, offset=v.offset + v.strides[dim] * first)


def _call(cx: LoweringContext, args: list[View], out: View) -> None:
    """A product into ``out``, a part of a buffer."""
    target = aten.mm.default if len(args) == 2 else aten.addmm.default
    cx.low.nodes.append(
        Extern(
            cx.low.next_node(), target, tuple(args), (("out", out),), (None,), (out.buffer,),
            out=(OUT_VARIANTS[target], ("out",)), reason="library call, of aligned rows", origins=(cx.origin,),
        )
    )  # fmt: skip


def _result(cx: LoweringContext, bias: list[View], a: View, b: View) -> View:
    out, step = cx.out(), BYTES // cx.dtype.itemsize
    n = _int(b.shape[1])
    parts = _aligned_rows(out, n)
    for i, (part, c) in enumerate(parts):
        width = _int(part.shape[1])
        given = [_cut(v, len(v.shape) - 1, c, width) for v in bias]
        _call(cx, [*given, _every(a, i, len(parts)), _cut(b, 1, c, width)], part)
    for at in (0, n - step):
        edge = cx.temp("edge", (a.shape[0], step), cx.dtype)
        given = [_cut(v, len(v.shape) - 1, at, step) for v in bias]
        _call(cx, [*given, a, _cut(b, 1, at, step)], edge)
        k = NestBuilder(cx, edge.shape)
        k.store(_cut(out, 1, at, step), k.load(edge))
        k.finish()
    return out


def _left(cx: LoweringContext, a: View, b: View) -> View:
    out = cx.temp("product", (a.shape[0], b.shape[1]), cx.dtype)
    parts, columns = _aligned_rows(a, _int(a.strides[0])), _int(a.shape[1])
    for i, (part, c) in enumerate(parts):
        width, to = _int(part.shape[1]), _every(out, i, len(parts))
        _rest(cx, _every(a, i, len(parts)), b, [*range(c), *range(c + width, columns)], to)
        _call(cx, [to, part, _cut(b, 0, c, width)], to)
    return _strided(cx, out)


def _rest(cx: LoweringContext, a: View, b: View, places: list[int], to: View) -> None:
    """a[:, places] @ b[places], rounded, into ``to``."""
    k = NestBuilder(cx, to.shape)
    row, column = k.coords
    total: Value | None = None
    for d in places:
        term = k.load(a, [row, d]) * k.load(b, [d, column])
        total = term if total is None else total + term
    k.store(to, 0.0 if total is None else total)
    k.finish()


def _in_parts(cx: LoweringContext, a: View, b: View) -> View:
    step, rows, depth = BYTES // cx.dtype.itemsize, _int(a.shape[0]), _int(a.shape[1])
    count = -(-rows * depth * cx.dtype.itemsize // PART)
    size = _up(-(-rows // count), step)
    out = cx.temp("product", (_up(rows, step), b.shape[1]), cx.dtype)  # (rows after the result's cost nothing)
    for first in range(0, rows, size):
        part = _cut(a, 0, first, min(size, rows - first))
        whole = _up(_int(part.shape[0]), step)
        made = cx.temp("operand", (depth, whole), cx.dtype)
        turned = replace(part, shape=part.shape[::-1], strides=part.strides[::-1])
        _copy(cx, turned, replace(made, shape=turned.shape))
        _fill(cx, made, turned.shape)
        given = replace(made, shape=made.shape[::-1], strides=made.strides[::-1])
        _call(cx, [given, b], _cut(out, 0, first, whole))
    return _strided(cx, replace(out, shape=cx.shape))


def _strided(cx: LoweringContext, v: View) -> View:
    """``v``, or a copy with eager's strides."""
    want = cx.low.symbols.exprs(cx.fakes[0].stride())
    if want == contiguous_strides(cx.shape):
        return v
    k, out = NestBuilder(cx, v.shape), cx.out()
    k.store(out, k.load(v))
    k.finish()
    return out
