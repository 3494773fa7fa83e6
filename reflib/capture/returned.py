"""A graph that returns a view of an input that it writes to (``cache[i] = v; return cache[:n]``) returns a view of the
input.

AOTAutograd's graph has it of the functional value, which is then needed beside the input that it is copied onto. But
such an output is used for its sizes and strides only: the caller gets a view of the input itself.
"""

import operator
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg

from ..options import Options
from .copies import copied

aten = torch.ops.aten


def views_of_inputs(module: torch.fx.GraphModule, options: Options, gpu: bool) -> torch.fx.GraphModule:
    """``module`` with such outputs made of what ``copy_`` returns."""
    bases, inputs = _bases(module), _placeholders(module)
    out = module.graph.output_node()
    found = [i for i, b in bases.items() if _chain(out.args[0][i], inputs[b])]  # type: ignore[index]
    if not found:
        return module
    module = copied(module)
    out, inputs = module.graph.output_node(), _placeholders(module)
    results = list(out.args[0])  # type: ignore[arg-type]
    for i in found:
        results[i] = views_back(module.graph, results[i], inputs[bases[i]])
    out.args = (tuple(results),)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def views_back(graph: torch.fx.Graph, value: Any, base: torch.fx.Node) -> torch.fx.Node | None:
    """``value``, a view of what is copied onto ``base``, as the same view of what ``copy_`` returns, which is added
    before the output; None if it is no such view."""
    chain = _chain(value, base)
    if not chain:
        return None
    *views, copy = chain
    with graph.inserting_before(graph.output_node()):
        for v in reversed(views):
            new = graph.node_copy(v, lambda n: n)
            new.args = (copy, *v.args[1:])
            new.meta = {**v.meta, "val": _value(new)}
            copy = new
    return copy


def _value(view: torch.fx.Node) -> Any:
    """What stands for its result: the input may be laid out, and begin, elsewhere than the functional value."""
    fake = lambda n: n.meta["val"]  # noqa: E731
    with detect_fake_mode([fake(view.args[0])]) or nullcontext():  # type: ignore[arg-type]
        return view.target(*map_arg(view.args, fake), **map_arg(view.kwargs, fake))  # type: ignore[operator]


def _placeholders(module: torch.fx.GraphModule) -> list[torch.fx.Node]:
    return [n for n in module.graph.nodes if n.op == "placeholder"]


def _bases(module: torch.fx.GraphModule) -> Any:
    """By output: the number of the input that it is, or is a view of; as AOTAutograd knows. (Inference graphs.)"""
    info = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    if info is None or info.tokens or len(info.input_info) != len(_placeholders(module)):
        return {}
    first = len(info.mutated_inp_runtime_indices)
    if len(module.graph.output_node().args[0]) != first + len(info.output_info):  # type: ignore[arg-type]
        return {}
    kinds = ("alias_of_input", "is_input")
    return {
        first + i: o.base_idx for i, o in enumerate(info.output_info)
        if o.output_type.name in kinds and o.base_idx is not None
    }  # fmt: skip


def _chain(value: Any, base: torch.fx.Node) -> list[torch.fx.Node]:
    """The views from ``value`` back to what is copied onto ``base``, last first, and the ``copy_``; else []."""
    views: list[torch.fx.Node] = []
    while isinstance(value, torch.fx.Node):
        copies = [u for u in value.users if u.target is aten.copy_.default and u.args[1] is value]
        if len(copies) == 1 and copies[0].args[0] is base:
            return [*views, copies[0]]
        of_several = value.args[0] if value.target is operator.getitem else value  # (of ``split``)
        infos = [r.alias_info for r in getattr(getattr(of_several.target, "_schema", None), "returns", ())]
        if not value.args or not any(a is not None and not a.is_write for a in infos):
            return []
        views.append(value)
        value = value.args[0]
    return []
