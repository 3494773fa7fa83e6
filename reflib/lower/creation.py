"""Tensors made from nothing: full, arange, eye-like masks. A tensor of one number everywhere is remembered as such,
so that whoever reads it uses the number and the tensor itself usually disappears."""

from __future__ import annotations

from typing import Any

import torch

from reflib.ir.expr import Expr
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import Kernel, Value, check_dtype, fit, where
from .context import Context
from .rules import RULES, Unsupported, overloads, rule


def fill(cx: Context, value: Any) -> View:
    """The output, holding ``value`` everywhere."""
    out = cx.out()
    dtype = value_dtype(check_dtype(out.dtype))
    k = Kernel(cx, out.shape)
    if isinstance(value, View):
        k.store(out, k.load(value))
    else:
        k.store(out, value)
        if not isinstance(value, Expr):
            cx.low.uniform[out.buffer] = _rounded(fit(value, dtype), out.dtype)
    k.finish()
    return out


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """The number that reading it back from a tensor of ``dtype`` gives."""
    return torch.tensor(value, dtype=dtype).item() if dtype.is_floating_point else value


@rule("full.default")
def full(cx: Context, size: Any, fill_value: Any, **_: Any) -> View:
    return fill(cx, fill_value)


@rule("full_like", "new_full", "fill.Scalar", "fill.Tensor")
def full_like(cx: Context, x: Any, *args: Any, **kwargs: Any) -> View:
    return fill(
        cx,
        kwargs["fill_value"] if "fill_value" in kwargs else kwargs["value"] if "value" in kwargs else args[-1],
    )


@rule("scalar_tensor")
def scalar_tensor(cx: Context, s: Any, **_: Any) -> View:
    return fill(cx, s)


@rule("zeros.default", "zeros_like", "new_zeros")
def zeros(cx: Context, *_: Any, **__: Any) -> View:
    return fill(cx, 0)


@rule("ones.default", "ones_like", "new_ones")
def ones(cx: Context, *_: Any, **__: Any) -> View:
    return fill(cx, 1)


@rule("arange.default")
def arange(cx: Context, end: Any, **_: Any) -> View:
    return _range(cx, 0, 1, end)


@rule("arange.start", "arange.start_step")
def arange_start(cx: Context, start: Any, end: Any, step: Any = 1, **_: Any) -> View:
    return _range(cx, start, step, end)


def _range(cx: Context, start: Any, step: Any, end: Any) -> View:
    """start + i*step, in integers where they all are, else in float64 as eager does."""
    out = cx.out()
    check_dtype(out.dtype)
    k = Kernel(cx, out.shape)
    whole = all(
        isinstance(v, int) or isinstance(v, Expr) and not cx.low.symbols.is_float(v) for v in (start, step, end)
    )
    if whole:
        k.store(out, k.index(k.linear([0]) * step + start))
    else:
        k.store(out, k.index(k.linear([0])).to(torch.float64) * step + start)
    k.finish()
    return out


@rule("prims::iota")
def iota(cx: Context, length: Any, *, start: Any, step: Any, **_: Any) -> View:
    return _range(cx, start, step, 0)


@rule("eye.default", "eye.m")
def eye(cx: Context, *_: Any, **__: Any) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    k.store(out, k.index(k.coords[0]).eq(k.index(k.coords[1])).to(value_dtype(check_dtype(out.dtype))))
    k.finish()
    return out


@rule("triu.default")
def triu(cx: Context, x: View, diagonal: Any = 0) -> View:
    return _triangle(cx, x, lambda row, col: col - row >= diagonal)


@rule("tril.default")
def tril(cx: Context, x: View, diagonal: Any = 0) -> View:
    return _triangle(cx, x, lambda row, col: col - row <= diagonal)


def _triangle(cx: Context, x: View, keep: Any) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    mask: Value = keep(k.index(k.coords[-2]), k.index(k.coords[-1]))
    value = k.load(x)
    k.store(out, where(mask, value, 0))
    k.finish()
    return out


def uninitialised(cx: Context, *args: Any, **kwargs: Any) -> View:
    raise Unsupported("uninitialised memory")


for _op in overloads("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided"):
    RULES[_op] = uninitialised
