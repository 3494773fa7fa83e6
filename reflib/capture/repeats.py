"""A joint graph computes nothing twice: common subexpressions are merged before it is cut into forward and backward.

A node repeats an earlier one if both call the same op with the same arguments, and nothing is mutated in between. Left
alone are random ops, uninitialised tensors, what shares storage with an output (eager returns tensors of their own) and
sizes that only running gives.

NB: the partitioner of PyTorch can do this (``torch._functorch.config.cse``), but imports TorchInductor's lowerings and
templates for it: over a second of the first training step in a process.
"""

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

EMPTY = {getattr(torch.ops.aten, n) for n in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
SIZED = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


def merge_repeats(gm: torch.fx.GraphModule) -> None:
    """Merge nodes of ``gm`` that repeat earlier ones."""
    mutations, first = 0, dict[Any, torch.fx.Node]()
    returned = {_storage(n) for n in gm.graph.output_node().all_input_nodes} - {None}
    for node in gm.graph.nodes:
        op = node.target
        mutations += isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable
        if node.op != "call_function" or not _repeatable(node) or _storage(node) in returned:
            continue
        try:
            earlier = first.setdefault((op, mutations, _key(node.args), _key(node.kwargs)), node)
        except TypeError:  # an argument without a hash
            continue
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            gm.graph.erase_node(node)


def _repeatable(node: torch.fx.Node) -> bool:
    op, value = node.target, node.meta.get("val")
    if isinstance(op, torch._ops.OpOverload):
        if torch.Tag.nondeterministic_seeded in op.tags or op.overloadpacket in EMPTY or op._schema.is_mutable:
            return False
    elif isinstance(op, torch._ops.HigherOrderOperator):
        return False
    return not (isinstance(value, SIZED) and free_unbacked_symbols(value))


def _storage(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.untyped_storage()._cdata if strided else None


def _key(value: Any) -> Any:
    """Equal for equal arguments alone: 1, 1.0 and True differ, 0.0 and -0.0 too."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_key, value))
    if isinstance(value, dict):
        return (dict, *((k, _key(v)) for k, v in value.items()))
    if isinstance(value, SIZED[1:]):
        return value.node
    return (float, repr(value)) if isinstance(value, float) else (type(value), value)
