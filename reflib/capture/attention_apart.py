"""``scaled_dot_product_attention`` in one order of additions, for ``Options.batch_invariant``.

PyTorch's kernels for it split the keys among idle multiprocessors, or choose by size how operands are packed: their
sums depend on the batch. On a GPU it becomes ``flex_attention``, whose kernels walk along all keys of a block of
queries in blocks of a size that follows from the heads alone (``lower.flex_tilings``); a causal mask becomes lists of
blocks, so that half of them are skipped.

Where that has no kernel (a CPU, float64, dropout, a bias with a gradient): two products and a softmax of ours, which
have one order as well (``lower.one_order``). Scores are float32, as in the fused kernels, and so are weights until they
are rounded for the second product; they are stored, which costs memory and time where there are many keys.

Done in the graph before autograd sees it, so that a backward is of the same parts.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..options import Options
from ..target import parse_target
from .attention_call import named
from .storages import value

BLOCK = 128  # queries and keys of a block of the mask
LARGEST_HEAD = 256  # (lower.flex_tilings)
HALVES = (torch.float16, torch.bfloat16)


def attention_apart(module: GraphModule, options: Options) -> GraphModule:
    """``module``, a graph of torch's functions or of ATen, with each call in it taken apart, in place."""
    if not options.batch_invariant:
        return module
    on_gpu = parse_target(options.target).is_gpu if options.target else None
    for graph in [m for m in module.modules() if isinstance(m, GraphModule)]:
        found = [n for n in graph.graph.nodes if named(n) == "scaled_dot_product_attention"]
        for node in found:
            fake = value(node)
            inside = isinstance(fake, torch.Tensor) and fake.ndim == 4 and _lower(fake, 1, 2)
            node.target = attend_inside if inside else attend
            node.kwargs = {**node.kwargs, "on_gpu": on_gpu}
        if found:
            graph.recompile()
    return module


def _lower(fake: torch.Tensor, a: int, b: int) -> bool:
    """Do the elements of dimension ``a`` lie inside of those of ``b``?"""
    strides = [s.node.hint if isinstance(s, torch.SymInt) else s for s in fake.stride()]
    return strides[a] is not None and strides[b] is not None and strides[a] < strides[b]


def attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False, on_gpu: bool | None = None,
) -> torch.Tensor:  # fmt: skip
    """Its meaning, with its arguments. ``on_gpu``: None where that is where they are."""
    if _on_gpu(query, on_gpu) and _fused(query, key, value, attn_mask, dropout_p):
        return _flex(query, key, value, attn_mask, is_causal, scale)
    heads = query.shape[:-1]
    groups = enable_gqa and query.ndim > 3 and query.shape[-3] != key.shape[-3]
    if groups:  # queries of heads that share keys: rows of one product
        query = query.reshape(*query.shape[:-3], key.shape[-3], -1, query.shape[-1])
    wide = torch.float32 if query.dtype in HALVES else query.dtype
    scores = torch.matmul(query.to(wide), key.to(wide).transpose(-2, -1))
    scores = scores.reshape(*heads, key.shape[-2]) if groups else scores
    scores = scores * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
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
    out = torch.matmul(weights, value)
    return out.reshape(*heads, value.shape[-1]) if groups else out


def attend_inside(*args: Any, **kwargs: Any) -> torch.Tensor:
    """The same, laid out as the fused kernels do it: heads inside the length."""
    return attend(*args, **kwargs).transpose(1, 2).contiguous().transpose(1, 2)


# -- as flex_attention ------------------------------------------------------------------------------
def _on_gpu(query: torch.Tensor, known: bool | None) -> bool:
    return query.is_cuda if known is None else known


def _fused(query: Any, key: Any, value: Any, mask: Any, dropout_p: float) -> bool:
    tensors, gradient = (query, key, value), isinstance(mask, torch.Tensor) and mask.requires_grad
    if dropout_p or gradient or query.dtype not in (*HALVES, torch.float32):
        return False
    alike = all(t.ndim == 4 and t.dtype == query.dtype and t.shape[0] == query.shape[0] for t in tensors)
    if not alike:
        return False
    widths, heads = (query.shape[-1], value.shape[-1]), [t.shape[1] for t in tensors]
    if not all(isinstance(n, int) for n in (*widths, *heads)) or not heads[1] or heads[0] % heads[1]:
        return False
    return max(widths) <= LARGEST_HEAD and heads[1] == heads[2]  # (else heads of one are broadcast)


def _flex(query: Any, key: Any, value: Any, mask: Any, is_causal: bool, scale: float | None) -> torch.Tensor:
    """Attention of tensors [B, heads, length, width]; keys and values of fewer heads are shared."""
    from torch._higher_order_ops.flex_attention import flex_attention
    from torch.nn.attention.flex_attention import BlockMask

    length, keys = query.shape[2], key.shape[2]
    none = torch.zeros(1, 1, 1, 1, dtype=torch.int32, device=query.device)
    lists: Sequence[Any] = (none[0], none, None, None, none[0], none, None, None)
    block, of_score, of_mask = 1 << 30, (), ()
    score_mod: Any = _as_is
    mask_mod: Any = _everywhere
    if is_causal:
        mask_mod = _causal
        if length > BLOCK or keys > BLOCK:
            block, lists = BLOCK, _causal_blocks(length, keys, query.device)
    elif mask is not None:
        shown: Any = (mask.expand(*query.shape[:3], keys),)
        if mask.dtype == torch.bool:
            mask_mod, of_mask = _where, shown
        else:
            score_mod, of_score = _biased, shown
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    blocks = BlockMask((length, keys), *lists, BLOCK_SIZE=(block, block), mask_mod=mask_mod).as_tuple()
    return flex_attention(query, key, value, score_mod, blocks, scale, {}, of_score, of_mask)[0]


def _as_is(score: Any, b: Any, h: Any, m: Any, n: Any) -> Any:
    return score


def _biased(score: Any, b: Any, h: Any, m: Any, n: Any, bias: Any) -> Any:
    return score.float() + bias[b, h, m, n].float()


def _everywhere(b: Any, h: Any, m: Any, n: Any) -> Any:
    return b.new_ones((), dtype=torch.bool)


def _causal(b: Any, h: Any, m: Any, n: Any) -> Any:
    return m >= n


def _where(b: Any, h: Any, m: Any, n: Any, mask: Any) -> Any:
    return mask[b, h, m, n]


def _causal_blocks(length: Any, keys: Any, device: torch.device) -> list[Any]:
    """Of each row of blocks how many are cut by the diagonal, which, how many are whole, which; of each column too."""
    rows, columns = (-(-n // BLOCK) for n in (length, keys))
    i, j = (torch.arange(n, dtype=torch.int32, device=device) for n in (rows, columns))
    by_row = (i < columns).int(), i[:, None].expand(-1, columns), i.clamp(max=columns), j.expand(rows, -1)
    after = j[:, None] + 1 + i
    by_column = (j < rows).int(), j[:, None].expand(-1, rows), (rows - 1 - j).clamp(min=0), after
    return [t[None, None] for t in (*by_row, *by_column)]
