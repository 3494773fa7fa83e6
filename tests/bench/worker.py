"""Kernels and memory: check each contender, then time them in turn. (In a child process: see child.py.)"""

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch._functorch.config

from reflib.lab.machine import describe
from reflib.lab.measuring import time_cases
from reflib.lab.peak_memory import peak_bytes
from reflib.lab.rivals import own_copy
from reflib.lab.timing import Samples
from reflib.sweep.child import brief

from . import cases, contenders

ROTATED_BYTES = 6 * 2**30  # at most this much in all input sets of a case
MOST_SETS = 64
Row = dict[str, Any]


def device_of(job: Row) -> torch.device:
    """The job's device, with its threads set."""
    if job["device"] == "cuda":
        return torch.device("cuda", 0)
    torch.set_num_threads(job["threads"])
    return torch.device("cpu")


def start_afresh(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- kernels: check, then time ---------------------------------------------------------------
def kernels(job: Row) -> Iterator[Row]:
    # A backward is timed over and over on one forward, which AOTAutograd's donation of buffers forbids.
    torch._functorch.config.donated_buffer = False
    device, few = device_of(job), job["quick"] and not job["match"]
    every = cases.gpu_cases(few) if device.type == "cuda" else cases.cpu_cases(few)
    start = time.monotonic()
    for case in every:
        if time.monotonic() - start > job["stop_after"]:
            yield {"case": case.name, "group": case.group, "who": contenders.US, "us": None, "note": "no time left"}
        elif case.name not in job["done"] and any(word in case.name for word in job["match"] or [""]):
            start_afresh(device)
            yield from _one_case(case, job, device)
            yield {"kind": "done", "case": case.name}


def _one_case(case: cases.Case, job: Row, device: torch.device) -> Iterator[Row]:
    sets = _input_sets(case, device)
    reference, eager_error = _reference(case, sets[0])
    fns: dict[str, Callable[[], Any]] = {}
    about = {"case": case.name, "group": case.group}
    searching = case.group in ("reduction", "backward")
    for who in contenders.names(job["device"], job["quick"], searching):
        if [case.name, who] in job["skip"]:
            continue
        yield {"kind": "trying", **about, "who": who}
        try:
            fn, problem = _checked(who, case, sets, reference, eager_error)
        except Exception as error:
            fn, problem = None, brief(error)
        if fn is None:
            yield {**about, "who": who, "us": None, "note": problem}
        else:
            fns[who] = fn
    del reference
    if device.type == "cuda" and not case.backward:
        fns["copy"] = _copy(case.moved, device)
    yield {"kind": "trying", **about, "who": "timing"}
    for who, s in time_cases(fns, "auto", "warm", job["rounds"], job["seconds"], device).items():
        row = {**about, "who": who, "main_bytes": case.main_bytes}
        if isinstance(s, Samples):
            row |= {"us": s.median * 1e6, "spread": s.spread * 1e6, "best": min(s.seconds) * 1e6, "clock": s.clock}
            yield {**row, "gbps": case.moved / s.median / 1e9, "note": s.note}
        else:
            yield {**row, "us": None, "note": s.note or s.status}


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
    return exact, [distance(g, e) for g, e in zip(got, exact, strict=True)]


def distance(got: torch.Tensor, exact: torch.Tensor) -> tuple[float, float]:
    """Relative in the norm, and of the worst element relative to the largest."""
    off = got.double().sub_(exact)
    far = off.abs().max().item() / max(exact.abs().max().item(), 1e-30)
    return (off.norm() / exact.norm().clamp(min=1e-30)).item(), far


def wrong(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, allowed: tuple[float, float], ours: bool) -> str:
    """"" if the result is right: no further from float64 than twice eager's own distance and a little. So strict a
    definition of wrong is for us; a peer's sum in another order is not what this is about."""
    if got.dtype != dtype or got.shape != exact.shape or got.stride() != exact.stride():
        return f"wrong: {got.dtype} {tuple(got.shape)} strides {got.stride()}"
    found, floor = distance(got, exact), torch.finfo(dtype).eps * (0.5 if ours else 32)
    if all(f <= 2 * a + floor for f, a in zip(found, allowed, strict=True)):  # NaN never passes
        return ""
    shown = ["{:.2g} worst {:.2g}".format(*pair) for pair in (found, allowed)]
    return f"wrong: error {shown[0]}; eager {shown[1]}"


def poison(shapes: list[torch.Tensor], dtype: torch.dtype) -> None:
    """The next allocation of such a size finds NaN, not an earlier contender's right answer."""
    for t in shapes:
        torch.full_like(t, math.nan, dtype=dtype)


def _checked(
    who: str, case: cases.Case, sets: list[list[torch.Tensor]], exact: list[torch.Tensor], eager: list[tuple]
) -> tuple[Callable[[], Any] | None, str]:
    """A function of no arguments to time, or None and what is wrong with the result."""
    fn = contenders.compiled(who, own_copy(case.fn))
    poison(exact, case.dtype)
    got = _run(case, fn, sets[0])
    for g, e, allowed in zip(got, exact, eager, strict=True):
        if problem := wrong(g, e, case.dtype, allowed, who == contenders.US):
            return None, problem
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


def ceiling(job: Row) -> Iterator[Row]:
    """A large copy: the bandwidth that the promises are measured against."""
    device = device_of(job)
    half = 2**28 if device.type == "cuda" else 128 * 2**20
    source = torch.empty(half // 4, device=device).normal_()
    target = torch.empty_like(source)
    # In a CUDA graph a large copy_ can become a node for the copy engine, slower than a kernel: so both are tried.
    ways = {"copy": lambda: target.copy_(source), "kernel": lambda: torch.neg(source, out=target)}
    tried = [s for s in time_cases(ways, "auto", "warm", 20, 1.0, device).values() if isinstance(s, Samples)]
    yield {"gbps": 2 * half / min(s.median for s in tried) / 1e9}


# --- memory ---------------------------------------------------------------------
def memory(job: Row) -> Iterator[Row]:
    """Peak bytes of a training step beyond what was there before it."""
    device = device_of(job)
    for name in ("block", "blocks", "convolutions"):
        for who in contenders.names(job["device"], job["quick"], searching=False):
            if name in job["done"] or [name, who] in job["skip"]:
                continue
            torch._dynamo.reset()
            yield {"kind": "trying", "case": name, "who": who}
            try:
                net, x = cases.model(name, device)
                peak = _peak(contenders.compiled(who, net), net, x, device)
                yield {"case": name, "who": who, "mib": peak / 2**20}
            except Exception as error:
                yield {"case": name, "who": who, "mib": None, "note": brief(error)}
        yield {"kind": "done", "case": name}


def _peak(fn: Callable[..., Any], net: torch.nn.Module, x: torch.Tensor, device: torch.device) -> int:
    def step() -> None:
        net.zero_grad(set_to_none=True)
        fn(x).square().mean().backward()

    for _ in range(2):
        step()
    net.zero_grad(set_to_none=True)
    gc.collect()
    return peak_bytes(step, device)
