"""Convolutions on a GPU: cuDNN multiplies, and kernels of ours add the bias and sum its gradient.

ATen's call adds the bias in a kernel of its own, which reads and writes all of the result once more; its gradient is a
reduction over all but the channels, for which ATen takes as long as for the weights' (segformer, H200: 216 us in 18
calls, and 80 us of additions). Outside of the call both are loop nests, which fuse with what is around them::

    convolution(x, w, bias)           =  convolution(x, w, None) + bias
    convolution_backward(..)'s bias   =  grad.sum((0, 2, 3, ..))

Eager rounds the result before it adds the bias, as this does. It does not in ATen's own kernels for depthwise
convolutions, to which it gives halves that are not in channels-last order: those keep their bias.

A depthwise convolution multiplies a window of each channel by a few numbers: a pooling with weights, and so a loop nest
that fuses with what follows. Not of tensors in channels-last order, for which cuDNN has kernels. (A 5 x 5 blur of 4
channels in float32, 81 MB: 332 us by ATen's kernel on an H200, 209 by cuDNN's with two copies to NHWC.)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import expr, product
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, nest
from .context import LoweringContext
from .extern import extern
from .pooling import Geometry, Window
from .reductions import reduction
from .rules import Unsupported, rule

aten = torch.ops.aten
_PLAIN = "library call"
TAPS = 25  # of a depthwise window: 5 x 5


@rule("convolution.default")
def convolution(cx: LoweringContext, x: View, weight: View, bias: View | None, *how: Any) -> View:
    groups = how[-1]
    if cx.on_gpu and _is_window(cx, x, weight, *how):
        return _depthwise(cx, x, weight, bias, *how[:3])
    if not cx.on_gpu or bias is None or _in_one_kernel(x, groups):
        raise Unsupported(_PLAIN)
    inner = replace(cx, name=cx.low.unique(f"{cx.name}_call"))
    product = extern(inner, aten.convolution.default, (x, weight, None, *how), {}, _PLAIN)

    def biased(k: NestBuilder) -> Value:
        return k.load(product) + k.load(bias, [k.coords[len(k.coords) - len(product.shape) + 1]])

    return nest(cx, biased)


def _in_one_kernel(x: View, groups: Any) -> bool:
    """Does ATen add the bias to halves before it rounds them? In its own kernels for depthwise convolutions."""
    depthwise = groups == x.shape[1] and groups != 1
    return depthwise and x.dtype in (torch.float16, torch.bfloat16) and x.strides[1] != 1


def _is_window(cx: LoweringContext, x: View, weight: View, *how: Any) -> bool:
    """Is it depthwise, a result per channel, of few elements that are not in channels-last order?"""
    transposed, groups, taps = how[3], expr(how[-1]).constant or 1, product(weight.shape[1:]).constant
    depthwise = groups > 1 and x.shape[1] == groups and weight.shape[0] == groups and len(x.shape) == len(weight.shape)
    few = taps is not None and taps <= TAPS
    return depthwise and few and not transposed and x.strides[1] != 1


def _depthwise(
    cx: LoweringContext, x: View, weight: View, bias: View | None, stride: Any, padding: Any, dilation: Any
) -> View:
    out, sizes = cx.out(), x.shape[2:]
    g = Geometry.of(len(sizes), list(weight.shape[2:]), stride, padding, dilation, ceil=False)
    w, compute = Window(cx, out, g.kernel), value_dtype(check_dtype(x.dtype))
    sides = [g.side(d, w.spatial[d], size) for d, size in enumerate(sizes)]
    k, channel = w.k, w.lead[1]
    taps = (k.load(weight, [channel, expr(0), *map(expr, p)]).to(compute) for p in w.points())
    elements = (k.load(x, [*w.lead, *at], inside).to(compute) for at, inside in w.elements(sides))
    total = w.sum(element * tap for element, tap in zip(elements, taps))
    return w.finish(out, total if bias is None else total + k.load(bias, [channel]).to(compute))


@rule("convolution_backward.default")
def convolution_backward(
    cx: LoweringContext, grad: View, x: View, weight: View, bias_sizes: Any, *how: Any
) -> Sequence[Any]:
    *settings, mask = how
    if not cx.on_gpu or not mask[2]:
        raise Unsupported(_PLAIN)
    made: Sequence[Any] = (None, None, None)
    if mask[0] or mask[1]:
        inner = replace(cx, fake=(*cx.fake[:2], None))
        given = grad, x, weight, bias_sizes, *settings, [*mask[:2], False]
        made = extern(inner, aten.convolution_backward.default, given, {}, _PLAIN)
    sums = replace(cx, fake=cx.fake[2], name=cx.low.unique(f"{cx.name}_bias"))
    compute = value_dtype(check_dtype(sums.dtype))
    dims = tuple(d for d in range(len(grad.shape)) if d != 1)
    return [*made[:2], reduction(sums, grad, dims, lambda k, v: k.reduce("sum", v.to(compute)))]
