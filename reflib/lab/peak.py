"""Bytes, counted and not timed: `lab.peak_bytes` of a call, as PyTorch's allocators say; `lab.counted` makes rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from reflib.lab.rows import Row, Rows, append, stamp


def peak_bytes(run: Callable[[], Any]) -> int:
    """The most bytes that one call of `run` has allocated at a time, its results included, on this notebook's device.

    Call `run` once before, so that nothing is compiled meanwhile. What a library allocates by itself is not counted.
    """
    import torch

    from reflib.lab.session import current

    device = current().device
    if device.type != "cuda":
        return _on_cpu(run)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    result = run()
    torch.cuda.synchronize(device)
    del result
    return torch.cuda.max_memory_allocated(device) - before


def counted(name: str, metric: str, sizes: Mapping[str, float]) -> Rows:
    """Rows as `lab.measure` makes them, recorded like those, of bytes by case."""
    shared = {"name": name, "metric": metric, "unit": "bytes", "clock": "allocator", **stamp()}
    rows = Rows(Row(case=case, value=float(size), **shared) for case, size in sizes.items())
    append({"kind": "row", **row.to_data()} for row in rows)
    return rows


def _on_cpu(run: Callable[[], Any]) -> int:
    """The largest sum of what the profiler saw allocated and freed."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as p:
        result = run()
    assert isinstance(p.profiler, torch.autograd.profiler.profile) and p.profiler.kineto_results is not None
    now = most = 0
    for event in p.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    del result
    return most


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the profiler's C++ code says on the standard error."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
