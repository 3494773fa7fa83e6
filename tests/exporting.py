"""Models captured by ``torch.export``, and their graphs as numbers."""

import functools
from typing import Any

import torch
from torch import nn

from reflib.capture import export as capture
from reflib.capture.export import Exported
from reflib.lower import decompositions

export_for = functools.partial(capture.export_for, decompositions=decompositions())

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
DEVICES = ["cpu", "cuda"]


class Alone(nn.Module):
    def __init__(self, fn: Any):
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def calls(e: Exported, op: Any) -> list[torch.fx.Node]:
    return [n for n in e.graph.nodes if n.target == op]


def targets(e: Exported) -> list[str]:
    return [str(n.target) for n in e.graph.nodes if n.op == "call_function"]


def devices(e: Exported) -> set[torch.device]:
    """Of every value in the graph, and of every device written in it."""
    found: set[torch.device] = set()
    for n in e.graph.nodes:
        if n.op != "output":
            vals = torch.utils._pytree.tree_leaves(n.meta.get("val"))
            found |= {v.device for v in vals if isinstance(v, torch.Tensor)}
            if n.target != aten._assert_tensor_metadata.default:
                found |= {a for a in [*n.args, *n.kwargs.values()] if isinstance(a, torch.device)}
    return found


def run(e: Exported, *args: Any) -> Any:
    """The graph with its state, as numbers on the CPU; then what the user gets."""
    flat = torch.utils._pytree.tree_leaves(args)
    state = iter([t.clone() for t in e.state.values()])  # some is written to
    users = iter(flat)
    inputs = [
        next(users) if s.kind.name == "USER_INPUT" else next(state) for s in e.program.graph_signature.input_specs
    ]
    with torch.no_grad():
        results = torch.fx.Interpreter(e.graph.module).run(*inputs)
    kinds = [s.kind.name for s in e.program.graph_signature.output_specs if "MUTATION" not in s.kind.name]
    return [r for r, kind in zip(results, kinds) if kind == "USER_OUTPUT"]


def on_cpu(e: Exported, *args: Any) -> Any:
    """A graph for cuda, run here: its device arguments become the CPU."""
    for n in e.graph.nodes:
        n.kwargs = {k: torch.device("cpu") if isinstance(v, torch.device) else v for k, v in n.kwargs.items()}
        if n.target == aten._assert_tensor_metadata.default:
            e.graph.module.graph.erase_node(n)
    e.graph.module.recompile()
    return run(e, *args)


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.linear.weight
        self.register_buffer("kept", torch.arange(8.0))
        self.register_buffer("unsaved", torch.arange(8.0) * 2, persistent=False)
        self.plain = torch.ones(8) * 3
        self.nested = {"a": [torch.ones(8) * 4, (torch.ones(8) * 5,)]}
        self.listed = [nn.Parameter(torch.ones(8) * 6)]
        self.norm = nn.BatchNorm1d(8)

    def forward(self, t: torch.Tensor) -> torch.Tensor:
        y = self.tied(self.linear(t)) + self.kept + self.unsaved + self.plain + self.nested["a"][0]
        y = y + self.nested["a"][1][0] * self.listed[0] + torch.tensor([1.0, 2.0] * 4, device=t.device)
        y = y * 2 if t.is_cuda else y
        return self.norm(y + torch.zeros(8, device=t.device) + torch.arange(8, device=t.device))
