"""Clocks. A clock turns a function into a sampler: a sampler runs it and returns seconds a call.

    wall      the host's own clock around a loop, waiting for the device at its end
    events    two marks in the GPU's queue around a loop; host time shows when the host is slower
    graph     the loop is captured once as a CUDA graph and replayed: no host in the number

With a cold cache, a buffer larger than the last-level cache is written before each call, and
its own time is left out.
"""

from __future__ import annotations

import gc
import math
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import repeat
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError

if TYPE_CHECKING:
    import torch

Sampler = Callable[[], float]
Clock = Callable[[Callable[[], Any], "torch.device"], Sampler]

LOOP_SECONDS = 300e-6  # a loop this long makes the host clock's own cost invisible
GRAPH_SECONDS = 1e-3
MOST_CALLS = 1000
COLD_CALLS = 20
FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class Samples:
    """Seconds a call, one sample a round."""

    seconds: tuple[float, ...]
    clock: str
    note: str = ""

    @property
    def median(self) -> float:
        return quantile(self.seconds, 0.5)

    @property
    def spread(self) -> float:
        """The interquartile range: the middle half of the samples lies within it."""
        return quantile(self.seconds, 0.75) - quantile(self.seconds, 0.25)


def quantile(values: tuple[float, ...], q: float) -> float:
    """Linear between the two nearest samples."""
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def interleave(samplers: Mapping[str, Sampler], rounds: int, budget_s: float) -> dict[str, tuple[float, ...]]:
    """One sample of each case a round, and a different case first each round.

    Whatever drifts (clock speed, heat, a neighbour) then reaches all cases alike. Stops after
    `rounds`, or once `budget_s` is spent and there are enough samples for quartiles.
    """
    names = list(samplers)
    found: dict[str, list[float]] = {name: [] for name in names}
    collecting = gc.isenabled()
    gc.disable()
    start = time.perf_counter()
    try:
        for turn in range(rounds):
            if turn >= FEWEST_ROUNDS and time.perf_counter() - start > budget_s:
                break
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                found[name].append(samplers[name]())
    finally:
        if collecting:
            gc.enable()
    return {name: tuple(seconds) for name, seconds in found.items()}


def make_sampler(
    fn: Callable[[], Any], clock: str | Clock, cache: str, device: torch.device
) -> tuple[Sampler, str, str]:
    """The sampler, the name of the clock in use and a note if it is not the one asked for."""
    if cache not in ("warm", "cold"):
        raise LabError(f'cache is {cache!r}; it must be "warm" or "cold"')
    if callable(clock):
        return clock(fn, device), getattr(clock, "__name__", "own"), ""
    if clock == "auto":
        clock = "graph" if device.type == "cuda" else "wall"
    if clock not in ("wall", "events", "graph"):
        raise LabError(f"clock is {clock!r}; it must be auto, wall, events, graph or a function")
    flush = flusher(device) if cache == "cold" else None
    if clock == "wall":
        return wall_sampler(fn, device, flush), clock, ""
    if device.type != "cuda":
        raise NotHere(f"the {clock} clock needs a GPU")
    if clock == "events":
        return event_sampler(fn, flush), clock, ""
    try:
        return graph_sampler(fn, device, flush), clock, ""
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        synchronize(device)
        why = f"no graph ({str(error).splitlines()[0][:80]}), so timed with events"
        return event_sampler(fn, flush), "events", why


class NotHere(LabError):
    """This machine has no such clock. `measure` turns it into a labelled row."""


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # on a CPU


