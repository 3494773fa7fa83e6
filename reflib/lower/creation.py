"""Tensors made from nothing: full, arange, eye-like masks. A tensor with one number everywhere is recorded as such:
loads of it use the number, and the tensor itself usually disappears."""

from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import Expr, expr
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, element, fit, nest, where
from .context import LoweringContext
from .extern import extern
from .rules import Unsupported, rule
from .views import REINTERPRET

# Not of 16 bits: a kernel computes these in float32, and a rounding may write other bits of a NaN.
_PAIRS = ((torch.float32, torch.int32), (torch.float64, torch.int64))
SAME_BITS = {*_PAIRS, *(pair[::-1] for pair in _PAIRS)}


def fill(cx: LoweringContext, value: Any) -> View:
    """The output, holding ``value`` everywhere."""
    dtype = value_dtype(check_dtype(cx.dtype))
    if isinstance(value, View):
        return nest(cx, lambda k: k.load(value))
    out = nest(cx, lambda k: value)
    if not isinstance(value, Expr):
        cx.low.uniform[out.buffer] = _rounded(fit(value, dtype), out.dtype)
    return out


def _rounded(value: Any, dtype: torch.dtype) -> Any:
    """The number that reading it back from a tensor of ``dtype`` gives."""
    return torch.tensor(value, dtype=dtype).item() if dtype.is_floating_point else value


rule("full.default")(lambda cx, size, fill_value, **_: fill(cx, fill_value))
rule("scalar_tensor")(lambda cx, s, **_: fill(cx, s))


@rule("full_like", "new_full", "fill.Scalar", "fill.Tensor")
def full_like(cx: LoweringContext, x: Any, *args: Any, **kwargs: Any) -> View:
    return fill(cx, kwargs.get("fill_value", kwargs.get("value", args[-1] if args else None)))


def _once(cx: LoweringContext, x: View) -> tuple[LoweringContext, View]:
    """What an expanded tensor repeats is copied once, and expanded: a copy of all could not be laid out as the view."""
    fake, strides = cx.fake, zip(cx.fake.stride(), x.strides)
    dims = {d for d, (s, own) in enumerate(strides) if isinstance(s, int) and s == 0 == own.constant}
    sizes, shape = ([1 if d in dims else n for d, n in enumerate(t)] for t in (fake.shape, x.shape))
    return replace(cx, fake=fake.as_strided(sizes, fake.stride())), replace(x, shape=tuple(map(expr, shape)))


@rule("view_copy.dtype", "view_as_real_copy.default", "view_as_complex_copy.default")
def reinterpreted(cx: LoweringContext, x: View, *args: Any) -> View:
    inner, part = _once(cx, x)
    if (x.dtype, cx.dtype) in SAME_BITS:
        return replace(nest(inner, lambda k: _as_bits(k.load(part), cx.dtype)), shape=cx.shape)
    op = REINTERPRET.get(cx.node.target, cx.node.target)
    return replace(extern(inner, op, (part, *args), {}, "another dtype"), shape=cx.shape)


def _as_bits(value: Value, dtype: torch.dtype) -> Value:
    how = "from_bits" if dtype.is_floating_point else "to_bits"
    return Value(value.kernel, value.kernel.b.op(how, value.id, dtype=dtype))


@rule("_neg_view_copy.default")
def negated(cx: LoweringContext, x: View) -> View:
    inner, part = _once(cx, x)
    return replace(inner.call(torch.ops.aten.neg.default, part), shape=cx.shape)


@rule("_conj_physical.default")
def conj_physical(cx: LoweringContext, x: Any) -> View:
    """The gradient of a product with a complex number calls this for the number, which eager's op does not take."""
    if isinstance(x, View):
        return reinterpreted(cx, x)
    if not isinstance(x, complex):
        raise Unsupported("complex numbers")
    kwargs = {"dtype": cx.dtype, "device": cx.device}
    return extern(cx, torch.ops.aten.scalar_tensor.default, (x.conjugate(),), kwargs, "a complex number")


rule("zeros.default", "zeros_like", "new_zeros")(lambda cx, *_, **__: fill(cx, 0))
rule("ones.default", "ones_like", "new_ones")(lambda cx, *_, **__: fill(cx, 1))
rule("arange.default")(lambda cx, end, **_: _range(cx, 0, 1, end))
rule("arange.start", "arange.start_step")(lambda cx, start, end, step=1, **_: _range(cx, start, step, end))
rule("prims::iota")(lambda cx, length, *, start, step, **_: _range(cx, start, step, 0))


def _range(cx: LoweringContext, start: Any, step: Any, end: Any) -> View:
    """start + i*step, in integers where they all are or are to be, else in float64 as eager does."""
    if not check_dtype(cx.dtype).is_floating_point:
        start, step, end = (int(v) if isinstance(v, float) else v for v in (start, step, end))
    if all(isinstance(v, int) or isinstance(v, Expr) and not cx.low.symbols.is_float(v) for v in (start, step, end)):
        return nest(cx, lambda k: k.index(k.linear([0]) * step + start))
    return nest(cx, lambda k: k.index(k.linear([0])).to(torch.float64) * step + start)


@element("eye.default", "eye.m")
def eye(k: NestBuilder, *_: Any, **__: Any) -> Value:
    return k.index(k.coords[0]).eq(k.index(k.coords[1])).to(value_dtype(check_dtype(k.cx.dtype)))


def _above(k: NestBuilder) -> Value:
    """How far an element of a matrix lies above the diagonal."""
    row, col = k.index(k.coords[-2]), k.index(k.coords[-1])
    return col - row


element("triu.default")(lambda k, x, diagonal=0: where(_above(k) >= diagonal, k.load(x), 0))
element("tril.default")(lambda k, x, diagonal=0: where(_above(k) <= diagonal, k.load(x), 0))


@rule("empty.memory_format", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
def uninitialised(cx: LoweringContext, *args: Any, **kwargs: Any) -> View:
    raise Unsupported("uninitialised memory")
