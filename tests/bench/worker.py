"""One section in a child process: ``python -m tests.bench.worker SECTION JOB.json RESULTS.jsonl``.

Every row is written at once, and so is the name of whatever is about to run: when the process dies, its
parent knows what killed it, and starts again without that.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch._functorch.config

from reflib.lab.machine import describe
from reflib.lab.measuring import time_cases
from reflib.lab.rivals import own_copy
from reflib.lab.timing import Samples, synchronize

from . import cases, contenders

ROTATED_BYTES = 6 * 2**30  # at most this much in all input sets of a case
MOST_SETS = 64


class Journal:
    """Rows and notices, one JSON text a line, on disk as soon as they are known."""

    def __init__(self, path: Path):
        self.file = path.open("a", encoding="utf-8")

    def write(self, kind: str, **fields: Any) -> None:
        self.file.write(json.dumps({"kind": kind, **fields}) + "\n")
        self.file.flush()


def brief(error: Exception) -> str:
    """A line for the table; what a backend raised is inside what Dynamo raises."""
    inner = getattr(error, "inner_exception", None) or error
    first = next((line for line in str(inner).splitlines() if line.strip()), "")
    return f"{type(inner).__name__}: {first[:200]}"


def main(section: str, job: dict[str, Any], results: Path) -> None:
    device = torch.device("cuda", 0) if job["device"] == "cuda" else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(job["threads"])
    # A backward is timed over and over on one forward, which AOTAutograd's donation of buffers forbids.
    torch._functorch.config.donated_buffer = section == "memory"
    SECTIONS[section](job, device, Journal(results))


# --- kernels: check, then time ---------------------------------------------------------------
def kernels(job: dict[str, Any], device: torch.device, out: Journal) -> None:
    few = job["quick"] and not job["match"]
    every = cases.gpu_cases(few) if device.type == "cuda" else cases.cpu_cases(few)
    skip = {tuple(s) for s in job["skip"]}
    start = time.monotonic()
    for case in every:
        if time.monotonic() - start > job["stop_after"]:
            out.write("row", case=case.name, group=case.group, who=contenders.US, us=None, note="no time left")
            continue
        if case.name in job["done"] or not any(word in case.name for word in job["match"] or [""]):
            continue
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        _one_case(case, job, device, out, skip)
        out.write("done", case=case.name)


def _one_case(case: cases.Case, job: dict, device: torch.device, out: Journal, skip: set[tuple]) -> None:
    sets = _input_sets(case, device)
    reference, eager_error = _reference(case, sets[0])
    fns = {}
    searching = case.group in ("reduction", "backward")
    for who in contenders.names(job["device"], job["quick"], searching):
        if (case.name, who) in skip:
            continue
        out.write("trying", case=case.name, who=who)
        try:
            fn, problem = _checked(who, case, sets, reference, eager_error)
        except Exception as error:
            fn, problem = None, brief(error)
        if fn is None:
            out.write("row", case=case.name, group=case.group, who=who, us=None, note=problem)
        else:
            fns[who] = fn
    del reference
    if device.type == "cuda" and not case.backward:
        fns["copy"] = _copy(case.moved, device)
    out.write("trying", case=case.name, who="timing")
    clock = processor_clock if job["busy"] else "auto"
    timed = time_cases(fns, clock, "warm", job["rounds"], job["seconds"], device)
    for who, samples in timed.items():
        fields = {"case": case.name, "group": case.group, "who": who, "main_bytes": case.main_bytes}
        if isinstance(samples, Samples):
            gbps = case.moved / samples.median / 1e9
            us, spread = samples.median * 1e6, samples.spread * 1e6
            fields["best"] = min(samples.seconds) * 1e6
            out.write("row", us=us, spread=spread, gbps=gbps, clock=samples.clock, note=samples.note, **fields)
        else:
            out.write("row", us=None, note=samples.note or samples.status, **fields)


def processor_clock(fn: Callable[[], Any], device: torch.device) -> Callable[[], float]:
    """Seconds of processor time a call: another process on the same core does not count."""
    fn()

    def sample() -> float:
        start = time.process_time()
        for _ in range(3):
            fn()
        return (time.process_time() - start) / 3

    return sample


def _input_sets(case: cases.Case, device: torch.device) -> list[list[torch.Tensor]]:
    """Enough sets of inputs that going through them empties the last-level cache."""
    first = case.arguments(device, 0)
    size = sum(t.nbytes for t in first)
    wanted = math.ceil(2 * describe(device).cache_bytes / size)
    room = ROTATED_BYTES if device.type == "cuda" else ROTATED_BYTES // 12
    count = max(1, min(wanted, MOST_SETS, room // size))
    return [first] + [case.arguments(device, seed) for seed in range(1, count)]


def _run(case: cases.Case, fn: Callable[..., torch.Tensor], args: list[torch.Tensor]) -> list[torch.Tensor]:
    """The results to compare: the output, or the gradients."""
    if not case.backward:
        return [fn(*args)]
    out = fn(*args)
    return list(torch.autograd.grad(out, args, _gradient(out)))


def _gradient(out: torch.Tensor) -> torch.Tensor:
    gen = torch.Generator(out.device).manual_seed(99)
    return torch.randn(out.shape, generator=gen, device=out.device, dtype=torch.float32).to(out.dtype)


def _reference(case: cases.Case, args: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[tuple]]:
    """The results in float64, and eager's own distance from them."""
    exact_args = [a.detach().double().requires_grad_(a.requires_grad) for a in args]
    if case.backward:
        out = case.fn(*exact_args)
        grad = _gradient(case.fn(*args).detach()).double()
        exact = list(torch.autograd.grad(out, exact_args, grad))
    else:
        exact = _run(case, case.fn, exact_args)
    got = _run(case, case.fn, args)
    return exact, [_distance(g, e) for g, e in zip(got, exact, strict=True)]


