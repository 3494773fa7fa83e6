"""The smallest part of a graph that still fails: wrong beside eager, slower than eager, or an error or a crash.

Any subset of a graph's nodes is a graph: what it needs of the others becomes an input, with the value that eager has
there. So chunks of nodes are left out, halves first, then quarters, down to single nodes, as long as what is left fails
in the same way. Every trial is a child process, which may crash or hang: on a CPU forked, when all is imported (0.2 s);
the parent runs on one thread and differentiates nothing, since neither OpenMP nor autograd survives a fork. CUDA does
not either: there each trial is a repro file and a process from the beginning (some 10 s).
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from .. import atomic
from ..autotune.inputs import copy_of
from ..errors import ReflibError
from ..options import Options
from . import repro
from .given import Symbol, Tensor, describe
from .rebuild import Subject, Watched, as_captured, compile_again, differences, load, outcome, reference, run_file

Say = Callable[[str], Any]
SEARCHES = 4  # trials at a time


@dataclass
class Part(Subject):
    """``held``: values of inputs that are another graph's nodes, by position."""

    held: dict[int, torch.Tensor] | None = None

    def values(self) -> list[Any]:
        out = super().values()
        for i, t in (self.held or {}).items():
            out[i] = copy_of(t.detach()).requires_grad_(t.requires_grad)
        return out


@dataclass
class Minified:
    """``kind``: how it fails. ``before``, ``after``: numbers of ops. ``trials``: how many child processes it took."""

    subject: Subject
    kind: str
    before: int
    after: int
    trials: int
    seconds: float


# -- one trial --------------------------------------------------------------------------------------
def verdict(subject: Subject, slower: float | None = None) -> str:
    """Empty if nothing is wrong, else "wrong", "slower", "error: ...", or "invalid" where eager fails. (With a target
    nothing is computed: all that can be found is an error.)"""
    target = Options.make(subject.options).target
    try:
        want, names = outcome(subject.module, subject) if target is None else ([], [])
    except Exception:
        return "invalid"
    try:
        with as_captured(subject.state):
            call = compile_again(subject, [])
        if target is not None:
            return ""
        got = outcome(call, subject)[0]
    except Exception as e:
        return f"error: {type(e).__name__}"
    if differences(got, want, reference(subject), names):
        return "wrong"
    if slower is not None and _seconds(call, subject) > slower * _seconds(subject.module, subject):
        return "slower"
    return ""


def _seconds(call: Callable[..., Any], subject: Subject) -> float:
    """Of the fastest of a few calls."""
    times = []
    args = subject.values()
    with as_captured(subject.state):
        for _ in range(7):
            start = time.perf_counter()
            call(*args)
            if any(isinstance(a, torch.Tensor) and a.is_cuda for a in args):
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return min(times)


@dataclass
class Trials:
    """Runs ``verdict`` in child processes, each for ``limit`` seconds at most ("hang"); a signal is "crash"."""

    slower: float | None = None
    limit: float = 60.0
    forks: bool = True
    at_once: int = SEARCHES
    ran: int = 0

    def first(self, subjects: Sequence[Subject], kind: str) -> int | None:
        """The number of the first that fails with ``kind``, or None. Those after it may be cut short."""
        found: dict[int, str] = {}
        running: dict[int, Trial] = {}
        waiting = list(range(len(subjects)))
        try:
            while True:
                for i in range(len(subjects)):
                    if i not in found:
                        break
                    if found[i] == kind:
                        return i
                else:
                    return None
                while waiting and len(running) < self.at_once:
                    i = waiting.pop(0)
                    running[i] = self._start(subjects[i])
                self._wait(running, found)
        finally:
            for trial in running.values():
                trial.end()

    def of(self, subject: Subject) -> str:
        running, found = {0: self._start(subject)}, dict[int, str]()
        while running:
            self._wait(running, found)
        return found[0]

    def _start(self, subject: Subject) -> Trial:
        self.ran += 1
        context = multiprocessing.get_context("fork" if self.forks else "spawn")
        what = subject if self.forks else repro.text(with_values(subject))[0]
        read, write = context.Pipe(duplex=False)
        process = context.Process(target=_trial, args=(what, self.slower, write))  # type: ignore[attr-defined]
        process.start()
        write.close()
        return Trial(process, read, time.monotonic() + self.limit)

    def _wait(self, running: dict[int, Trial], found: dict[int, str]) -> None:
        wait([t.said for t in running.values()], timeout=0.5)
        for i, t in list(running.items()):
            if t.said.poll():
                try:
                    found[i] = t.said.recv()
                except EOFError:
                    found[i] = "crash"
            elif time.monotonic() > t.deadline:
                found[i] = "hang"
            if i in found:
                running.pop(i).end()


