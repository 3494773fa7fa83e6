"""Traces of a running program: calls of its graphs, launches, kernels on the device, each with what it came from.

Launches are timed by functions put in the place of a Python wrapper's launchers. What a device did, and what a C++
wrapper launched, is known to ``torch.profiler`` (CUPTI), which runs during the first PROFILED calls of each graph:
such a call ends by waiting for the device. Where another profiler runs, ours does not. On a CUDA device each call and
launch is an NVTX range too, for Nsight Systems.

NB: TorchInductor leaves this to ``torch.profiler``, where kernels have names and no loop nests.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .. import tracing
from ..generate.compile_triton import alike
from ..ir.loops import Origin
from ..ir.printer import format_node
from ..ir.program import Extern, KernelNode, walk
from ..lower.lower import origin
from ..options import Options
from ..pipeline import Stages
from ..timeline import Timed
from ..wrap.bad_values import module_of
from ..wrap.runtime import namespace

PROFILED = 10  # calls of each graph
LINES, NEST = 6, 600  # at most, in each event: lines of the user's code; characters of a loop nest
Links = Mapping[str, Mapping[str, Any]]
clock = time.perf_counter
_profiling = threading.Lock()


def compiling(compile: Callable[..., Any]) -> Callable[..., Any]:
    """Plugs into ``pipeline.OBSERVE``: an event around what torch makes of a captured graph and the stages in it."""

    def timed(backend: Any, module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        start = clock()
        try:
            return compile(backend, module, inputs)
        finally:
            folder = tracing.folder(backend.options)
            if folder:
                about = {"nodes": len(module.graph.nodes), "inputs": len(inputs)}
                tracing.recorder(folder).add(_event("compile a graph", start, "stage", about))

    return timed


def traced(call: Callable[..., Any], what: Any, options: Options) -> Callable[..., Any]:
    """Plugs into ``pipeline.OBSERVE``: ``call``, recorded, if it is what a graph's Stages became."""
    folder = tracing.folder(options)
    return Traced(call, what, tracing.recorder(folder)) if folder and isinstance(what, Stages) else call


class Traced:
    """A graph whose calls are recorded."""

    def __init__(self, call: Callable[..., Any], stages: Stages, recorder: tracing.Recorder):
        self.call, self.stages, self.recorder = call, stages, recorder
        recorder.graphs += 1
        self.name = f"{stages.graph.name} {recorder.graphs}"
        self.gpu = any(b.device.type == "cuda" for b in stages.program.buffers.values()) if stages.program else False
        self.profiled = 0
        self.links: Links = {}
        self._seen: Any = None  # whose launchers are timed: the fallback, or what tuning made
        self._replaced: list[tuple[dict[str, Any], str, Any]] = []  # (globals of a wrapper, name, the launcher)
        recorder.watch(stages.timeline)

    def __call__(self, args: list) -> Any:
        if self.recorder.failed:
            return self.call(args)
        background = getattr(self.stages.call, "background", None)
        now = background.tuned if background and background.state == "swapped" else self.stages
        if now is not self._seen:
            self._seen = now
            self._prepare(now)
        start = clock()
        try:
            with self._profiler(now), _range(self.name, self.gpu):
                return self.call(args)
        finally:
            self.recorder.add(_event(self.name, start, "call", {"kernels": len(now.kernels or ())}))

    def _prepare(self, s: Stages) -> None:
        """Load the kernels, and time each launch from now on. What fails here fails in the call itself, or is lost."""
        start = clock()
        try:
            self.links = links(s, self.name)
            at = _event("", start, "kernel").start
            for name, about in self.links.items():
                if kernel := (s.kernels or {}).get(name):
                    whole = {**about, "nest": _nest(s, name), "source": kernel.source}
                    self.recorder.add(Timed(name, at, 0.0, "kernel", f"kernels of {self.name}", about=whole))
            wrapped = getattr(s.call, "_call", None) if hasattr(s.call, "background") else s.call
            load = getattr(wrapped, "load", None)
            if load is None:
                return
            scope = getattr(load(), "__globals__", {})  # a C++ wrapper has none
            common = namespace()
            for name, f in list(scope.items()):
                op = isinstance(f, torch._ops.OpOverload) and name not in common
                if name in self.links or op:
                    label = str(f) if op else name
                    self._replaced.append((scope, name, f))
                    scope[name] = self._timed(f, label, self.links.get(label, {}))
            self.recorder.add(_event(f"load {self.name}", start, "call"))
        except Exception as e:
            tracing.logger("trace").info("%s: launches are not recorded: %s", self.name, e)

    def end(self) -> None:
        """Launches are no longer timed."""
        for scope, name, launch in self._replaced:
            scope[name] = launch

    def _timed(self, launch: Callable[..., Any], name: str, about: Mapping[str, Any]) -> Callable[..., Any]:
        recorder, gpu = self.recorder, self.gpu

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                with _range(name, gpu):
                    return launch(*args, **kwargs)
            finally:
                recorder.add(_event(name, start, "launch", about))

        return timed

    # -- the profiler -------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _profiler(self, s: Stages) -> Iterator[None]:
        """torch.profiler around one call, where it tells more than we know and none runs yet."""
        useful = self.gpu or not hasattr(getattr(s.call, "_call", None), "__globals__")
        if self.profiled >= PROFILED or not useful or not _profiling.acquire(blocking=False):
            yield
            return
        try:
            self.profiled += 1
            profiler = _started(self.gpu)
            try:
                yield
            finally:
                if profiler is not None:
                    self._stop(profiler)
        finally:
            _profiling.release()

    def _stop(self, profiler: Any) -> None:
        try:
            profiler.__exit__(None, None, None)
            offset = (time.time_ns() - time.perf_counter_ns()) / 1e9
            found = profiler.kineto_results.events()
            self.recorder.add(*profiled(found, self.links, offset, _track()))
        except Exception as e:
            self.profiled = PROFILED
            tracing.logger("trace").warning("what the device did is missing in traces: %s", e)


