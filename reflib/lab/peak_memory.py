"""`lab.peak_bytes`, and `lab.measure_memory` as rows: the most bytes that a call holds at once, as its allocator says.

On a GPU the caching allocator keeps the peak. PyTorch's allocator for the CPU keeps none, but tells the profiler of
each allocation and release; their running sum has a peak. Eager and compiled code go through the same allocator, so one
method serves all. What a library or a kernel takes past it (``malloc``, a stack) is not seen.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from reflib.lab.rows import Row, Rows, record, stamp

if TYPE_CHECKING:
    import torch


def measure_memory(
    name: str, cases: Mapping[str, Callable[[], Any]], *, at: Mapping[str, Any] | None = None,
    device: torch.device | None = None,
) -> Rows:  # fmt: skip
    """Call each case twice, and return a row ``peak memory``, in MB, of the second call. Counted is what the call
    allocates, its results included; not what was there before."""
    shared = {"name": name, "at": dict(at or {}), "clock": "allocator", **stamp()}
    found = []
    for case, call in cases.items():
        call()  # (a first call compiles, and allocates what it keeps)
        found.append(Row(case=case, metric="peak memory", value=peak_bytes(call, device) / 1e6, unit="MB", **shared))
    return record(found)


def counted(name: str, metric: str, sizes: Mapping[str, float]) -> Rows:
    """Rows of bytes by case, recorded like those of `lab.measure`."""
    shared = {"name": name, "metric": metric, "unit": "bytes", "clock": "allocator", **stamp()}
    return record(Row(case=case, value=float(size), **shared) for case, size in sizes.items())


def peak_bytes(call: Callable[[], Any], device: torch.device | None = None) -> int:
    """The most bytes allocated at a time during one call, its results included, beyond those before it; on this
    notebook's device, or another. Call it once before, so that nothing is compiled meanwhile."""
    import torch

    from reflib.lab.session import current

    device = device or current().device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()  # noqa: F841 (alive until the peak is read)
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    changes = _changes(call)
    return max(accumulate(changes), default=0)


def _changes(call: Callable[[], Any]) -> list[int]:
    """Bytes allocated (released: negative) on the CPU, in order."""
    from torch.autograd.profiler import profile

    with _quiet(), profile(profile_memory=True, use_kineto=True) as found:
        call()
    return [e.nbytes() for e in found.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's library writes to the process's stderr when it starts and stops."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
