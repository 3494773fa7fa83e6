"""Clocks: a function becomes a sampler, which runs it many times and returns seconds per call.

    wall      the host's clock around a loop, waiting for the device at its end
    events    two marks in the GPU's queue around a loop; the host's launches show where the GPU waits for them
    graph     the loop captured once as a CUDA graph and replayed: the device's time alone

A loop is long enough for its clock, and a whole number of ``unit`` calls. With ``flush`` the cache is cold: a buffer
larger than the last-level cache is written before each call, and its own time is left out. (``autotune`` makes weights
cold by using copies of them in turn: ``turning``.) ``interleave`` takes samples of several functions in rounds.
"""

from __future__ import annotations

import functools
import gc
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import cycle, repeat
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import MeasureError

if TYPE_CHECKING:
    import torch

Fn = Callable[[], Any]
Call = Callable[[list], Any]
Sampler = Callable[[], float]
K = TypeVar("K")

LOOP_SECONDS = 300e-6  # a loop this long makes the host clock's own cost invisible
WAIT_SECONDS = 0.25  # for that: the clock of the processor stands still while a case waits
GRAPH_SECONDS = 1.5e-3
MOST_CALLS = 1000
COLD_CALLS = 20
FEWEST_ROUNDS = 5


# -- samples ----------------------------------------------------------------------------------------
def quantile(values: Sequence[float], q: float) -> float:
    """Linear between the two nearest samples."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(frozen=True)
class Samples:
    """Seconds per call, one sample per round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Twice the median distance from the median, over the median: how wide the middle half of the samples is. The
        interquartile range, if they lie evenly on both sides; but the quartiles go wild when a quarter of the samples
        was interrupted (a busy machine), this only when half were."""
        middle = self.median
        return 2 * statistics.median(abs(s - middle) for s in self.seconds) / middle if middle else 0.0


def interleave(
    samplers: Mapping[K, Sampler], rounds: int, budget_s: float, least: int = FEWEST_ROUNDS
) -> dict[K, tuple[float, ...]]:
    """One sample of each case per round, and a different case first in each round.

    Whatever drifts (clock speed, heat, another process) then reaches all cases alike. Stops after ``rounds``, or once
    ``budget_s`` is spent and there are ``least`` samples of each.
    """
    names = list(samplers)
    found: dict[K, list[float]] = {name: [] for name in names}
    start = time.perf_counter()
    with uncollected():
        for turn in range(rounds):
            if turn >= least and time.perf_counter() - start > budget_s:
                break
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                found[name].append(samplers[name]())
    return {name: tuple(seconds) for name, seconds in found.items()}


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage collection meanwhile: it looks at every object of the process again and again."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def calls_for(seconds: float, target: float, unit: int = 1) -> int:
    """How many calls of ``seconds`` last ``target`` seconds, rounded up to a multiple of ``unit``."""
    calls = max(1, min(MOST_CALLS, round(target / max(seconds, 1e-9))))
    return -(-calls // unit) * unit


def turning(call: Call, sets: Sequence[Sequence[Any]]) -> Fn:
    """``call`` with each of these argument lists in turn. (It takes a list of its own, and may empty it.)"""
    turns = cycle(sets)
    return lambda: call(list(next(turns)))


def loop(fn: Fn, calls: int) -> None:
    for _ in repeat(None, calls):
        fn()


def synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- the host's clock -------------------------------------------------------------------------------
def wall_sampler(
    fn: Fn, device: torch.device, flush: Fn | None = None, unit: int = 1, now: Sampler = time.perf_counter
) -> Sampler:
    """``now`` around a loop long enough to time, waiting for the device at its end."""

    def sample(calls: int) -> float:
        if flush:
            flush()
        synchronize(device)
        start = now()
        loop(fn, calls)
        synchronize(device)
        return now() - start

    sample(unit)
    calls, last = unit, time.perf_counter() + WAIT_SECONDS
    if not flush:  # double the loop until it lasts long enough; this warms up as well
        while sample(calls) < LOOP_SECONDS and calls < 2**16 and time.perf_counter() < last:
            calls *= 2
    return lambda: sample(calls) / calls


# -- the GPU's clocks -------------------------------------------------------------------------------
def event_sampler(fn: Fn, flush: Fn | None = None, unit: int = 1) -> Sampler:
    """Marks in the queue. Warm: around a loop. Cold: around each call, after its flush."""
    loop(fn, unit)

    def cold() -> float:
        assert flush is not None
        pairs = [(_event(), _event()) for _ in range(COLD_CALLS)]
        for start, stop in pairs:
            flush()
            start.record()
            fn()
            stop.record()
        pairs[-1][1].synchronize()
        return quantile([a.elapsed_time(b) * 1e-3 for a, b in pairs], 0.5)

    if flush:
        cold()
        return cold
    calls = calls_for(_estimate(fn, unit), GRAPH_SECONDS, unit)
    elapsed(lambda: loop(fn, calls))
    return lambda: elapsed(lambda: loop(fn, calls)) / calls


def graph_sampler(fn: Fn, graphs: Graphs, flush: Fn | None = None, unit: int = 1) -> Sampler:
    """Capture a loop of calls as a CUDA graph; a sample replays it between two events."""
    if flush:
        return _cold_graph_sampler(fn, graphs, flush)
    loop(fn, max(2, unit))
    calls = calls_for(_estimate(fn, unit), GRAPH_SECONDS, unit)
    graph = graphs.capture(lambda: loop(fn, calls))
    graph.replay()
    seconds = replay_seconds(graph)
    if seconds < GRAPH_SECONDS / 2 and calls < MOST_CALLS:  # the estimate had launches in it: calls are shorter
        calls = calls_for(seconds / calls, GRAPH_SECONDS, unit)
        graph = graphs.capture(lambda: loop(fn, calls))

    def sample(kept: Any = fn) -> float:  # the graph reads memory that only fn keeps alive
        return replay_seconds(graph) / calls

    return sample


def _cold_graph_sampler(fn: Fn, graphs: Graphs, flush: Fn) -> Sampler:
    """Two graphs, with ``fn`` and without it: the difference is ``fn`` on a cold cache."""

    def both() -> None:
        flush()
        fn()

    loop(both, 3)
    with_fn, without = (graphs.capture(lambda f=f: loop(f, COLD_CALLS)) for f in (both, flush))  # type: ignore[misc]

    def sample(kept: Any = both) -> float:
        return (replay_seconds(with_fn) - replay_seconds(without)) / COLD_CALLS

    return sample


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Replay twice, time the second: the first keeps the GPU busy while it is queued."""
    graph.replay()
    return elapsed(graph.replay)


