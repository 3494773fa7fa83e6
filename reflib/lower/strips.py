"""Products of an operand with misaligned rows, copied a few columns at a time.

The gradient of logits is mostly the largest tensor of a step, and both products of the layer's backward read it. With a
vocabulary of 30522 its rows begin at any multiple of four bytes, so it is copied (``padding``), and while the copy is
there a step holds the most. In strips of columns only one is there at a time::

    dX  =  dY[:, :s] @ W[:s]  +  dY[:, s:2s] @ W[s:2s]  + ...        dW[:s] = dY[:, :s].T @ X,   dW[s:2s] = ...

A strip is copied once, for both, and is still in the L2 cache then. dX is summed in float32 and rounded once, as in one
product (rounded per strip, bfloat16 had 1.6 times eager's error); dW is as it was. Which product runs when is for
``plan.order`` to say.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import expr
from reflib.ir.program import Extern, View

from .body import nest
from .context import LoweringContext
from .padding import BYTES, _by_columns, _copy, _int, _is_copied, _is_moved, _only_long, _rest, _transposed, _up

STRIPS = 4, 5  # at least, at most: launches take time as well
WIDE = 24 << 20  # bytes of a strip, if there need not be more for it
LEAST = 32 << 20  # bytes that a copy of all would take
TILE = 128  # columns: so that a strip's products have whole tiles

aten = torch.ops.aten


def in_strips(cx: LoweringContext, a: View, b: View, sizes: tuple[int, int, int]) -> View | None:
    """a[M, K] @ b[K, N], where ``sizes`` are what they would be padded to; None: not in strips."""
    m, n, k = sizes
    if len(a.shape) != 2 or not _is_moved(cx, a, (m, k)):
        return None
    turned = _by_columns(a)
    wide = _transposed(a) if turned else a
    rows, columns = map(_int, wide.shape)
    if rows * columns * a.dtype.itemsize < LEAST or not (
        k == rows and not _is_copied(b, (k, n)) if turned else _only_long(b, n, k, torch.float32)
    ):
        return None
    if turned:
        made = cx.temp("padded", (m, n), cx.dtype)
        for first, strip in _strips(cx, wide):
            _call(cx, aten.mm.default, aten.mm.out, _rows(made, first, _int(strip.shape[1])), _transposed(strip), b)
        return replace(made, shape=cx.shape)
    made = _rest(cx, a, b, torch.float32)
    whole = columns - columns % (BYTES // a.dtype.itemsize)
    for first, strip in _strips(cx, wide):
        if (deep := min(_int(strip.shape[1]), whole - first)) == 0:  # the last one is of the rest alone
            break
        left = replace(strip, shape=(strip.shape[0], expr(deep)))
        of_strip = made, left, _rows(b, first, deep)
        if cx.dtype == torch.float32:
            _call(cx, aten.addmm.default, aten.addmm.out, made, *of_strip)
        else:
            _call(cx, aten.addmm.dtype, aten.addmm.dtype_out, made, *of_strip, torch.float32)
    return made if cx.dtype == torch.float32 else nest(cx, lambda k: k.load(made))


def _strips(cx: LoweringContext, v: View) -> Iterator[tuple[int, View]]:
    """Where each begins, and its copy: the last one has zeros up to a multiple of 16 bytes."""
    rows, columns = map(_int, v.shape)
    count = -(-rows * columns * v.dtype.itemsize // WIDE)
    each = _up(-(-columns // max(STRIPS[0], min(STRIPS[1], count))), TILE)
    writers = sum(v.buffer in node.writes() for node in cx.low.nodes)
    for first in range(0, columns, each):
        here = min(each, columns - first)
        key = v, first, here, writers  # (v may be written to between two uses)
        if key not in cx.low.moved:
            width = _up(here, BYTES // v.dtype.itemsize)
            made = cx.low.moved[key] = cx.temp("strip", (rows, width), v.dtype)
            part = replace(v, shape=(v.shape[0], expr(here)), offset=v.offset + first * v.strides[1])
            _copy(cx, part, made)
        yield first, cx.low.moved[key]


def _rows(v: View, first: int, count: int) -> View:
    return replace(v, shape=(expr(count), v.shape[1]), offset=v.offset + first * v.strides[0])


def _call(cx: LoweringContext, op: Any, out_variant: Any, out: View, *args: Any) -> None:
    reason = f"library call, of strips padded to multiples of {BYTES} bytes"
    cx.low.nodes.append(
        Extern(
            cx.low.next_node(), op, args, (("out", out),), (None,), (out.buffer,), out=(out_variant, ("out",)),
            reason=reason, origins=(cx.origin,),
        )
    )  # fmt: skip
