"""Composite ops taken apart in another way than torch does it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten
Parts = Callable[..., Any]


def own_parts(table: Mapping[Any, Parts]) -> dict[Any, Parts]:
    """What replaces entries of torch's table (plugs into ``lower.PARTS``)."""
    means = (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
    return {aten.max_unpool2d.default: max_unpool2d, **{op: partial(counted_wide, table[op]) for op in means}}


def max_unpool2d(x: torch.Tensor, indices: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    """torch's own parts, laid out in memory as the operator's result is."""
    out = decomposition_table[aten.max_unpool2d.default](x, indices, output_size)
    return out.contiguous(memory_format=suggest_memory_format(x))


def counted_wide(parts: Parts, x: torch.Tensor, target: torch.Tensor, weight: Any, *how: int) -> Any:
    """A mean loss, and its number of rows or sum of weights, which torch's parts add in ``x``'s dtype: bfloat16 has no
    4,784. Like eager's kernels, in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    found = parts(x.to(wide), target, None if weight is None else weight.to(wide), *how)
    return tuple(t.to(x.dtype) for t in found)
