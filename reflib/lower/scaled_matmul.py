"""Scaled products of 8-bit floats: ``_scaled_mm`` (and ``torch.nn.functional.scaled_mm``) becomes a Choice of ATen's
call and a Template, whose epilogue multiplies by the scales and adds the bias; what follows is fused behind that.

Scales are float32: one number per tensor, or one per row of a and column of b. Others (blocks, MX formats) are ATen's.
Elements are multiplied exactly and added in float32: Hopper's tensor cores keep 14 bits of a sum of 8-bit products, so
without ``use_fast_accum`` the kernel adds such sums up every 128 elements of depth (``generate.matmul_printer``).

NB: TorchInductor has one more template for this, written for TMA, and scales per block.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import expr
from reflib.ir.program import Extern, Variant, View

from .context import LoweringContext
from .extern import extern
from .matmul import CHOSEN, as_choice, template, templates_can_read
from .rules import Unsupported, rule

aten = torch.ops.aten
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_PLAIN = "library call"
TENSORWISE, ROWWISE = 0, 1  # of torch.nn.functional.ScalingType


@rule("_scaled_mm.default")
def scaled_mm(
    cx: LoweringContext, a: View, b: View, scale_a: View, scale_b: View, bias: View | None = None,
    scale_result: View | None = None, out_dtype: torch.dtype | None = None, use_fast_accum: bool = False,
) -> Any:  # fmt: skip
    args = (a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    if scale_result is not None:
        raise Unsupported(_PLAIN)
    return _scaled(cx, aten._scaled_mm.default, args, (a, b), (scale_a, scale_b), bias, use_fast_accum)


@rule("_scaled_mm_v2.default")
def scaled_mm_v2(
    cx: LoweringContext, a: View, b: View, scale_a: Sequence[View], recipe_a: Sequence[int], swizzle_a: Sequence[int],
    scale_b: Sequence[View], recipe_b: Sequence[int], swizzle_b: Sequence[int], bias: View | None = None,
    out_dtype: torch.dtype | None = None, contraction_dim: Sequence[int] = (), use_fast_accum: bool = False,
) -> Any:  # fmt: skip
    args = (
        a, b, scale_a, recipe_a, swizzle_a, scale_b, recipe_b, swizzle_b, bias, out_dtype, contraction_dim,
        use_fast_accum,
    )  # fmt: skip
    recipes, swizzles = (*recipe_a, *recipe_b), (*swizzle_a, *swizzle_b)
    if len(scale_a) != 1 or len(scale_b) != 1 or any(swizzles) or not {*recipes} <= {TENSORWISE, ROWWISE}:
        raise Unsupported(_PLAIN)
    return _scaled(cx, aten._scaled_mm_v2.default, args, (a, b), (scale_a[0], scale_b[0]), bias, use_fast_accum)


def _scaled(
    cx: LoweringContext, target: Any, args: tuple[Any, ...], operands: tuple[View, View], scales: tuple[View, View],
    bias: View | None, fast: bool,
) -> Any:  # fmt: skip
    a, b = operands
    read = (a, b, *scales, *([] if bias is None else [bias]))
    if not cx.low.choices or not cx.on_gpu or cx.low.options.batch_invariant or not templates_can_read(cx, read, {}):
        raise Unsupported(_PLAIN)
    rows_first = a.strides[1] == 1 and b.strides[0] == 1  # the only order that tensor cores take 8-bit floats in
    if a.dtype not in FP8 or b.dtype not in FP8 or cx.dtype not in CHOSEN or not rows_first:
        raise Unsupported(_PLAIN)
    if any(size == 0 for v in (a, b) for size in v.shape) or not _known(scales, a, b):
        raise Unsupported(_PLAIN)
    value = extern(cx, target, args, {}, _PLAIN)
    default = cx.low.nodes.pop()
    assert isinstance(default, Extern)
    t = template(cx, default.name, a, b, value, bias, scales=scales)
    t = replace(t, dtype=a.dtype, precision="fast" if fast else "ieee")
    return as_choice(cx, target, default, value, [Variant("triton", (t,))])


def _known(scales: tuple[View, View], a: View, b: View) -> bool:
    """One number each, or one per row and column."""
    wide = ((a.shape[0], expr(1)), (expr(1), b.shape[1]))
    ones = all(all(n == 1 for n in s.shape) for s in scales)
    return all(s.dtype == torch.float32 for s in scales) and (ones or tuple(s.shape for s in scales) == wide)
