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
    backward: set[torch.fx.Node] = set()
    for node in joint.graph.nodes:
        if node.op == "placeholder" and node.name.startswith("tangents") or not backward.isdisjoint(node.all_input_nodes):
            backward.add(node)
    for node in joint.graph.nodes:
        if node.target is not aten.clone.default or node in backward or backward.isdisjoint(node.users):
            continue
        made, source = node.meta.get("val"), root[node.args[0]]
        if source.op == "placeholder" and isinstance(made, torch.Tensor) and not isinstance(made.numel(), torch.SymInt):
            if made.numel() * made.itemsize >= LEAST:
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_RECOMPUTE)
    return joint
