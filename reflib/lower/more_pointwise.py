"""Elementwise ops that most models do without: rounding, bits, tests of floats, rarer functions."""

from __future__ import annotations

import torch

from .body import Scalar, Value, where
from .pointwise import pointwise, scaled


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


@pointwise("sign", "sgn")
def sign(x: Value) -> Value:
    if x.dtype == torch.bool:
        return x
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@pointwise("prims::fma", n=3)
def fma(x: Value, y: Value, z: Value) -> Value:
    return x.op("fma", y, z)


@pointwise("lerp.Scalar", "lerp.Tensor", n=3)
def lerp(x: Value, y: Value, w: Value) -> Value:
    return where(w.abs() < 0.5, x + w * (y - x), y - (y - x) * (1 - w))


@pointwise("addcmul", n=3)
def addcmul(x: Value, a: Value, b: Value, value: Scalar = 1) -> Value:
    return x + scaled(a, value) * b


@pointwise("addcdiv", n=3)
def addcdiv(x: Value, a: Value, b: Value, value: Scalar = 1) -> Value:
    return x + scaled(a, value) / b


def _register_table() -> None:
    """Ops that are one OPS entry."""
    for name, op in (("bitwise_and", "and"), ("bitwise_or", "or"), ("bitwise_xor", "xor")):
        pointwise(name, n=2)(lambda x, y, op=op: x.op(op, y))
    for name in ("atan2", "copysign", "hypot", "nextafter"):
        pointwise(name, n=2)(lambda x, y, op=name: x.op(op, y))
    for name in "log10 tan asin acos atan sinh cosh asinh acosh atanh erfc lgamma".split():
        pointwise(name)(lambda x, op=name: x.op(op))
    for name in ("floor", "ceil", "trunc"):
        pointwise(name)(lambda x, op=name: x.op(op) if x.dtype.is_floating_point else x)


_register_table()


@pointwise("round.default")
def round_(x: Value) -> Value:
    return x.op("round") if x.dtype.is_floating_point else x


# -- bits -------------------------------------------------------------------------------------------------
@pointwise("bitwise_not")
def bitwise_not(x: Value) -> Value:
    return ~x


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


# -- tests of values --------------------------------------------------------------------------------------
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
