"""Large results with rows that begin at no multiple of 16 bytes: without a padded copy of all of them.

A padded result of the logits' size is as much memory as the logits once more (``padding``). But of rows that are N
halves long, each ``g = 8 / gcd(N, 8)``-th lies at the same place between two multiples of 16 bytes, and has a first
element that lies at one. So they are written where they are::

    out[i::g, c:] = a[i::g] @ b[:, c:]     for i in range(g): a matrix of aligned rows, g times as far apart;
                                           the first and the last columns are a product of their own

It is less memory and not less time (H100, bfloat16: bert's head 278 us padded and copied, 368 so, eager's 427;
whisper's, g = 8: 114, 248, 262), so it is done where the padded copy would form the peak: in a graph without a
backward, whose gradient would be copied with padding anyway (that in parts, without one, took twice as long).

**When**: where padding pays, and what is padded is more than a cache holds; where each product has ``ROWS`` left; and
for a result that no kernel reads, which would read the padded one.
"""

import math
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import expr
from reflib.ir.program import Extern, View

from .body import NestBuilder
from .context import LoweringContext, contiguous_strides
from .extern import OUT_VARIANTS
from .padding import BYTES, _by_columns, _int, _is_copied

aten = torch.ops.aten
LARGE = 32 << 20  # bytes: about what a cache holds
ROWS = 64  # of a product, for all of a GPU's cores to have some
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default)
_PRODUCTS = (aten.mm.default, aten.addmm.default)


def unpadded_product(cx: LoweringContext, target: Any, args: tuple[View, ...], scale: dict[str, Any]) -> View | None:
    """``target([bias,] a, b)`` without padding; None if this is not for it."""
    *bias, a, b = args
    trained = any(n.op == "placeholder" and n.name.startswith(("primals", "tangents")) for n in cx.node.graph.nodes)
    if scale or trained or target not in _PRODUCTS or any(v.dtype != cx.dtype for v in args):
        return None
    m, k, n = _int(a.shape[0]), _int(a.shape[1]), _int(b.shape[1])
    rows = cx.low.symbols.exprs(cx.fakes[0].stride()) == contiguous_strides(cx.shape) and not _by_columns(a)
    fine = rows and _fine(a, (m, k)) and _by_columns(b) and _fine(b, (k, n), but=1)
    one_row = all(v.shape in ((b.shape[1],), (expr(1), b.shape[1])) for v in bias)
    if fine and one_row and _returned(cx.node) and _large(cx, m * n) and m // _apart(a, n) >= ROWS:
        return _result(cx, bias, a, b)
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
