"""Running programs with choices in them, up to ``lower``: any variant, by the interpreter; a kernel as ``schedule``
makes it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from reflib.capture import Graph, dynamo_graph_to_aten
from reflib.ir.interpret import interpret
from reflib.ir.loops import LoopNest
from reflib.ir.program import Choice, Config, KernelNode, Program, Template, Variant, Variants, kernel_with_fallback
from reflib.ir.verify import verify
from reflib.lower import decompositions, lower
from reflib.options import Options
from reflib.pipeline import run

GPU = Options(target="sm_90")
TABLE = decompositions()


def program_of(fn: Callable[..., Any], *args: Any, options: Options = GPU, mode: str = "fake") -> Program:
    """``fn``, traced (``mode``: make_fx's) and lowered."""
    program = lower(Graph(make_fx(fn, decomposition_table=TABLE, tracing_mode=mode)(*args)), options)
    verify(program)
    return program


def choices(program: Program) -> list[Choice]:
    return [n for n in program.nodes if isinstance(n, Choice)]


def with_variant(program: Program, pick: Callable[[Choice], Variant]) -> Program:
    """Each choice replaced by one of its variants, those inside included."""
    nodes: list[Any] = []
    buffers = dict(program.buffers)
    for n in program.nodes:
        if isinstance(n, Choice):
            chosen = pick(n)
            nodes += chosen.nodes
            buffers.update({b.name: b for b in chosen.buffers})
        else:
            nodes.append(n)
    out = replace(program, nodes=tuple(nodes), buffers=buffers)
    return with_variant(out, pick) if choices(out) else out


def scheduled(part: LoopNest | Template, config: Config | None = None, name: str = "") -> Variants:
    """``part`` as a kernel without a fallback."""
    kernel = KernelNode(name or part.name, (part,), config or Config())
    return Variants(kernel.name, tuple(kernel.writes()), kernel_with_fallback(kernel), part.origins)


class Lowered:
    """A ``torch.compile`` backend that stops after ``lower`` and runs graphs by the interpreter. ``programs``: one for
    each graph. ``pick``: the name of the alternative to run (else the first)."""

    def __init__(self, **options: Any) -> None:
        self.options = Options.make({"autotune": "blocking", "verify": True, **options})
        self.programs: list[Program] = []
        self.pick = ""

    def __call__(self, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return dynamo_graph_to_aten(module, inputs, decompositions(), self._compile)

    def _compile(self, graph: Graph, inputs: Sequence[Any]) -> Callable[[list], Any]:
        program = run(graph, self.options, until="lower").program
        assert program is not None
        self.programs.append(program)

        def call(args: list) -> tuple:
            one = with_variant(program, self._alternative)
            verify(one)
            return tuple(interpret(one, args))

        return call

    def _alternative(self, choice: Choice) -> Variant:
        return next((a for a in choice.variants if a.name == self.pick), choice.variants[0])

    @property
    def choice(self) -> Choice:
        """The only one."""
        (found,) = [c for p in self.programs for c in choices(p)]
        return found


def check_all(fn: Callable[..., Any], args: Sequence[Any], dynamic: bool | None = False, **options: Any) -> Lowered:
    """Compile ``fn``, compare every alternative with eager, and return the backend."""
    torch._dynamo.reset()
    backend = Lowered(**options)
    compiled = torch.compile(fn, backend=backend, dynamic=dynamic, fullgraph=True)
    want = fn(*args)
    torch.testing.assert_close(compiled(*args), want)
    names = {a.name for p in backend.programs for c in choices(p) for a in c.variants}
    for name in names:
        backend.pick = name
        torch.testing.assert_close(compiled(*args), want, msg=lambda m, name=name: f"{name}: {m}")
    backend.pick = ""
    return backend
