"""Positions that a graph computes from nothing (``arange`` and arithmetic) and scatters to.

Interpolation is such reads, and its backward such scatters. If the forward saves the positions, the backward's compiler
does not know them, though a rule of ours needs them (``lower/index_put``); so they are computed again, which takes a
few operations on one number per row.
"""

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ..options import Options

aten = torch.ops.aten
SCATTERS = (aten.index_put.default, aten._unsafe_index_put.default)
MAX_NODES = 64


def recompute_positions(joint: torch.fx.GraphModule, options: Options, gpu: bool) -> torch.fx.GraphModule:
    """Tag the nodes for the partitioner. A random op, or an input, leaves what needs it untagged."""
    for node in joint.graph.nodes:
        if node.target in SCATTERS and len(node.args) > 3 and node.args[3]:
            for index in node.args[1]:
                for n in from_nothing(index) or ():
                    n.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    return joint


def from_nothing(node: Any) -> list[torch.fx.Node] | None:
    """The node and all that it needs, in order, if these are calls without inputs or random numbers; else None."""
    found: dict[torch.fx.Node, None] = {}
    todo = [node]
    while todo:
        n = todo.pop()
        if not isinstance(n, torch.fx.Node) or n.op != "call_function":
            return None
        if not isinstance(n.meta.get("val"), torch.Tensor) or len(found) > MAX_NODES:
            return None
        if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
            return None
        found[n] = None
        todo += [a for a in n.all_input_nodes if a not in found]
    return sorted(found)
