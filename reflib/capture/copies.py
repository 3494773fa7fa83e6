"""A graph module that may be changed, beside the one it was copied from."""

from __future__ import annotations

import warnings
from copy import deepcopy

from torch.fx import GraphModule


def copied(module: GraphModule) -> GraphModule:
    """The nodes are new, parameters and fake tensors (``meta``) are shared: ``deepcopy`` would copy those."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # copying PyTorch's LeafSpec warns of its own class
        out = GraphModule(module, deepcopy(module.graph))
    for old, new in zip(module.graph.nodes, out.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    return out
