"""The notebooks' clocks: those of `reflib.timing`, by name, warm or with a cold cache."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError
from reflib.timing import (
    FEWEST_ROUNDS,
    GRAPH_SECONDS,
    CaptureFailed,
    Graphs,
    Sampler,
    event_sampler,
    graph_sampler,
    interleave,
    quantile,
    replay_seconds,
    side_stream,
    synchronize,
    wall_sampler,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "FEWEST_ROUNDS", "GRAPH_SECONDS", "Clock", "NotHere", "Sampler", "Samples", "event_sampler", "graph_sampler",
    "interleave", "is_out_of_memory", "make_sampler", "quantile", "replay_seconds", "synchronize", "wall_sampler",
]  # fmt: skip

# Environment variable: "processor" where other programs use the CPU (`machine.use_free_cores`). With one thread, the
# processor's time is what the host's clock would show without them.
CPU_CLOCK = "REFLIB_LAB_CPU_CLOCK"

Clock = Callable[[Callable[[], Any], "torch.device"], Sampler]


@dataclass(frozen=True)
class Samples:
    """Seconds per call, one sample per round."""

    seconds: tuple[float, ...]
    clock: str
    note: str = ""

    @property
    def median(self) -> float:
        return quantile(self.seconds, 0.5)

    @property
    def spread(self) -> float:
        """The interquartile range."""
        return quantile(self.seconds, 0.75) - quantile(self.seconds, 0.25)


def make_sampler(
    fn: Callable[[], Any], clock: str | Clock, cache: str, device: torch.device
) -> tuple[Sampler, str, str]:
    """The sampler, the name of the clock in use and a note if it is another than `clock`."""
    if cache not in ("warm", "cold"):
        raise LabError(f'cache is {cache!r}; it must be "warm" or "cold"')
    if callable(clock):
        return clock(fn, device), getattr(clock, "__name__", "own"), ""
    if clock == "auto":
        clock = "graph" if device.type == "cuda" else os.environ.get(CPU_CLOCK, "wall")
    if clock not in ("wall", "processor", "events", "graph"):
        raise LabError(f"clock is {clock!r}; it must be auto, wall, processor, events, graph or a function")
    flush = flusher(device) if cache == "cold" else None
    if clock == "processor":
        return wall_sampler(fn, device, flush, now=time.process_time), clock, ""
    if clock == "wall":
        return wall_sampler(fn, device, flush), clock, ""
    if device.type != "cuda":
        raise NotHere(f"the {clock} clock needs a GPU")
    if clock == "events":
        return event_sampler(fn, flush), clock, ""
    try:
        with side_stream(device):
            return graph_sampler(fn, Graphs(), flush), clock, ""
    except CaptureFailed as error:
        synchronize(device)
        why = textwrap.shorten(str(error), 90, placeholder=" ...")
        return event_sampler(fn, flush), "events", f"no graph ({why}), so timed with events"


class NotHere(LabError):
    """The machine lacks the clock. `measure` turns this error into a labelled row."""


def is_out_of_memory(error: BaseException) -> bool:
    import torch

    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # on a CPU


def flusher(device: torch.device) -> Callable[[], Any]:
    """A function that evicts the last-level cache."""
    import torch

    from reflib.lab.machine import describe

    size = 2 * describe(device).cache_bytes
    if device.type == "cuda":
        size = max(size, 256 * 2**20)
    buffer = torch.empty(size // 4, dtype=torch.int32, device=device)
    return buffer.zero_
