"""Attention in which several heads of queries share one of keys and values, for few queries: no key is copied.

Models repeat keys and values per head of queries (``repeat_interleave``, or ``expand`` and ``reshape``), or pass
``enable_gqa``. With a mask, PyTorch's fused kernels want the repeated ones in memory; one step of a decoder then copies
its whole cache. But heads that share keys are rows of one product::

    attend(q[b, G g, l, d], repeated(k[b, G, s, d]), ..)  =  attend(q'[b, G, g l, d], k, v, ..)     of g l rows

The same numbers are multiplied and added in the same kernels. Only for at most ROWS rows: of many queries the products
take longer than the copy, and flash attention groups heads itself. (4 queries' heads per key's head, 16 bits: a step
reads the cache once; before, it read it once, wrote it four times and read that.)

NB: TorchInductor copies.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx import Graph, GraphModule, Node

from ..logs import get as logger
from ..options import Options
from .attention import NAMES, change_calls, is_tensor
from .attention_call import equal, named, on_fakes, same_strides, writes
from .storages import value

ROWS = 64
_COPIES = ("repeat_interleave", "reshape", "view", "flatten", "_unsafe_view", "expand", "unsqueeze", "getitem",
           "contiguous", "clone", "transpose")  # fmt: skip


def grouped_heads(module: GraphModule, options: Options) -> GraphModule:
    """``module``, a graph of torch's functions or of ATen with fake tensors in ``meta``, with such calls, in place
    (plugs into ``pipeline.CAPTURED``)."""
    if not options.attention or options.numerics == "eager":
        return module
    return change_calls(module, _grouped)


def _grouped(graph: Graph, node: Node, given: dict[str, Any]) -> bool:
    q, mask = given["query"], given.get("attn_mask")
    if given.get("is_causal") or given.get("dropout_p") or not all(is_tensor(given[n]) for n in NAMES[:3]):
        return False
    if not hasattr(value(node), "fake_mode") or value(q).dim() != 4 or not isinstance(value(q).shape[2], int):
        return False
    (k, g, *begun), (v, h, *more) = (_shared(given[n], value(q), bool(given.get("enable_gqa"))) for n in NAMES[1:3])
    if any(writes(n) for first in (*begun, *more) if first for n in graph.nodes if first < n < node):
        return False
    if g != h or g == 1 or g * value(q).shape[2] > ROWS or (mask is not None and value(mask).dim() not in (2, 4)):
        return False
    length, heads = value(q).shape[2], value(k).shape[1]
    with on_fakes(value(node)), graph.inserting_before(node):
        put = _putter(graph)
        rows = put("flatten", put("unflatten", q, 1, (heads, g)), 2, 3)
        if mask is not None and value(mask).dim() == 4 and not equal(value(mask).shape[1], 1):
            mask = put("flatten", put("unflatten", mask, 1, (heads, g)), 2, 3)
        elif mask is not None and not equal(value(mask).shape[-2], 1):
            mask = put("repeat", mask, *[1] * (value(mask).dim() - 2), g, 1)
        call = graph.call_function(
            F.scaled_dot_product_attention, (rows, k, v), {"attn_mask": mask, "scale": given.get("scale")}
        )
        call.meta["example_value"] = F.scaled_dot_product_attention(
            value(rows), value(k), value(v), attn_mask=value(mask), scale=value(given.get("scale"))
        )
        out = put("flatten", put("unflatten", call, 2, (g, length)), 1, 2)
        if not same_strides(value(out), value(node)):  # fused kernels' results have the heads inside the length
            out = put("transpose", put("contiguous", put("transpose", out, 1, 2)), 1, 2)
    if not same_strides(value(out), value(node)):
        return False
    logger("attention").info("%s: %d heads are rows of one", node.name, g)
    node.replace_all_uses_with(out)
    _erase(graph, [node], {k, v})
    out.name = node.name
    return True


def _shared(node: Node, q: torch.Tensor, grouped: bool) -> tuple[Node, int, Node | None]:
    """Keys or values before they were repeated per head of queries, how often each was, and the first op of that."""
    shape, heads = list(value(node).shape), q.shape[1]
    if len(shape) != 4 or not isinstance(shape[1], int) or not isinstance(heads, int):
        return node, 1, None
    if shape[1] != heads:
        return node, heads // shape[1] if grouped else 1, None
    source: Any = _source(node)
    if named(source) == "repeat_interleave":
        x, n, dim = (*source.args, *source.kwargs.values(), None)[:3]
        if is_tensor(x) and isinstance(n, int) and dim in (1, -3) and equal(list(value(source).shape), shape):
            return x, n, source
    wide: Any = _source(source.args[0]) if named(source) in ("reshape", "view", "flatten", "_unsafe_view") else None
    one: Any = wide.args[0] if named(wide) == "expand" else None
    if is_tensor(one) and (named(one) == "unsqueeze" or named(one) == "getitem" and _whole(one.args[1])):
        b, n, *rest = (*value(one.args[0]).shape, 0, 0)[:4]
        chain = [value(t).shape for t in (one, wide, source)]
        want = [b, n, 1, *rest], [b, n, heads // n, *rest] if n else [], [b, heads, *rest]
        if all(equal(list(s), w) for s, w in zip(chain, want)) and equal(shape, want[2]):
            return one.args[0], heads // n, one
    return node, 1, None


def _whole(index: Any) -> bool:
    """Does it add dimensions at most?"""
    return isinstance(index, tuple) and not any(isinstance(i, Node) or i not in (None, ..., slice(None)) for i in index)


def _source(node: Any) -> Any:
    """Behind copies, and dimensions swapped twice."""
    while True:
        inner: Any = node.args[0] if isinstance(node, Node) and node.args else None
        if named(node) == named(inner) == "transpose" and _swapped(node) == _swapped(inner):
            node = inner.args[0]
        elif named(node) in ("contiguous", "clone"):
            node = inner
        else:
            return node


def _swapped(node: Node) -> set[int]:
    return {d % 4 for d in node.args[1:] if isinstance(d, int)}


def _erase(graph: Graph, unused: list[Node], stay: set[Node]) -> None:
    """The call and the copies that were made for it alone. No other node: a method that writes to a tensor, whose
    result nothing needs, is dead to ``eliminate_dead_code`` (a cache's ``index_copy_``)."""
    while unused:
        node = unused.pop()
        given = node.all_input_nodes
        graph.erase_node(node)
        unused += [n for n in given if not n.users and n not in stay and named(n) in _COPIES and not writes(n)]


def _putter(graph: Graph) -> Callable[..., Node]:
    def put(name: str, x: Node, *args: Any) -> Node:
        made = graph.call_method(name, (x, *args))
        made.meta["example_value"] = getattr(value(x), name)(*args)
        return made

    return put
