"""Repros of what torch.export captured: the graph after it was decomposed, with weights and arguments as its inputs.

The file has no Dynamo and no exporter in it: its graph is given values as the exporter's has them (a fake tensor per
node, symbols under their names), and goes through the stages from ``lower`` on.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import compute_unbacked_bindings
from torch.utils._pytree import tree_leaves

from ..capture import Graph
from ..options import Options
from ..pipeline import Stages, run
from ..wrap.exported import WEIGHTS, weights_of
from .given import Unprintable
from .rebuild import Subject


def inputs_of(program: Any, graph: Graph) -> list[Any]:
    """What the graph was captured with, in its order: weights, arguments; of a program that has kept none, zeros."""
    weights, nodes = weights_of(program), [n for n in graph.nodes if n.op == "placeholder"]
    given = iter(tree_leaves(program.example_inputs, is_leaf=lambda x: x is None) if program.example_inputs else ())
    out: list[Any] = []
    for spec, node in zip(program.graph_signature.input_specs, nodes, strict=True):
        if spec.kind.name in WEIGHTS:
            out.append(weights[spec.target])
        elif spec.kind.name == "USER_INPUT":
            fake = node.meta.get("val")
            out.append(next(given) if program.example_inputs else _zeros(fake))
        else:
            raise Unprintable(f"input {node.name} is a {spec.kind.name.lower()}")
    return out


def unbacked(graph: Graph) -> dict[str, int]:
    """Node -> the number of the first symbol that stands for a size it makes, which only running it tells."""
    made = {n.name: [str(s) for s in n.meta.get("unbacked_bindings") or ()] for n in graph.nodes}
    return {name: min(int(s[1:]) for s in found) for name, found in made.items() if found and found[0][0] == "u"}


def _zeros(fake: Any) -> Any:
    if not isinstance(fake, torch.Tensor):
        return fake
    sizes = (fake.shape, fake.stride())
    size, stride = ([n.node.hint if isinstance(n, torch.SymInt) else n for n in of] for of in sizes)
    return torch.empty_strided(size, stride, dtype=fake.dtype, device=fake.device).zero_()


def compile_exported(
    subject: Subject, fakes: Sequence[Any], mode: FakeTensorMode, stages: list[Stages]
) -> Callable[..., Any]:
    """The graph of an exported program through the stages."""
    values = [f.detach() if isinstance(f, torch.Tensor) else f for f in fakes]  # what it writes to is not the input
    env: Any = mode.shape_env
    with mode, torch.no_grad(), env.ignore_fresh_unbacked_symbols():
        _Values(subject.module, mode, subject.exported["unbacked"]).run(*values)
    for node, fake in zip((n for n in subject.module.graph.nodes if n.op == "placeholder"), fakes):
        node.meta["val"] = fake
    weights, ranges = subject.exported["weights"], subject.exported["ranges"]
    graph = Graph(subject.module, "inference", frozenset(weights), ranges=ranges)
    made = run(graph, Options.make(subject.options))
    stages.append(made)
    call = subject.module if made.call is None else lambda *args: made.call(list(args))  # type: ignore[misc]
    return call


class _Values(torch.fx.Interpreter):
    """Notes each node's value, in subgraphs too: an operator that has any runs them."""

    def __init__(self, module: torch.fx.GraphModule, mode: FakeTensorMode, numbers: Mapping[str, int] | None = None):
        super().__init__(module)
        self.mode, self.unbacked = mode, numbers or {}

    def run_node(self, n: torch.fx.Node) -> Any:
        number = self.unbacked.get(n.name)
        if number is not None:  # the number in the name of the symbol that it makes
            env: Any = self.mode.shape_env
            counts = isinstance(env.unbacked_symint_counter, int)  # before, an iterator
            env.unbacked_symint_counter = number if counts else itertools.count(number)
        with self._watched(n):
            out = super().run_node(n)
        if isinstance(out, torch.Tensor) and not isinstance(out, torch._subclasses.FakeTensor):
            out = self.mode.from_tensor(out, static_shapes=True)
        if n.op != "output" and not isinstance(out, torch.fx.GraphModule):
            n.meta["val"] = out
            if found := compute_unbacked_bindings(self.mode.shape_env, out, peek=True):
                n.meta["unbacked_bindings"] = found
        return out

    @contextlib.contextmanager
    def _watched(self, n: torch.fx.Node) -> Iterator[None]:
        """While a node runs, its subgraphs are run by one of these. (``while_loop`` does not look at its condition.)"""
        held = [str(a.target) for a in n.args if isinstance(a, torch.fx.Node) and a.op == "get_attr"]
        inner = [m for name in held if isinstance(m := getattr(self.module, name, None), torch.fx.GraphModule)]
        ran = []

        def runs(m: torch.fx.GraphModule, *args: Any) -> Any:
            ran.append(m)
            return _Values(m, self.mode).run(*args)

        for m in inner:
            m.forward = partial(runs, m)  # type: ignore[method-assign]
        try:
            yield
            for m in inner:
                if m not in ran:
                    carried = torch.fx.map_arg(n.args[2:4], lambda a: self.env[a])
                    m(*(x for part in carried for x in part))
        finally:
            for m in inner:
                del m.forward
