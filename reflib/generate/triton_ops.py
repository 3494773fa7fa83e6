"""Every op of ``ir.ops.OPS`` as a Triton expression, and the helper functions some of them need.

Two rules decide how an op is written:

* The result must be eager's. Eager on CUDA calls the CUDA math library, and Triton's ``libdevice`` is that
  library; ``tl.log`` and ``tl.sin`` are the hardware's approximations, and wrong near 1 and far from 0. Only
  ``tl.exp2`` and ``tl.rsqrt`` are good to about 2 ulp, so they are used as they are.
* ``/`` on float32 is approximate too (``div.full.f32``, 2 ulp, 5 instructions, no branch). The exact ``tl.div_rn``
  has a slow path and costs about 15. What is only stored in half precision, or added up, cannot show the difference,
  so it gets the cheap one, and ``tl.exp2`` for exponentials (``exact=False``; see ``exact_values``, ``triton_half``).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import GenerateError
from ..seams import Seam

# Modules with more ``PRINTERS`` (by op) or ``HELPERS`` (by name).
MORE = Seam("generate.MORE")
# Cheaper code for kernels that store only half precision. "forms": a Space -> ({statement: Form}, unread statements).
# None: the code for float32.
CHEAP = Seam("generate.CHEAP")

TL = {
    torch.bool: "tl.int1", torch.uint8: "tl.uint8", torch.int8: "tl.int8", torch.int16: "tl.int16",
    torch.int32: "tl.int32", torch.int64: "tl.int64", torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32", torch.float64: "tl.float64",
}  # fmt: skip

_LOG2_E = 1.4426950408889634


@dataclass
class Needs:
    """What a module's text must contain besides the kernel: helper functions by name, and the libdevice import."""

    helpers: set[str] = field(default_factory=set)
    settings: dict[str, int] = field(default_factory=dict)  # options of Triton's, by name
    libdevice: bool = False

    def helper(self, name: str) -> str:
        self.helpers.add(name)
        return name

    def lib(self, name: str) -> str:
        self.libdevice = True
        return f"libdevice.{name}"


Printer = Callable[[Needs, torch.dtype, list[str]], str]


def print_op(needs: Needs, op: str, dtype: torch.dtype, source: torch.dtype, args: list[str], exact: bool) -> str:
    """The expression for ``op`` of ``args`` (names or literals). ``dtype``: the result's, ``source``: the operands'."""
    if op == "cast":
        return print_cast(args[0], source, dtype)
    if op == "div":
        return _divide(args[0], args[1], source, exact)
    if op == "sigmoid":
        return _sigmoid(needs, args[0], source, exact)
    if op == "exp":
        return _exp(needs, args[0], source, exact)
    if op == "rsqrt" and exact and source == torch.float32:  # tl.rsqrt takes a denormal for 0; eager's does this
        x, small = args[0], f"{args[0]} < 1e-30"
        return f"tl.rsqrt({x} * tl.where({small}, 2.0**64, 1.0)) * tl.where({small}, 2.0**32, 1.0)"
    if op in ("erf", "tanh") and not exact and source == torch.float32 and "forms" in CHEAP:
        return f"{needs.helper(op + '_half')}({args[0]})"
    if op in _LIBDEVICE:
        return f"{needs.lib(_LIBDEVICE[op])}({', '.join(args)})"
    printer = _PRINTERS.get(op) or _further("PRINTERS", op)
    if printer is None:
        raise GenerateError(f"no Triton form for the op {op!r}")
    return printer(needs, source, args)


def _further(table: str, name: str) -> Any:
    return next((t[name] for module in MORE.values() if name in (t := getattr(module, table, {}))), None)


def print_cast(a: str, source: torch.dtype, dtype: torch.dtype) -> str:
    """What torch's ``.to(dtype)`` does: to bool is ``!= 0``, a float to a small integer goes through a wide one."""
    if dtype == source:
        return a
    if dtype == torch.bool:
        return f"{a} != 0"
    if source.is_floating_point and dtype in (torch.uint8, torch.int8, torch.int16):
        wide = "tl.int64" if dtype == torch.uint8 else "tl.int32"
        return f"{a}.to({wide}).to({TL[dtype]})"
    return f"{a}.to({TL[dtype]})"


def _divide(a: str, b: str, t: torch.dtype, exact: bool) -> str:
    """IEEE division; for float64 ``/`` is. The only literal among the operands is 1.0."""
    if t == torch.float32 and exact:
        return f"tl.div_rn({'tl.full([], 1.0, tl.float32)' if a == '1.0' else a}, {b})"
    return f"{a} / ({b})" if " " in b else f"{a} / {b}"


def _exp(needs: Needs, a: str, t: torch.dtype, exact: bool) -> str:
    """A multiplication by log2(e) in one rounding is off by |x| / 2 ulp: too much only in full precision. ``tl.exp``
    does the same with three instructions more, which keep results under 2^-126."""
    return f"{needs.lib('exp')}({a})" if exact or t == torch.float64 else f"tl.exp2({a} * {_LOG2_E})"


def _sigmoid(needs: Needs, a: str, t: torch.dtype, exact: bool) -> str:
    if exact or t == torch.float64:
        return _divide("1.0", f"1.0 + {_exp(needs, f'{a} * -1.0', t, exact)}", t, exact)
    return f"{needs.lib('fast_dividef')}(1.0, 1.0 + tl.exp2({a} * -{_LOG2_E}))"


