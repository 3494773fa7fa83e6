"""Depthwise convolutions of few elements on a GPU, as loop nests.

A window of each channel that is multiplied by a few numbers is a pooling with weights. It fuses with what computes its
input and with what follows, and so do its gradients::

    out[o]         = sum over j of            x[o * stride - padding + j * dilation] * weight[j]
    grad_x[i]      = sum over j of            grad[(i + padding - j * dilation) / stride] * weight[j], if that is whole
    grad_weight[j] = sum over batch and o of  grad[o] * x[o * stride - padding + j * dilation]

Not of images in channels-last order by square windows of 3, 5 or 7, for which cuDNN has kernels. (A 5 x 5 blur of 4
channels in float32, 81 MB: 332 us by ATen's kernel on an H200, 209 by cuDNN's with two copies to NHWC.) Its kernel of
all others is slow. (A 4 x 4 blur of 64 channels with stride 2, 40 MB in bf16: 84 us by ATen's kernel, 482 by cuDNN's of
NHWC, and 524 for its gradient.) Sequences are windows in any order: ATen copies those that are not contiguous ("avoid
accidentally going through NHWC for permuted 3d input", Convolution.cpp), and then takes its own kernel. (4 taps of a
Mamba layer in bf16: 31 us for the copy, 51 for the kernel.)
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from reflib.ir.expr import ONE, Expr, IntLike, expr, product
from reflib.ir.ops import value_dtype
from reflib.ir.program import View
from reflib.ir.traffic import SECTOR

from .body import NestBuilder, Value, check_dtype
from .context import LoweringContext
from .indexing import both
from .pooling import Geometry, Side, Window

TAPS = 32  # of a window: 5 x 5, 31
SUMS = 9  # that a kernel of the weights' gradient keeps at the same time
SQUARES = (3, 5, 7)  # windows that cuDNN has NHWC kernels for


def channels_last(x: View) -> bool:
    """Is ``x``, of an image or a volume, in an order for which there are other kernels than ATen's own?"""
    return len(x.shape) > 3 and x.strides[1] == 1


def is_window(cx: LoweringContext, x: View, weight: View, *how: Any) -> bool:
    """Is it depthwise, a result per channel, of few elements that are not in channels-last order? Where lanes go along
    channels each reads its weights at a place of its own: these are to be one sector."""
    transposed, groups, taps = how[3], expr(how[-1]).constant or 1, product(weight.shape[1:]).constant
    depthwise = groups > 1 and x.shape[1] == groups and weight.shape[0] == groups and len(x.shape) == len(weight.shape)
    few = taps is not None and taps <= (TAPS if x.strides[1] != 1 else SECTOR // weight.dtype.itemsize)
    image, sizes = channels_last(x) and sum(n != 1 for n in x.shape[2:]) > 1, {n.constant for n in weight.shape[2:]}
    known = image and len(sizes) == 1 and sizes <= {*SQUARES}
    return cx.on_gpu and depthwise and few and not (transposed or known)


def depthwise(cx: LoweringContext, x: View, weight: View, bias: View | None, *how: Any) -> View:
    out, g = cx.out(), _geometry(weight, how)
    w = Window(cx, out, g.kernel)
    total = _weighted(w, x, weight, [g.side(d, w.spatial[d], size) for d, size in enumerate(x.shape[2:])])
    return w.finish(out, total if bias is None else total + w.k.load(bias, [w.lead[1]]).to(total.dtype))


def grad_of_input(cx: LoweringContext, grad: View, weight: View, *how: Any) -> View:
    g = _geometry(weight, how)
    out = cx.out()
    w = Window(cx, out, g.kernel)
    each = zip(w.spatial, g.kernel, g.padding, g.dilation, g.stride, grad.shape[2:])
    sides = [_Spread(i + padding, n, size * every, -step, every=every) for i, n, padding, step, every, size in each]
    return w.finish(out, _weighted(w, grad, weight, sides))


@dataclass(frozen=True)
class _Spread(Side):
    """Of the places of a Side, each ``every``-th one has an element."""

    every: Expr = ONE

    def at(self, j: IntLike) -> Expr:
        return super().at(j) // self.every

    def mask(self, k: NestBuilder, j: IntLike) -> Value | None:
        place = self.start + self.step * expr(j)
        here = Side(self.start, self.count, self.end, self.step).mask(k, j)
        return here if self.every == 1 else both(here, k.index(place % self.every).eq(0))


def _geometry(weight: View, how: Sequence[Any]) -> Geometry:
    stride, padding, dilation = how[:3]
    return Geometry.of(len(weight.shape) - 2, list(weight.shape[2:]), stride, padding, dilation, ceil=False)


def _weighted(w: Window, x: View, weight: View, sides: Sequence[Side]) -> Any:
    """The sum of a window's elements of ``x``, each times its weight."""
    compute, (_, channel) = value_dtype(check_dtype(x.dtype)), w.lead
    taps = (w.k.load(weight, [channel, expr(0), *map(expr, p)]).to(compute) for p in w.points())
    elements = (w.k.load(x, [*w.lead, *at], inside).to(compute) for at, inside in w.elements(sides))
    return w.sum(element * tap for element, tap in zip(elements, taps))


def grad_of_weight(cx: LoweringContext, grad: View, x: View, weight: View, *how: Any) -> View | None:
    """As many elements of it at a time as a kernel keeps. None: it is left to ATen, as where these are many."""
    g = _geometry(weight, how)
    points = list(itertools.product(*(range(int(n)) for n in g.kernel)))
    if len(points) > 2 * SUMS:
        return None
    out, pieces = cx.out(), -(-len(points) // SUMS)
    for piece in range(pieces):
        _sums(cx, out, grad, x, g, points[piece::pieces])
    return out


def _sums(cx: LoweringContext, out: View, grad: View, x: View, g: Geometry, points: Sequence[Sequence[int]]) -> None:
    compute = value_dtype(check_dtype(x.dtype))
    batch, channels, *sizes = grad.shape
    k = NestBuilder(cx, (channels, batch, *sizes), range(1, len(grad.shape)))
    c, n, *at = k.coords
    sides = [g.side(d, o, size) for d, (o, size) in enumerate(zip(at, x.shape[2:]))]
    given = k.load(grad, [n, c, *at]).to(compute)
    for point in points:
        inside = None
        for side, j in zip(sides, point):
            inside = both(inside, side.mask(k, j))
        read = k.load(x, [n, c, *(side.at(j) for side, j in zip(sides, point))], inside).to(compute)
        k.store(out, k.reduce("sum", given * read), [c, expr(0), *map(expr, point)])
    k.finish()
