"""``_foreach_*``: one op over lists of tensors is that op on each element; fusion and combined launches do the rest."""

from typing import Any

import torch

from reflib.ir.program import View

from .context import LoweringContext
from .rules import RULES, Unsupported, rule

aten = torch.ops.aten


def _element_op(name: str, has_tensor: bool) -> Any:
    """The overload of ``name`` that takes a tensor (or a number) as its second operand and has a rule."""
    wanted = ("Tensor", "Tensor_Tensor") if has_tensor else ("Scalar", "Tensor_Scalar")
    for overload in (*wanted, "default", "Tensor", "Scalar"):
        op = getattr(getattr(aten, name, None), overload, None)
        if op in RULES:
            return op
    raise Unsupported("no rule for one element")


_NAMES = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp "
    "expm1 floor frac lerp lgamma log log10 log1p log2 max maximum minimum mul neg pow reciprocal round rsqrt "
    "sigmoid sign sin sinh sqrt sub tan tanh trunc zero"
).split()


@rule(*(f"_foreach_{name}" for name in _NAMES))
def foreach(cx: LoweringContext, *args: Any, **kwargs: Any) -> list[View]:
    """Element i of every list argument, and the other arguments as they are, to the op for one element."""
    schema = cx.node.target._schema  # type: ignore[union-attr]
    name = schema.name.partition("_foreach_")[2]
    count = next(len(a) for a in args if isinstance(a, (list, tuple)))
    out = []
    for i in range(count):
        mine = [a[i] if isinstance(a, (list, tuple)) else a for a in args]
        named = {k: v[i] if isinstance(v, (list, tuple)) else v for k, v in kwargs.items()}
        if name in ("addcmul", "addcdiv") and len(mine) > 3:  # the scalar is a keyword in the single op
            named["value"] = mine.pop()
        if any(isinstance(v, View) for v in named.values()) or "scalars" in named:
            raise Unsupported("a scalar in a tensor")
        if not isinstance(mine[0], View):  # pow(number, tensor)
            out.append(cx.call(getattr(aten, name).Scalar, *mine, fake=cx.fake[i], name=f"{cx.name}_{i}", **named))
            continue
        op = _element_op(name, len(mine) > 1 and isinstance(mine[1], View))
        out.append(cx.call(op, *mine, fake=cx.fake[i], name=f"{cx.name}_{i}", **named))
    return out
