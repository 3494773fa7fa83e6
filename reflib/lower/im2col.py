"""``im2col`` and ``col2im`` (``unfold`` and ``fold`` of images): windows side by side, and their sum.

Each element of ``im2col`` is read at its place in the image, or is 0 in the padding. ``col2im`` is its transpose:
a pixel is the sum over the windows that contain it, as in the backward of an average pooling. ATen takes the images of
a batch one after another, a kernel each.
"""

from __future__ import annotations

from typing import Any

from reflib.ir.expr import Expr, IntLike, expr, mod, nonneg
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype
from .context import LoweringContext
from .indexing import both
from .pooling import Geometry, Side, Window
from .rules import rule


@rule("im2col")
def im2col(cx: LoweringContext, x: View, kernel_size: Any, dilation: Any, padding: Any, stride: Any) -> View:
    """x: [N?, C, H, W] -> [N?, C * kernel rows * kernel columns, windows]"""
    out, g = cx.out(), Geometry.of(2, kernel_size, stride, padding, dilation, False)
    *lead, channels, height, width = x.shape
    windows = [_windows(g, d, size) for d, size in enumerate((height, width))]
    k = NestBuilder(cx, (*lead, channels, *g.kernel, *windows), ())
    *n, c, i, j, row, column = k.coords
    at, mask = [], None
    for d, (o, point, size) in enumerate(((row, i, height), (column, j, width))):
        side = g.side(d, o, size)
        at.append(side.at(point))
        mask = both(mask, side.mask(k, point))
    value = k.load(x, [*n, c, *at], mask).to(value_dtype(check_dtype(x.dtype)))
    k.store(out, value, [*n, (c * g.kernel[0] + i) * g.kernel[1] + j, row * windows[1] + column])
    k.finish()
    return out


@rule("col2im")
def col2im(
    cx: LoweringContext, x: View, output_size: Any, kernel_size: Any, dilation: Any, padding: Any, stride: Any
) -> View:
    """x: [N?, C * kernel rows * kernel columns, windows] -> [N?, C, *output_size]"""
    out, g = cx.out(), Geometry.of(2, kernel_size, stride, padding, dilation, False)
    sizes = out.shape[-2:]
    windows = [_windows(g, d, size) for d, size in enumerate(sizes)]
    dense = all(step.constant == 1 for step in g.dilation)  # then few places of the kernel can be at a pixel
    sides = [g.windows(d, expr(0), size) for d, size in enumerate(windows)]
    w = Window(cx, out, [s.count for s in sides] if dense else g.kernel)
    *n, c = w.lead

    def term(point: Any) -> Value:
        at: list[tuple[Expr, Expr]] = []  # per dimension: which window, and where in it
        mask: Value | None = None
        for d, j in enumerate(point):
            window, inside, test = _place(w.k, g, d, w.spatial[d], j, windows[d], dense)
            at.append((window, inside))
            mask = both(mask, test)
        (row, i), (column, j) = at
        where = [*n, (c * g.kernel[0] + i) * g.kernel[1] + j, row * windows[1] + column]
        return w.k.load(x, where, mask).to(value_dtype(check_dtype(x.dtype)))

    return w.finish(out, w.sum(term(point) for point in w.points()))


def _windows(g: Geometry, d: int, size: Expr) -> Expr:
    """How many windows there are along a dimension."""
    return (size + 2 * g.padding[d] - g.dilation[d] * (g.kernel[d] - 1) - 1) // g.stride[d] + 1


def _place(
    k: NestBuilder, g: Geometry, d: int, pixel: Expr, j: IntLike, windows: Expr, dense: bool
) -> tuple[Expr, Expr, Value | None]:
    """The ``j``-th candidate for a pixel along a dimension: (window, place in it, whether there is such a window)."""
    at, stride, mask = pixel + g.padding[d], g.stride[d], None
    if dense:
        window, inside = at // stride - j, mod(at, stride) + stride * expr(j)
        if not nonneg(g.kernel[d] - 1 - inside):
            mask = k.index(inside) < g.kernel[d]
    else:
        start, inside = at - g.dilation[d] * expr(j), expr(j)
        window = start // stride
        if stride.constant != 1:
            mask = k.index(mod(start, stride)).eq(0)
    return window, inside, both(mask, Side(window, expr(1), windows).mask(k, 0))