class _Kept(tracing.Recorder):
    """Events that are kept in memory, for a caller that reads them at once."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.events: list[Timed] = []

    def add(self, *events: Any) -> None:
        self.events += events


def recorded_calls(call: Callable[[], Any], graphs: Sequence[Stages], rounds: int) -> list[list[Timed]]:
    """The events of so many calls of a program, after one more. graphs: of that program, loaded; a launch's
    ``about["graph"]`` is the number of its graph there."""
    kept, out = _Kept(), []
    watched = [Traced(s.call, s, kept) for s in graphs if s.call is not None]
    gpu = any(t.gpu for t in watched)
    try:
        for i, t in enumerate(watched):
            t.name = str(i)
            t._prepare(t.stages)
        useful = gpu or not all(t._replaced for t in watched)
        call()
        profiler = _started(gpu) if useful else None
        spans = []
        kept.events.clear()
        for _ in range(rounds):
            start = clock()
            call()
            if gpu:
                torch.cuda.synchronize()
            spans.append((start, clock()))
        if profiler is not None:
            watched[0].links = {name: about for t in watched for name, about in t.links.items()}
            watched[0]._stop(profiler)
    finally:
        for t in watched:
            t.end()
    for start, end in spans:
        out.append([e for e in kept.events if start <= e.start <= end])
    return out


def _started(gpu: bool) -> Any:
    """A running profiler, or None: another one runs, or the caller records a CUDA graph."""
    if torch.autograd._profiler_enabled() or gpu and torch.cuda.is_current_stream_capturing():
        return None
    try:
        profiler = torch.autograd.profiler.profile(use_kineto=True, use_device="cuda" if gpu else None)
        return profiler.__enter__()
    except Exception as e:
        tracing.logger("trace").info("no profiler: %s", e)
        return None


def profiled(found: Sequence[Any], links: Links, offset: float, track: str) -> list[Timed]:
    """The profiler's events on our clock. offset: of the profiler's clock (Unix time) before ours, in s."""
    events = []
    for e in found:
        start, seconds, name = e.start_ns() / 1e9 - offset, e.duration_ns() / 1e9, e.name()
        on_host = e.device_type() == torch.autograd.DeviceType.CPU
        runtime = on_host and name.startswith(("cu", "hip"))
        where = f"{track}: torch" if on_host else f"cuda:{e.device_index()} stream {e.device_resource_id()}"
        flow = e.correlation_id() if runtime or not on_host else 0
        kind = "profiler" if on_host else "device"
        events.append(Timed(name, start, seconds, kind, where, about=links.get(name, {}), flow=flow))
    return events


# -- what a kernel came from ------------------------------------------------------------------------
@dataclass(frozen=True)
class Modules:
    """Where ops are in the user's model: of an op at a line, which several modules may share, and of a graph's node."""

    by_origin: dict[Origin, dict[str, None]]
    by_name: dict[str, str]


def links(s: Stages, graph: str = "") -> dict[str, dict[str, Any]]:
    """Kernel, or op that is called -> the graph, its ATen ops, the user's lines, modules and loop nest. A device shows
    the first of kernels with the same machine code: that one has what all of them came from."""
    modules = modules_of(s)
    shared = {k.name: one.name for k, one in alike((s.kernels or {}).values()).items()}
    found: dict[str, list[Origin]] = {}
    results: dict[str, list[str]] = {}
    for n in walk(s.scheduled.nodes) if s.scheduled is not None else ():
        if isinstance(n, (KernelNode, Extern)):
            called = [str(n.target), *([str(n.out[0])] if n.out else [])] if isinstance(n, Extern) else []
            for name in called or dict.fromkeys((n.name, shared.get(n.name, n.name))):
                found.setdefault(name, []).extend(n.origins)
                results.setdefault(name, []).extend(n.writes())
    out = {}
    for name, origins in found.items():
        about: dict[str, Any] = {"graph": graph, **came_from(origins, modules, results[name])}
        if nest := _nest(s, name):
            about["nest"] = nest if len(nest) <= NEST else nest[:NEST] + "\n..."
        out[name] = about
    return out


def modules_of(s: Stages) -> Modules:
    """Where the ops of the graph are in the user's model."""
    modules = Modules({}, {})
    for node in s.graph.module.graph.nodes if s.graph is not None else ():
        if node.op == "call_function" and (module := module_of(node)):
            module = module.removeprefix("computed in ")
            modules.by_origin.setdefault(origin(node), {})[module] = None
            modules.by_name[node.name] = module
    return modules


