"""Graph: what ``capture`` returns."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Graph:
    """A graph of ATen calls. Each node's ``meta["val"]`` is a fake tensor (dtype, device, sizes, eager's strides), a
    SymInt, or a nest of these. Functional, but for ``aten.copy_`` onto an input at the end (a mutated input).

    module: the FX graph; placeholders are its inputs in call order (tensors and SymInts), ``get_attr`` its constants.
    name: ``inference``, ``forward`` or ``backward``.
    weights: names of the placeholders that are parameters or buffers of the model, where that is known.
    saved: how many of the outputs, the last ones, are for a backward graph.
    ranges: of symbols, by name: (least, most or None), where capture states more than the graph's ShapeEnv says.
    """

    module: torch.fx.GraphModule
    name: str = "inference"
    weights: frozenset[str] = frozenset()
    saved: int = 0
    ranges: Mapping[str, tuple[int, int | None]] = field(default_factory=dict)

    @property
    def nodes(self) -> list[torch.fx.Node]:
        return list(self.module.graph.nodes)

    def __str__(self) -> str:
        text = self.module.print_readable(print_output=False)
        return text.replace("class <lambda>(", f"class {self.name.capitalize()}(", 1)  # Dynamo's name is no Python

    def placeholders(self) -> list[Any]:
        return [n.meta.get("val") for n in self.nodes if n.op == "placeholder"]
