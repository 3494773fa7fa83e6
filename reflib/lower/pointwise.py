"""Elementwise ops. A formula is written once, on Values; ``@pointwise`` makes the Loops around it.

In which dtype is it computed? ``same``: the result's (float32 for half results, as in eager, which is also how
torch's promotion of integers to float comes out right: the result's dtype is known). ``compare``: the operands are
promoted among themselves, the result is bool. ``self``: each operand as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from reflib.ir.expr import Expr
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import Kernel, Scalar, Value, check_dtype, where
from .context import Context
from .rules import Unsupported, rule

aten = torch.ops.aten


def pointwise(*names: str, n: int = 1, dtype: str = "same") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a formula of ``n`` operands (tensors or numbers; None is passed on) and of parameters."""

    def decorate(formula: Callable[..., Any]) -> Callable[..., Any]:
        @rule(*names)
        @functools.wraps(formula)
        def lower_op(cx: Context, *args: Any, **kwargs: Any) -> View:
            return elementwise(cx, formula, args[:n], args[n:], kwargs, dtype)

        return formula

    return decorate


def elementwise(
    cx: Context,
    formula: Callable[..., Any],
    operands: Any,
    rest: Any = (),
    kwargs: Any = None,
    dtype: str = "same",
) -> View:
    """One Loops over the output's points that stores ``formula(*operands, *rest, **kwargs)``."""
    out = cx.out()
    k = Kernel(cx, out.shape)
    if dtype == "same":
        compute: Any = value_dtype(check_dtype(out.dtype))
    elif dtype == "compare":
        compute = value_dtype(check_dtype(promote(operands)))
    else:
        compute = None
    values = [operand(k, x, compute) for x in operands]
    k.store(out, formula(*values, *rest, **(kwargs or {})))
    k.finish()
    return out


def operand(k: Kernel, x: Any, compute: torch.dtype | None) -> Any:
    if isinstance(x, View):
        value = k.load(x)
        return value if compute is None else value.to(compute)
    return x if x is None or compute is None else k.value(x, compute)


def promote(operands: Any) -> torch.dtype:
    """torch's type promotion: tensors with dimensions, 0-d tensors, numbers: each group only if of a higher kind."""
    groups: list[torch.dtype | None] = [None, None, None]
    for x in operands:
        if x is None:
            continue
        if isinstance(x, View):
            g, d = (0 if x.shape else 1), x.dtype
        else:
            g, d = 2, _number_dtype(x)
        groups[g] = d if groups[g] is None else torch.promote_types(groups[g], d)  # type: ignore[arg-type]
    out = None
    for d in groups:
        if d is not None and (out is None or _kind(d) > _kind(out)):
            out = d
    assert out is not None
    return out


def _number_dtype(x: Any) -> torch.dtype:
    if isinstance(x, bool):
        return torch.bool
    if isinstance(x, (int, Expr)):
        return torch.int64
    return torch.complex64 if isinstance(x, complex) else torch.get_default_dtype()


def _kind(d: torch.dtype) -> int:
    return 3 if d.is_complex else 2 if d.is_floating_point else 0 if d == torch.bool else 1


# -- arithmetic -----------------------------------------------------------------------------------------
def _scaled(y: Value, alpha: Scalar) -> Value:
    return y if isinstance(alpha, (int, float)) and alpha == 1 else y * alpha


@pointwise("add", n=2)
def add(x: Value, y: Value, alpha: Scalar = 1) -> Value:
    if x.dtype == torch.bool:
        return x | (y if alpha else y.like(False))
    return x + _scaled(y, alpha)


@pointwise("sub", n=2)
def sub(x: Value, y: Value, alpha: Scalar = 1) -> Value:
    return x - _scaled(y, alpha)


@pointwise("rsub", n=2)
def rsub(x: Value, y: Value, alpha: Scalar = 1) -> Value:
    return y - _scaled(x, alpha)


@pointwise("mul", n=2)
def mul(x: Value, y: Value) -> Value:
    return x & y if x.dtype == torch.bool else x * y


@pointwise("div.Tensor", "div.Scalar", "true_divide", n=2)
def div(x: Value, y: Value) -> Value:
    return x / y