def came_from(origins: Sequence[Origin], modules: Modules, results: Iterable[str] = ()) -> dict[str, list[str]]:
    """The ATen ops, the user's lines and modules. ``results``: buffers that it writes, which have the names of the
    graph's nodes: of the modules that have an op at the same line, only theirs are named, where that says one."""
    found = {"ops": [o.op for o in origins], "lines": [o.source for o in origins if o.source]}
    candidates = [list(modules.by_origin.get(o, ())) for o in origins]
    sure = {m for b in results if (m := modules.by_name.get(b))} | {c[0] for c in candidates if len(c) == 1}
    kept = ([m for m in c if m in sure] for c in candidates)
    found["modules"] = [m for of in kept for m in of] or [m for c in candidates for m in c]
    return {what: _some(texts) for what, texts in found.items()}


def _nest(s: Stages, name: str) -> str:
    nodes = walk(s.scheduled.nodes) if s.scheduled is not None else ()
    return next((format_node(n) for n in nodes if isinstance(n, KernelNode) and n.name == name), "")


def _some(texts: Sequence[str]) -> list[str]:
    """Each once, the first few."""
    once = list(dict.fromkeys(texts))
    return once if len(once) <= LINES else [*once[:LINES], f"and {len(once) - LINES} more"]


# -- one event --------------------------------------------------------------------------------------
def _event(name: str, start: float, kind: str, about: Mapping[str, Any] | None = None) -> Timed:
    return Timed(name, start, clock() - start, kind, _track(), about=about or {})


def _track() -> str:
    thread = threading.current_thread()
    return "main" if thread is threading.main_thread() else f"thread {thread.name}"


@contextlib.contextmanager
def _range(name: str, gpu: bool) -> Iterator[None]:
    """An NVTX range, where there is a GPU."""
    if not gpu:
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