def elapsed(fn: Fn) -> float:
    """Seconds of the current stream's time."""
    start, stop = _event(), _event()
    start.record()
    fn()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3


def _event() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)


def _estimate(fn: Fn, unit: int) -> float:
    calls = -(-3 // unit) * unit
    return elapsed(lambda: loop(fn, calls)) / calls


# -- CUDA graphs ------------------------------------------------------------------------------------
class CaptureFailed(MeasureError):
    """A function cannot be captured as a CUDA graph."""


class Graphs:
    """Captures graphs that share a memory pool: they are replayed one at a time, and nothing in the pool outlives a
    replay. Assumes that the current stream is not the default one (``side_stream``)."""

    def __init__(self) -> None:
        self._new_pool()

    def _new_pool(self) -> None:
        """A pool ends with its last graph; an empty graph keeps it."""
        import torch

        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = self._capture(lambda: None)

    def capture(self, fn: Fn) -> torch.cuda.CUDAGraph:
        """Raises CaptureFailed, or torch.OutOfMemoryError."""
        import torch

        try:
            return self._capture(fn)
        except Exception as e:
            with suppress(Exception):  # what a failed capture leaves behind in the allocator
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            torch.cuda.synchronize()
            self._new_pool()
            if isinstance(e, torch.OutOfMemoryError):
                raise
            raise CaptureFailed(str(e).partition("\n")[0][:120]) from e

    def _capture(self, fn: Fn) -> torch.cuda.CUDAGraph:
        """Other threads (compiling, loading kernels) go on meanwhile. NB: ``torch.cuda.graph`` would empty the user's
        allocator cache and collect garbage first."""
        import torch

        graph = torch.cuda.CUDAGraph()
        torch.cuda.current_stream().synchronize()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # no elements, no kernels
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                fn()
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph


@functools.cache
def _stream(index: int) -> torch.cuda.Stream:
    """One for good: cuBLAS keeps a workspace of some 32 MiB for every stream it has seen."""
    import torch

    return torch.cuda.Stream(index)


@contextmanager
def side_stream(device: torch.device, stream: torch.cuda.Stream | None = None) -> Iterator[None]:
    """Work on a stream of our own, or this one, after what the user has queued; device and stream are as found
    afterwards. Nothing on a CPU. Raises MeasureError while the user's stream is being captured."""
    import torch

    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise MeasureError(
                "candidates cannot be measured while a CUDA graph is being captured; "
                "call the compiled function once before the capture"
            )
        stream = stream or _stream(torch.cuda.current_device())
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()


# -- for autotune: clocks for calls with argument lists -------------------------------------------------
@dataclass(frozen=True)
class Clock:
    """``name``: for people. ``sampler``: of ``call`` with each of ``sets`` in turn, a whole number of turns per loop,
    so that weights are cold."""

    name: str
    sampler: Callable[[Call, Sequence[Sequence[Any]]], Sampler]


def wall_clock() -> Clock:
    import torch

    cpu = torch.device("cpu")
    return Clock("wall", lambda call, sets: wall_sampler(turning(call, sets), cpu, unit=len(sets)))


def event_clock() -> Clock:
    """Launches are in the number: what a user sees without CUDA graphs."""
    return Clock("events", lambda call, sets: event_sampler(turning(call, sets), unit=len(sets)))


def graph_clock() -> Clock:
    """No host time in the number. Its sampler raises CaptureFailed for a function that cannot be captured."""
    graphs = Graphs()
    return Clock("graph", lambda call, sets: graph_sampler(turning(call, sets), graphs, unit=len(sets)))
