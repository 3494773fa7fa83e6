"""What poolings and searches save for their backward: positions in as many bits as they need, and no shapes.

torch's positions are int64: 8 bytes beside each bfloat16 result of 2 that a pooling, a maximum or a sort writes, and to
be read again. A position is below the size of what was searched, which the graph knows, so it is saved as int16 or
int32; the backward's kernels widen what they load::

    i = max_pool2d_with_indices(x, ...)[1]     int64
    s = _to_copy(i, int16)                     saved: the smallest cut between forward and backward
    w = _to_copy(s, int64)                     read by the backward

A result that is returned stays as it is: it is in memory anyway. In bfloat16, a pooling of windows of 2 x 2 reads 8
bytes per window and writes 2 and a position: 18 bytes with int64, 12 with int16; its backward the same.

A pooling's backward is also given what was pooled, of which only the shape matters. It gets a tensor without values of
that shape, so that ``max_pool2d(relu(x))`` saves no ``relu(x)`` beside what the gradient of ``relu`` needs.

NB: TorchInductor saves what was pooled; of a pooling's positions the offset within the window, in 8 bits; other
positions as they are.
"""

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..options import Options
from .copies import copied
from .random import after_the_forward
from .slice_sums import call, val

aten = torch.ops.aten
# Ops and the number of their result that is a position along the dimension ``dim``; pooling ops and the dimensions of
# their windows.
_ALONG = {
    aten.max.dim: 1, aten.min.dim: 1, aten.sort.default: 1, aten.sort.stable: 1, aten.topk.default: 1,
    aten.median.dim: 1, aten.nanmedian.dim: 1, aten.kthvalue.default: 1, aten.mode.default: 1,
    aten.cummax.default: 1, aten.cummin.default: 1, aten.argmax.default: 0, aten.argmin.default: 0,
}  # fmt: skip
_POOLS = {
    aten.max_pool2d_with_indices.default: 2, aten.max_pool3d_with_indices.default: 3,
    aten.adaptive_max_pool2d.default: 2, aten.adaptive_max_pool3d.default: 3,
}  # fmt: skip
_OF_A_SHAPE = {
    getattr(aten, f"{name}pool{n}d{kind}_backward").default
    for n in (2, 3)
    for name, kind in (("avg_", ""), ("_adaptive_avg_", ""), ("max_", "_with_indices"), ("adaptive_max_", ""))
}


def saved_positions(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it in which the backward reads narrow positions. module: a functional ATen graph with
    ``meta["val"]``; one without a backward is not changed."""
    if not gpu or not any(n.target in _ALONG or n.target in _POOLS or _pooled(n) for n in module.graph.nodes):
        return module
    if not after_the_forward(module.graph):
        return module
    out = copied(module)
    later = _backward(out.graph)
    for node in list(out.graph.nodes):
        if node.target in _ALONG or node.target in _POOLS:
            _narrow(out.graph, node, later)
        elif node in later and (x := _pooled(node)) is not None and x not in later:
            with out.graph.inserting_before(node):
                shape = list(val(x).shape), list(val(x).stride())
                empty = call(out.graph, node, aten.new_empty_strided.default, (node.args[0], *shape), val(x))
            node.update_arg(1, empty)
    out.recompile()
    return out


def _pooled(node: Node) -> Node | None:
    """What this backward is given for its shape alone, if that was computed and the shape is known."""
    x = node.args[1] if node.target in _OF_A_SHAPE else None
    if not isinstance(x, Node) or x.op == "placeholder" or val(x).dtype != val(node.args[0]).dtype:
        return None
    return x if all(isinstance(n, int) for n in val(x).shape) else None


def _backward(graph: Graph) -> set[Node]:
    """What no result of the forward needs; such a result needs no tangent."""
    after = after_the_forward(graph)
    todo = [n for n in graph.output_node().all_input_nodes if n not in after]
    forward = set(todo)
    while todo:
        new = [a for a in todo.pop().all_input_nodes if a not in forward]
        forward.update(new)
        todo += new
    return set(graph.nodes) - forward


def _narrow(graph: Graph, node: Node, later: set[Node]) -> None:
    number, dtype = _ALONG.get(node.target, 1), _dtype(node)
    found = [n for n in node.users if n.target is operator.getitem and n.args[1] == number] if number else [node]
    for positions in found if dtype is not None else ():
        readers = [n for n in positions.users if n in later]
        if readers and not any(n.op == "output" for n in positions.users):
            wide = val(positions)
            with graph.inserting_before(positions.next):
                small = call(graph, node, aten._to_copy.default, (positions,), wide.to(dtype), {"dtype": dtype})
                again = call(graph, node, aten._to_copy.default, (small,), wide.to(wide.dtype), {"dtype": wide.dtype})
            for n in readers:
                n.replace_input_with(positions, again)


def _dtype(node: Node) -> torch.dtype | None:
    """The narrowest one for all positions; None if their number is not known."""
    shape: Sequence[Any] = val(node.args[0]).shape
    if node.target in _POOLS:
        shape = shape[len(shape) - _POOLS[node.target] :]
    elif shape:
        names = (a.name for a in node.target._schema.arguments)  # type: ignore[union-attr]
        given = {"dim": -1 if _ALONG[node.target] else None, **dict(zip(names, node.args)), **node.kwargs}
        shape = shape if given["dim"] is None else [shape[given["dim"]]]
    if not all(isinstance(n, int) for n in shape):
        return None
    return next((d for d in (torch.int16, torch.int32) if math.prod(shape) - 1 <= torch.iinfo(d).max), None)
