"""Elementwise ops. A formula is written once, on Values; ``@pointwise`` makes the LoopNest around it.

In which dtype is it computed? ``same``: the result's (float32 for half results, as in eager, which is also how
torch's promotion of integers to float comes out right: the result's dtype is known). ``compare``: the operands are
promoted among themselves, the result is bool; to half: numbers are rounded, and two tensors too, which are fused with
what makes them. (A maximum was rounded when it was stored: no element would equal it.) ``self``: each operand as it is.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from reflib.ir.expr import Expr
from reflib.ir.loops import Const
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Scalar, Value, check_dtype, nest, where
from .context import LoweringContext
from .rules import Unsupported, rule

aten = torch.ops.aten


def pointwise(*names: str, n: int = 1, dtype: str = "same") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a formula of ``n`` operands (tensors or numbers; None is passed on) and of parameters."""

    def decorate(formula: Callable[..., Any]) -> Callable[..., Any]:
        @rule(*names)
        @functools.wraps(formula)
        def lower_op(cx: LoweringContext, *args: Any, **kwargs: Any) -> View:
            return elementwise(cx, formula, args[:n], args[n:], kwargs, dtype)

        return formula

    return decorate


def formulas(n: int, table: dict[str, Callable[..., Any]], dtype: str = "same") -> None:
    """A formula per op, as :func:`pointwise`. A key may name several ops, with spaces between them."""
    for names, formula in table.items():
        pointwise(*names.split(), n=n, dtype=dtype)(formula)


def elementwise(
    cx: LoweringContext, formula: Callable[..., Any], operands: Any, rest: Any = (), kwargs: Any = None,
    dtype: str = "same",
) -> View:  # fmt: skip
    """One LoopNest over the output's points that stores ``formula(*operands, *rest, **kwargs)``."""
    compute = None
    if dtype != "self":
        compute = check_dtype(promote(operands)) if dtype == "compare" else value_dtype(check_dtype(cx.dtype))
    rounded = dtype == "compare" and all(isinstance(x, View) for x in operands)
    return nest(cx, lambda k: formula(*(operand(k, x, compute, rounded) for x in operands), *rest, **(kwargs or {})))


def operand(k: NestBuilder, x: Any, compute: torch.dtype | None, rounded: bool = False) -> Any:
    if isinstance(x, View):
        value = k.load(x)
        return value if compute is None or (compute == x.dtype and not rounded) else value.to(compute)
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
def scaled(y: Value, alpha: Scalar) -> Value:
    return y if isinstance(alpha, (int, float)) and alpha == 1 else y * alpha


@pointwise("add", n=2)
def add(x: Value, y: Value, alpha: Scalar = 1) -> Value:
    if x.dtype == torch.bool:
        return x | (y if alpha else y.like(False))
    return x + scaled(y, alpha)


@pointwise("div.Tensor", "div.Scalar", "true_divide", n=2)
def div(x: Value, y: Value) -> Value:
    """By a number, eager on a GPU multiplies by its reciprocal: one instruction instead of some 12."""
    by = y.kernel.b.body[y.id]
    number = isinstance(by, Const) and y.kernel.cx.on_gpu and 1e-30 < abs(by.value) < 1e30
    return x * (1 / by.value) if number else x / y  # type: ignore[union-attr]


formulas(2, {
    "sub": lambda x, y, alpha=1: x - scaled(y, alpha),
    "mul": lambda x, y: x & y if x.dtype == torch.bool else x * y,
    "threshold_backward": lambda grad, x, threshold: where(x <= threshold, 0, grad),
})  # fmt: skip
formulas(1, {"abs": lambda x: x.abs(), "neg": lambda x: -x, "relu": lambda x: x.maximum(0)})
formulas(1, {"logical_not": lambda x: ~x.to(torch.bool)}, dtype="self")


# -- comparison, logic, functions ----------------------------------------------------------------------------
def _register_table() -> None:
    """Ops that are one OPS entry."""
    for name in ("eq", "ne", "lt", "le", "gt", "ge"):
        pointwise(name, n=2, dtype="compare")(lambda x, y, op=name: x.op(op, y))
    for name in ("maximum", "minimum"):
        pointwise(name, n=2)(lambda x, y, op=name: x.op(op, y))
    for name, op in (("logical_and", "and"), ("logical_or", "or"), ("logical_xor", "xor")):
        pointwise(name, n=2, dtype="self")(lambda x, y, op=op: x.to(torch.bool).op(op, y.to(torch.bool)))
    for name in "sqrt rsqrt exp exp2 expm1 log log2 log1p sin cos tanh sigmoid erf".split():
        pointwise(name)(lambda x, op=name: x.op(op))


_register_table()


# -- selection ------------------------------------------------------------------------------------------
@rule("where.self")
def where_self(cx: LoweringContext, cond: View, x: Any, y: Any) -> View:
    def formula(c: Value, a: Value, b: Value) -> Value:
        dtype = value_dtype(check_dtype(cx.dtype))
        return where(c.to(torch.bool), a.kernel.value(a, dtype), b.kernel.value(b, dtype))

    return elementwise(cx, formula, (cond, x, y), dtype="self")


# -- casts and copies -----------------------------------------------------------------------------------
def copy(cx: LoweringContext, x: View) -> View:
    """A new tensor with the output's dtype and strides."""
    rounds = cx.dtype in (torch.float16, torch.bfloat16) and x.dtype != cx.dtype
    return elementwise(cx, lambda v: v.to(cx.dtype) if rounds else v, (x,), dtype="self")


@rule("clone", "contiguous", "lift_fresh_copy", "prims::clone", "alias_copy", "detach_copy", "lift")
def clone(cx: LoweringContext, x: View, **_: Any) -> View:
    return copy(cx, x)


@rule("_to_copy", "prims::convert_element_type", "to.dtype")
def to_copy(cx: LoweringContext, x: View, *_: Any, **kwargs: Any) -> View:
    if cx.low.buffers[x.buffer].device != cx.device:
        raise Unsupported("a copy between devices")
    return copy(cx, x)
