"""Masks of ``scaled_dot_product_attention`` that no input decides.

A model's eager code leaves a mask out where all of it is true, and says ``is_causal`` where it is a triangle: it looks
at the numbers. Under Dynamo it cannot, and computes the mask from ``arange`` (most of ``transformers``' models). With a
mask, flash and cuDNN's kernels for ``is_causal`` are out, and half of the scores that a triangle forbids are computed.
Worse, a mask that is broadcast along the keys (stride 0) is read by no fused kernel: PyTorch takes the call apart into
products in float32, and saves the weights of every layer for the backward. (One H200, bfloat16, training: a ViT's peak
was 2,842 MiB that way, 1,900 in eager mode.)

So here, in the graph before autograd sees it:

- A mask that is made of constants and static sizes alone is computed, once per graph, on the CPU. If all of it is true
  (or 0, of a mask that is added) the call gets none; if it is the lower triangle of as many queries as keys, the call
  gets ``is_causal=True``. A number that is added counts as forbidding if it is ``finfo.min`` or less: in both cases
  every row has an allowed key, beside which it has no weight.
- This holds for the mask of attention that was written by hand, too (``attention``), with which the factors of rows
  that see no key are gone.
- Any other mask that is broadcast along the keys is copied, but not along dimensions where it is broadcast as well.

Results are those of the same call, by another of PyTorch's kernels; so on a CPU ``numerics="eager"`` leaves masks
alone. On a GPU, where attention is eager's call and not eager's bits, it does not.

NB: TorchInductor keeps the masks (seen in torch 2.11 and 2.13).
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import GraphModule, Node

from ..logs import get as logger
from ..options import Options
from .attention import NAMES, change_calls, is_tensor
from .attention_call import copied_later, equal, named, on_fakes, same_strides
from .mask_values import computed
from .storages import value


def masks(module: GraphModule, options: Options) -> GraphModule:
    """``module``, a graph of torch's functions or of ATen with fake tensors in ``meta``, with simpler masks, in place
    (plugs into ``pipeline.CAPTURED``)."""
    if not options.attention:
        return module
    return change_calls(module, partial(_simplified, {}, options.numerics == "eager"))


def _simplified(memo: dict[Node, str], exact: bool, graph: torch.fx.Graph, node: Node, given: dict[str, Any]) -> bool:
    mask: Any = given.get("attn_mask")
    if not is_tensor(mask) or not hasattr(value(node), "fake_mode") or given.get("is_causal"):
        return False
    if exact and not value(mask).is_cuda:
        return False
    rows, columns = value(given["query"]).shape[-2], value(given["key"]).shape[-2]
    if mask not in memo:
        memo[mask] = _meaning(mask, rows, columns)
    match memo[mask]:
        case "all":
            given["attn_mask"] = None
        case "causal":
            given |= {"attn_mask": None, "is_causal": True}
        case _ if value(mask).is_cuda and value(mask).stride(-1) == 0 and _several(value(mask).shape[-1]):
            with graph.inserting_before(node):
                given["attn_mask"] = _dense(graph, mask)
        case _:
            return False
    logger("attention").info("%s: mask %s: %s", node.name, mask.name, memo[mask] or "copied")
    if memo[mask]:
        given["query"] = _unweighted(given["query"])
    return _called(graph, node, given)


def _unweighted(q: Node) -> Node:
    """The queries without a factor per row that is 1 in all (see ``attention_call.masked``: wholly masked rows)."""
    x, by = (q.args[0], q.args[1]) if named(q) == "mul" else (None, None)
    if not isinstance(x, Node) or not isinstance(by, Node) or (weight := computed(by)) is None:
        return q
    same = value(x).dtype == value(q).dtype and equal(list(value(x).shape), list(value(q).shape))
    return x if same and (weight == 1).all() else q


def _called(graph: torch.fx.Graph, node: Node, given: dict[str, Any]) -> bool:
    """``node`` with other arguments, laid out as before where that matters."""
    old = value(node)
    with on_fakes(old):
        new = F.scaled_dot_product_attention(**{k: value(v) for k, v in given.items()})
    changed = not same_strides(new, old) and not copied_later(node)
    if changed and not (old.is_contiguous() and new.shape == old.shape):
        return False
    operands = tuple(given.pop(name) for name in NAMES[:3])
    node.args, node.kwargs = operands, given
    node.meta["example_value" if "example_value" in node.meta else "val"] = new
    if changed:
        with graph.inserting_after(node):
            copy = graph.call_method("contiguous", (node,))
        copy.meta = {**node.meta, "example_value": old}
        node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)
    return True


def _several(size: Any) -> bool:
    return not isinstance(size, int) or size > 1


def _dense(graph: torch.fx.Graph, mask: Node) -> Node:
    """A copy in which the keys lie beside each other, broadcast where else ``mask`` is."""
    fake, short = value(mask), mask

    def put(name: str, *args: Any) -> Node:
        made = graph.call_method(name, (short, *args))
        made.meta["example_value"] = getattr(value(short), name)(*args)
        return made

    with on_fakes(fake):
        wide = [i for i in range(fake.dim() - 1) if fake.stride(i) == 0 and isinstance(n := fake.shape[i], int) and n]
        for i in wide:
            short = put("narrow", i, 0, 1)
        short = put("contiguous")
        return put("expand", *(fake.shape[i] if i in wide else -1 for i in range(fake.dim()))) if wide else short


# -- what a mask says -------------------------------------------------------------------------------
def _meaning(mask: Node, rows: Any, columns: Any) -> str:
    """What the mask is: "all", "causal", or "" for another one, or one that is not known here."""
    if not isinstance(rows, int) or not isinstance(columns, int) or (found := computed(mask)) is None:
        return ""
    allowed = found
    if found.dtype != torch.bool:
        allowed = found == 0
        if not (allowed | (found <= torch.finfo(found.dtype).min)).all():
            return ""
    if allowed.all():
        return "all"
    triangle = torch.ones(rows, columns, dtype=torch.bool).tril()
    return "causal" if rows == columns and (allowed == triangle).all() else ""
