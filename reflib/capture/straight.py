"""Inference graphs are called without AOTAutograd's wrapper around them, where that has nothing to do.

The wrapper is Python that costs each call 4 µs (torch 2.11): it takes and returns tensors that are views of others,
writes back inputs, marks sizes, unpacks subclasses, and turns gradients off. Most graphs at inference need only the
last, which is done here. What a graph needs AOTAutograd says in its metadata; where anything is unknown, its wrapper
stays, and in training, where it is autograd's function.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..options import Options

_compiled: WeakKeyDictionary[Any, list[tuple[Any, Callable[[list], Any]]]] = WeakKeyDictionary()  # by TracingContext


def remembered(call: Callable[..., Any], what: Any, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Plugs into ``pipeline.AROUND``, last: ``call`` itself. ``what``: the Stages of a graph, which it is."""
    context = torch._guards.TracingContext.try_get()
    if context is not None and not isinstance(what, torch.fx.GraphModule):
        _compiled.setdefault(context, []).append((what.graph, call))
    return call


def straight(call: Callable[..., Any], what: Any, inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Plugs into ``pipeline.AROUND``, first. ``what``: Dynamo's graph; ``call``: what AOTAutograd made of it."""
    context = torch._guards.TracingContext.try_get()
    if context is None or not isinstance(what, torch.fx.GraphModule):
        return call
    all_compiled = _compiled.pop(context, [])
    if len(all_compiled) != 1:
        return call
    ((graph, compiled),) = all_compiled
    if graph.name != "inference" or not _nothing_else(context.fw_metadata, graph, inputs):
        return call
    is_enabled, enable = torch.is_grad_enabled, torch._C._set_grad_enabled

    def run(*args: Any) -> Any:
        if not is_enabled():
            return compiled([*args])
        enable(False)
        try:
            return compiled([*args])
        finally:
            enable(True)

    run.boxed = compiled  # type: ignore[attr-defined]
    return run


def _nothing_else(about: Any, graph: Any, inputs: Sequence[Any]) -> bool:
    """Would AOTAutograd pass ``inputs`` as they are, and the results too?"""
    try:
        todo = (
            about.num_mutated_inp_runtime_indices, about.mutated_graph_handled_indices_seen_by_autograd,
            about.num_outputs_aliased, about.num_intermediate_bases, about.dynamic_outputs, about.tokens,
            about.is_rng_op_functionalized, about.grad_enabled_mutation is not None,
        )  # fmt: skip
        plain = all(type(m).__name__ == "PlainTensorMeta" for m in about.subclass_fw_graph_out_meta)
    except AttributeError:  # this torch differs from the ones that were tested
        return False
    placeholders = sum(n.op == "placeholder" for n in graph.module.graph.nodes)
    subclasses = any(is_traceable_wrapper_subclass(x) for x in inputs)
    autocast = torch._C._is_any_autocast_enabled()
    return plain and not any(todo) and placeholders == len(inputs) and not subclasses and not autocast
