"""Integers that a model computes on the CPU from nothing, for tensors on a GPU: made on the GPU.

``table[index]`` takes an index from the CPU, and ``torch.arange(n)`` without ``device=`` is there, whatever the model
is on: so relative positions are computed by CPU kernels in every call and copied, which a CUDA graph cannot contain.
The same ops on the GPU give the same integers, and fuse with what reads them. (Floating point might differ in its last
bits, and stays where it is.)
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..options import Options
from .copies import copied
from .positions import from_nothing


def constructors(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it without such copies. module: a functional ATen graph with ``meta["val"]``."""
    if not any(_from_cpu(n) for n in module.graph.nodes):
        return module
    out = copied(module)
    made: dict[Any, Node] = {}
    for node in list(out.graph.nodes):
        for a in _from_cpu(node):
            chain, device = from_nothing(a) or (), node.meta["val"].device
            if chain and all(_is_of_torch(n) and not _is_float(n.meta["val"]) for n in chain):
                node.replace_input_with(a, [_made(out.graph, n, device, made) for n in chain][-1])
    out.graph.eliminate_dead_code()
    out.recompile()
    return out


def _from_cpu(node: Node) -> list[Node]:
    """The operands of an op on a GPU that are on the CPU, but for numbers. (One of the user's may want them there.)"""
    if not _is_of_torch(node) or not _is_on(node, "cuda"):
        return []
    return [a for a in node.all_input_nodes if _is_on(a, "cpu") and a.meta["val"].dim()]


def _is_of_torch(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")


def _is_float(t: torch.Tensor) -> bool:
    return t.dtype.is_floating_point or t.is_complex()


def _is_on(node: Node, kind: str) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == kind


def _made(graph: Graph, node: Node, device: torch.device, made: dict[Any, Node]) -> Node:
    """``node`` on ``device``, where what it needs has been made; what is equal, as in each layer of a model, once."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: made[n, device])
    if "device" in kwargs or not node.all_input_nodes:
        kwargs = {**kwargs, "device": device}
    key = node.target, str((args, kwargs))
    if key not in made:
        old = node.meta["val"]
        with graph.inserting_before(node), old.fake_mode:
            made[key] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            value = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
        made[key].meta = {**node.meta, "val": value}
    made[node, device] = made[key]
    return made[key]
