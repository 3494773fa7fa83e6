"""Parts are rounded before they are joined: ``cat([a, b]).to(bfloat16)`` becomes ``cat([a.to(bfloat16), ..])``.

The gradient of boxes ``[x, y, w, h]``, which a loss computes in float32, is a ``cat`` of four columns and then a cast.
Behind the cast the whole is not what is stored, so it could only be made as a loop over its elements, of which each
chooses its column. Before it, the kernel that computes the columns may store each to its place (``fuse/into_place``).

The values are the same. Only where all parts are computed elementwise: a call's result would need a cast of its own.
"""

from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..options import Options
from .copies import copied
from .slice_sums import call, val

aten = torch.ops.aten
_UNTAGGED = {  # elementwise too
    aten.softplus_backward.default, aten.leaky_relu_backward.default, aten.elu_backward.default, aten.full.default,
}  # fmt: skip
_VIEWS = {aten.unsqueeze.default, aten.view.default, aten.squeeze.dim, aten.permute.default}


def rounded_parts(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it. module: a functional ATen graph with ``meta["val"]``."""
    if not gpu or not any(map(_rounds, module.graph.nodes)):
        return module
    out = copied(module)
    for node in filter(_rounds, list(out.graph.nodes)):
        cat, kwargs = node.args[0], node.kwargs
        with out.graph.inserting_before(node):
            to = [val(p).to(val(node).dtype) for p in cat.args[0]]
            parts = [call(out.graph, node, node.target, (p,), v, kwargs) for p, v in zip(cat.args[0], to)]
            new = call(out.graph, node, cat.target, (parts, *cat.args[1:]), val(node))
        node.replace_all_uses_with(new)
    out.graph.eliminate_dead_code()
    out.recompile()
    return out


def _rounds(node: Node) -> bool:
    """Is it the only use of a ``cat`` of computed parts, with another type of fewer bytes?"""
    if node.target is not aten._to_copy.default or "memory_format" in node.kwargs:
        return False
    cat: Any = node.args[0]
    if cat.target is not aten.cat.default or len(cat.users) != 1 or not all(map(_elementwise, cat.args[0])):
        return False
    old, new = cat.meta["val"], node.meta["val"]
    return new.device == old.device and new.dtype.itemsize < old.dtype.itemsize


def _elementwise(node: Any) -> bool:
    while node.target in _VIEWS:
        node = node.args[0]
    return node.target in _UNTAGGED or torch.Tag.pointwise in getattr(node.target, "tags", ())
