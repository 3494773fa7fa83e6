"""Clocks: a callable and the argument lists it takes in turn become a sampler, which returns seconds a call.

    WallClock    the host's clock around a loop: for the CPU
    EventClock   two marks in a GPU's queue around a loop: the host's launches show where the GPU waits for them
    GraphClock   the loop captured once as a CUDA graph and replayed: the device's time alone

Callables take a list and may empty it. Argument lists are used in turn (``sets[i % len(sets)]``), so that weights are
cold; the loop is a whole number of turns. The GPU's clocks work on the current stream, which is a side stream of our
own (``side_stream``). NB: ``lab/timing`` has the notebooks' clocks; theirs flush the cache, ours turn the weights.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from typing import Any, Protocol, TypeVar

import torch

from ..errors import MeasureError

Call = Callable[[list], Any]
Sampler = Callable[[], float]
K = TypeVar("K")

WALL_SECONDS = 300e-6  # a loop this long makes the host clock's own cost invisible
GRAPH_SECONDS = 1.5e-3
MOST_CALLS = 1000


class Clock(Protocol):
    """``name``: of the clock in use, for people. ``sampler`` runs ``call`` a few times to size its loop."""

    name: str

    def sampler(self, call: Call, sets: Sequence[Sequence[Any]]) -> Sampler: ...


@dataclass(frozen=True)
class Samples:
    """Seconds a call, a sample a round."""

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


def interleave(samplers: Mapping[K, Sampler], rounds: int, least: int, deadline: float) -> dict[K, Samples]:
    """One sample of each a round, another one first each round, so that what drifts (clock speed, heat, a neighbour)
    reaches all alike. Stops after ``rounds``, or past ``deadline`` (perf_counter) once there are ``least``."""
    names = list(samplers)
    found: dict[K, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for turn in range(rounds):
            if turn >= least and time.perf_counter() > deadline:
                break
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                found[name].append(samplers[name]())
    finally:
        if collecting:
            gc.enable()
    return {name: Samples(tuple(seconds)) for name, seconds in found.items()}


def turns(seconds: float, target: float, sets: int) -> int:
    """How many calls of ``seconds`` last ``target`` seconds, rounded up to whole turns of ``sets``."""
    calls = max(1, min(MOST_CALLS, round(target / max(seconds, 1e-9))))
    return -(-calls // sets) * sets


def run_calls(call: Call, sets: Sequence[Sequence[Any]], calls: int) -> None:
    for args in islice(cycle(sets), calls):
        call(list(args))


class WallClock:
    name = "wall"

    def sampler(self, call: Call, sets: Sequence[Sequence[Any]]) -> Sampler:
        def sample(calls: int) -> float:
            start = time.perf_counter()
            run_calls(call, sets, calls)
            return (time.perf_counter() - start) / calls

        calls = turns(min(sample(len(sets)), sample(len(sets))), WALL_SECONDS, len(sets))
        return lambda: sample(calls)


class EventClock:
    """Launches are in the number: what a user sees who does not replay CUDA graphs."""

    name = "events"

    def sampler(self, call: Call, sets: Sequence[Sequence[Any]]) -> Sampler:
        def sample(calls: int) -> float:
            return elapsed(lambda: run_calls(call, sets, calls)) / calls

        sample(len(sets))
        calls = turns(sample(max(3, len(sets))), GRAPH_SECONDS, len(sets))
        return lambda: sample(calls)


class GraphClock:
    """No host in the number. Raises CaptureFailed for a callable that cannot be captured. All graphs of a clock share a
    memory pool: they are replayed one at a time, and nothing in it outlives a replay."""

    name = "graph"

    def __init__(self) -> None:
        self._new_pool()

    def _new_pool(self) -> None:
        """A pool is gone with its last graph; an empty one keeps it."""
        self._pool = torch.cuda.graph_pool_handle()
        self._keeper = self._capture(lambda: None)

    def sampler(self, call: Call, sets: Sequence[Sequence[Any]]) -> Sampler:
        run_calls(call, sets, 2)
        calls = turns(elapsed(lambda: run_calls(call, sets, 3)) / 3, GRAPH_SECONDS, len(sets))
        graph = self._graph_of(call, sets, calls)
        graph.replay()
        seconds = elapsed(graph.replay)
        if seconds < GRAPH_SECONDS / 2 and calls < MOST_CALLS:  # the estimate had launches in it
            calls = turns(seconds / calls, GRAPH_SECONDS, len(sets))
            graph = self._graph_of(call, sets, calls)

        def sample(alive: Any = (call, sets)) -> float:  # the graph reads memory that only these keep alive
            graph.replay()  # the GPU is busy while the timed one is queued
            return elapsed(graph.replay) / calls

        return sample

    def _graph_of(self, call: Call, sets: Sequence[Sequence[Any]], calls: int) -> torch.cuda.CUDAGraph:
        try:
            return self._capture(lambda: run_calls(call, sets, calls))
        except Exception as e:
            with suppress(Exception):  # what a failed capture leaves behind in the allocator
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self._pool)
            torch.cuda.synchronize()
            self._new_pool()
            if isinstance(e, torch.OutOfMemoryError):
                raise
            raise CaptureFailed(str(e).partition("\n")[0][:120]) from e

    def _capture(self, fn: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Other threads (compiling, loading kernels) go on meanwhile. NB: ``torch.cuda.graph`` would empty the user's
        allocator cache and collect garbage first."""
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


class CaptureFailed(MeasureError):
    """A callable cannot be captured as a CUDA graph."""


def elapsed(fn: Callable[[], Any]) -> float:
    """Seconds of the current stream's time."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    fn()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3


@cache
def _stream(index: int) -> torch.cuda.Stream:
    """One for good: cuBLAS keeps a workspace of some 32 MiB for every stream it has seen."""
    return torch.cuda.Stream(index)


@contextmanager
def side_stream(device: torch.device) -> Iterator[None]:
    """Work on a stream of our own, after what the user has queued; device and stream are as found afterwards. Nothing
    on a CPU. Raises MeasureError while the user's stream is being captured."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise MeasureError(
                "candidates cannot be measured while a CUDA graph is being captured; "
                "call the compiled function once before the capture"
            )
        stream = _stream(torch.cuda.current_device())
        torch.cuda.synchronize()
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            stream.synchronize()
