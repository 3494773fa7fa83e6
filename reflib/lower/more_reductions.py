"""Reductions that most models do without: products, any and all, positions of extremes, norms."""

import math
from functools import partial
from typing import Any

import torch

from reflib.ir.expr import Expr
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype
from .context import LoweringContext
from .reductions import dims_of, extreme, out_coords, reduction
from .rules import Unsupported, rule


@rule("prod.default", "prod.dim_int")
def prod(cx: LoweringContext, x: View, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> View:
    compute = value_dtype(check_dtype(cx.dtype))
    if compute == torch.bool:
        return reduction(cx, x, dims_of(x, dim), lambda k, v: k.reduce("all", v.to(torch.bool)))
    return reduction(cx, x, dims_of(x, dim), lambda k, v: k.reduce("prod", v.to(compute)))


def _truth(kind: str, cx: LoweringContext, x: View, dim: Any = None, keepdim: bool = False) -> View:
    """any/all over an empty list of dims reduce nothing."""
    dims = () if isinstance(dim, (list, tuple)) and not dim else dims_of(x, dim)
    return reduction(cx, x, dims, lambda k, v: k.reduce(kind, v.to(torch.bool)))


def _arg(kind: str, cx: LoweringContext, x: View, dim: int | None = None, keepdim: bool = False) -> View:
    dims = dims_of(x, dim)
    return reduction(cx, x, dims, lambda k, v: k.reduce(kind, _ordered(v), k.index(k.linear(dims))))


def _ordered(v: Value) -> Value:
    return v.to(torch.int32) if v.dtype == torch.bool else v


def _extreme_and_index(kind: str, cx: LoweringContext, x: View, dim: int, keepdim: bool = False) -> list[View]:
    dims = dims_of(x, dim)
    if any(x.shape[d] == 0 for d in dims):
        raise Unsupported("the extreme of nothing is an error, which ATen raises")
    values, indices = cx.out(0), cx.out(1)
    k = NestBuilder(cx, x.shape, dims)
    v = k.load(x)
    at = out_coords(k, dims, values)
    k.store(values, extreme(k, kind, v), at)
    k.store(indices, k.reduce(f"arg{kind}", _ordered(v), k.index(k.linear(dims))), at)
    k.finish()
    return [values, indices]


for _kind, _names in (("any", ("any.default", "any.dim", "any.dims")), ("all", ("all.default", "all.dim", "all.dims"))):
    rule(*_names)(partial(_truth, _kind))
for _kind in ("max", "min"):
    rule(f"arg{_kind}")(partial(_arg, f"arg{_kind}"))
    rule(f"{_kind}.dim")(partial(_extreme_and_index, _kind))


@rule("linalg_vector_norm")
def vector_norm(
    cx: LoweringContext, x: View, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> View:
    compute = value_dtype(check_dtype(cx.dtype))
    if isinstance(ord, Expr) or not compute.is_floating_point or not x.dtype.is_floating_point:
        raise Unsupported(f"the {ord}-norm of {x.dtype}")
    dims = dims_of(x, dim)

    def norm(k: NestBuilder, v: Value) -> Value:
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
