"""A copy that changes nothing is the tensor itself.

In a functional graph ``clone(x)`` in x's own order in memory is x: nothing writes to either. Decompositions leave such
copies (dropout with p = 0, dtypes that are equal), eager has none. Each is a name of its own for what is there already,
so the value is stored twice where both are needed: by the backward, or by two calls::

    softmax = ...                        saved, for its own backward
    clone   = clone(softmax)             saved, an operand of a product

Copies of inputs stay, which may be written to, and so do copies of or to what is returned: the caller may write to it.

NB: TorchInductor does this after forward and backward were cut apart (``remove_noop_ops``).
"""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true as known

from ..options import Options
from .copies import copied

aten = torch.ops.aten


def without_clones(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it without such copies. module: a functional ATen graph with ``meta["val"]``."""
    root = roots(module.graph)
    if not any(_in_order(n, root) for n in module.graph.nodes):
        return module
    out = copied(module)
    root = roots(out.graph)
    written = {root[a] for n in out.graph.nodes if _writes(n) for a in n.all_input_nodes}
    gone: dict[Node, Node] = {}  # clones, and in whose storage their views are now
    for node in [n for n in out.graph.nodes if _in_order(n, root)]:
        source = gone.get(root[node.args[0]], root[node.args[0]])
        if source.op == "call_function" and written.isdisjoint((source, node)):
            gone[node] = source
            node.replace_all_uses_with(node.args[0])
            out.graph.erase_node(node)
    out.recompile()
    return out


def _in_order(node: Node, root: dict[Node, Node]) -> bool:
    """Is it a copy, in its order in memory, of all that is in a storage? (What views a part of one, by places in it or
    as another dtype, was traced for places in the copy.)"""
    if node.target is not aten.clone.default:
        return False
    source, made = node.args[0].meta.get("val"), node.meta.get("val")  # type: ignore[union-attr]
    if type(source) is not type(made) or not isinstance(made, torch.Tensor) or made.layout != torch.strided:
        return False
    whole = root[node.args[0]].meta.get("val")  # type: ignore[arg-type]
    if not isinstance(whole, torch.Tensor) or not known(source.storage_offset() == made.storage_offset()):
        return False
    sizes = zip(source.stride(), made.stride(), made.shape, strict=True)
    return known(source.numel() == whole.numel()) and all(known(s == t) or known(n == 1) for s, t, n in sizes)


def _writes(node: Node) -> bool:
    """Is it the caller, or an op that writes to an argument?"""
    schema = getattr(node.target, "_schema", None)
    return node.op == "output" or schema is not None and schema.is_mutable


def roots(graph: torch.fx.Graph) -> dict[Node, Node]:
    """Whose storage each node's result is in."""
    root: dict[Node, Node] = {}
    for node in graph.nodes:
        view = node.op == "call_function" and node.args and isinstance(node.args[0], Node) and _is_view(node)
        root[node] = root[node.args[0]] if view else node
    return root


def _is_view(node: Node) -> bool:
    if node.target in (operator.getitem, aten._unsafe_view.default):
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
