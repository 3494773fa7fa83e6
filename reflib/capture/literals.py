"""Numbers that a model computes from its own literals: ``torch.sqrt(torch.tensor(64.0) * 3)``.

Such a tensor has no dimensions and is on the CPU, whatever the model is on, so each kernel on a GPU that reads it would
wait for a copy, which a CUDA graph cannot contain. It is the same in every call: computed here, once, by the ops that
eager would call, it becomes a ``full``, and so a literal in the kernels.
"""

import contextlib
from operator import attrgetter

import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes

from ..options import Options
from .copies import copied

aten = torch.ops.aten


def literals(module: GraphModule, options: Options, gpu: bool) -> GraphModule:
    """``module``, or a copy of it with such numbers computed. module: a functional ATen graph with ``meta["val"]``.

    Only what begins with ``lift_fresh_copy``, which makes a literal's tensor, is computed: any other constant of the
    graph may be a tensor that the user changes between calls."""
    lifted = (n for n in module.graph.nodes if n.target is aten.lift_fresh_copy.default)
    if not any(_is_number(n) for n in lifted):
        return module
    out = copied(module)
    values: dict[Node, torch.Tensor] = {}
    tensors: dict[Node, torch.Tensor] = {}  # that the graph holds
    with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
        for node in out.graph.nodes:
            if node.op == "get_attr" and type(held := attrgetter(node.target)(module)) is torch.Tensor:
                tensors[node] = held
            elif _is_number(node) and _computable(node, values, tensors):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), (tensors | values).__getitem__)
                with contextlib.suppress(RuntimeError, ZeroDivisionError):  # raised when it is called, as in eager
                    values[node] = node.target(*args, **kwargs).clone()
        for node, value in reversed(values.items()):
            if any(user not in values for user in node.users):
                _replace(node, value)
            out.graph.erase_node(node)
    for node in out.graph.nodes:
        if node.op == "get_attr" and not node.users:
            out.graph.erase_node(node)
    out.recompile()
    return out


def _is_number(node: Node) -> bool:
    """Is it a call whose result is one real number on the CPU?"""
    val = node.meta.get("val")
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and isinstance(val, torch.Tensor)
        and val.dim() == 0
        and val.device.type == "cpu"
        and val.layout == torch.strided
        and val.dtype in (torch.bool, *_INTEGERS, *_FLOATS)
    )


_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _computable(node: Node, values: dict[Node, torch.Tensor], tensors: dict[Node, torch.Tensor]) -> bool:
    """A literal, or computed from literals alone, without effects and random numbers?"""
    op, inputs = node.target, node.all_input_nodes
    assert isinstance(op, torch._ops.OpOverload)
    if op is aten.lift_fresh_copy.default:
        return all(n in tensors for n in inputs)
    plain = op.namespace == "aten" and not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags
    return plain and bool(inputs) and all(n in values for n in inputs)


def _replace(node: Node, value: torch.Tensor) -> None:
    """A ``full`` in the place of ``node``."""
    kwargs = {"dtype": value.dtype, "device": torch.device("cpu")}
    with node.graph.inserting_before(node):
        full = node.graph.call_function(aten.full.default, ([], value.item()), kwargs)
    full.meta = dict(node.meta)
    node.replace_all_uses_with(full)
