"""Which values of a joint graph are the caller's tensors, or views of them: saved for the backward they hold no memory
that could be freed, and cost none. (A weight's transpose, a slice of an index tensor.)"""

from typing import Any

import torch

from .repeats import storages

CALLERS = "reflib_callers"  # in a node's meta, which goes with it when the graph is cut in two


def mark(gm: torch.fx.GraphModule, options: Any = None, gpu: bool = False) -> torch.fx.GraphModule:
    """Plugs into ``pipeline.REWRITES``, after all that makes nodes."""
    arguments = [n for n in gm.graph.nodes if n.op == "placeholder" and not n.name.startswith("tangents")]
    given = set().union(*map(storages, arguments))
    for n in gm.graph.nodes:
        if n.op != "output" and storages(n) & given:
            n.meta[CALLERS] = True
    return gm


def is_callers(n: torch.fx.Node) -> bool:
    """Of a placeholder of a backward graph."""
    return n.name.startswith("primals_") or CALLERS in n.meta
