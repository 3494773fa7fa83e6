"""Reductions: a Loops whose reduced dimensions are r axes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from reflib.ir.expr import ZERO, Expr
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import Kernel, Value, check_dtype
from .context import Context
from .rules import Unsupported, rule


def dims_of(x: View, dim: Any) -> tuple[int, ...]:
    """The reduced dimensions, non-negative and sorted; None and () mean all."""
    n = len(x.shape)
    dims = range(n) if dim is None else [dim] if isinstance(dim, int) else list(dim)
    if not dims:
        dims = range(n)
    return tuple(sorted({d % n for d in dims})) if n else ()


def out_coords(k: Kernel, dims: tuple[int, ...], out: View) -> list[Expr]:
    """Where the row of ``k`` goes in ``out``, whether it keeps the reduced dimensions or not."""
    if len(out.shape) == len(k.shape):
        return [ZERO if d in dims else c for d, c in enumerate(k.coords)]
    return [c for d, c in enumerate(k.coords) if d not in dims]


def reduction(
    cx: Context,
    x: View,
    dims: tuple[int, ...],
    formula: Callable[[Kernel, Value], Any],
    out: View | None = None,
) -> View:
    """One Loops: ``formula`` reduces the loaded value (in x's own value dtype) and gives the row's result."""
    out = cx.out() if out is None else out
    k = Kernel(cx, x.shape, dims)
    check_dtype(out.dtype)
    k.store(out, formula(k, k.load(x)), out_coords(k, dims, out))
    k.finish()
    return out


@rule("sum.default", "sum.dim_IntList")
def sum_(cx: Context, x: View, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> View:
    compute = value_dtype(check_dtype(cx.dtype))
    return reduction(cx, x, dims_of(x, dim), lambda k, v: k.reduce("sum", v.to(compute)))


@rule("mean.default", "mean.dim")
def mean(cx: Context, x: View, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> View:
    compute = value_dtype(check_dtype(cx.dtype))
    dims = dims_of(x, dim)
    return reduction(cx, x, dims, lambda k, v: k.reduce("sum", v.to(compute)) / k.count(dims))


@rule("prod.default", "prod.dim_int")
def prod(cx: Context, x: View, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> View:
    compute = value_dtype(check_dtype(cx.dtype))
    if compute == torch.bool:
        return reduction(cx, x, dims_of(x, dim), lambda k, v: k.reduce("all", v.to(torch.bool)))
    return reduction(cx, x, dims_of(x, dim), lambda k, v: k.reduce("prod", v.to(compute)))


@rule("any.default", "any.dim", "any.dims")
def any_(cx: Context, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return reduction(cx, x, _all_or(x, dim), lambda k, v: k.reduce("any", v.to(torch.bool)))


@rule("all.default", "all.dim", "all.dims")
def all_(cx: Context, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return reduction(cx, x, _all_or(x, dim), lambda k, v: k.reduce("all", v.to(torch.bool)))


def _all_or(x: View, dim: Any) -> tuple[int, ...]:
    """any/all over an empty list of dims reduce nothing."""
    return () if isinstance(dim, (list, tuple)) and not dim else dims_of(x, dim)


@rule("amax", "max.default")
def amax(cx: Context, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return reduction(cx, x, dims_of(x, dim), lambda k, v: extreme(k, "max", v))


@rule("amin", "min.default")
def amin(cx: Context, x: View, dim: Any = None, keepdim: bool = False) -> View:
    return reduction(cx, x, dims_of(x, dim), lambda k, v: extreme(k, "min", v))


def extreme(k: Kernel, kind: str, v: Value) -> Value:
    if v.dtype == torch.bool:
        return k.reduce("any" if kind == "max" else "all", v)
    return k.reduce(kind, v)


@rule("argmax")
def argmax(cx: Context, x: View, dim: int | None = None, keepdim: bool = False) -> View:
    return _arg(cx, x, dim, "argmax")


@rule("argmin")
def argmin(cx: Context, x: View, dim: int | None = None, keepdim: bool = False) -> View:
    return _arg(cx, x, dim, "argmin")


def _arg(cx: Context, x: View, dim: int | None, kind: str) -> View:
    dims = dims_of(x, dim)
    return reduction(cx, x, dims, lambda k, v: k.reduce(kind, _ordered(v), k.index(k.linear(dims))))


def _ordered(v: Value) -> Value:
    return v.to(torch.int32) if v.dtype == torch.bool else v


@rule("max.dim")
def max_dim(cx: Context, x: View, dim: int, keepdim: bool = False) -> list[View]:
    return _extreme_and_index(cx, x, dim, "max")


@rule("min.dim")
def min_dim(cx: Context, x: View, dim: int, keepdim: bool = False) -> list[View]:
    return _extreme_and_index(cx, x, dim, "min")


def _extreme_and_index(cx: Context, x: View, dim: int, kind: str) -> list[View]:
    dims = dims_of(x, dim)
    if any(x.shape[d] == 0 for d in dims):
        raise Unsupported("the extreme of nothing is an error, which ATen raises")
    values, indices = cx.out(0), cx.out(1)
    k = Kernel(cx, x.shape, dims)
    v = k.load(x)
    at = out_coords(k, dims, values)
    k.store(values, extreme(k, kind, v), at)
    k.store(indices, k.reduce(f"arg{kind}", _ordered(v), k.index(k.linear(dims))), at)
    k.finish()
    return [values, indices]


@rule("linalg_vector_norm")
def vector_norm(
    cx: Context, x: View, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> View:
    compute = value_dtype(check_dtype(cx.dtype))
    if isinstance(ord, Expr) or not compute.is_floating_point or not x.dtype.is_floating_point:
        raise Unsupported(f"the {ord}-norm of {x.dtype}")
    dims = dims_of(x, dim)

    def norm(k: Kernel, v: Value) -> Value:
        v = v.to(compute)
        if k.count(dims) == 1 and ord != 0:
            return v.abs()
        if abs(ord) == math.inf:
            return k.reduce("max" if ord > 0 else "min", v.abs())
        if ord == 0:
            return k.reduce("sum", v.ne(0).to(compute))
        if ord == 1:
            return k.reduce("sum", v.abs())
        if ord == 2:
            return k.reduce("sum", v * v).sqrt()
        raise Unsupported(f"the {ord}-norm")

    return reduction(cx, x, dims, norm)


# -- variance: two passes, mean then squared distances ----------------------------------------------------
@rule("var.correction")
def var(cx: Context, x: View, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> View:
    return _variance(cx, x, dim, correction, cx.out())


@rule("std.correction")
def std(cx: Context, x: View, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> View:
    return _variance(cx, x, dim, correction, cx.out(), root=True)


@rule("var_mean.correction")
def var_mean(cx: Context, x: View, dim: Any = None, *, correction: Any = 1, keepdim: bool = False) -> list[View]:
    variance, mean_out = cx.out(0), cx.out(1)
    _variance(cx, x, dim, correction, variance, mean_out=mean_out)
    return [variance, mean_out]


def _variance(
    cx: Context,
    x: View,
    dim: Any,
    correction: Any,
    out: View,
    root: bool = False,
    mean_out: View | None = None,
) -> View:
    """``sum((x - mean)^2) / max(n - correction, 0)``. The mean is kept in the computing dtype in between."""
    dims = dims_of(x, dim)
    compute = value_dtype(check_dtype(out.dtype))
    if not compute.is_floating_point or x.dtype.is_complex:
        raise Unsupported(f"variance of {x.dtype}")
    same = mean_out is not None and mean_out.dtype == compute
    kept = [1 if d in dims else s for d, s in enumerate(x.shape)]
    center = mean_out if same else cx.temp("mean", kept, compute)  # type: ignore[assignment]
    reduction(cx, x, dims, lambda k, v: k.reduce("sum", v.to(compute)) / k.count(dims), center)
    k = Kernel(cx, x.shape, dims)
    mu = k.load(center, out_coords(k, dims, center))  # type: ignore[arg-type]
    d = k.load(x).to(compute) - mu
    count = k.value(k.count(dims), compute)
    freedom = (count - (1 if correction is None else correction)).maximum(0)
    result = k.reduce("sum", d * d) / freedom
    k.store(out, result.sqrt() if root else result, out_coords(k, dims, out))
    if mean_out is not None and not same:
        k.store(mean_out, mu, out_coords(k, dims, mean_out))
    k.finish()
    return out
