"""Capture: a model becomes graphs of ATen calls.

Dynamo turns Python into an FX graph and guards; AOTAutograd makes it functional, derives the backward graph,
partitions the two (min-cut recomputation) and applies decompositions. Both are PyTorch's own and used as they are:
what reflib adds is the choice of decompositions and the handing over as :class:`Graph`. ``torch.export`` is the other
door: the graph is whole, the guards are the exporter's, and no Dynamo runs at call time.

NB: TorchInductor runs pattern passes (attention, batch-norm folding, ...) before and after AOTAutograd; we run none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch

from ..errors import CaptureError
from .graph import Graph, ranges_of

CompileGraph = Callable[[Graph, Sequence[Any]], Callable[[list], Any]]


def dynamo_graph_to_aten(
    module: torch.fx.GraphModule, inputs: Sequence[Any], decompositions: dict, compile_graph: CompileGraph
) -> Callable[..., Any]:
    """AOTAutograd over one of Dynamo's graphs. ``compile_graph`` is called once for an inference graph, or for the
    forward and (perhaps later, when first needed) the backward graph; it returns a callable taking a list of inputs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

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
        partition_fn=min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return backend(module, inputs)


def _weights(gm: torch.fx.GraphModule) -> frozenset[str]:
    """Placeholders that hold parameters: AOTAutograd knows their positions among the forward's inputs, and names a
    forward's and a backward's saved input ``primals_N``, an inference graph's ``argN_1``, by that position."""
    context = torch._guards.TracingContext.try_get()
    static = getattr(getattr(context, "fw_metadata", None), "static_input_indices", None) or []
    names = {f"primals_{i + 1}" for i in static} | {f"arg{i}_1" for i in static}
    return frozenset(n.name for n in gm.graph.nodes if n.op == "placeholder" and n.name in names)


def exported_graph(program: Any, decompositions: dict) -> tuple[Graph, Any]:
    """An ``ExportedProgram`` as a Graph (parameters, buffers and constants first among its inputs), and its signature.

    Raises CaptureError for what is no ExportedProgram.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise CaptureError(f"expected a torch.export.ExportedProgram, got {type(program).__name__}")
    env = _shape_env(program)
    before = len(env.guards) if env is not None else 0
    program = program.run_decompositions(decompositions)  # in the same ShapeEnv: what it assumes is found there
    if env is not None:
        env.guards[before:] = [g for g in env.guards[before:] if not _of_two_or_more(g.expr)]
    held = {s.arg.name for s in program.graph_signature.input_specs if s.kind.name in ("PARAMETER", "BUFFER")}
    return Graph(program.graph_module, "inference", frozenset(held), ranges_of(program)), program


def _shape_env(program: Any) -> Any:
    """The ShapeEnv of its symbols; None if all sizes are numbers."""
    for n in program.graph.nodes:
        val = n.meta.get("val")
        for s in (val, *(val.shape if isinstance(val, torch.Tensor) else ())):
            if isinstance(s, torch.SymInt):
                return s.node.shape_env
    return None


def _of_two_or_more(e: Any) -> bool:
    """A condition on one symbol that all numbers from 2 on meet. Tracing assumes them of every size that varies, and
    torch.export does not hold a call to that."""
    if not (isinstance(e, sympy.Rel) and e.lhs.is_Symbol and e.rhs.is_Integer):
        return False
    least = {sympy.StrictGreaterThan: 1, sympy.GreaterThan: 2, sympy.Unequality: 1}.get(type(e))
    return least is not None and int(e.rhs) <= least