# The same name as in libdevice unless stated. Exact, rounded or within 1-2 ulp, as eager's.
_LIBDEVICE = {
    n: n
    for n in (
        "expm1", "log", "log2", "log10", "log1p", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh",
        "asinh", "acosh", "atanh", "erf", "erfc", "lgamma", "trunc", "atan2", "copysign", "hypot", "nextafter", "pow",
    )
}  # fmt: skip
_LIBDEVICE["round"] = "rint"


def _infix(sign: str) -> Printer:
    return lambda needs, t, a: f"{a[0]} {sign} {a[1]}"


def _call(name: str) -> Printer:
    return lambda needs, t, a: f"{name}({', '.join(a)})"


def _order(sign: str) -> Printer:
    """Comparison; a one-bit integer is signed to Triton, so bools are widened first."""

    def printer(needs: Needs, t: torch.dtype, a: list[str]) -> str:
        if t == torch.bool:
            return f"{a[0]}.to(tl.int8) {sign} {a[1]}.to(tl.int8)"
        return f"{a[0]} {sign} {a[1]}"

    return printer


def _extreme(fn: str, logic: str) -> Printer:
    def printer(needs: Needs, t: torch.dtype, a: list[str]) -> str:
        if t == torch.bool:
            return f"{a[0]} {logic} {a[1]}"
        if t.is_floating_point:
            return f"{needs.helper(nan_helper(fn, t))}({a[0]}, {a[1]})"
        return f"tl.{fn}({a[0]}, {a[1]})"

    return printer


def nan_helper(fn: str, t: torch.dtype) -> str:
    """The helper for ``maximum`` or ``minimum`` of a floating-point dtype."""
    return f"{fn}_nan64" if t == torch.float64 else f"{fn}_nan"


def _not(needs: Needs, t: torch.dtype, a: list[str]) -> str:
    if t == torch.bool:
        return f"{a[0]} == 0"
    return f"{a[0]} ^ tl.full([], 255, tl.uint8)" if t == torch.uint8 else f"~{a[0]}"


_PRINTERS: dict[str, Printer] = {
    "add": _infix("+"), "sub": _infix("-"), "mul": _infix("*"),
    # Triton's -x is 0 - x, and loses -0.0
    "neg": lambda needs, t, a: f"{a[0]} * -1.0" if t.is_floating_point else f"0 - {a[0]}",
    "abs": lambda needs, t, a: a[0] if t == torch.uint8 else f"tl.abs({a[0]})",
    "maximum": _extreme("maximum", "|"), "minimum": _extreme("minimum", "&"),
    "fma": _call("tl.fma"),
    "and": _infix("&"), "or": _infix("|"), "xor": _infix("^"), "not": _not,
    "eq": _infix("=="), "ne": _infix("!="),
    "lt": _order("<"), "le": _order("<="), "gt": _order(">"), "ge": _order(">="),
    "where": _call("tl.where"),
    "to_f16": lambda needs, t, a: f"{a[0]}.to(tl.float16).to({TL[t]})",
    "to_bf16": lambda needs, t, a: (
        f"{a[0]}{'.to(tl.float32)' if t == torch.float64 else ''}.to(tl.bfloat16).to({TL[t]})"),
    "isnan": lambda needs, t, a: f"{a[0]} != {a[0]}",
    "sqrt": lambda needs, t, a: f"tl.sqrt_rn({a[0]})" if t == torch.float32 else f"tl.sqrt({a[0]})",
    "rsqrt": _call("tl.rsqrt"),
    "exp2": lambda needs, t, a: f"{needs.lib('exp2')}({a[0]})" if t == torch.float64 else f"tl.exp2({a[0]})",
}  # fmt: skip


def takes_literal(op: str, t: torch.dtype) -> bool:
    """May an operand be a Python number? Outside arithmetic it is an int32 to Triton, and narrower results would be."""
    arithmetic = op in ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "where")
    return arithmetic or (t.is_floating_point or t.itemsize >= 4) and op in ("maximum", "minimum", "and", "or", "xor")


# Ops that make a last-bit difference in a quotient visible in a half-precision result (so do casts to integers).
SHARP = {
    "floor", "ceil", "trunc", "round", "floordiv", "remainder", "fmod", "eq", "ne", "lt", "le", "gt", "ge",
}  # fmt: skip

# -- helper functions -------------------------------------------------------------------------------
_EXTREME = '''
def {fn}_nan(a, b):
    """The {which}; NaN wins."""
    return tl.{fn}(a, b, propagate_nan=tl.PropagateNan.ALL)
'''
_EXTREME64 = '''
def {fn}_nan64(a, b):
    """The {which}; NaN wins. (The hardware's instruction is for 32 bits.)"""
    return tl.where((a {sign} b) | (a != a), a, b)
'''
_EXTREME_INT = """
def {fn}_int(a, b):
    return tl.{fn}(a, b)
"""
HELPERS: dict[str, str] = {
    **{
        fn + kind: text.format(fn=fn, which=which, sign=sign)
        for kind, text in (("_nan", _EXTREME), ("_nan64", _EXTREME64), ("_int", _EXTREME_INT))
        for fn, which, sign in (("maximum", "greater", ">"), ("minimum", "smaller", "<"))
    },
    "product_of": """
def product_of(a, b):
    return a * b
""",
    "sum_of": """
def sum_of(a, b):
    return a + b
""",
}


def helper_text(needs: Needs) -> str:
    """The helpers in use, as jitted functions; sets ``needs.libdevice`` when one of them uses it."""
    out = []
    for name in sorted(needs.helpers):
        text = HELPERS.get(name) or _further("HELPERS", name)
        needs.libdevice |= "libdevice." in text
        out.append("@triton.jit" + text.rstrip() + "\n")
    return "\n\n".join(out)
