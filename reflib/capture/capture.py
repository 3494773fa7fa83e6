"""Capture: a model becomes graphs of ATen calls.

Dynamo turns Python into an FX graph and guards; AOTAutograd makes it functional, derives the backward graph,
partitions the two (min-cut recomputation) and applies decompositions. Both are PyTorch's own and used as they are;
reflib chooses the decompositions and receives each graph as a :class:`Graph`. (Programs of ``torch.export``:
``capture/exported.py``.)

NB: TorchInductor runs pattern passes (attention, batch-norm folding, ...) before and after AOTAutograd; we run none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from reflib.seams import Seam

from .graph import Graph

# What to do before AOTAutograd cuts a joint graph in two: (GraphModule) -> None, which may tag nodes. None: nothing.
BEFORE_PARTITION = Seam("capture.BEFORE_PARTITION")
CompileGraph = Callable[[Graph, Sequence[Any]], Callable[[list], Any]]


def dynamo_graph_to_aten(
    module: torch.fx.GraphModule, inputs: Sequence[Any], decompositions: dict, compile_graph: CompileGraph
) -> Callable[..., Any]:
    """AOTAutograd over one of Dynamo's graphs. ``compile_graph`` is called once for an inference graph, or for the
    forward graph and, possibly only when it is first needed, for the backward graph; it returns a callable that takes a
    list of inputs."""
    from torch._dynamo.backends.common import aot_autograd

    def compiler(name: str) -> Callable[..., Any]:
        def compile_one(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list], Any]:
            fn = compile_graph(Graph(gm, name, _weights(gm)), example_inputs)
            fn._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd: takes a list, which it may empty
            return fn

        return compile_one

    backend = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        decompositions=decompositions,
        partition_fn=partition,
        keep_inference_input_mutations=True,
    )
    return backend(module, inputs)


def partition(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """AOTAutograd's joint graph as a forward and a backward graph; arguments are those of the partitioner."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    for tag in BEFORE_PARTITION.values():
        tag(joint)
    return min_cut_rematerialization_partition(joint, *args, **kwargs)


def _weights(gm: torch.fx.GraphModule) -> frozenset[str]:
    """Placeholders that hold parameters. AOTAutograd has their positions among the forward's inputs, and names inputs
    by position: ``primals_N`` in a forward graph and where a backward graph reads a saved one, ``argN_1`` in an
    inference graph."""
    context = torch._guards.TracingContext.try_get()
    static = getattr(getattr(context, "fw_metadata", None), "static_input_indices", None) or []
    names = {f"primals_{i + 1}" for i in static} | {f"arg{i}_1" for i in static}
    return frozenset(n.name for n in gm.graph.nodes if n.op == "placeholder" and n.name in names)
