"""Compile time, each run in a fresh process (see child.py).

A cold run has empty caches (reflib's, TorchInductor's and Triton's). The clock starts at the first call, when
torch is imported and nothing else is, and stops when the first backward has completed. One step that is not compiled
runs before, so that starting the device and its libraries is in nobody's number.
"""

from __future__ import annotations

import builtins
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any


def first_step(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A model's first compiled forward and backward, after one that was not compiled."""
    import torch

    from . import cases

    device = torch.device(job["device"])
    if device.type == "cpu":
        torch.set_num_threads(job["threads"])
    net, x = cases.model(job["model"], device)
    net(x).sum().backward()  # uncompiled: the device, its libraries and attention have started, for everybody alike
    net.zero_grad(set_to_none=True)
    if device.type == "cuda":
        torch.cuda.synchronize()
    with Imports() as imports:
        start = time.perf_counter()
        fn, clock = compiler(job["who"], imports)
        compiled = fn(net)
        clock.mark("torch.compile")
        y = compiled(x).sum()
        clock.mark("the rest of the forward call")
        y.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        clock.mark("the rest of the backward call")
        seconds = time.perf_counter() - start
    yield {"seconds": seconds, "stages": clock.parts()}


class Imports:
    """Seconds that the main thread spends in imports of what was not there yet."""

    def __init__(self) -> None:
        self.seconds, self.depth = 0.0, 0
        self.original = builtins.__import__

    def __enter__(self) -> Imports:
        builtins.__import__ = self._import
        return self

    def __exit__(self, *_: object) -> None:
        builtins.__import__ = self.original

    def _import(self, *args: Any, **kwargs: Any) -> Any:
        if self.depth or threading.current_thread() is not threading.main_thread():
            return self.original(*args, **kwargs)
        before, start = len(sys.modules), time.perf_counter()
        self.depth = 1
        try:
            return self.original(*args, **kwargs)
        finally:
            self.depth = 0
            if len(sys.modules) != before:
                self.seconds += time.perf_counter() - start


class Clock:
    """Where the time of a first step goes, imports apart. For contenders that we cannot look into, only their total."""

    def __init__(self, imports: Imports) -> None:
        self.imports = imports
        self.last = (time.perf_counter(), 0.0)
        self.spent: dict[str, float] = {}
        self.timeline: list[tuple[str, float, float]] = []

    def mark(self, part: str) -> None:
        """All that was not in imports since the last mark belongs to ``part``."""
        now = (time.perf_counter(), self.imports.seconds)
        self.spent[part] = self.spent.get(part, 0.0) + (now[0] - self.last[0]) - (now[1] - self.last[1])
        self.last = now

    def around(self, backend: Any) -> Any:
        """``backend``, which Dynamo calls with its graph."""

        def call(*args: Any) -> Any:
            self.mark("Dynamo, before our backend")
            made = backend(*args)
            self.mark("AOTAutograd, decompositions, our stages")
            return made

        return call

    def first_calls(self, stages: Any) -> None:
        """``stages.call`` waits for its kernels when it is first called: that goes under a name of its own."""
        self.timeline += stages.timeline
        run, name = stages.call, f"waiting for {stages.graph.name} kernels, and running them"

        def call(args: list) -> Any:
            if name in self.spent:
                return run(args)
            self.mark("Dynamo's guards, AOTAutograd's wrappers")
            result = run(args)
            self.mark(name)
            return result

        stages.call = call

    def parts(self) -> dict[str, float]:
        return {"imports": self.imports.seconds, **self.spent, **by_stage(self.timeline)}


def compiler(who: str, imports: Imports | None = None) -> tuple[Any, Clock]:
    """What compiles for this contender, and a clock that it marks."""
    import torch

    clock = Clock(imports or Imports())
    if who == "reflib":
        from reflib.options import Options
        from reflib.pipeline import Backend

        backend = clock.around(Backend(Options(), clock.first_calls))
        return lambda f: torch.compile(f, backend=backend, dynamic=False), clock
    if who == "aot_eager":  # what any backend pays: Dynamo and AOTAutograd
        return lambda f: torch.compile(f, backend="aot_eager_decomp_partition", dynamic=False), clock
    return lambda f: torch.compile(f, dynamic=False), clock


def by_stage(timeline: list[tuple[str, float, float]]) -> dict[str, float]:
    stages: dict[str, float] = defaultdict(float)
    for stage, _, seconds in timeline:
        stages[f"of it in {stage}"] += seconds
    return dict(stages)


def chains(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Seconds to compile 100 and 1,000 operations, imports and the compiler's own start-up paid before."""
    import torch

    from . import cases

    torch.set_num_threads(job["threads"])
    x = torch.randn(4096)
    fn, _ = compiler(job["who"])
    fn(cases.many_ops(8))(x)
    found = {}
    for count in job["counts"]:
        torch._dynamo.reset()
        start = time.perf_counter()
        fn(cases.many_ops(count))(x)
        found[str(count)] = time.perf_counter() - start
    yield {"seconds": found}


def import_time(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Seconds that ``import reflib`` adds to ``import torch``."""
    import torch  # noqa: F401

    start = time.perf_counter()
    import reflib  # noqa: F401

    yield {"seconds": time.perf_counter() - start}
