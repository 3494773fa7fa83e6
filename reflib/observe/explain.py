"""``explain``: every stage of one compilation as data, with a rich form for notebooks.

>>> e = reflib.explain(f, x)                  # doctest: +SKIP
>>> e.program, e.groups, e.kernels[0].source  # doctest: +SKIP
"""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable
from html import escape
from typing import Any

import torch

from ..errors import ReflibError
from ..options import Options
from ..pipeline import Backend, Stages, exported_stages
from ..timeline import Timeline
from .decisions import Decisions

_serial = itertools.count(1)


class Explanation:
    """The stages of one graph. Where a model gives several (graph breaks, a backward), ``graphs`` has them all and
    this object speaks of the first; ``backward`` is the backward graph's explanation, or None.

    graph: the captured ATen graph (str() prints it).
    program: after ``lower``; one node an op.   fused: after ``fuse``.   chosen: after ``choose``, made of Regions.
    groups: what was fused with what.           refusals: which pairs were not, with the Reason.
    before, inlined: where there were choices: the first fusion with them in it; the program with the winners inlined.
    decisions: what was chosen, with every candidate.      memory: the Plan (``peak_bytes``, ``moments``).
    kernels: list of Kernel (``name``, ``language``, ``source``).  wrapper: the text of the host code.
    timeline: a Timeline: every stage, and where candidates were measured every compile, wait and measurement.
        ``for name, start, seconds in e.timeline.only("stage")``.
    """

    def __init__(self, graphs: list[Stages], first: int = 0):
        self.graphs = graphs
        self._first = first

    @property
    def stages(self) -> Stages:
        return self.graphs[self._first]

    @property
    def graph(self) -> Any:
        return self.stages.graph

    @property
    def program(self) -> Any:
        return self.stages.program

    @property
    def fused(self) -> Any:
        return self._reached(self.stages.fused, "fuse").program

    @property
    def chosen(self) -> Any:
        return self._reached(self.stages.chosen, "choose")

    @property
    def groups(self) -> list[Any]:
        return list(self._reached(self.stages.fused, "fuse").groups)

    @property
    def refusals(self) -> list[Any]:
        return list(self._reached(self.stages.fused, "fuse").refusals)

    @property
    def decisions(self) -> Any:
        return Decisions(self.stages.decisions)

    @property
    def before(self) -> Any:
        """The first fusion (a ``Fused``), with choices still in it; where there was none, the only one."""
        return self.stages.before or self._reached(self.stages.fused, "fuse")

    @property
    def inlined(self) -> Any:
        """The program with every choice's winner in its place, before it was fused again."""
        return self.stages.inlined or self.program

    @property
    def memory(self) -> Any:
        return self._reached(self.stages.plan, "plan")

    @property
    def kernels(self) -> list[Any]:
        return [k for (_, arm), k in self._reached(self.stages.kernels, "generate").items() if arm == 0]

    @property
    def general_kernels(self) -> list[Any]:
        """The kernels of fallback arms: for misaligned or huge inputs."""
        return [k for (_, arm), k in self._reached(self.stages.kernels, "generate").items() if arm > 0]

    @property
    def wrapper(self) -> str:
        if self.stages.wrapper is None and self.stages.plan is not None and self.stages.kernels is not None:
            from ..wrap.cpp import CppPrinter
            from ..wrap.python import PythonPrinter

            printer = CppPrinter if self.stages.options.wrapper == "cpp" else PythonPrinter
            return printer(self.chosen, self.stages.plan, self.stages.kernels).print()
        return self._reached(self.stages.wrapper, "wrap")

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.stages.timeline)

    @property
    def backward(self) -> Explanation | None:
        for i, s in enumerate(self.graphs):
            if s.graph.name == "backward":
                return Explanation(self.graphs, i)
        return None

    def _reached(self, value: Any, stage: str) -> Any:
        if value is None:
            raise ReflibError(f"this compilation stopped before the stage {stage!r}")
        return value

    def summary(self) -> list[dict[str, Any]]:
        """One row a graph: name, ATen ops, kernels, calls, peak temporary bytes."""
        from ..ir.program import Dispatch, Extern, walk

        rows = []
        for s in self.graphs:
            assert s.program is not None and s.chosen is not None and s.plan is not None
            nodes = [n for n in walk(s.chosen.nodes) if not isinstance(n, Dispatch)]
            externs = [n for n in nodes if isinstance(n, Extern)]
            rows.append(
                {
                    "graph": s.graph.name,
                    "ATen ops": sum(n.op == "call_function" for n in s.graph.nodes),
                    "lowered nodes": len(s.program.nodes),
                    "kernels": len(nodes) - len(externs),
                    "calls": len(externs),
                    "temporary bytes at peak": s.plan.peak_bytes,
                }
            )
        return rows

    def __repr__(self) -> str:
        lines = []
        for row in self.summary():
            lines.append(", ".join(f"{k}: {v}" for k, v in row.items()))
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = self.summary()
        head = "".join(f"<th>{escape(k)}</th>" for k in rows[0])
        body = ""
        for row in rows:
            texts = [f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()]
            body += "<tr>" + "".join(f"<td>{escape(t)}</td>" for t in texts) + "</tr>"
        kernels = "".join(
            f"<details><summary><code>{escape(k.name)}</code> ({k.language})</summary>"
            f"<pre>{escape(k.source)}</pre></details>"
            for k in self.kernels
        )
        wrapper = f"<details><summary>wrapper</summary><pre>{escape(self.wrapper)}</pre></details>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{kernels}{wrapper}"


