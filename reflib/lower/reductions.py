"""Reductions: a LoopNest whose reduced dimensions are r axes."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from reflib.ir.expr import ZERO, Expr
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, where
from .context import LoweringContext
from .rules import Unsupported, rule


def dims_of(x: View, dim: Any) -> tuple[int, ...]:
    """The reduced dimensions, non-negative and sorted; None and () mean all."""
    n = len(x.shape)
    dims = [dim] if isinstance(dim, int) else dim or range(n)
    return tuple(sorted({d % n for d in dims})) if n else ()


def out_coords(k: NestBuilder, dims: tuple[int, ...], out: View) -> list[Expr]:
    """Where the row of ``k`` goes in ``out``, whether it keeps the reduced dimensions or not."""
    if len(out.shape) == len(k.shape):
        return [ZERO if d in dims else c for d, c in enumerate(k.coords)]
    return [c for d, c in enumerate(k.coords) if d not in dims]


def reduction(
    cx: LoweringContext, x: View, dims: tuple[int, ...], formula: Callable[[NestBuilder, Value], Any],
    out: View | None = None,
) -> View:  # fmt: skip
    """One LoopNest: ``formula`` reduces the loaded value (in x's own value dtype) and gives the row's result."""
    out = cx.out() if out is None else out
    k = NestBuilder(cx, x.shape, dims)
    check_dtype(out.dtype)
    k.store(out, formula(k, k.load(x)), out_coords(k, dims, out))
    k.finish()
    return out


@rule("sum.default", "sum.dim_IntList")
def sum_(cx: LoweringContext, x: View, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> View:
    compute = value_dtype(check_dtype(cx.dtype))
    return reduction(cx, x, dims_of(x, dim), lambda k, v: k.reduce("sum", v.to(compute)))


@rule("mean.default", "mean.dim")
def mean(cx: LoweringContext, x: View, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> View:
    compute = value_dtype(check_dtype(cx.dtype))
    dims = dims_of(x, dim)
    return reduction(cx, x, dims, lambda k, v: k.reduce("sum", v.to(compute)) / k.count(dims))


def _extremes(kind: str, cx: LoweringContext, x: View, dim: Any = None, keepdim: bool = False) -> View:
    if any(x.shape[d] == 0 for d in dims_of(x, dim)):
        raise Unsupported("nothing has no extreme: eager's error")
    return reduction(cx, x, dims_of(x, dim), lambda k, v: extreme(k, kind, v))


rule("amax", "max.default")(partial(_extremes, "max"))
rule("amin", "min.default")(partial(_extremes, "min"))


def extreme(k: NestBuilder, kind: str, v: Value) -> Value:
    return k.reduce({"max": "any", "min": "all"}[kind] if v.dtype == torch.bool else kind, v)


# -- variance ---------------------------------------------------------------------------------------------
@rule("var.correction")
def var(cx: LoweringContext, x: View, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> View:
    return _variance(cx, x, dim, correction, cx.out())


@rule("std.correction")
def std(cx: LoweringContext, x: View, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> View:
    return _variance(cx, x, dim, correction, cx.out(), root=True)


@rule("var_mean.correction")
def var_mean(
    cx: LoweringContext, x: View, dim: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> list[View]:
    variance, mean_out = cx.out(0), cx.out(1)
    _variance(cx, x, dim, correction, variance, mean_out=mean_out)
    return [variance, mean_out]


def _variance(
    cx: LoweringContext, x: View, dim: Any, correction: Any, out: View, root: bool = False,
    mean_out: View | None = None,
) -> View:  # fmt: skip
    """``m2 / max(n - correction, 0)``, and the mean: one round of reductions."""
    dims = dims_of(x, dim)
    compute = value_dtype(check_dtype(out.dtype))
    if not compute.is_floating_point or x.dtype.is_complex:
        raise Unsupported(f"variance of {x.dtype}")
    k = NestBuilder(cx, x.shape, dims)
    v = k.load(x).to(compute)
    count = k.value(k.count(dims), compute)
    mean, m2 = (k.reduce("sum", v) / count if mean_out is not None else count), k.reduce("m2", v)
    if mean_out is not None:
        if "_mean" in str(cx.node.meta.get("original_aten")):  # not a norm's: Welford's formula, and so eager's
            mean = where(m2.isnan() & (count > 1), float("nan"), mean)  # var_mean, has none of a row with an infinity
        k.store(mean_out, mean, out_coords(k, dims, mean_out))
    freedom = (count - (1 if correction is None else correction)).maximum(0)
    result = m2 / freedom
    k.store(out, result.sqrt() if root else result, out_coords(k, dims, out))
    k.finish()
    return out
