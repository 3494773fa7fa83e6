"""Which composite ops are decomposed during capture, and which stay whole for a rule or a call."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, get_decompositions

from ..options import Options
from . import pointwise, reductions  # noqa: F401  (they register their rules)
from .rules import LIKE_EAGER, PARTS, RULES, WHOLE, overloads

aten = torch.ops.aten

# Taken apart although core ATen keeps them whole: their parts fuse.
_TAKE_APART = (
    *("native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit"),
    *("_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "_batch_norm_with_update"),
    *("_batch_norm_with_update_functional", "_batch_norm_no_update", "batch_norm_backward"),
    *("_softmax", "_log_softmax", "_safe_softmax", "addmv", "_adaptive_avg_pool2d"),
)

# Left whole although core ATen takes them apart: one call of ATen is faster, or more exact, than the parts.
_KEEP_WHOLE = (
    *("_scaled_dot_product_flash_attention_for_cpu", "scaled_dot_product_attention", "grid_sampler", "index_copy"),
    *("_scaled_dot_product_attention_math", "embedding_dense_backward", "baddbmm", "dot", "vdot", "mv", "index_add"),
    "soft_margin_loss_backward",  # torch's parts subtract 1 from a sigmoid: nothing is left of small gradients
)


def decompositions(options: Options = Options()) -> dict[Any, Callable[..., Any]]:
    """The table for AOTAutograd and ``torch.export``. Random ops stay whole, for eager's numbers or a rewrite."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd")
    table = _table(len(registered), len(RULES))
    if options.numerics == "eager":
        return LIKE_EAGER["parts"](table, options)  # type: ignore[no-any-return]
    whole = {name for names in WHOLE.values() for name in names()}
    return {op: fn for op, fn in table.items() if str(op) not in whole} if whole else dict(table)


@lru_cache(1)
def _table(_registered: int, _rules: int) -> dict[Any, Callable[..., Any]]:
    """Collected again when an op is registered: it takes 35 ms, a third of a small graph's compile time."""
    packets = [getattr(aten, n) for n in _TAKE_APART if hasattr(aten, n)]
    table = {**core_aten_decompositions(), **get_decompositions(packets)}
    whole = set(overloads(*_KEEP_WHOLE)) | set(RULES)
    table = {op: fn for op, fn in table.items() if op not in whole and not _random(op)}
    for change in PARTS.values():  # (of a rule's ops, too: those that it does not take)
        table.update(change(table))
    return table


def _random(op: Any) -> bool:
    return isinstance(op, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in op.tags
