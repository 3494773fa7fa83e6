"""Convolutions on a GPU: cuDNN multiplies, and kernels of ours add the bias and sum its gradient.

ATen's call adds the bias in a kernel of its own, which reads and writes all of the result once more; its gradient is a
reduction over all but the channels, for which ATen takes as long as for the weights' (segformer, H200: 216 us in 18
calls, and 80 us of additions). Outside of the call both are loop nests, which fuse with what is around them::

    convolution(x, w, bias)           =  convolution(x, w, None) + bias
    convolution_backward(..)'s bias   =  grad.sum((0, 2, 3, ..))

Eager rounds the result before it adds the bias, as this does. It does not in ATen's own kernels for depthwise
convolutions, to which it gives halves that are not in channels-last order: those keep their bias.

Depthwise ones of few elements are loop nests (``depthwise``). Of sequences ATen copies what is not contiguous, an
element at a time; our copy moves tiles, or what computes the sequence stores it so.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, nest
from .context import LoweringContext
from .depthwise import channels_last, depthwise, grad_of_input, grad_of_weight, is_window
from .extern import extern
from .reductions import reduction
from .rules import Unsupported, rule
from .segment_sums import contiguous

aten = torch.ops.aten
_PLAIN = "library call"


@rule("convolution.default")
def convolution(cx: LoweringContext, x: View, weight: View, bias: View | None, *how: Any) -> View:
    if is_window(cx, x, weight, *how):
        return depthwise(cx, x, weight, bias, *how[:3])
    if not cx.on_gpu:
        raise Unsupported(_PLAIN)
    x = _sequence(cx, x)
    if bias is None or _in_one_kernel(x, how[-1]):
        return extern(cx, aten.convolution.default, (x, weight, bias, *how), {}, _PLAIN)
    inner = replace(cx, name=cx.low.unique(f"{cx.name}_call"))
    product = extern(inner, aten.convolution.default, (x, weight, None, *how), {}, _PLAIN)

    def biased(k: NestBuilder) -> Value:
        return k.load(product) + k.load(bias, [k.coords[len(k.coords) - len(product.shape) + 1]])

    return nest(cx, biased)


def _in_one_kernel(x: View, groups: Any) -> bool:
    """Does ATen add the bias to halves before it rounds them? In its own kernels for depthwise convolutions."""
    of_channels = groups == x.shape[1] and groups != 1
    return of_channels and x.dtype in (torch.float16, torch.bfloat16) and not channels_last(x)


def _sequence(cx: LoweringContext, x: View) -> View:
    """``x``, contiguous if it is of one dimension."""
    return contiguous(cx, x) if len(x.shape) == 3 else x


@rule("convolution_backward.default")
def convolution_backward(
    cx: LoweringContext, grad: View, x: View, weight: View, bias_sizes: Any, *how: Any
) -> Sequence[Any]:
    *settings, mask = how
    if not cx.on_gpu:
        raise Unsupported(_PLAIN)
    made: list[Any] = [None, None, None]
    of = [replace(cx, fake=f, name=cx.low.unique(f"{cx.name}_{i}")) for i, f in enumerate(cx.fake)]
    if is_window(cx, x, weight, *settings):
        made[0] = grad_of_input(of[0], grad, weight, *settings) if mask[0] else None
        made[1] = grad_of_weight(of[1], grad, x, weight, *settings) if mask[1] else None
    if mask[2]:
        compute = value_dtype(check_dtype(of[2].dtype))
        dims = tuple(d for d in range(len(grad.shape)) if d != 1)
        made[2] = reduction(of[2], grad, dims, lambda k, v: k.reduce("sum", v.to(compute)))
    left = [wanted and m is None for wanted, m in zip(mask, made)]
    if any(left):
        inner = replace(cx, fake=tuple(f if take else None for f, take in zip(cx.fake, left)))
        given = (_sequence(cx, grad), _sequence(cx, x), weight, bias_sizes, *settings, left)
        found = extern(inner, aten.convolution_backward.default, given, {}, _PLAIN)
        made = [f if take else m for f, take, m in zip(found, left, made)]
    return made
