"""The operations of a loop body: the operands, the result and the meaning of each.

One table, for the verifier (arity, dtype), the interpreter (``meaning``, in torch) and the printers (C++, Triton).

Value dtypes. A value in a loop body is bool, uint8, int8, int16, int32, int64, float32 or float64.
float16 and bfloat16 exist in *buffers* only: a Load widens them to float32 and a Store rounds.
``to_f16``/``to_bf16`` round a float32 value where the program has an explicit cast.

NB: eager rounds after every half-precision op; reflib (like TorchInductor) rounds where a value is stored and where the
program casts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

BUFFER_DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
VALUE_DTYPES = tuple(d for d in BUFFER_DTYPES if d not in (torch.float16, torch.bfloat16))


def value_dtype(buffer_dtype: torch.dtype) -> torch.dtype:
    """The dtype of a Load from a buffer of ``buffer_dtype``."""
    return torch.float32 if buffer_dtype in (torch.float16, torch.bfloat16) else buffer_dtype


@dataclass(frozen=True)
class OpSpec:
    """``arity`` operands, all of one dtype except for ``where`` (bool first); ``kind`` of operand: ``float``, ``int``,
    ``bool``, ``intbool``, ``number`` (no bool) or ``any``; ``result``: ``same`` as the operands, ``bool``, or ``given``
    (by the statement: casts)."""

    name: str
    arity: int
    kind: str
    result: str
    meaning: Callable[..., Any]


def _float(name: str, fn: Callable[..., Any], arity: int = 1) -> OpSpec:
    return OpSpec(name, arity, "float", "same", fn)


def _compare(name: str, fn: Callable[..., Any]) -> OpSpec:
    return OpSpec(name, 2, "any", "bool", fn)


def _safe_int(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Integer division by zero is 0 here: a masked lane must not trap."""

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.dtype.is_floating_point:
            return fn(a, b)
        zero = b == 0
        return torch.where(zero, torch.zeros_like(b), fn(a, torch.where(zero, torch.ones_like(b), b)))

    return call


