"""Loop statements as C++ text: types, literals, index expressions, operations. No structure here, only pieces.

The table in ``ir/ops.py`` defines operations; those that are more than a C++ operator are functions of
``cpp_header.h``, in the namespace ``op``.
"""

import ctypes
import math
import re

import torch

from ..errors import GenerateError
from ..ir.expr import Atom, BinOp, Expr, Ref, nonneg
from ..ir.loops import Op, Scan
from ..ir.ops import identity

CTYPE = {
    torch.bool: "bool", torch.uint8: "uint8_t", torch.int8: "int8_t", torch.int16: "int16_t", torch.int32: "int32_t",
    torch.int64: "int64_t", torch.float16: "float16", torch.bfloat16: "bfloat16", torch.float32: "float",
    torch.float64: "double",
}  # fmt: skip
_HALF = (torch.float16, torch.bfloat16)
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip
# operations as expensive as many additions: threads pay earlier, and results are kept rather than computed again
EXPENSIVE = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh sigmoid erf "
    "erfc lgamma pow atan2 hypot fmod remainder floordiv truncdiv nextafter philox".split()
)
_KEYWORDS = frozenset(
    "alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl const constexpr continue "
    "decltype default delete do double else enum explicit export extern false float for friend goto if inline int "
    "long mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public register "
    "return short signed sizeof static struct switch template this throw true try typedef typeid typename union "
    "unsigned using virtual void volatile wchar_t while xor xor_eq op float16 bfloat16 threads failed main "
    "int8_t int16_t int32_t int64_t uint8_t uint16_t uint32_t uint64_t".split()
)


def identifier(name: str) -> str:
    """``name`` as a C++ identifier."""
    text = re.sub(r"\W", "_", name)
    return f"{text}_" if text in _KEYWORDS or not re.match(r"[A-Za-z]", text) else text


def memory_type(dtype: torch.dtype) -> str:
    """The type of a buffer's elements. A bool is read as a byte: not every program writes only 0 and 1."""
    return "uint8_t" if dtype == torch.bool else CTYPE[dtype]


def literal(value: float | int | bool, dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "true" if value else "false"
    if not dtype.is_floating_point:
        # typed, for the templates in the header: op::maximum(v0, int64_t(3))
        return integer(int(value)) if dtype == torch.int32 else f"{CTYPE[dtype]}({integer(int(value))})"
    suffix = "f" if dtype == torch.float32 else ""
    value = float(value)
    if math.isnan(value):
        return f'__builtin_nan{suffix}("")'
    if dtype == torch.float32:
        value = ctypes.c_float(value).value  # rounds to the nearest; a tensor would take a millisecond here
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}__builtin_inf{suffix}()"
    return f"{value!r}{suffix}"


def integer(value: int) -> str:
    if value == -(2**63):
        return "INT64_MIN"
    return str(value) if -(2**31) < value < 2**31 else f"INT64_C({value})"


def index(e: Expr) -> str:
    """An index expression; every name in it is an int64_t."""
    if not e.terms:
        return "0"
    text = ""
    for m, c in sorted(e.terms, key=lambda term: not term[0]):  # the constant last
        factors = [_atom(a) for a in m]
        if abs(c) != 1 or not factors:
            factors.append(integer(abs(c)))
        sign = "-" if c < 0 else "+" if text else ""
        text += f" {sign} " if text else sign
        text += "*".join(factors)
    return text


def _atom(a: Atom) -> str:
    if isinstance(a, Ref):
        return f"v{a.id}"
    if not isinstance(a, BinOp):
        return identifier(a.key)
    if a.fn in ("max", "min"):
        return f"op::{a.fn}<int64_t>({index(a.a)}, {index(a.b)})"
    if nonneg(a.a):
        return f"({_operand(a.a)} {'/' if a.fn == '//' else '%'} {_operand(a.b)})"
    return f"op::{'floordiv' if a.fn == '//' else 'remainder'}<int64_t>({index(a.a)}, {index(a.b)})"


def _operand(e: Expr) -> str:
    text = index(e)
    return text if re.fullmatch(r"\w+", text) else f"({text})"


