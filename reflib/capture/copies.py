"""Copies: of a graph module, which may be changed, and of a user's module."""

import traceback
import warnings
from copy import deepcopy
from typing import Any

import torch
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _make_graph_module


def copied(module: GraphModule) -> GraphModule:
    """The nodes are new, parameters and fake tensors (``meta``) are shared: ``deepcopy`` would copy those."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # copying PyTorch's LeafSpec warns of its own class
        out = _make_graph_module(module, deepcopy(module.graph))  # (as Dynamo does: its text is made when it is read)
    for old, new in zip(module.graph.nodes, out.graph.nodes, strict=True):
        new.meta = dict(old.meta)
    return out


def deep_copied(x: Any, memo: dict[int, Any]) -> Any:
    """``copy.deepcopy``, but what Python cannot copy and is neither a tensor nor a module stays as it is: a lock, an
    open file, what an op of ``torch.library`` holds."""
    while True:
        before = dict(memo)
        try:
            return deepcopy(x, memo)
        except TypeError as e:
            if (kept := _refused(e)) is None or id(kept) in before:
                raise
            tensors = {key: t for key, t in memo.items() if isinstance(t, torch.Tensor)}
            alive = {id(memo): memo[id(memo)]} if id(memo) in memo else {}  # what is copied, whose ids are the keys
            memo.clear()
            memo.update(before | tensors | alive | {id(kept): kept})


def _refused(e: TypeError) -> Any:
    """The object that pickle's protocol refused, if ``deepcopy`` itself asked for it: a ``__deepcopy__`` that raises
    says what its class wants."""
    innermost = list(traceback.walk_tb(e.__traceback__))[-1][0]
    found = innermost.f_locals.get("x") if innermost.f_code is deepcopy.__code__ else None
    return None if isinstance(found, (torch.Tensor, torch.nn.Module)) else found
