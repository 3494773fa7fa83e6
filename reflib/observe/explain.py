"""``explain``: all stages of one compilation as data, with HTML for notebooks.

>>> e = reflib.explain(f, x)                  # doctest: +SKIP
>>> e.program, e.groups, e.kernels[0].source  # doctest: +SKIP
"""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from html import escape
from typing import Any

import torch

from ..api import exported_stages
from ..capture.triton_there import triton_of_gpu
from ..errors import ReflibError
from ..generate.user_kernel import expect_taken
from ..ir.program import fallback_kernels, kernels_and_calls
from ..logs import get as logger
from ..options import Options
from ..pipeline import Backend, Stages, advance, main_device
from ..plan.memory import memory
from ..target import parse_target
from ..timeline import Timed, Timeline
from .decisions import Decisions, html_table
from .eager_memory import Eager, copied, eager_memory
from .memory import MemoryReport, report
from .ranking import Ranking, Roof, data_sheet, ranking
from .trace import recorded_calls
from .ways import Again, first_rows

Measured = tuple[list[Stages], list[list[Timed]]]  # graphs, and the events of each call of them
_serial = itertools.count(1)


class Explanation:
    """The stages of one graph. If a model has several (graph breaks, a backward), ``graphs`` has all of them and the
    other attributes are those of the first; ``backward`` is the backward graph's explanation, or None.

    graph: the captured ATen graph (str() prints it).
    program: after ``lower``; mostly one node per op.   fused: after ``fuse``.   scheduled: after ``schedule``.
    groups: the nodes fused together.           refusals: pairs not fused, with the Reason.
    before, inlined: with choices, the program fused with them in it; the program with the winners inlined.
    decisions: the Decisions, with all candidates.
    memory: the plan (``peak_bytes``, ``moments``) with each step's buffers, eager's bytes, what forms the peak, and
        how to lower it (``observe.memory.MemoryReport``).
    updates: each update of a tensor, made in place, or in a copy and why.
    kernels: list of Kernel (``name``, ``language``, ``source``).  wrapper: the text of the host code.
    timeline: a Timeline of the stages, and of all compilations, waits and measurements of candidates.
        ``for name, start, seconds in e.timeline.only("stage")``.
    """

    def __init__(
        self, graphs: list[Stages], first: int = 0, eager: Callable[[], Eager] | None = None,
        measured: Callable[[int], Measured] | None = None, again: Again | None = None,
    ):  # fmt: skip
        self.graphs = graphs
        self._first = first
        self._again = functools.cache(again) if again is not None else None
        self._eager = functools.cache(eager) if eager is not None else None
        self._measured = measured

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
    def scheduled(self) -> Any:
        return self._reached(self.stages.scheduled, "schedule")

    @property
    def groups(self) -> list[Any]:
        return list(self._reached(self.stages.fused, "fuse").groups)

    @property
    def refusals(self) -> list[Any]:
        return list(self._reached(self.stages.fused, "fuse").refusals)

    @property
    def updates(self) -> list[Any]:
        """Of all graphs' tensors, as ``fuse.in_place.Updated``."""
        fused = (f for s in self.graphs for f in ((s.before, s.fused) if s.before is not s.fused else (s.fused,)))
        return list(dict.fromkeys(u for f in fused if f is not None for u in f.updates))

    @property
    def decisions(self) -> Any:
        return Decisions(self.stages.decisions)

    @property
    def before(self) -> Any:
        """The program fused with its choices in it (a ``Fused``); without choices the only fusion."""
        s = self.stages
        if s.once and s.before is None and s.inlined is not None:  # nothing was measured, so nothing needed it
            s.before = advance(Stages(s.graph, s.options, s.target_of, s.program), ["fuse"], "").fused
        return s.before or self._reached(s.fused, "fuse")

    @property
    def inlined(self) -> Any:
        """The program with each choice replaced by its winner, before that is fused."""
        return self.stages.inlined or self.program

    @property
    def memory(self) -> MemoryReport:
        self._reached(self.stages.plan, "plan")
        return report(self.stages, self.graphs, self.updates, self._eager, self._again)

    @property
    def kernels(self) -> list[Any]:
        return [k for k in self._all_kernels() if k.name not in fallback_kernels(self.scheduled.nodes)]

    @property
    def fallback_kernels(self) -> list[Any]:
        """The kernels for misaligned or huge inputs."""
        return [k for k in self._all_kernels() if k.name in fallback_kernels(self.scheduled.nodes)]

    def _all_kernels(self) -> list[Any]:
        return list(self._reached(self.stages.kernels, "generate").values())

    @property
    def wrapper(self) -> str:
        if self.stages.wrapper is None and self.stages.plan is not None and self.stages.kernels is not None:
            from ..wrap.cpp import CppPrinter
            from ..wrap.python import PythonPrinter

            printer = CppPrinter if self.stages.options.wrapper == "cpp" else PythonPrinter
            return printer(self.scheduled, self.stages.plan, self.stages.kernels).print()
        return self._reached(self.stages.wrapper, "wrap")

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.stages.timeline)

    @property
    def backward(self) -> Explanation | None:
        for i, s in enumerate(self.graphs):
            if s.graph.name == "backward":
                return Explanation(self.graphs, i, self._eager, self._measured, self._again)
        return None

    def ranking(self, roof: Roof | None = None, calls: int = 7) -> Ranking:
        """The kernels and calls of PyTorch of all graphs, those that take most above their floor first.

        roof: the device's limits: ``lab.roofline()`` measures them. None: a GPU's data sheet; for a CPU no floors.
        calls: how often to run the function again, on copies of its arguments, to see how long each kernel takes; it is
            compiled again for that. 0, and for a target: no times, those with the highest floor first.
        """
        self._reached(self.stages.plan, "plan")
        graphs, seen = self._measured(calls) if self._measured and calls else (self.graphs, [])
        return ranking(graphs, seen, roof or data_sheet(graphs))

    def _reached(self, value: Any, stage: str) -> Any:
        if value is None:
            raise ReflibError(f"this compilation stopped before the stage {stage!r:.200}")
        return value

    def summary(self) -> list[dict[str, Any]]:
        """One row per graph: name, ATen ops, kernels, calls, peak temporary bytes."""
        rows = []
        for s in self.graphs:
            assert s.program is not None and s.scheduled is not None and s.plan is not None
            kernels, calls = kernels_and_calls(s.scheduled.nodes)
            rows.append(
                {
                    "graph": s.graph.name,
                    "ATen ops": sum(n.op == "call_function" for n in s.graph.nodes),
                    "lowered nodes": len(s.program.nodes),
                    "kernels": kernels,
                    "calls": calls,
                    "temporary bytes at peak": memory(s.scheduled, s.plan).peak_bytes,
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
        texts = [[f"{v:,}" if isinstance(v, int) else str(v) for v in row.values()] for row in rows]
        kernels = "".join(
            f"<details><summary><code>{escape(k.name)}</code> ({k.language})</summary>"
            f"<pre>{escape(k.source)}</pre></details>"
            for k in self.kernels
        )
        wrapper = f"<details><summary>wrapper</summary><pre>{escape(self.wrapper)}</pre></details>"
        return html_table(rows[0], texts) + kernels + wrapper


def explain(
    f: Callable[..., Any], *args: Any, kwargs: dict[str, Any] | None = None, dynamic: bool | None = None, **options: Any
) -> Explanation:
    """Compile ``f`` for these arguments and return its stages as data.

    f: a function, a module, a result of ``torch.compile`` or ``reflib.compile``, or an ExportedProgram.
    args, kwargs: its arguments. ``f`` is called once, so its side effects happen; for a target once or twice with
        tensors without numbers, and then, if that does not do, once more with ``args``.
    dynamic: as in ``torch.compile``.   options: fields of :class:`reflib.Options`; ``target="sm_90"`` shows a GPU's
        code on any machine. Then only sizes, strides and dtypes of the arguments matter: nothing is computed, unless
        ``f`` needs numbers or has tensors of its own.

    Raises OptionError for a bad option, ReflibError if no tensor operation was captured; for a target ToolchainError
    for a Triton kernel of the user's that Triton refuses, DeviceError for one that needs more shared memory than the
    target has.
    """
    opts = Options.make(options)
    if opts.target is not None:
        parse_target(opts.target)
    graphs: list[Stages] = []
    if isinstance(f, torch.export.ExportedProgram):
        return Explanation(_taken([exported_stages(f, opts)[0]]))
    fn = original(f)
    failed: list[str] = []
    if opts.target is None or not (graphs := _graphs_of_fakes(fn, args, kwargs or {}, opts, dynamic, failed)):
        gpu = opts.target is not None and parse_target(opts.target).is_gpu
        with triton_of_gpu() if gpu else nullcontext(), _noting(failed):
            graphs = _graphs(Backend, fn, args, kwargs or {}, opts, dynamic)
    if not graphs:
        raise ReflibError(f"explain: no tensor operation was captured from {getattr(fn, '__name__', fn)!r:.200}")
    _taken(graphs)
    eager = functools.partial(_eager, fn, args, kwargs or {}, graphs)
    measured = functools.partial(_measure, fn, args, kwargs or {}, opts, dynamic)
    again = functools.partial(_again, fn, (args, kwargs or {}), graphs[0], dynamic)
    return Explanation(graphs, eager=eager, measured=measured if opts.target is None else None, again=again)


def _taken(graphs: list[Stages]) -> list[Stages]:
    """For a target only the user's Triton kernels are compiled, so that none is shown that cannot be."""
    for s in graphs:
        if s.options.target is not None and s.scheduled is not None and s.kernels is not None:
            expect_taken(s.scheduled, s.kernels, parse_target(s.options.target))
    return graphs


def _again(
    fn: Any, call: Any, s: Stages, dynamic: bool | None, option: tuple[str, Any] | None, rows: tuple[int, int] | None
) -> list[Stages]:
    """See ``ways.Again``. ``s``: a graph of the first compilation."""
    args, kwargs = call if rows is None else first_rows(call, *rows)
    assert s.scheduled is not None
    target = s.options.target or s.target_of(main_device(s.scheduled)).arch
    options = replace(s.options, **{"autotune": "off", "target": target} | dict([option] if option else []))
    return _graphs_of_fakes(fn, args, kwargs, options, dynamic, [])


def _eager(fn: Any, args: Any, kwargs: dict[str, Any], graphs: list[Stages]) -> Eager:
    """Of another run of ``fn``, on copies: on fake tensors, or on a GPU if its arguments lie on one."""
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    trains = any(s.graph.name in ("forward", "backward") for s in graphs)
    on_gpu = any(t.is_cuda for t in tensors) and graphs[0].options.target is None
    return eager_memory(fn, args, kwargs, _run_backward if trains else None, on_gpu)


def _measure(fn: Any, args: Any, kwargs: Any, options: Options, dynamic: bool | None, calls: int) -> Measured:
    """The graphs of another compilation, and the events of so many calls of it."""
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    gpus = {t.device.index for t in tensors if t.is_cuda}
    with copied(fn, args, kwargs, real=True) as (_, own, given), torch.random.fork_rng(list(gpus)):
        graphs: list[Stages] = []
        compiled = torch.compile(_fresh(own), backend=Backend(options, graphs.append), dynamic=dynamic)

        def call() -> None:
            result = compiled(*given[0], **given[1])
            if any(s.graph.name == "forward" for s in graphs):
                _run_backward(own, given[0], given[1], result)

        call()
        return graphs, recorded_calls(call, graphs, calls)


def _graphs(
    backend: type[Backend], fn: Any, args: Any, kwargs: dict[str, Any], options: Options, dynamic: bool | None
) -> list[Stages]:
    graphs: list[Stages] = []
    compiled = torch.compile(_fresh(fn), backend=backend(options, graphs.append), dynamic=dynamic)
    result = compiled(*args, **kwargs)
    if not any(s.graph.name == "backward" for s in graphs) and any(s.graph.name == "forward" for s in graphs):
        _run_backward(fn, args, kwargs, result)
    return graphs


def _graphs_of_fakes(
    fn: Any, args: Any, kwargs: dict[str, Any], options: Options, dynamic: bool | None, failed: list[str]
) -> list[Stages]:
    """The same, without computing anything; empty where that cannot be: ``failed`` is where it was tried and why."""
    from ..capture.advice import first_lines
    from ..capture.export import with_fakes

    assert options.target is not None
    target = parse_target(options.target)
    gpu = target if target.is_gpu else None
    for there in (False, True) if gpu else (False,):  # a function may ask for a GPU itself
        try:
            with with_fakes(fn, (args, kwargs), gpu, there) as (mode, fake_fn, (fake_args, fake_kwargs)):

                class OfFakes(Backend):
                    def around(self, call: Any, what: Any, inputs: Sequence[Any], mode: Any = mode) -> Any:
                        return mode(call)

                with torch._dynamo.config.patch(capture_scalar_outputs=True):  # as packages do
                    return _graphs(OfFakes, fake_fn, fake_args, fake_kwargs, options, dynamic)
        except Exception as e:
            logger("compile").info("explain needs more than fake tensors: %s", first_lines(e))
            failed.append(f"{'as if on a GPU' if there else 'on their devices'}: {first_lines(e)}")
    return []


@contextmanager
def _noting(failed: list[str]) -> Iterator[None]:
    """An error of a call with ``args`` themselves also says why that call was made."""
    try:
        yield
    except Exception as e:
        for why in failed:
            e.add_note(f"explain(target=) called it before with tensors without numbers, {why}")
        raise


def original(f: Any) -> Any:
    """The function or module inside a result of ``torch.compile``; other things unchanged."""
    f = getattr(f, "_orig_mod", f)
    return getattr(f, "_torchdynamo_orig_callable", f)


def _fresh(fn: Any) -> Callable[..., Any]:
    """A wrapper of ``fn`` with a new code object, so that Dynamo, whose cache is by code object, compiles again."""

    def probe(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    code = probe.__code__.replace(co_name=f"explained_{next(_serial)}")
    return types.FunctionType(code, globals(), code.co_name, None, probe.__closure__)


def _run_backward(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Run the backward, since with dynamic shapes it is compiled on first use. The gradients are discarded."""
    from torch.utils._pytree import tree_leaves

    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    if isinstance(fn, torch.nn.Module):
        leaves += [p for p in fn.parameters() if p.requires_grad]
    if outputs and leaves:
        torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs], allow_unused=True)
