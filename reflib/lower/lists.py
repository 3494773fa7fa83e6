"""Lists of tensors: fusion and combined launches do the rest.

``_foreach_*``: one op over lists is that op on each element. ``split_copy`` and ``unbind_copy``: each part is a copy.
"""

import itertools
from typing import Any

import torch

from reflib.ir.program import View, full_view

from .body import nest
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


@rule("_foreach_norm")
def foreach_norm(cx: LoweringContext, tensors: Any, order: Any = 2, dtype: Any = None) -> list[View]:
    norm = aten.linalg_vector_norm.default
    pairs = list(zip(tensors, cx.fake, strict=True))
    named = [(x, fake, f"{cx.name}_{i}") for i, (x, fake) in enumerate(pairs)]
    return [cx.call(norm, x, order, None, False, dtype=dtype, fake=f, name=n) for x, f, n in named]


@rule("split_copy")
def split_copy(cx: LoweringContext, x: View, size: Any, dim: int = 0) -> list[View]:
    dim %= len(x.shape)
    starts = itertools.accumulate((f.shape[dim] for f in cx.fake[:-1]), initial=0)
    return [_part(cx, x, dim, start, i) for i, start in enumerate(starts)]


@rule("unbind_copy")
def unbind_copy(cx: LoweringContext, x: View, dim: int = 0) -> list[View]:
    dim %= len(x.shape)
    return [_part(cx, x, dim, i, i, dropped=True) for i in range(len(cx.fake))]


def _part(cx: LoweringContext, x: View, dim: int, start: Any, i: int, dropped: bool = False) -> View:
    """Copy result ``i``, which begins at ``start`` of dimension ``dim``, whose index it may lack."""
    made = full_view(cx.low.new_buffer(f"{cx.name}_{i}", cx.fake[i]))
    (low,), strides = cx.low.symbols.exprs([start]), x.strides
    strides = strides[:dim] + strides[dim + dropped :]
    part = View(x.buffer, made.shape, strides, x.offset + low * x.strides[dim], x.dtype)
    return nest(cx, lambda k: k.load(part), made)
