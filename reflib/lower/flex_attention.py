"""``flex_attention``: fused kernels with the functions of scores and masks in them (``flex_template``), or, where these
do not support a case, two products with the functions in the softmax's kernels between them.

The op comes with these functions as graphs of one element. Its definition, a formula over the whole matrix of scores
with the functions vectorised, is then traced and lowered in its place; the backward's computes the scores again. Eager
runs the formula op by op and writes every step; here the scores are written once by the product, and once for the next
product. Which blocks a block mask calls empty is not used. Why it is not fused is with the decisions (``explain``).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from reflib import logs
from reflib.ir.program import Choice, View

from . import flex_template as template
from .context import LoweringContext
from .extern import used_results
from .flex_options import kernel_options as options_of
from .rules import RULES, Unsupported
from .subgraph import Refused, variant

aten = torch.ops.aten


def flex_attention(
    cx: LoweringContext,
    query: View,
    key: View,
    value: View,
    score_mod: Any,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> Any:
    """(output, log-sum-exp and maximum of the scores, in base 2)."""
    from torch._higher_order_ops.flex_attention import math_attention

    def dense(q: Any, k: Any, v: Any, of_score: Any, of_mask: Any) -> Any:
        found = math_attention(q, k, v, score_mod, (block_mask[-1],), scale, {}, tuple(of_score), tuple(of_mask))
        if template.used(cx) > {0}:
            return found
        return found[0], *(x.float() for x in found[1:])  # (of float64 eager's are; the op says otherwise)

    def fused() -> Any:
        captured, asked = (tuple(score_buffers), tuple(mask_buffers)), options_of(cx.node, True)
        a = template.Attention(cx, query, key, value, block_mask, scale, captured, asked)
        return template.forward(a, score_mod)

    return _instead(cx, fused, dense, query, key, value, score_buffers, mask_buffers)


def flex_attention_backward(
    cx: LoweringContext,
    query: View,
    key: View,
    value: View,
    out: View,
    logsumexp: View,
    grad_out: View | None,
    grad_logsumexp: View | None,
    score_mod: Any,
    joint: Any,
    block_mask: Sequence[Any],
    scale: float,
    kernel_options: dict[str, Any],
    score_buffers: Sequence[Any] = (),
    mask_buffers: Sequence[Any] = (),
) -> Any:
    """Gradients of query, key and value, and of those of ``score_buffers`` that have one."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

    wanted, joint = cx.fake[3], with_gradient(joint)

    def dense(q: Any, k: Any, v: Any, o: Any, lse: Any, g: Any, g_lse: Any, of_score: Any, of_mask: Any) -> Any:
        groups, wide = q.shape[1] // k.shape[1], torch.promote_types(q.dtype, torch.float32)
        keys, values = (x.expand(len(q), *x.shape[1:]).repeat_interleave(groups, 1) for x in (k, v))
        scores = q.to(wide) @ keys.to(wide).mT * scale
        at = [torch.arange(n, device=q.device) for n in scores.shape]
        with TransformGetItemToIndex():
            mask = _vmap_for_bhqkv(block_mask[-1], (), (None,) * len(of_mask))(*at, *of_mask)
            modified = _vmap_for_bhqkv(score_mod, (0,), (None,) * len(of_score))(scores, *at, *of_score)
        masked = torch.where(mask, modified, -math.inf)
        lse = lse.unsqueeze(-1) * math.log(2)
        p = torch.where(lse == -math.inf, 0, torch.exp(masked - lse))
        of_p = (g.to(wide) @ values.to(wide).mT) - (o.to(wide) * g.to(wide)).sum(-1, keepdim=True)
        if g_lse is not None:
            of_p = of_p + g_lse.unsqueeze(-1) / math.log(2)
        constant = (None,) * len(of_score)
        with TransformGetItemToIndex():
            by_joint = _vmap_for_bhqkv(joint, (0,), (0, *constant), [0, *(None,) * 4, *constant])
            of_scores, _, _, _, _, *more = by_joint(scores, *at, p * of_p, *of_score)
        of_scores = torch.where(mask, of_scores * scale, 0).to(q.dtype)
        of_keys, of_values = of_scores.mT @ q, p.to(q.dtype).mT @ g
        of_keys, of_values = (x.unflatten(1, (-1, groups)).sum(2) for x in (of_keys, of_values))
        of_keys, of_values = (x if len(k) == len(q) else x.sum(0, keepdim=True) for x in (of_keys, of_values))
        more = [torch.zeros_like(b) if x is None else x.to(b.dtype) for b, x in zip(of_score, more)]  # (None: no part)
        return [of_scores @ keys, of_keys, of_values, *(x for x, w in zip(more, wanted) if w is not None)]

    g = grad_out if grad_out is not None else cx.call(aten.zeros_like.default, out)

    def fused() -> Any:
        captured, asked = (tuple(score_buffers), tuple(mask_buffers)), options_of(cx.node, False)
        a = template.Attention(cx, query, key, value, block_mask, scale, captured, asked)
        return template.backward(a, out, logsumexp, g, grad_logsumexp, score_mod, joint)

    args = (query, key, value, out, logsumexp, g, grad_logsumexp, score_buffers, mask_buffers)
    return _instead(cx, fused, dense, *args)