_SPECS = [
    # arithmetic. Integer arithmetic wraps. bool has no arithmetic: rules use and/or/xor.
    OpSpec("add", 2, "number", "same", lambda a, b: a + b),
    OpSpec("sub", 2, "number", "same", lambda a, b: a - b),
    OpSpec("mul", 2, "number", "same", lambda a, b: a * b),
    OpSpec("div", 2, "float", "same", lambda a, b: a / b),  # IEEE: x/0 is inf or nan
    OpSpec("floordiv", 2, "number", "same", _safe_int(lambda a, b: torch.div(a, b, rounding_mode="floor"))),
    OpSpec("truncdiv", 2, "int", "same", _safe_int(lambda a, b: torch.div(a, b, rounding_mode="trunc"))),
    OpSpec("remainder", 2, "number", "same", _safe_int(torch.remainder)),  # sign of the divisor (Python's %)
    OpSpec("fmod", 2, "number", "same", _safe_int(torch.fmod)),  # sign of the dividend (C's %)
    OpSpec("neg", 1, "number", "same", lambda a: -a),
    OpSpec("abs", 1, "number", "same", torch.abs),
    OpSpec("maximum", 2, "any", "same", torch.maximum),  # NaN wins
    OpSpec("minimum", 2, "any", "same", torch.minimum),  # NaN wins
    _float("pow", torch.pow, 2),
    _float("fma", lambda a, b, c: torch.addcmul(c, a, b), 3),  # a*b + c, rounded once or twice
    # bits and logic
    OpSpec("and", 2, "intbool", "same", lambda a, b: a & b),
    OpSpec("or", 2, "intbool", "same", lambda a, b: a | b),
    OpSpec("xor", 2, "intbool", "same", lambda a, b: a ^ b),
    OpSpec("not", 1, "intbool", "same", lambda a: ~a),
    OpSpec("shl", 2, "int", "same", lambda a, b: a << b),  # by 0 to all bits but one
    OpSpec("shr", 2, "int", "same", lambda a, b: a >> b),  # the same; arithmetic for signed types
    # comparison: operands of one dtype, bool out
    _compare("eq", torch.eq), _compare("ne", torch.ne), _compare("lt", torch.lt),
    _compare("le", torch.le), _compare("gt", torch.gt), _compare("ge", torch.ge),
    OpSpec("where", 3, "any", "same", torch.where),  # (bool, a, b)
    OpSpec("cast", 1, "any", "given", None),  # type: ignore[arg-type]  # torch's .to(dtype)
    OpSpec("from_bits", 1, "int", "given", lambda a: a.view({4: torch.float32, 8: torch.float64}[a.itemsize])),
    OpSpec("to_bits", 1, "float", "given", lambda a: a.view({4: torch.int32, 8: torch.int64}[a.itemsize])),
    _float("to_f16", lambda a: a.to(torch.float16).to(a.dtype)),
    _float("to_bf16", lambda a: a.to(torch.bfloat16).to(a.dtype)),
    OpSpec("isnan", 1, "float", "bool", torch.isnan),
    OpSpec("isinf", 1, "float", "bool", torch.isinf),
    OpSpec("signbit", 1, "float", "bool", torch.signbit),
    # float functions
    _float("sqrt", torch.sqrt), _float("rsqrt", torch.rsqrt),
    _float("exp", torch.exp), _float("exp2", torch.exp2), _float("expm1", torch.expm1),
    _float("log", torch.log), _float("log2", torch.log2), _float("log10", torch.log10), _float("log1p", torch.log1p),
    _float("sin", torch.sin), _float("cos", torch.cos), _float("tan", torch.tan),
    _float("asin", torch.asin), _float("acos", torch.acos), _float("atan", torch.atan),
    _float("sinh", torch.sinh), _float("cosh", torch.cosh), _float("tanh", torch.tanh),
    _float("asinh", torch.asinh), _float("acosh", torch.acosh), _float("atanh", torch.atanh),
    _float("sigmoid", torch.sigmoid), _float("erf", torch.erf), _float("erfc", torch.erfc),
    _float("lgamma", torch.lgamma),
    _float("floor", torch.floor), _float("ceil", torch.ceil), _float("trunc", torch.trunc),
    _float("round", torch.round),  # to nearest, ties to even
    _float("atan2", torch.atan2, 2), _float("copysign", torch.copysign, 2), _float("hypot", torch.hypot, 2),
    _float("nextafter", torch.nextafter, 2),
]  # fmt: skip
OPS: dict[str, OpSpec] = {s.name: s for s in _SPECS}

# Reductions over all "r" axes of a LoopNest, by name, with the result of an empty one (None: an error). Operands are
# (value,), of arg* (value, index: int64). The result of an arg* is the index of the extreme value: the smallest among
# equals, the first NaN if there is one. max/min: NaN wins. m2 of floats is the sum of (value - mean of the values)^2;
# with operands (value, weight) each value counts ``weight`` times, a whole number.
REDUCTIONS: dict[str, Any] = {
    "sum": 0, "prod": 1, "max": None, "min": None, "any": False, "all": True, "argmax": None, "argmin": None, "m2": 0,
}  # fmt: skip


def identity(kind: str, dtype: torch.dtype) -> float | int | bool:
    """The Python number that an accumulator of ``dtype`` starts from (of an arg*: the one of the extreme value)."""
    if REDUCTIONS[kind] is not None:
        return REDUCTIONS[kind]
    lowest = kind in ("max", "argmax")  # the maximum of nothing is the least value there is
    if dtype == torch.bool:
        return not lowest
    if dtype.is_floating_point:
        return float("-inf") if lowest else float("inf")
    info = torch.iinfo(dtype)
    return info.min if lowest else info.max