@dataclass(frozen=True)
class Trial:
    process: Any
    said: Connection
    deadline: float

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.said.close()


def _trial(what: Subject | str, slower: float | None, say: Connection) -> None:
    """In the child. ``what``: the subject, or its file's text."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if isinstance(what, Subject):
        return say.send(verdict(what, slower))
    with tempfile.NamedTemporaryFile("w", suffix=".py", encoding="utf-8") as f:
        f.write(what)
        f.flush()
        say.send(verdict(load(run_file(f.name)), slower))


# -- parts of a graph -------------------------------------------------------------------------------
class Parts:
    """Makes graphs of some of a subject's nodes."""

    def __init__(self, subject: Subject):
        self.subject = subject
        self.seen: dict[str, Any] = {}  # a copy of each node's value
        torch.manual_seed(0)
        with as_captured(subject.state):
            Watched(subject.module, self._saw).run(*subject.values())
        self.ops = [n.name for n in subject.module.graph.nodes if n.op.startswith("call_")]

    def _saw(self, n: torch.fx.Node, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            value = copy_of(value.detach()).requires_grad_(value.requires_grad)
        self.seen[n.name] = value

    def part(self, kept: set[str]) -> Part | None:
        """The graph of these nodes; what none of them uses is returned, and what was before. None: that is no graph."""
        graph, env = torch.fx.Graph(), {}
        given: list[tuple[Any, Any]] = []  # what is said of an input, its value

        def operand(n: torch.fx.Node) -> Any:
            if n not in env:
                spec, value = self._input(n)
                if spec is None:
                    return value
                given.append((spec, value))
                env[n] = graph.placeholder(n.name)
                env[n].meta = dict(n.meta)
            return env[n]

        nodes = [n for n in self.subject.module.graph.nodes if n.name in kept]
        try:
            for n in nodes:
                for x in n.all_input_nodes:
                    if x not in env and x.op == "get_attr":
                        env[x] = graph.node_copy(x)
                copied = torch.fx.map_arg((n.args, n.kwargs), operand)
                env[n] = graph.create_node(n.op, n.target, *copied, name=n.name)
                env[n].meta = dict(n.meta)
        except _NoValue:
            return None
        sinks = [n for n in nodes if not any(u.name in kept for u in n.users) or any(u.op == "output" for u in n.users)]
        returned = [env[n] for n in sinks if isinstance(self.seen[n.name], torch.Tensor)]
        if not returned:
            return None
        graph.output(tuple(returned))
        _placeholders_first(graph)
        module = torch.fx.GraphModule(self.subject.module, graph)
        s = self.subject
        held = {i: v for i, (_, v) in enumerate(given) if isinstance(v, torch.Tensor)}
        names = {n.name for n in graph.find_nodes(op="placeholder")}
        exported = {**s.exported, "weights": [w for w in s.exported["weights"] if w in names]} if s.exported else {}
        specs = [spec for spec, _ in given]
        return Part(module, specs, s.options, s.state, s.symbols, exported=exported, held=held)

    def _input(self, n: torch.fx.Node) -> tuple[Any, Any]:
        """(what is said of it as an input, its value); (None, value) for what is written where it is used."""
        value, known = self.seen[n.name], n.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            return describe([value], [known], [False])[0], value
        if isinstance(known, torch.SymInt):
            return Symbol(str(known.node.expr)), None
        if isinstance(value, (bool, int, float, str, torch.Size, torch.dtype, torch.device)) or value is None:
            return None, value
        raise _NoValue


class _NoValue(Exception):
    """A node's value cannot be an input: a tuple, a context."""


def _placeholders_first(graph: torch.fx.Graph) -> None:
    first = next(iter(graph.nodes))
    last = None
    for n in list(graph.find_nodes(op="placeholder")):
        if last is None:
            if n is not first:
                first.prepend(n)
        else:
            last.append(n)
        last = n


def used(kept: set[str], module: torch.fx.GraphModule) -> set[str]:
    """``kept`` without nodes whose tuple is not kept: ``chunk[1]`` where ``chunk`` is left out is an input itself."""
    out = set(kept)
    for n in module.graph.nodes:
        if n.name in out and any(
            x.name not in out and not isinstance(x.meta.get("example_value"), (torch.Tensor, torch.SymInt, int, float))
            and x.op.startswith("call_") for x in n.all_input_nodes
        ):  # fmt: skip
            out.discard(n.name)
    return out


# -- the search -------------------------------------------------------------------------------------
def minify(
    subject: Subject, slower: float | None = None, limit: float = 60.0, say: Say = lambda line: None
) -> Minified:
    """The smallest part found that fails as ``subject`` does. Raises ReflibError if it does not fail."""
    start = time.monotonic()
    torch.set_num_threads(1)
    on_cpu = all(x.device == "cpu" for x in subject.inputs if isinstance(x, Tensor))
    trials = Trials(slower, limit, on_cpu, min(SEARCHES, os.cpu_count() or 1))
    if on_cpu:
        warm()
    kind = trials.of(subject)
    if kind in ("", "invalid"):
        raise ReflibError("the graph does not fail" if not kind else "the graph fails without reflib, in eager mode")
    parts = Parts(_noted(subject))
    ops = list(parts.ops)
    say(f"{len(ops)} ops: {kind}")
    chunk = -(-len(ops) // 2)
    while chunk:
        ops, again = _without(parts, ops, chunk, trials, kind)
        say(f"{len(ops)} ops, after {trials.ran} trials")
        chunk = min(chunk, len(ops)) if again else chunk // 2
    best = parts.part(set(ops))
    assert best is not None
    return Minified(_written(best, trials, kind), kind, len(parts.ops), len(ops), trials.ran, time.monotonic() - start)


def _without(parts: Parts, ops: list[str], chunk: int, trials: Trials, kind: str) -> tuple[list[str], bool]:
    """``ops`` without as many pieces of ``chunk`` as can go; and whether to try the same size again."""
    at, smaller = 0, False
    while at < len(ops):
        candidates = []
        for first in range(at, len(ops), chunk):
            kept = used(set(ops[:first] + ops[first + chunk :]), parts.subject.module)
            part = parts.part(kept) if kept else None
            if part is not None:
                candidates.append((first, kept, part))
        hit = trials.first([p for _, _, p in candidates], kind)
        if hit is None:
            break
        at, kept, _ = candidates[hit]
        ops, smaller = [n for n in ops if n in kept], True
    return ops, smaller and len(ops) > 1


def warm() -> None:
    """Import what a trial imports, by one of nothing: children then begin with it."""
    graph = torch.fx.Graph()
    graph.output((graph.call_function(torch.add, (graph.placeholder("x"), 1)),))
    verdict(Subject(torch.fx.GraphModule(torch.nn.Module(), graph), [Tensor((4,), (1,))]))


def _noted(subject: Subject) -> Subject:
    """With what capture knows of each node's value."""
    from .rebuild import note_values

    note_values(subject)
    return subject


def _written(part: Part, trials: Trials, kind: str) -> Subject:
    """With inputs that are drawn from a seed, where it fails with those too; else with their values."""
    drawn = Subject(part.module, part.inputs, part.options, part.state, part.symbols, exported=part.exported)
    if trials.of(drawn) == kind:
        return drawn
    return with_values(part)


def with_values(subject: Subject) -> Subject:
    """The same, its inputs as bytes."""
    values, nodes = subject.values(), subject.module.graph.find_nodes(op="placeholder")
    inputs = describe(values, [n.meta.get("example_value") for n in nodes], [False] * len(values), whole=True)
    s = subject
    return Subject(s.module, inputs, s.options, s.state, s.symbols, exported=s.exported)


def minify_file(path: Path, out: Path, slower: float | None, limit: float, say: Say) -> Minified:
    """Minify a repro file into another. Raises ReflibError if it does not fail, or is none."""
    found = minify(load(run_file(str(path))), slower, limit, say)
    why = f", the smallest part found of {path.name} that is still: {found.kind}"
    text, missing = repro.text(found.subject, why=why)
    atomic.write(out, text)
    say(f"{out}: {found.after} of {found.before} ops, {found.trials} trials in {found.seconds:.0f} s")
    for what in missing:
        say(f"it lacks {what}")
    return found