@pointwise("div.Tensor_mode", "div.Scalar_mode", n=2)
def div_mode(x: Value, y: Value, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return x / y
    if rounding_mode == "floor":
        return x.op("floordiv", y)
    return (x / y).op("trunc") if x.dtype.is_floating_point else x.op("truncdiv", y)


@pointwise("floor_divide", n=2)
def floor_divide(x: Value, y: Value) -> Value:
    return x.op("floordiv", y)


@pointwise("remainder", n=2)
def remainder(x: Value, y: Value) -> Value:
    return x.op("remainder", y)


@pointwise("fmod", n=2)
def fmod(x: Value, y: Value) -> Value:
    return x.op("fmod", y)


@pointwise("maximum", n=2)
def maximum(x: Value, y: Value) -> Value:
    return x.maximum(y)


@pointwise("minimum", n=2)
def minimum(x: Value, y: Value) -> Value:
    return x.minimum(y)


@pointwise("fmax", n=2)
def fmax(x: Value, y: Value) -> Value:
    if not x.dtype.is_floating_point:
        return x.maximum(y)
    return where(x.isnan(), y, where(y.isnan(), x, x.maximum(y)))


@pointwise("fmin", n=2)
def fmin(x: Value, y: Value) -> Value:
    if not x.dtype.is_floating_point:
        return x.minimum(y)
    return where(x.isnan(), y, where(y.isnan(), x, x.minimum(y)))


@pointwise("abs")
def abs_(x: Value) -> Value:
    return x.abs()


@pointwise("sign", "sgn")
def sign(x: Value) -> Value:
    if x.dtype == torch.bool:
        return x
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@pointwise("square")
def square(x: Value) -> Value:
    return x * x


@pointwise("addcmul", n=3)
def addcmul(x: Value, a: Value, b: Value, value: Scalar = 1) -> Value:
    return x + _scaled(a, value) * b


@pointwise("addcdiv", n=3)
def addcdiv(x: Value, a: Value, b: Value, value: Scalar = 1) -> Value:
    return x + _scaled(a, value) / b


@pointwise("prims::fma", n=3)
def fma(x: Value, y: Value, z: Value) -> Value:
    return x.op("fma", y, z)


@pointwise("lerp.Scalar", "lerp.Tensor", n=3)
def lerp(x: Value, y: Value, w: Value) -> Value:
    return where(w.abs() < 0.5, x + w * (y - x), y - (y - x) * (1 - w))


@pointwise("pow.Tensor_Scalar", n=1)
def pow_scalar(x: Value, exponent: Any) -> Value:
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        exact = _exact_power(x, float(exponent))
        if exact is not None:
            return exact
    return x.op("pow", exponent)


def _exact_power(x: Value, e: float) -> Value | None:
    """The powers eager has special cases for; of integers, every one that is not negative."""
    if not x.dtype.is_floating_point:
        if x.dtype == torch.bool or e < 0 or e != int(e) or e > 64:
            raise Unsupported(f"integers to the power {e}")
        return _integer_power(x, int(e))
    special: dict[float, Callable[[], Value]] = {
        0.0: lambda: x.like(1),
        1.0: lambda: x,
        2.0: lambda: x * x,
        3.0: lambda: x * x * x,
        0.5: lambda: x.sqrt(),
        -0.5: lambda: x.op("rsqrt"),
        -1.0: lambda: 1 / x,
        -2.0: lambda: 1 / (x * x),
    }
    return special[e]() if e in special else None


def _integer_power(x: Value, n: int) -> Value:
    out = x.like(1)
    while n:
        if n & 1:
            out = out * x
        x, n = (x * x if n > 1 else x), n >> 1
    return out


@pointwise("pow.Tensor_Tensor", "pow.Scalar", n=2)
def pow_tensor(x: Value, y: Value) -> Value:
    return x.op("pow", y)


# -- comparison, logic, bits ----------------------------------------------------------------------------
def _register_table() -> None:
    """Ops that are one OPS entry."""
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        pointwise(name, n=2, dtype="compare")(lambda x, y, op=name: x.op(op, y))
    for name, op in (("bitwise_and", "and"), ("bitwise_or", "or"), ("bitwise_xor", "xor")):
        pointwise(name, n=2)(lambda x, y, op=op: x.op(op, y))
    for name, op in (("logical_and", "and"), ("logical_or", "or"), ("logical_xor", "xor")):
        pointwise(name, n=2, dtype="self")(lambda x, y, op=op: x.to(torch.bool).op(op, y.to(torch.bool)))
    for name in ("atan2", "copysign", "hypot", "nextafter"):
        pointwise(name, n=2)(lambda x, y, op=name: x.op(op, y))
    unary = (
        "sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh "
        "sigmoid erf erfc lgamma"
    )
    for name in unary.split():
        pointwise(name)(lambda x, op=name: x.op(op))
    for name in ("floor", "ceil", "trunc"):
        pointwise(name)(lambda x, op=name: x.op(op) if x.dtype.is_floating_point else x)


_register_table()


@pointwise("round.default")
def round_(x: Value) -> Value:
    return x.op("round") if x.dtype.is_floating_point else x


@pointwise("neg")
def neg(x: Value) -> Value:
    return -x


@pointwise("reciprocal")
def reciprocal(x: Value) -> Value:
    return 1 / x


@pointwise("bitwise_not")
def bitwise_not(x: Value) -> Value:
    return ~x


@pointwise("logical_not", dtype="self")
def logical_not(x: Value) -> Value:
    return ~x.to(torch.bool)


@pointwise("bitwise_left_shift", "__lshift__", n=2)
def left_shift(x: Value, y: Value) -> Value:
    bits = torch.iinfo(x.dtype).bits if x.dtype != torch.bool else 1
    return where((y >= 0) & (y < bits), x.op("shl", _clamp(y, 0, bits - 1)), 0)


@pointwise("bitwise_right_shift", "__rshift__", n=2)
def right_shift(x: Value, y: Value) -> Value:
    bits = torch.iinfo(x.dtype).bits if x.dtype != torch.bool else 1
    gone = where(x < 0, -1, x.like(0)) if x.dtype != torch.uint8 else x.like(0)
    return where((y >= 0) & (y < bits), x.op("shr", _clamp(y, 0, bits - 1)), gone)


def _clamp(x: Value, lo: Scalar, hi: Scalar) -> Value:
    return x.maximum(lo).minimum(hi)


@pointwise("isnan", dtype="self")
def isnan(x: Value) -> Value:
    return x.isnan()


@pointwise("isinf", dtype="self")
def isinf(x: Value) -> Value:
    return x.op("isinf") if x.dtype.is_floating_point else x.kernel.value(False, torch.bool)


@pointwise("isfinite", dtype="self")
def isfinite(x: Value) -> Value:
    if not x.dtype.is_floating_point:
        return x.kernel.value(True, torch.bool)
    return ~(x.op("isinf") | x.isnan())


@pointwise("signbit", dtype="self")
def signbit(x: Value) -> Value:
    if x.dtype.is_floating_point:
        return x.op("signbit")
    return x.kernel.value(False, torch.bool) if x.dtype in (torch.bool, torch.uint8) else x < 0


# -- selection ------------------------------------------------------------------------------------------
@rule("where.self")
def where_self(cx: Context, cond: View, x: Any, y: Any) -> View:
    def formula(c: Value, a: Value, b: Value) -> Value:
        dtype = value_dtype(check_dtype(cx.dtype))
        return where(c.to(torch.bool), a.kernel.value(a, dtype), b.kernel.value(b, dtype))

    return elementwise(cx, formula, (cond, x, y), dtype="self")


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(cx: Context, x: View, mask: View, value: Any) -> View:
    def formula(a: Value, m: Value, v: Any) -> Value:
        return where(m.to(torch.bool), v.to(a.dtype) if isinstance(v, Value) else v, a)

    return elementwise(cx, formula, (x, mask, value), dtype="self")


@pointwise("clamp", n=3)
def clamp(x: Value, lo: Value | None = None, hi: Value | None = None, **named: Any) -> Value:
    lo, hi = named.get("min", lo), named.get("max", hi)
    x = x if lo is None else x.maximum(lo)
    return x if hi is None else x.minimum(hi)


@pointwise("clamp_min", n=2)
def clamp_min(x: Value, lo: Value) -> Value:
    return x.maximum(lo)


@pointwise("clamp_max", n=2)
def clamp_max(x: Value, hi: Value) -> Value:
    return x.minimum(hi)


# -- casts and copies -----------------------------------------------------------------------------------
def copy(cx: Context, x: View) -> View:
    """A new tensor with the output's dtype and strides."""
    rounds = cx.dtype in (torch.float16, torch.bfloat16) and x.dtype != cx.dtype
    return elementwise(cx, lambda v: v.to(cx.dtype) if rounds else v, (x,), dtype="self")


@rule("clone", "contiguous", "lift_fresh_copy", "prims::clone", "alias_copy", "detach_copy", "lift")
def clone(cx: Context, x: View, **_: Any) -> View:
    return copy(cx, x)


@rule("_to_copy", "prims::convert_element_type", "to.dtype")
def to_copy(cx: Context, x: View, *_: Any, **kwargs: Any) -> View:
    if cx.low.buffers[x.buffer].device != cx.device:
        raise Unsupported("a copy between devices")
    return copy(cx, x)


@rule("copy.default")
def copy_functional(cx: Context, _self: View, src: View, non_blocking: bool = False) -> View:
    return to_copy(cx, src)


@rule("copy_.default")
def copy_(cx: Context, dst: View, src: View, non_blocking: bool = False) -> View:
    """Write over an input. Read the whole source first if it is the same storage seen differently."""
    buffer = cx.low.buffers[dst.buffer]
    if cx.low.buffers[src.buffer].device != buffer.device:
        raise Unsupported("a copy between devices")
    if buffer.dtype != dst.dtype:
        raise Unsupported("a copy onto a tensor seen as another dtype")
    if src == dst:
        return dst
    if src.buffer == dst.buffer:
        moved = cx.temp("copy", src.shape, src.dtype)
        _store(cx, src, moved)
        src = moved
    _store(cx, src, dst)
    return dst


def _store(cx: Context, src: View, dst: View) -> None:
    device = cx.low.buffers[dst.buffer].device
    k = Kernel(cx, dst.shape, device=device)
    value = k.load(src)
    if dst.dtype in (torch.float16, torch.bfloat16) and src.dtype != dst.dtype:
        value = value.to(value_dtype(dst.dtype))
    k.store(dst, value)
    k.finish()
