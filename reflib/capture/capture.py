"""Capture: a model becomes graphs of ATen calls.

Dynamo turns Python into an FX graph and guards; AOTAutograd makes it functional, derives the backward graph,
partitions the two (min-cut recomputation) and applies decompositions. Both are PyTorch's own and used as they are;
reflib chooses the decompositions and receives each graph as a :class:`Graph`. (Programs of ``torch.export``:
``capture/exported.py``.)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._functorch import config

from .graph import Graph
from .repeats import merge_repeats

CompileGraph = Callable[[Graph, Sequence[Any]], Callable[[list], Any]]
Rewrite = Callable[[torch.fx.GraphModule], torch.fx.GraphModule]


def dynamo_graph_to_aten(
    module: torch.fx.GraphModule, inputs: Sequence[Any], decompositions: dict, compile_graph: CompileGraph,
    rewrite: Rewrite = lambda gm: gm,
) -> Callable[..., Any]:  # fmt: skip
    """AOTAutograd over one of Dynamo's graphs. ``compile_graph`` is called once for an inference graph, or for the
    forward graph and, possibly only when it is first needed, for the backward graph; it returns a callable that takes a
    list of inputs. ``rewrite``: of the joint graph, before it is cut into these two."""
    from torch._dynamo.backends.common import aot_autograd

    donated: list[int] = []

    def compiler(name: str) -> Callable[..., Any]:
        def compile_one(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[[list], Any]:
            if name == "inference":  # (of a joint graph, ``partitioner`` does)
                merge_repeats(gm)
            fn = compile_graph(Graph(gm, name, *_known(gm, name, donated)), example_inputs)
            fn._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd: takes a list, which it may empty
            return fn

        return compile_one

    backend = aot_autograd(
        fw_compiler=compiler("forward"), bw_compiler=compiler("backward"), inference_compiler=compiler("inference"),
        decompositions=decompositions, partition_fn=partitioner(rewrite), keep_inference_input_mutations=True,
    )  # fmt: skip
    with config.patch(functionalize_rng_ops=False):  # (needs CUDA): random ops become functions by REWRITES, or calls
        return backend(module, inputs)


def partitioner(rewrite: Rewrite) -> Callable[..., Any]:
    """What cuts a joint graph, rewritten first, in forward and backward."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    cut = config.patch(graphsafe_rng_functionalization=False, cse=False)(min_cut_rematerialization_partition)

    def partition(gm: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        gm = rewrite(gm)
        merge_repeats(gm)
        return cut(gm, *args, **kwargs)

    return partition


def _known(gm: torch.fx.GraphModule, name: str, donated: list[int]) -> tuple[frozenset[str], int]:
    """Placeholders that hold parameters, and how many outputs are for the backward. AOTAutograd has the positions of
    the former among the forward's inputs, and names inputs by position: ``primals_N`` in a forward graph and where a
    backward graph reads a saved one, ``argN_1`` in an inference graph. Marked: what it donates to a backward graph."""
    info: Any = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    names = {x for i in getattr(info, "static_input_indices", None) or [] for x in (f"primals_{i + 1}", f"arg{i}_1")}
    saved = len(gm.graph.output_node().args[0]) - info.num_forward if name == "forward" else 0
    inputs, now = gm.graph.find_nodes(op="placeholder"), getattr(info, "bw_donated_idxs", None) or []
    donated += now
    now.clear()  # (with any, AOTAutograd refuses a later backward that retains the graph)
    for i in donated if name == "backward" else ():
        inputs[i].meta["donated"] = True
    return frozenset(n.name for n in inputs if n.name in names), saved
