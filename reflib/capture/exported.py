"""A program of ``torch.export`` as a Graph: whole, with the exporter's guards; no Dynamo runs at call time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch._functorch import config

from ..errors import CaptureError
from .copies import copied
from .graph import Graph, ranges_of

Rewrite = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]


@config.patch(functionalize_rng_ops=False)
def exported_graph(program: Any, decompositions: dict, rewrite: Rewrite = lambda m: m) -> tuple[Graph, Any]:
    """An ``ExportedProgram`` as a Graph (parameters, buffers and constants first among its inputs), and its signature.
    ``rewrite``: of its graph, before it is decomposed (``pipeline.before_autograd``).

    Raises CaptureError for what is no ExportedProgram.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        raise CaptureError(f"expected a torch.export.ExportedProgram, got {type(program).__name__}")
    env = _shape_env(program)
    before = len(env.guards) if env is not None else 0
    program = _rewritten(program, rewrite)
    vals = [n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"]
    gpu = any(isinstance(v, torch.Tensor) and v.device.type == "cuda" for v in vals)
    # in the same ShapeEnv: what it assumes is found there
    program = program.run_decompositions(decompositions, decompose_custom_triton_ops=gpu)
    if env is not None:
        env.guards[before:] = [g for g in env.guards[before:] if not _of_two_or_more(g.expr)]
    held = {s.arg.name for s in program.graph_signature.input_specs if s.kind.name in ("PARAMETER", "BUFFER")}
    return Graph(program.graph_module, "inference", frozenset(held), ranges_of(program)), program


def _rewritten(program: Any, rewrite: Rewrite) -> Any:
    """A copy of ``program`` with its graph rewritten. Calls in it may be no ATen ops until it is decomposed."""
    new = copy.copy(program)
    new._graph_module = rewrite(copied(program.graph_module))
    return new


def _shape_env(program: Any) -> Any:
    """The ShapeEnv of its symbols; None if all sizes are numbers."""
    for n in program.graph.nodes:
        val = n.meta.get("val")
        for s in (val, *(val.shape if isinstance(val, torch.Tensor) else ())):
            if isinstance(s, torch.SymInt):
                return s.node.shape_env
    return None


def _of_two_or_more(e: Any) -> bool:
    """A condition on one symbol that every number from 2 on meets. Tracing assumes it of every dynamic size;
    torch.export does not check it."""
    if not (isinstance(e, sympy.Rel) and e.lhs.is_Symbol and e.rhs.is_Integer):
        return False
    least = {sympy.StrictGreaterThan: 1, sympy.GreaterThan: 2, sympy.Unequality: 1}.get(type(e))
    return least is not None and int(e.rhs) <= least