def with_gradient(joint: Callable[..., Any]) -> Callable[..., Any]:
    """``joint``, which gives None as the gradient of a score that its function does not use."""

    def of_score(score: Any, *more: Any) -> Any:
        first, *others = joint(score, *more)
        return [torch.zeros_like(score) if first is None else first, *others]

    return of_score


def _instead(cx: LoweringContext, fused: Callable[[], Any], fn: Callable[..., Any], *args: Any) -> Any:
    """The fused kernels; where they do not support the case, ``fn(*args)``, with the reason."""
    if cx.low.options.numerics == "eager":
        raise Unsupported("numerics: eager's own calls")
    low, nodes, buffers = cx.low, len(cx.low.nodes), dict(cx.low.buffers)
    try:
        return fused()
    except Refused as e:
        why = e
        del low.nodes[nodes:]
        for b in set(low.buffers) - set(buffers):
            del low.buffers[b]
    flat, spec = pytree.tree_flatten(cx.fake)
    used, tensors = used_results(cx, flat), [i for i, f in enumerate(flat) if isinstance(f, torch.Tensor)]
    views: list[Any] = [None] * len(flat)
    for i in tensors:
        if i in used:
            views[i] = cx.out(tensors.index(i))
    try:
        v = variant(cx, "", "dense", fn, args, {}, [views[i] for i in tensors])
    except Refused as e:
        raise Unsupported(f"not fused: {why.why}; not dense: {e}") from e
    if v.predicate:
        raise Unsupported(f"not fused: {why.why}; not dense: it is traced for some of the sizes only")
    logs.get("fallback").info("%s is dense: %s (%s)", cx.origin.op, why.why, cx.origin.source)
    if not cx.on_gpu or low.options.autotune != "off":  # nothing to tell, or to be measured as one
        low.nodes += v.nodes
        low.buffers.update({b.name: b for b in v.buffers})
        return pytree.tree_unflatten(views, spec)
    outputs = tuple(views[i].buffer for i in tensors if views[i] is not None)
    failed = (("fused", why.status, why.why),)
    low.nodes.append(Choice(low.next_node(), cx.origin.op, outputs, (v,), failed, origins=(cx.origin,)))
    return pytree.tree_unflatten(views, spec)


def zeros_and_scatter(cx: LoweringContext, shape: Sequence[Any], indices: Sequence[Any], values: View) -> Any:
    """The gradient of a table that a score function reads: sums, by the places read."""
    zeros = cx.call(aten.full.default, shape, 0)
    return cx.call(aten.index_put.default, zeros, indices, values, True)


RULES["flex_lib.zeros_and_scatter.default"] = zeros_and_scatter  # by name: torch defines them when they are first used
RULES.update({fn.__name__: fn for fn in (flex_attention, flex_attention_backward)})
