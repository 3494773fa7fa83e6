"""``index_put``: values stored (``scatter``) or added (``accumulate``) at positions that tensors hold."""

from collections.abc import Sequence

import torch

from reflib.ir.expr import expr
from reflib.ir.program import View

from .accumulate import accumulate as add
from .accumulate import put
from .body import NestBuilder, Value, nest, where
from .context import LoweringContext
from .rules import rule
from .scatter import scatter
from .segment_sums import segment_sums


@rule("index_put.default", "_unsafe_index_put.default")
def index_put(
    cx: LoweringContext, x: View, indices: Sequence[View | None], values: View, accumulate: bool = False
) -> View:
    if accumulate:
        alone = indices[0] if len([i for i in indices if i is not None]) == 1 else None
        shaped = alone is not None and list(values.shape) == [*alone.shape, *x.shape[1:]]
        if shaped and alone is not None and (out := segment_sums(cx, x, alone, values, wraps=True)) is not None:
            return out
        return put(cx, x, indices, values, add)
    return _masked(cx, x, indices, values) or put(cx, x, indices, values, scatter)


def _masked(cx: LoweringContext, x: View, indices: Sequence[View | None], values: View) -> View | None:
    """``x[mask] = v``, one value (per element that the mask does not choose) for all that it does: a select."""
    masks = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(masks) != 1 or masks[0][1].dtype != torch.bool or not masks[0][1].shape:
        return None
    first, mask = masks[0]
    after = first + len(mask.shape)
    rest = [*x.shape[:first], expr(1), *x.shape[after:]]  # of values: the mask's dimensions are one
    wide = [expr(1)] * (len(rest) - len(values.shape)) + list(values.shape)
    if list(mask.shape) != list(x.shape[first:after]) or len(wide) != len(rest) or wide[first] != 1:
        return None

    def value(k: NestBuilder) -> Value:
        at = [*k.coords[:first], expr(0), *k.coords[after:]][len(rest) - len(values.shape) :]
        here = [expr(0) if n == 1 else c for n, c in zip(values.shape, at)]
        old = k.load(x)
        return where(k.load(mask, k.coords[first:after]), k.load(values, here).to(old.dtype), old)

    return nest(cx, value)
