"""Rows added where an index says, in their order, on a GPU: for ``Options.batch_invariant``, and ``numerics="eager"``
where eager's kernel sorts as well (gradients of embeddings, ``index_put``).

    out[v] = x[v] + sum over e, with index[e] = v, of new[e]

Atomic additions have no order. Here the *index* is sorted, once for all sums by it; a kernel has a program per row of
the result, which walks along its segment of the sorted positions and reads the rows of ``new`` through them::

    places = index, in 16 bits where they hold the number of rows: two passes of a radix sort, where 64 bits take eight
    order  = argsort(places), stable        first[v] = the number of places below v
    out[v] = x[v] + sum over at from first[v] to first[v + 1] of new[order[at]]

So E rows of W bytes are read once, and nothing but the result is written. (ATen's ``index_put`` sorts 64-bit numbers in
each call.) A program adds LANES rows at a time, lane by lane, then neighbouring lanes in pairs: in that order however
the tensors lie in memory. Sums are float32, and rounded once.

A row that most of the others are added to takes as long as one program takes for them.
"""

from dataclasses import replace

import torch

from reflib.ir.division import ceildiv
from reflib.ir.expr import Expr, expr, product
from reflib.ir.program import Extern, View
from reflib.ir.user_kernel import UserKernel

from .body import NestBuilder, nest, where
from .context import LoweringContext, contiguous_strides
from .search import place_in

aten = torch.ops.aten

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SHORT = torch.iinfo(torch.int16).max  # rows that 16 bits tell apart, and one for what is added nowhere
TILE, COLUMNS = 1024, 128  # elements that a program reads at once, of a row
FEW, LANES = 8, 32  # rows
ARGUMENTS = ("out", "x", "new", "order", "first", "columns")
SOURCE = '''
import triton
import triton.language as tl


@triton.jit
def segment_sums(
    out, x, new, order, first, columns, GIVEN: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr
):
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    start = tl.load(first + row)
    end = tl.load(first + row + 1)
    lane = tl.arange(0, LANES)
    acc = tl.zeros([LANES, COLUMNS], tl.float32)
    for at in range(start, end, LANES):
        here = at + lane < end
        e = tl.load(order + at + lane, mask=here, other=0)
        mask = here[:, None] & inside[None, :]
        acc += tl.load(new + e[:, None] * columns + column[None, :], mask=mask, other=0.0).to(tl.float32)
    for step in tl.static_range(8):
        if LANES >> step > 1:
            acc = tl.sum(tl.reshape(acc, [LANES >> (step + 1), 2, COLUMNS]), 1)
    total = tl.reshape(acc, [COLUMNS])
    if GIVEN:
        total += tl.load(x + row * columns + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * columns + column, total.to(out.dtype.element_ty), mask=inside)
'''


def segment_sums(
    cx: LoweringContext, x: View | None, index: View, new: View, skipped: int = -1, wraps: bool = False
) -> View | None:
    """``x`` (None: zeros), the op's result, with the rows of ``new`` added where ``index`` says; those of index
    ``skipped`` are not. ``wraps``: negative ones count from the end. None where that is not so: not for this option, or
    of other dtypes or layouts."""
    ordered = cx.low.options.batch_invariant or cx.low.options.numerics == "eager"
    if not ordered or not cx.on_gpu or cx.dtype not in FLOATS or new.dtype not in FLOATS:
        return None
    rows, width = cx.shape[0], product(cx.shape[1:])
    if x is not None and cx.low.uniform.get(x.buffer) == 0:
        x = None
    count = product(index.shape)
    known = count.constant is not None and count.constant > 0 and rows.constant is not None and rows.constant < 2**30
    if not known or index.dtype not in (torch.int32, torch.int64):
        return None
    if (out := cx.out()).strides != contiguous_strides(cx.shape):
        return None
    new = contiguous(cx, new)
    given = new if x is None else contiguous(cx, x)
    order, first = _sorted(cx, index, count, rows, skipped, wraps)
    columns = min(COLUMNS, 1 << max(0, (width.constant or COLUMNS) - 1).bit_length())
    lanes = LANES if count.constant > 64 * rows.constant else max(FEW, min(LANES, TILE // columns))  # type: ignore[operator]
    call: list[tuple[str | int, ...]] = [(f"{name}=", i) for i, name in enumerate(ARGUMENTS)]
    call += [("GIVEN=", str(x is not None)), ("LANES=", str(lanes)), ("COLUMNS=", str(columns))]
    kernel = UserKernel("segment_sums", SOURCE, tuple(call), max(1, lanes * columns // TILE))
    grid = (rows * ceildiv(width, expr(columns)), expr(1), expr(1))
    args = (out, given, new, order, first, width)
    cx.low.nodes.append(
        Extern(cx.low.next_node(), kernel, args, (("grid", grid),), (), (out.buffer,), origins=(cx.origin,))
    )
    return out


def contiguous(cx: LoweringContext, v: View) -> View:
    """``v``, or a copy: rows that many share (the gradient of a sum over embeddings), columns."""
    v = cx.readable(v)
    if all(n == 1 or a == b for n, a, b in zip(v.shape, v.strides, contiguous_strides(v.shape))):
        return v
    return nest(cx, lambda k: k.load(v), cx.temp("rows", v.shape, v.dtype))


def _sorted(cx: LoweringContext, index: View, count: Expr, rows: Expr, skipped: int, wraps: bool) -> tuple[View, View]:
    """Positions in ``index`` by what is there, and how many are below each row, and below their number."""
    low = cx.low
    key = "sorted", index, rows, skipped, wraps, sum(index.buffer in node.writes() for node in low.nodes)
    if key not in low.moved:
        most = rows.constant or 0
        places = cx.temp("places", index.shape, torch.int16 if most <= SHORT else torch.int32)
        k = NestBuilder(cx, index.shape)
        at = k.load(index).to(torch.int64)
        nowhere = (at < (-most if wraps else 0)) | (at >= most)
        nowhere = nowhere | at.eq(skipped) if skipped >= 0 else nowhere
        row = k.index(k.indirect(at, rows, wraps))
        k.store(places, where(nowhere, most, row).to(places.dtype))
        k.finish()
        places = replace(places, shape=(count,), strides=(expr(1),))
        ordered, order = (cx.temp(n, (count,), d) for n, d in (("ordered", places.dtype), ("order", torch.int64)))
        how = (("stable", True), ("dim", 0), ("descending", False))
        outputs = ordered.buffer, order.buffer
        why = "sums in one order: rows are sorted by their index"
        low.nodes.append(
            Extern(low.next_node(), aten.sort.stable, (places,), how, outputs, reason=why, origins=(cx.origin,))
        )
        first = cx.temp("first", (rows + 1,), torch.int32)
        k = NestBuilder(cx, first.shape)
        k.store(first, place_in(k, ordered, [], k.index(k.coords[0]).to(torch.int32), count.constant or 0))
        k.finish()
        low.moved[key] = order, first
    return low.moved[key]
