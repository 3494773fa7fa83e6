"""One model of the sweep: a name, how to build it, and what that needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Built = tuple[Any, tuple[Any, ...]]  # a torch.nn.Module in float32 on the CPU, and the tensors it is called with


@dataclass(frozen=True)
class Model:
    """``build(real)``: with real sizes for a GPU, or small ones for a CPU; random weights, without a network, without
    dropout. It returns a module whose results are tensors (nested in tuples, lists or dicts), and its inputs.
    ``needs``: the library it is imported from. ``cost``: seconds of compiling relative to others, to begin early what
    takes long.
    """

    name: str
    build: Callable[[bool], Built]
    needs: str = ""
    cost: float = 1.0
    modes: tuple[str, ...] = ("inference", "training")
