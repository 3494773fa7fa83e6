"""Reductions in Triton whose sums have one order (``Options.batch_invariant``).

``tl.sum`` adds what a thread has, then what a warp's lanes have, then warps: in an order that follows from how a block
is spread over threads, which Triton derives from alignment, strides, warps and the block's other side. Here a block is
halved instead, neighbours added, until one column is left: each of these sums has two addends, so nothing is left to
choose. Steps within a thread come first where a thread holds neighbours; then those within a warp.

A row longer than the block is added up lane by lane first, as ``PartPrinter`` does it. Variances are computed in two
passes and softmax in its three: the one-pass forms (``triton_one_pass``) of a long row and the plain ones of a short
row would differ.
"""

from dataclasses import replace
from typing import Any

import torch

from .triton_body import ROW, PartPrinter


class OneOrderPrinter(PartPrinter):
    """``Config.reduction`` "one_order": persistent where the row fits the block, else looped."""

    def __init__(self, space: Any, config: Any, *args: Any, **kwargs: Any):
        length = None if space.r is None else space.r.size.constant
        fits = length is not None and length <= config.rblock
        super().__init__(space, replace(config, reduction="persistent" if fits else "looped"), *args, **kwargs)

    def _combine(self, i: int, value: str, dtype: torch.dtype, helper: str) -> None:
        if helper not in ("sum_of", "product_of") or not dtype.is_floating_point:
            return super()._combine(i, value, dtype, helper)
        kind = helper.removesuffix("_of")
        if kind == "product":
            self.needs.helper(helper)
        self._bind(i, f"{self.needs.helper(f'{kind}_in_pairs')}({value}, XBLOCK, RBLOCK)", ROW)


_IN_PAIRS = '''
def {name}_in_pairs(v, rows: tl.constexpr, columns: tl.constexpr):
    """The {name} of each row, as a column: of neighbours, then of neighbouring pairs, ..."""
    for step in tl.static_range(16):
        if columns >> step > 1:
            v = tl.{call}(tl.reshape(v, [rows, columns >> (step + 1), 2]), 2{more})
    return tl.reshape(v, [rows, 1])
'''
HELPERS = {
    "sum_in_pairs": _IN_PAIRS.format(name="sum", call="sum", more=""),
    "product_in_pairs": _IN_PAIRS.format(name="product", call="reduce", more=", product_of"),
}