def operation(s: Op, args: tuple[str, ...], arg_dtype: torch.dtype) -> str:
    """``s`` applied to ``args``, names of values (of ``arg_dtype``; a ``where`` has its bool in front)."""
    if s.op == "where":
        return f"{args[0]} ? {args[1]} : {args[2]}"
    if s.op == "cast":
        return cast(args[0], arg_dtype, s.dtype)
    if s.op == "not":
        return f"!{args[0]}" if s.dtype == torch.bool else _narrow(f"~{args[0]}", s.dtype)
    if s.op == "neg":
        return _narrow(f"-({args[0]})" if args[0].startswith("-") else f"-{args[0]}", s.dtype)
    if s.op in _INFIX:
        text = f"{args[0]} {_INFIX[s.op]} {args[1]}"
        return text if s.dtype == torch.bool else _narrow(text, s.dtype)
    if s.op == "fma":
        return f"{args[0]} * {args[1]} + {args[2]}"
    of = "" if arg_dtype.is_floating_point else f"<{CTYPE[arg_dtype]}>"  # a literal has no dtype of its own
    return f"op::{s.op}{of}({', '.join(args)})"


def _narrow(text: str, dtype: torch.dtype) -> str:
    """C++ computes small integers as int: bring the result back."""
    return f"({CTYPE[dtype]})({text})" if dtype in (torch.uint8, torch.int8, torch.int16) else text


def cast(text: str, source: torch.dtype, target: torch.dtype) -> str:
    if target == torch.bool:
        return f"{text} != 0"
    if source.is_floating_point and not target.is_floating_point:
        return f"op::to_integer<{CTYPE[target]}>({text})"
    return f"({CTYPE[target]}){text}"


def is_half(dtype: torch.dtype) -> bool:
    return dtype in _HALF


def loaded(text: str, dtype: torch.dtype) -> str:
    """The element ``text`` of a ``dtype`` buffer as a value."""
    if dtype in _HALF:
        return f"op::widen({text})"
    return f"({text} != 0)" if dtype == torch.bool else text


def stored(text: str, dtype: torch.dtype) -> str:
    """The value ``text`` as an element of a ``dtype`` buffer."""
    return f"op::to_{CTYPE[dtype]}({text})" if dtype in _HALF else text


# -- reductions -------------------------------------------------------------------------------------
def start(kind: str, dtype: torch.dtype) -> str:
    """What an accumulator starts from."""
    value = identity(kind, dtype)
    plain = kind in ("max", "min") and not dtype.is_floating_point and dtype != torch.bool
    return integer(int(value)) if plain else literal(value, dtype)


def combine(kind: str, acc: str, value: str) -> str:
    """The statement that takes ``value`` into ``acc``."""
    if kind == "sum":
        return f"{acc} += {value};"
    if kind == "prod":
        return f"{acc} *= {value};"
    if kind in ("max", "min"):
        return f"{acc} = op::{kind}imum({acc}, {value});"
    if kind in ("any", "all"):
        return f"{acc} = {acc} {'|' if kind == 'any' else '&'} {value};"
    raise GenerateError(f"no C++ for the reduction {kind!r}")


def clause(kind: str) -> str:
    """The OpenMP name of a reduction."""
    if kind in ("max", "min"):
        return f"{kind}imum"
    return {"sum": "+", "prod": "*", "any": "|", "all": "&"}[kind]


# -- scans ------------------------------------------------------------------------------------------
def scan_type(s: Scan, dtype: torch.dtype) -> str:
    """An accumulator's type: sums of floats in double, as eager's."""
    return "double" if dtype == torch.float32 and s.kind in ("sum", "prod", "logsumexp", "linear") else CTYPE[dtype]


def scan(kind: str, acc: str, at: str, values: list[str]) -> str:
    """The statement that takes the next value (and its index) into ``acc`` (and ``at``)."""
    if kind == "logsumexp":
        return f"{acc} = op::log_add_exp({acc}, (double){values[0]});"
    if kind == "linear":
        return f"{acc} = {acc} * {values[0]} + {values[1]};"
    if len(values) == 1:
        return combine(kind, acc, values[0])
    sign = ">=" if kind == "argmax" else "<="
    taken = f"{acc} == {acc} && {values[0]} {sign} {acc} || {values[0]} != {values[0]}"
    return f"{at} = {taken} ? {values[1]} : {at}; {acc} = {taken} ? {values[0]} : {acc};"
