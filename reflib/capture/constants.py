"""What a graph computes from nothing: from literals, ``arange`` and the like, and no input. It is always the same.

- **Numbers** that a model computes from its own literals, ``torch.sqrt(torch.tensor(64.0) * 3)``: tensors without
  dimensions, on the CPU whatever the model is on, so that each kernel on a GPU that reads one would wait for a copy,
  which a CUDA graph cannot contain. Computed here, once, by the ops that eager would call, each becomes a ``full``, and
  so a literal in the kernels.
- **Positions** that are on the CPU, since ``torch.arange(n)`` without ``device=`` is, and are read on a GPU:
  ``table[index]``. The same ops on the GPU give the same integers, and fuse with what reads them. Floating point might
  differ in its last bits, and with them an integer made of it (the bucket of a relative position by its logarithm). So
  that is computed here as well, and the graph holds the result on the GPU, if it is small.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from operator import attrgetter
from typing import Any

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils._python_dispatch import _disable_current_modes

from ..options import Options
from .copies import copied

aten = torch.ops.aten
LITERAL = aten.lift_fresh_copy.default  # makes the tensor of a literal, which the graph holds
MAX_NODES = 64  # of a chain
MOST = 2**22  # elements of a tensor that is held


# -- chains -----------------------------------------------------------------------------------------
def from_nothing(node: Any, literals: bool = False) -> list[Node] | None:
    """The node and all that it needs, in order, if these are calls without inputs or random numbers; else None.
    ``literals``: they may begin with these. (Any other constant of the graph may be a tensor that the user changes.)"""
    found: dict[Node, None] = {}
    todo = [node]
    while todo:
        n = todo.pop()
        if not isinstance(n, Node) or n.op != "call_function" or len(found) > MAX_NODES:
            return None
        if not isinstance(n.meta.get("val"), torch.Tensor):
            return None
        if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
            return None
        found[n] = None
        if not (literals and n.target is LITERAL and type(_held_by(n.args[0])) is torch.Tensor):
            todo += [a for a in n.all_input_nodes if a not in found]
    return sorted(found)


@contextmanager
def for_real() -> Iterator[None]:
    """Without AOTAutograd's modes: tensors have values here."""
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        yield


def _held_by(node: Any) -> Any:
    return attrgetter(node.target)(node.graph.owning_module) if node.op == "get_attr" else None


def computed(chain: list[Node], **instead: Any) -> torch.Tensor:
    """The value of the last, as eager computes it. ``instead``: of their keyword arguments of these names."""
    values: dict[Node, Any] = {}
    with for_real():
        for n in chain:
            args, kwargs = map_arg((n.args, n.kwargs), lambda a: values[a] if a in values else _held_by(a))
            values[n] = n.target(*args, **{k: instead.get(k, v) for k, v in kwargs.items()})  # type: ignore[operator]
        return values[chain[-1]].clone(memory_format=torch.preserve_format)


# -- numbers ----------------------------------------------------------------------------------------
def literals(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it with numbers computed. module: a functional ATen graph with ``meta["val"]``."""
    if not any(n.target is LITERAL and _is_number(n) for n in module.graph.nodes):
        return module
    out = copied(module)
    values: dict[Node, torch.Tensor] = {}
    for node in out.graph.nodes:
        chain = _is_number(node) and from_nothing(node, literals=True)
        if chain and chain[0].target is LITERAL and all(map(_is_number, chain)):
            with suppress(RuntimeError, ZeroDivisionError):  # raised when it is called, as in eager
                values[node] = computed(chain)
    for node, value in reversed(values.items()):
        if any(user not in values for user in node.users):
            with out.graph.inserting_before(node), for_real():
                how = {"dtype": value.dtype, "device": torch.device("cpu")}
                full = out.graph.call_function(aten.full.default, ([], value.item()), how)
            full.meta = dict(node.meta)
            node.replace_all_uses_with(full)
        out.graph.erase_node(node)
    for node in out.graph.nodes:
        if node.op == "get_attr" and not node.users:
            out.graph.erase_node(node)
    out.recompile()
    return out


def _is_number(node: Node) -> bool:
    """Is it a call of ATen whose result is one real number on the CPU?"""
    val = node.meta.get("val")
    return (
        _is_of_torch(node) and not node.target._schema.is_mutable  # type: ignore[union-attr]
        and isinstance(val, torch.Tensor) and val.dim() == 0 and val.device.type == "cpu"
        and val.layout == torch.strided and not val.is_complex() and not val.is_quantized
    )  # fmt: skip


def _is_of_torch(node: Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in ("aten", "prims")


# -- positions on the CPU ---------------------------------------------------------------------------
def constructors(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it with positions where they are read. module: a functional ATen graph."""
    if not any(_from_cpu(n) for n in module.graph.nodes):
        return module
    out = copied(module)
    made: dict[Any, Node] = {}
    for node in list(out.graph.nodes):
        for a in _from_cpu(node):
            chain, device = from_nothing(a) or (), node.meta["val"].device
            if not chain or not all(map(_is_of_torch, chain)):
                continue
            if not any(n.meta["val"].is_floating_point() or n.meta["val"].is_complex() for n in chain):
                node.replace_input_with(a, [_made(out.graph, n, device, made) for n in chain][-1])
            elif _is_known(chain) and (there := on_device(computed(chain), device)) is not None:
                node.replace_input_with(a, _held(out, a, there, made))
    out.graph.eliminate_dead_code()
    out.recompile()
    return out


def _from_cpu(node: Node) -> list[Node]:
    """The operands of an op on a GPU that are on the CPU, but for numbers. (One of the user's may want them there.)"""
    if not _is_of_torch(node) or not _is_on(node, "cuda"):
        return []
    return [a for a in node.all_input_nodes if _is_on(a, "cpu") and a.meta["val"].dim()]


def _is_on(node: Node, kind: str) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.device.type == kind


def _is_known(chain: list[Node]) -> bool:
    return all(isinstance(s, int) for n in chain for s in n.meta["val"].shape) and all(
        n.meta["val"].numel() <= MOST and not n.target._schema.is_mutable for n in chain  # type: ignore[union-attr]
    )  # fmt: skip


def on_device(value: torch.Tensor, device: torch.device) -> torch.Tensor | None:
    """None where this machine has no such device: what runs elsewhere."""
    with for_real():
        return value.to(device) if torch.cuda.is_available() else None


def _held(module: GraphModule, node: Node, value: torch.Tensor, made: dict[Any, Node]) -> Node:
    """``node``'s value as a constant of the module; what is equal, once."""
    with for_real():
        key = value.shape, value.stride(), value.dtype, value.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    if key not in made:
        name = f"_computed{len(made)}"
        module.register_buffer(name, value)
        with module.graph.inserting_before(node):
            made[key] = module.graph.get_attr(name)
        made[key].meta = {**node.meta, "val": _like(node, value.device)}
    return made[key]


def _made(graph: Graph, node: Node, device: torch.device, made: dict[Any, Node]) -> Node:
    """``node`` on ``device``, where what it needs has been made; what is equal, as in each layer of a model, once."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: made[n, device])
    if "device" in kwargs or not node.all_input_nodes:
        kwargs = {**kwargs, "device": device}
    key = node.target, str((args, kwargs))
    if key not in made:
        with graph.inserting_before(node):
            made[key] = graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made[key].meta = {**node.meta, "val": _like(node, device)}
    made[node, device] = made[key]
    return made[key]


def _like(node: Node, device: torch.device) -> torch.Tensor:
    """A fake tensor like ``node``'s, there."""
    old = node.meta["val"]
    with old.fake_mode:
        return torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=device)
