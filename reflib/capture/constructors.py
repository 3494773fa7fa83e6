"""What a model computes on the CPU from nothing, for tensors on a GPU: integers are made on the GPU, others are held.

``table[index]`` takes an index from the CPU, and ``torch.arange(n)`` without ``device=`` is there, whatever the model
is on: so relative positions are computed by CPU kernels in every call and copied, which a CUDA graph cannot contain.
The same ops on the GPU give the same integers, and fuse with what reads them. Floating point might differ in its last
bits, and with them an integer made of it (the bucket of a relative position by its logarithm). So that is computed
once, here, by the ops that eager would call, and the graph holds the result on the GPU, if it is small.
"""

from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..options import Options
from .copies import copied
from .positions import from_nothing

MOST = 2**22  # elements of a tensor that is held


def constructors(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it without such copies. module: a functional ATen graph with ``meta["val"]``."""
    if not any(_from_cpu(n) for n in module.graph.nodes):
        return module
    out = copied(module)
    made: dict[Any, Node] = {}
    for node in list(out.graph.nodes):
        for a in _from_cpu(node):
            chain, device = from_nothing(a) or (), node.meta["val"].device
            if not chain or not all(map(_is_of_torch, chain)):
                continue
            if not any(_is_float(n.meta["val"]) for n in chain):
                node.replace_input_with(a, [_made(out.graph, n, device, made) for n in chain][-1])
            elif _is_known(chain) and (there := on_device(_computed(chain), device)) is not None:
                node.replace_input_with(a, _held(out, a, there, made))
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


def _is_known(chain: list[Node]) -> bool:
    return all(isinstance(s, int) for n in chain for s in n.meta["val"].shape) and all(
        n.meta["val"].numel() <= MOST and not n.target._schema.is_mutable for n in chain
    )  # fmt: skip


def _computed(chain: list[Node]) -> torch.Tensor:
    """The value of the last, as eager computes it."""
    values: dict[Node, Any] = {}
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        for n in chain:
            args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), values.__getitem__)
            values[n] = n.target(*args, **kwargs)  # type: ignore[operator]
        return values[chain[-1]].clone(memory_format=torch.preserve_format)


def on_device(value: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """None where this machine has no such device: what runs elsewhere."""
    with unset_fake_temporarily(), _disable_current_modes():
        return value.to(device) if torch.cuda.is_available() else None


def _held(module: GraphModule, node: Node, value: torch.Tensor, made: dict[Any, Node]) -> Node:
    """``node``'s value as a constant of the module; what is equal, once."""
    with unset_fake_temporarily(), _disable_current_modes():
        key = value.shape, value.stride(), value.dtype, value.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    if key not in made:
        name = f"_computed{len(made)}"
        module.register_buffer(name, value)
        with module.graph.inserting_before(node):
            made[key] = module.graph.get_attr(name)
        old = node.meta["val"]
        with old.fake_mode:
            there = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=value.device)
        made[key].meta = {**node.meta, "val": there}
    return made[key]


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
