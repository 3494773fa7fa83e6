"""``scaled_dot_product_attention`` as two products and a softmax, for ``Options.batch_invariant``.

PyTorch's kernels for it split the keys among idle multiprocessors, or choose by size how operands are packed: their
sums depend on the batch. Products and softmax of ours have one order (``lower.one_order``). Scores are float32, as in
the fused kernels, and so are weights until they are rounded for the second product; they are stored, which costs
memory and time where there are many keys.

Done in the graph before autograd sees it, so that a backward is of the same parts.
"""

import math
from typing import Any

import torch
from torch.fx import GraphModule

from ..options import Options
from .attention_call import named, value

HALVES = (torch.float16, torch.bfloat16)


def attention_apart(module: GraphModule, options: Options) -> GraphModule:
    """``module``, a graph of torch's functions or of ATen, with each call in it taken apart, in place."""
    if not options.batch_invariant:
        return module
    for graph in [m for m in module.modules() if isinstance(m, GraphModule)]:
        found = [n for n in graph.graph.nodes if named(n) == "scaled_dot_product_attention"]
        for node in found:
            fake = value(node)
            inside = isinstance(fake, torch.Tensor) and fake.ndim == 4 and _lower(fake, 1, 2)
            node.target = attend_inside if inside else attend
        if found:
            graph.recompile()
    return module


def _lower(fake: torch.Tensor, a: int, b: int) -> bool:
    """Do the elements of dimension ``a`` lie inside of those of ``b``?"""
    strides = [s.node.hint if isinstance(s, torch.SymInt) else s for s in fake.stride()]
    return strides[a] is not None and strides[b] is not None and strides[a] < strides[b]


def attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Its meaning, with its arguments."""
    heads = query.shape[:-1]
    groups = enable_gqa and query.ndim > 3 and query.shape[-3] != key.shape[-3]
    if groups:  # queries of heads that share keys: rows of one product
        query = query.reshape(*query.shape[:-3], key.shape[-3], -1, query.shape[-1])
    wide = torch.float32 if query.dtype in HALVES else query.dtype
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-2, -1))
    scores = scores.reshape(*heads, key.shape[-2]) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if is_causal:
        rows, columns = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        scores = torch.where(columns <= rows[:, None], scores, -math.inf)
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = torch.where(attn_mask, scores, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = torch.softmax(scores, -1)
    if attn_mask is not None:  # a row without keys: zeros, as the fused kernels have it
        weights = torch.where((scores == -math.inf).all(-1, keepdim=True), 0.0, weights)
    weights = torch.dropout(weights.to(query.dtype), dropout_p, dropout_p > 0)
    if groups:
        weights = weights.reshape(*query.shape[:-1], key.shape[-2])
    return torch.matmul(weights, value).reshape(*heads, value.shape[-1])


def attend_inside(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The same, laid out as the fused kernels do it: heads inside the length."""
    return attend(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)
