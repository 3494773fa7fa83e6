"""A copy of an input, in another order in memory, is not saved for the backward: it has the input, and copies it again.

Convolutions in channels-last order (``layouts``) read copies of their weights, in the backward as well. torch's
partitioner saves whatever a call of the backward reads, however cheap it is. Eager has no such copies, so these would
be memory beyond its own (resnet50, 32 images: 33 MB; to copy them again takes 66 MB of traffic of some 30 GB).
"""

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ..options import Options
from .clones import roots

aten = torch.ops.aten
LEAST = 1 << 16  # bytes; for fewer no kernel is worth its launch


def copy_again(joint: torch.fx.GraphModule, options: Options, gpu: bool) -> torch.fx.GraphModule:
    """Tag such copies for the partitioner. One that is tagged already (of an input that is written) stays so."""
    root = roots(joint.graph)
    backward, copies = set[torch.fx.Node](), list[torch.fx.Node]()
    for node in joint.graph.nodes:
        tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if tangent or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
        elif node.target is aten.clone.default and root[node.args[0]].op == "placeholder" and _large(node):
            copies.append(node)
    for node in copies:
        if not backward.isdisjoint(node.users):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
    return joint


def _large(node: torch.fx.Node) -> bool:
    """(Of a size known now.)"""
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor) and isinstance(n := made.numel(), int) and n * made.itemsize >= LEAST
