"""More elementwise ops: powers, clamps, rounding, bits, tests of floats, rarer functions; writes onto inputs."""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from reflib.ir.loops import Const, Index
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import Value, nest, where
from .context import LoweringContext
from .numbers import HALF
from .pointwise import elementwise, formulas, pointwise, scaled, to_copy
from .rules import Unsupported, rule


@rule("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(cx: LoweringContext, x: View, mask: View, value: Any) -> View:
    def formula(a: Value, m: Value, v: Any) -> Value:
        return where(m.to(torch.bool), v.to(a.dtype) if isinstance(v, Value) else v, a)

    return elementwise(cx, formula, (x, mask, value), dtype="self")


@pointwise("pow.Tensor_Scalar", n=1)
def pow_scalar(x: Value, exponent: Any) -> Value:
    cx = x.kernel.cx
    if exponent in (0.5, -0.5) and cx.dtype == torch.float16 and not cx.on_gpu:  # no square root: (-inf) ** 0.5 is inf
        return x.op("pow", exponent)
    if isinstance(exponent, (int, float)) and not isinstance(exponent, bool):
        exact = _exact_power(x, float(exponent))
        if exact is not None:
            return exact
    return x.op("pow", exponent)


def _exact_power(x: Value, e: float) -> Value | None:
    """The powers eager has special cases for, and those of a few products; of integers, every one that is not negative.
    (A library's ``pow`` takes 100 instructions; 4 squarings are off by 8 units in the last place at most.)"""
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
    if e in special:
        return special[e]()
    if abs(e) == 1.5 and x.dtype == torch.float32 and x.kernel.cx.on_gpu:  # as in the gradient of x ** -0.5
        return _root_times(x, e)
    few = x.dtype == torch.float32 and e.is_integer() and 0 < e <= 16
    return _integer_power(x, int(e)) if few else None


def _root_times(x: Value, e: float) -> Value:
    """``x ** e``, which is 1.5 or -1.5: within 1.5 units in the last place; CUDA's is within 2, and takes four times as
    long. Numbers so large that their ``x * sqrt(x)`` is infinite, while its reciprocal is not 0, are scaled first. pow
    takes -inf for a positive number."""
    x = where(x.eq(-math.inf), math.inf, x)
    if e > 0:
        return x * x.sqrt()
    large = x > 2.0**80
    x = where(large, x * 2.0**-64, x)
    return where(large, 2.0**-96, x.like(1)) / (x * x.sqrt())


def _integer_power(x: Value, n: int) -> Value:
    out = x.like(1)
    while n:
        if n & 1:
            out = out * x
        x, n = (x * x if n > 1 else x), n >> 1
    return out


@pointwise("clamp", n=3)
def clamp(x: Value, lo: Value | None = None, hi: Value | None = None, **named: Any) -> Value:
    lo, hi = named.get("min", lo), named.get("max", hi)
    x = x if lo is None else x.maximum(lo)
    return x if hi is None else x.minimum(hi)


def whole(op: str, x: Value, y: Value) -> Value:
    """A division of integers. Eager's raises an error for a zero on a CPU, so it is eager's unless none is possible."""
    divisor = y.kernel.b.body[y.id]
    known = isinstance(divisor, Index) or isinstance(divisor, Const) and divisor.value != 0  # a size, a number
    if op in ("remainder", "fmod"):
        x, y = _rounded(x), _rounded(y)
    if not (known or x.dtype.is_floating_point or y.kernel.cx.on_gpu):
        raise Unsupported("a division by zero is an error")
    return x.op(op, y)


def _rounded(x: Value) -> Value:
    """A number in the op's dtype, as in eager: 0.3 % 0.3 of halves is 0, and not what 0.3 lost when it was stored."""
    number, dtype = x.kernel.b.body[x.id], x.kernel.cx.dtype
    return x.kernel.value(number.value, dtype) if isinstance(number, Const) and dtype in HALF else x


@pointwise("div.Tensor_mode", "div.Scalar_mode", n=2)
def div_mode(x: Value, y: Value, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return x / y
    if rounding_mode == "floor":
        return whole("floordiv", x, y)
    if not x.dtype.is_floating_point:
        return whole("truncdiv", x, y)
    y = y if x.kernel.cx.on_gpu else _rounded(y)
    return (x / y).to(x.kernel.cx.dtype).op("trunc")  # of half precision what eager takes, as in ``_to_whole``


def _extreme_number(op: str, x: Value, y: Value) -> Value:
    """The other operand, where one is not a number."""
    if not x.dtype.is_floating_point:
        return x.op(op, y)
    return where(x.isnan(), y, where(y.isnan(), x, x.op(op, y)))


@pointwise("sign", "sgn")
def sign(x: Value) -> Value:
    if x.dtype == torch.bool:
        return x
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


formulas(1, {"reciprocal": lambda x: 1 / x, "square": lambda x: x * x, "bitwise_not": lambda x: ~x})
formulas(2, {
    "rsub": lambda x, y, alpha=1: y - scaled(x, alpha),
    "pow.Tensor_Tensor pow.Scalar": lambda x, y: x.op("pow", y),
    "clamp_min": lambda x, lo: x.maximum(lo),
    "clamp_max": lambda x, hi: x.minimum(hi),
    "floor_divide": lambda x, y: whole("floordiv", x, y),
    "remainder": lambda x, y: whole("remainder", x, y),
    "fmod": lambda x, y: whole("fmod", x, y),
    "fmax": lambda x, y: _extreme_number("maximum", x, y),
    "fmin": lambda x, y: _extreme_number("minimum", x, y),
})  # fmt: skip
formulas(3, {
    "prims::fma": lambda x, y, z: x.op("fma", y, z),
    "lerp.Scalar lerp.Tensor": lambda x, y, w: where(w.abs() < 0.5, x + w * (y - x), y - (y - x) * (1 - w)),
    "addcmul": lambda x, a, b, value=1: x + scaled(a, value) * b,
    "addcdiv": lambda x, a, b, value=1: x + scaled(a, value) / b,
})  # fmt: skip


def _register_table() -> None:
    """Ops that are one OPS entry."""
    for name, op in (("bitwise_and", "and"), ("bitwise_or", "or"), ("bitwise_xor", "xor")):
        pointwise(name, n=2)(lambda x, y, op=op: x.op(op, y))
    for name in ("atan2", "copysign", "hypot"):
        pointwise(name, n=2)(lambda x, y, op=name: x.op(op, y))
    for name in "log10 tan asin acos atan sinh cosh asinh acosh atanh erfc lgamma".split():
        pointwise(name)(lambda x, op=name: x.op(op))
    for name in ("floor", "ceil", "trunc", "round.default"):
        rule(name)(functools.partial(_to_whole, name.partition(".")[0]))


@pointwise("nextafter", n=2)
def nextafter(x: Value, y: Value) -> Value:
    if x.kernel.cx.dtype in (torch.float16, torch.bfloat16):
        raise Unsupported("the next number of half precision")
    return x.op("nextafter", y)


def _to_whole(op: str, cx: LoweringContext, x: View) -> View:
    """Of half precision what eager takes, the operand as it would be stored: the next integer may be another one."""
    return elementwise(cx, lambda v: v.to(x.dtype).op(op) if x.dtype.is_floating_point else v, [x])


_register_table()


# -- bits -------------------------------------------------------------------------------------------------
@pointwise("bitwise_left_shift", "__lshift__", n=2)
def left_shift(x: Value, y: Value) -> Value:
    return _shifted("shl", x, y, lambda: x.like(0))


@pointwise("bitwise_right_shift", "__rshift__", n=2)
def right_shift(x: Value, y: Value) -> Value:
    return _shifted("shr", x, y, lambda: where(x < 0, -1, x.like(0)) if x.dtype != torch.uint8 else x.like(0))


def _shifted(op: str, x: Value, y: Value, gone: Callable[[], Value]) -> Value:
    """``gone``: what is left where the number of bits is negative, or all bits or more."""
    bits, by = torch.iinfo(x.dtype).bits if x.dtype != torch.bool else 1, y.kernel.b.body[y.id]
    if isinstance(by, Const) and 0 <= by.value < bits:
        return x.op(op, y)
    return where((y >= 0) & (y < bits), x.op(op, y.maximum(0).minimum(bits - 1)), gone())


# -- tests of values --------------------------------------------------------------------------------------
formulas(1, {"isnan": lambda x: x.isnan()}, dtype="self")


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


# -- writes onto inputs ---------------------------------------------------------------------------------
@rule("copy.default")
def copy_functional(cx: LoweringContext, _self: View, src: View, non_blocking: bool = False) -> View:
    return to_copy(cx, src)


@rule("copy_.default")
def copy_(cx: LoweringContext, dst: View, src: View, non_blocking: bool = False) -> View:
    """Write over an input. Read the whole source first if it is the same storage seen differently."""
    buffer = cx.low.buffers[dst.buffer]
    if cx.low.buffers[src.buffer].device != buffer.device:
        raise Unsupported("a copy between devices")
    if buffer.dtype != dst.dtype:
        raise Unsupported("a copy onto a tensor seen as another dtype")
    if src == dst:
        return dst
    if src.buffer == dst.buffer:
        src = _stored(cx, src, cx.temp("copy", src.shape, src.dtype))
    return _stored(cx, src, dst)


def _stored(cx: LoweringContext, src: View, dst: View) -> View:
    rounds = dst.dtype in (torch.float16, torch.bfloat16) and src.dtype != dst.dtype
    return nest(cx, lambda k: k.load(src).to(value_dtype(dst.dtype)) if rounds else k.load(src), dst)