def explain(
    f: Callable[..., Any], *args: Any, kwargs: dict[str, Any] | None = None, dynamic: bool | None = None, **options: Any
) -> Explanation:
    """Compile ``f`` for these arguments and return its stages as data.

    f: a function, module, something ``torch.compile`` or ``reflib.compile`` returned, or an ExportedProgram.
    args, kwargs: what to call it with. The call is really made (once, eagerly where ``target`` is set), so what ``f``
        mutates is mutated.
    dynamic: as in ``torch.compile``.   options: fields of :class:`reflib.Options`; ``target="sm_90"`` shows a GPU's
        code on any machine.

    Raises ReflibError if nothing was captured (the function has no tensor operation).
    """
    opts = Options.make(options)
    graphs: list[Stages] = []
    if isinstance(f, torch.export.ExportedProgram):
        return Explanation([exported_stages(f, opts)[0]])
    fn = original(f)
    compiled = torch.compile(_fresh(fn), backend=Backend(opts, graphs.append), dynamic=dynamic)
    result = compiled(*args, **(kwargs or {}))
    if not graphs:
        raise ReflibError(f"explain: no tensor operation was captured from {getattr(fn, '__name__', fn)!r}")
    if not any(s.graph.name == "backward" for s in graphs) and any(s.graph.name == "forward" for s in graphs):
        _run_backward(fn, args, kwargs or {}, result)
    return Explanation(graphs)


def original(f: Any) -> Any:
    """What was given to ``torch.compile``, for what it returned."""
    f = getattr(f, "_orig_mod", f)
    return getattr(f, "_torchdynamo_orig_callable", f)


def _fresh(fn: Any) -> Callable[..., Any]:
    """A function around ``fn`` with a code object of its own: Dynamo keeps its cache by code object, and what other
    compilations of ``fn`` left there must not answer."""

    def probe(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    code = probe.__code__.replace(co_name=f"explained_{next(_serial)}")
    return types.FunctionType(code, globals(), code.co_name, None, probe.__closure__)


def _run_backward(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """With dynamic shapes the backward graph is compiled when first run. Gradients are computed and dropped."""
    from torch.utils._pytree import tree_leaves

    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if isinstance(fn, torch.nn.Module):
        leaves += [p for p in fn.parameters() if p.requires_grad]
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True)
