"""A graph computes nothing twice: common subexpressions are merged, a joint graph's before it is cut in two.

A node repeats an earlier one if both call the same op with the same arguments, and nothing is mutated in between. Left
alone are random ops, ops that others registered, uninitialised tensors, what shares storage with an output (eager
returns tensors of their own) and sizes that only running gives.

NB: the partitioner of PyTorch can do this (``torch._functorch.config.cse``), but imports TorchInductor's lowerings and
templates for it: over a second of the first training step in a process.
"""

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

NAMESPACES = ("aten", "prims", "_c10d_functional")  # other ops do not promise that two calls return the same
SIZED = (torch.SymInt, torch.SymFloat, torch.SymBool)


def merge_repeats(gm: torch.fx.GraphModule) -> None:
    """Merge nodes of ``gm`` that repeat earlier ones."""
    mutations, first = 0, dict[Any, torch.fx.Node]()
    returned = set().union(*map(storages, gm.graph.output_node().all_input_nodes))
    for node in gm.graph.nodes:
        op = node.target
        mutations += isinstance(op, torch._ops.OpOverload) and op._schema.is_mutable
        if node.op != "call_function" or not _repeatable(node) or storages(node) & returned:
            continue
        try:
            earlier = first.setdefault((op, mutations, _key(node.args), _key(node.kwargs)), node)
        except TypeError:  # an argument without a hash
            continue
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            gm.graph.erase_node(node)


def _repeatable(node: torch.fx.Node) -> bool:
    op = node.target
    if isinstance(op, torch._ops.OpOverload):
        drawn = torch.Tag.nondeterministic_seeded in op.tags
        if drawn or op.namespace not in NAMESPACES or "empty" in op.name() or op._schema.is_mutable:
            return False
    elif isinstance(op, torch._ops.HigherOrderOperator) or node.is_impure():
        return False
    sized = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, (torch.Tensor, *SIZED))]
    return not free_unbacked_symbols(sized)


def storages(node: torch.fx.Node) -> set[Any]:
    """Of its value, or values. What has none stands for itself."""
    tensors = [v for v in tree_leaves(node.meta.get("val")) if isinstance(v, torch.Tensor)]
    return {v.untyped_storage()._cdata if v.layout is torch.strided else node for v in tensors}


def _key(value: Any) -> Any:
    """Equal for equal arguments alone: 1, 1.0 and True differ, 0.0 and -0.0 too."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_key, value))
    if isinstance(value, dict):
        return (dict, *((k, _key(v)) for k, v in value.items()))
    if isinstance(value, SIZED):
        return value.node
    return type(value), repr(value) if isinstance(value, (float, complex)) else value
