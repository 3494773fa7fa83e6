"""A copy of an input, in another order in memory, is not saved for the backward: it has the input, and copies it again.

Convolutions in channels-last order (``layouts``) read copies of their weights, in the backward as well. torch's
partitioner saves whatever a call of the backward reads, however cheap it is. Eager has no such copies, so these would
be memory beyond its own (resnet50, 32 images: 33 MB; to copy them again takes 66 MB of traffic of some 30 GB).
"""

import torch
from torch.utils.checkpoint import CheckpointPolicy

from ..options import Options
from .clones import roots
from .random import after_the_forward

aten = torch.ops.aten
LEAST = 1 << 16  # bytes; for fewer no kernel is worth its launch


def copy_again(joint: torch.fx.GraphModule, options: Options, gpu: bool) -> torch.fx.GraphModule:
    """Tag such copies for the partitioner. One that is tagged already (of an input that is written) stays so."""
    root, backward = roots(joint.graph), after_the_forward(joint.graph)
    copies = [n for n in joint.graph.nodes if n.target is aten.clone.default and n not in backward and _large(n)]
    for node in copies:
        if root[node.args[0]].op == "placeholder" and not backward.isdisjoint(node.users):
            node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
    return joint


def _large(node: torch.fx.Node) -> bool:
    """(Of a size known now.)"""
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor) and isinstance(n := made.numel(), int) and n * made.itemsize >= LEAST