def synchronize(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def flusher(device: torch.device) -> Callable[[], Any]:
    """A function that pushes everything out of the last-level cache."""
    import torch

    from reflib.lab.machine import describe

    size = 2 * describe(device).cache_bytes
    if device.type == "cuda":
        size = max(size, 256 * 2**20)
    buffer = torch.empty(size // 4, dtype=torch.int32, device=device)
    return buffer.zero_


# --- the host's clock ----------------------------------------------------------------------


def wall_sampler(
    fn: Callable[[], Any], device: torch.device, flush: Callable[[], Any] | None = None
) -> Sampler:
    """perf_counter around a loop long enough to time, the device waited for at its end."""
    fn()
    synchronize(device)
    calls = 1 if flush else _enough_calls(fn, device)

    def sample() -> float:
        if flush:
            flush()
        synchronize(device)
        start = time.perf_counter()
        for _ in repeat(None, calls):
            fn()
        synchronize(device)
        return (time.perf_counter() - start) / calls

    return sample


def _enough_calls(fn: Callable[[], Any], device: torch.device) -> int:
    """Double the loop until it lasts long enough; this warms up as well."""
    calls = 1
    while True:
        start = time.perf_counter()
        for _ in repeat(None, calls):
            fn()
        synchronize(device)
        if time.perf_counter() - start >= LOOP_SECONDS or calls >= 2**16:
            return calls
        calls *= 2


# --- the GPU's clocks ----------------------------------------------------------------------


def event_sampler(fn: Callable[[], Any], flush: Callable[[], Any] | None = None) -> Sampler:
    """Marks in the queue. Warm: around a loop. Cold: around each call, after its flush."""
    fn()
    calls = COLD_CALLS if flush else _calls_for(_event_seconds(fn, 5) / 5, GRAPH_SECONDS)

    def warm() -> float:
        return _event_seconds(fn, calls) / calls

    def cold() -> float:
        assert flush is not None
        pairs = [(_event(), _event()) for _ in range(calls)]
        for start, stop in pairs:
            flush()
            start.record()
            fn()
            stop.record()
        pairs[-1][1].synchronize()
        return quantile(tuple(a.elapsed_time(b) * 1e-3 for a, b in pairs), 0.5)

    sample = cold if flush else warm
    sample()
    return sample


def _event() -> torch.cuda.Event:
    import torch

    return torch.cuda.Event(enable_timing=True)


def _event_seconds(fn: Callable[[], Any], calls: int) -> float:
    start, stop = _event(), _event()
    start.record()
    for _ in repeat(None, calls):
        fn()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3


def _calls_for(seconds: float, target: float) -> int:
    return max(1, min(MOST_CALLS, math.ceil(target / max(seconds, 1e-9))))


def graph_sampler(
    fn: Callable[[], Any], device: torch.device, flush: Callable[[], Any] | None = None
) -> Sampler:
    """Capture a loop of calls as a CUDA graph; a sample replays it once between two events."""
    if flush:
        return _cold_graph_sampler(fn, device, flush)
    warm_up(fn, device)
    calls = _calls_for(_event_seconds(fn, 5) / 5, GRAPH_SECONDS)
    graph = capture(fn, calls, device)
    seconds = replay_seconds(graph)
    if seconds < GRAPH_SECONDS / 2 and calls < MOST_CALLS:
        # The estimate had the host's time in it: the calls are shorter than it said.
        calls = _calls_for(seconds / calls, GRAPH_SECONDS)
        graph = capture(fn, calls, device)

    def sample(kept: Any = fn) -> float:  # the graph reads tensors that only fn keeps alive
        return replay_seconds(graph) / calls

    return sample


def _cold_graph_sampler(fn: Callable[[], Any], device: torch.device, flush: Callable[[], Any]) -> Sampler:
    """Two graphs, with `fn` and without it: the difference is `fn` on a cold cache."""

    def both() -> None:
        flush()
        fn()

    warm_up(both, device)
    with_fn, without = capture(both, COLD_CALLS, device), capture(flush, COLD_CALLS, device)

    def sample(kept: Any = both) -> float:
        return (replay_seconds(with_fn) - replay_seconds(without)) / COLD_CALLS

    return sample


def warm_up(fn: Callable[[], Any], device: torch.device, calls: int = 3) -> None:
    """Run on a side stream first, as capture wants: libraries set themselves up lazily."""
    import torch

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(calls):
            fn()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)


def capture(fn: Callable[[], Any], calls: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of `calls` calls of `fn`, one after the other, replayed once."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")  # no elements, no kernels
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in repeat(None, calls):
                fn()
    graph.replay()
    torch.cuda.synchronize(device)
    return graph


def replay_seconds(graph: torch.cuda.CUDAGraph) -> float:
    """Replay twice, time the second: the first keeps the GPU busy while it is queued."""
    start, stop = _event(), _event()
    graph.replay()
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e-3
