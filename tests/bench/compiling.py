"""Compile time, each run in a fresh process: ``python -m tests.bench.compiling JOB.json`` is one run.

A cold run has empty caches (reflib's, TorchInductor's and Triton's). The clock starts at the first call, when
torch is imported and nothing else is, and stops when the first backward has completed.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any


def first_step(job: dict[str, Any]) -> dict[str, Any]:
    """A model's first forward and backward."""
    import torch

    from . import cases

    device = torch.device(job["device"])
    if device.type == "cpu":
        torch.set_num_threads(job["threads"])
    net, x = cases.model(job["model"], device)
    (torch.randn(8, 8, device=device) @ torch.randn(8, 8, device=device)).sum().item()  # the device is awake
    start = time.perf_counter()
    fn, timeline = compiler(job["who"])
    fn(net)(x).sum().backward()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    stages = by_stage(timeline)
    if stages:
        stages["the rest: imports, Dynamo, AOTAutograd, waiting for built kernels, the step"] = seconds - sum(
            stages.values()
        )
    return {"seconds": seconds, "stages": stages}


def compiler(who: str) -> tuple[Any, list[tuple[str, float, float]]]:
    """What compiles for this contender, and a list that will hold (stage, start, seconds), ours only."""
    import torch

    timeline: list[tuple[str, float, float]] = []
    if who == "reflib":
        from reflib.options import Options
        from reflib.pipeline import Backend

        backend = Backend(Options(), lambda stages: timeline.extend(stages.timeline))
        return lambda f: torch.compile(f, backend=backend, dynamic=False), timeline
    if who == "aot_eager":  # what any backend pays: Dynamo and AOTAutograd
        return lambda f: torch.compile(f, backend="aot_eager_decomp_partition", dynamic=False), timeline
    return lambda f: torch.compile(f, dynamic=False), timeline


def by_stage(timeline: list[tuple[str, float, float]]) -> dict[str, float]:
    stages: dict[str, float] = defaultdict(float)
    for stage, _, seconds in timeline:
        stages[stage] += seconds
    return dict(stages)


def chains(job: dict[str, Any]) -> dict[str, Any]:
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
    return {"seconds": found}


def import_time(job: dict[str, Any]) -> dict[str, Any]:
    """Seconds that ``import reflib`` adds to ``import torch``."""
    import torch  # noqa: F401

    start = time.perf_counter()
    import reflib  # noqa: F401

    return {"seconds": time.perf_counter() - start}


if __name__ == "__main__":
    job = json.loads(Path(sys.argv[1]).read_text())
    what = {"first_step": first_step, "chains": chains, "import": import_time}[job["what"]]
    Path(job["result"]).write_text(json.dumps(what(job)))