def _distance(got: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Relative in the norm, and of the worst element relative to the largest."""
    off = got.double().sub_(exact)
    far = off.abs().max().item() / max(exact.abs().max().item(), 1e-30)
    return (off.norm() / exact.norm().clamp(min=1e-30)).item(), far


def _checked(
    who: str, case: cases.Case, sets: list[list[torch.Tensor]], exact: list[torch.Tensor], eager: list[tuple]
) -> tuple[Callable[[], Any] | None, str]:
    """A function of no arguments to time, or None and what is wrong with the result."""
    fn = contenders.compiled(who, own_copy(case.fn))
    poison = [torch.full_like(e, math.nan, dtype=case.dtype) for e in exact]
    del poison  # the next allocation of that size finds NaN, not an earlier contender's right answer
    got = _run(case, fn, sets[0])
    # So strict a definition of wrong is for us; a peer's sum in another order is not what this is about.
    floor = torch.finfo(case.dtype).eps * (0.5 if who == contenders.US else 32)
    for g, e, allowed in zip(got, exact, eager, strict=True):
        if g.dtype != case.dtype or g.shape != e.shape or g.stride() != e.stride():
            return None, f"wrong: {g.dtype} {tuple(g.shape)} strides {g.stride()}"
        found = _distance(g, e)
        if not all(f <= 2 * a + floor for f, a in zip(found, allowed, strict=True)):  # NaN never passes
            shown = ["{:.2g} worst {:.2g}".format(*pair) for pair in (found, allowed)]
            return None, f"wrong: error {shown[0]}; eager {shown[1]}"
    del got
    if case.backward:
        return _backward(fn, sets), ""
    turns = itertools.cycle(sets)
    return lambda: fn(*next(turns)), ""


def _backward(fn: Callable[..., torch.Tensor], sets: list[list[torch.Tensor]]) -> Callable[[], Any]:
    """The backward graph alone: forward runs once for each set, on the stream that graphs are captured on
    (autograd runs a backward on its forward's stream)."""
    ready = []
    with _capture_stream(sets[0][0].device):
        for args in sets:
            out = fn(*args)
            ready.append((out, args, _gradient(out)))
    turns: Iterator[tuple] = itertools.cycle(ready)

    def backward() -> Any:
        out, args, grad = next(turns)
        return torch.autograd.grad(out, args, grad, retain_graph=True)

    return backward


def _capture_stream(device: torch.device) -> Any:
    if device.type != "cuda":
        return torch.enable_grad()
    graphs = torch.cuda.graph
    if graphs.default_capture_stream is None:
        graphs.default_capture_stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    return torch.cuda.stream(graphs.default_capture_stream)


def _copy(moved: int, device: torch.device) -> Callable[[], Any]:
    """A copy that moves as many bytes: what a kernel of this size can reach."""
    half = moved // 2
    count = max(1, min(MOST_SETS, math.ceil(2 * describe(device).cache_bytes / half)))
    made = [torch.randint(0, 127, (half,), dtype=torch.int8, device=device) for _ in range(count)]
    target = torch.empty_like(made[0])
    turns = itertools.cycle(made)
    return lambda: target.copy_(next(turns))


def ceiling(job: dict[str, Any], device: torch.device, out: Journal) -> None:
    """A large copy: the bandwidth that the promises are measured against."""
    half = 2**28 if device.type == "cuda" else 128 * 2**20
    source = torch.empty(half // 4, device=device).normal_()
    target = torch.empty_like(source)
    # In a CUDA graph a large copy_ can become a node for the copy engine, slower than a kernel: so both are tried.
    ways = {"copy": lambda: target.copy_(source), "kernel": lambda: torch.neg(source, out=target)}
    tried = [s for s in time_cases(ways, "auto", "warm", 20, 1.0, device).values() if isinstance(s, Samples)]
    found = min(tried, key=lambda s: s.median)
    out.write(
        "row",
        who="copy",
        gbps=2 * half / found.median / 1e9,
        us=found.median * 1e6,
        spread=found.spread * 1e6,
    )


# --- memory ---------------------------------------------------------------------
def memory(job: dict[str, Any], device: torch.device, out: Journal) -> None:
    """Peak bytes of a training step beyond what was there before it."""
    for name in ("block", "blocks", "convolutions"):
        for who in contenders.names(job["device"], job["quick"], searching=False):
            if (name, who) in {tuple(s) for s in job["skip"]}:
                continue
            torch._dynamo.reset()
            out.write("trying", case=name, who=who)
            try:
                net, x = cases.model(name, device)
                peak = _peak(contenders.compiled(who, net), net, x, device)
                out.write("row", case=name, who=who, mib=peak / 2**20)
            except Exception as error:
                out.write("row", case=name, who=who, mib=None, note=brief(error))


def _peak(fn: Callable[..., Any], net: torch.nn.Module, x: torch.Tensor, device: torch.device) -> int:
    def step() -> None:
        net.zero_grad(set_to_none=True)
        fn(x).square().mean().backward()

    for _ in range(2):
        step()
    net.zero_grad(set_to_none=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda e: e.start_ns())
    return max(itertools.accumulate(e.nbytes() for e in events), default=0)


SECTIONS = {"kernels": kernels, "ceiling": ceiling, "memory": memory}


if __name__ == "__main__":
    section, job_file, results = sys.argv[1:]
    main(section, json.loads(Path(job_file).read_text()), Path(results))
    synchronize(torch.device("cpu"))
