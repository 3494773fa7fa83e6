"""The matmul sets in child processes (see child.py).

prepare  TorchInductor compiles and tunes, several such processes at once: each takes the next case that nobody has
         taken yet. What it finds is in its caches on disk. Whoever measures on the GPU holds one lock meanwhile:
         a neighbour's kernels would otherwise be in the numbers by which it chooses.
timed    nothing else runs, and a reference kernel tells whether that is so. TorchInductor's code comes out of its
         caches, reflib tunes, every contender is checked against float64, and all of a case are timed in turn:
         CUDA-graph replay, inputs warm in L2.
"""

import contextlib
import fcntl
import functools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reflib.lab.rivals import own_copy
from reflib.lab.timing import Samples, synchronize

from . import contenders, matmul_cases, quiet
from .contenders import EAGER, PEER_MAX, TUNED, US
from .matmul_cases import MatmulCase
from .worker import Row, brief, device_of, distance, poison, start_afresh, wrong


def wanted(job: Row) -> list[MatmulCase]:
    every = {c.name: c for found in matmul_cases.cases(job["device"]).values() for c in found}
    return [every[name] for name in job["cases"] if name not in job["done"]]


def still_alive(device: torch.device) -> None:
    """Raises if the device's context is lost: this process must end, and a new one go on, or all that comes fails."""
    if device.type == "cuda":
        torch.ones(1, device=device).add_(1)
        torch.cuda.synchronize(device)


# --- prepare: the peer's compiling and tuning ------------------------------------------------
@torch.no_grad()
def prepare(job: Row) -> Iterator[Row]:
    device, claims = device_of(job), Path(job["claims"])
    lock_measuring(claims / "measuring.lock")
    picks = listen_to_choices()
    for case in wanted(job):
        if not claim(claims, case):
            continue
        start_afresh(device)
        picks.clear()
        about = {**case.facts, "who": PEER_MAX}
        yield {"kind": "trying", **about}
        try:
            args = case.arguments(device)
            seconds, _ = first_call(contenders.compiled(PEER_MAX, own_copy(case.fn)), args, device)
            about |= {"compile_s": seconds, "choice": picks[-1] if picks else None}
        except Exception as error:
            still_alive(device)
            about |= {"compile_s": None, "note": brief(error)}
        yield {"kind": "prepared", **about}


def claim(folder: Path, case: MatmulCase) -> bool:
    """Whether this process is the first to ask for this case."""
    try:
        (folder / case.name.replace(" ", "_")).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def first_call(fn: Callable[..., Tensor], args: list[Tensor], device: torch.device) -> tuple[float, Tensor]:
    synchronize(device)
    start = time.perf_counter()
    result = fn(*args)
    synchronize(device)
    return time.perf_counter() - start, result


def lock_measuring(path: Path) -> None:
    """TorchInductor measures only while it holds this lock: one process at a time has the GPU."""
    from torch._inductor.runtime import benchmarking

    held = threading.local()

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        if getattr(held, "now", False):  # one way of measuring calls another
            yield
            return
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held.now = True
            try:
                yield
            finally:
                held.now = False

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock():
                return method(*args, **kwargs)

        return call

    for cls in vars(benchmarking).values():
        for name in ("benchmark_gpu", "benchmark_gpu_with_cuda_graph"):
            if isinstance(cls, type) and name in vars(cls):
                setattr(cls, name, locked(vars(cls)[name]))


def listen_to_choices() -> list[str]:
    """A list that receives the name of the candidate that TorchInductor found fastest (before it fuses)."""
    picks: list[str] = []

    def hear(timings: dict[Any, float], *_: Any) -> None:
        if timings:
            picks.append(str(getattr(min(timings, key=timings.__getitem__), "name", "?")))

    with contextlib.suppress(Exception):  # it is no public function, and only for the reader
        from torch._inductor.select_algorithm import add_feedback_saver

        add_feedback_saver(hear)
    return picks


# --- time: all contenders of a case, in turn -------------------------------------------------
@torch.no_grad()
def timed(job: Row) -> Iterator[Row]:
    device = device_of(job)
    reference = quiet.Reference(device)
    for case in wanted(job):
        if time.time() > job["until"]:
            break
        start_afresh(device)
        reference.settle()  # ours is about to tune
        yield from time_case(case, job, reference)
        yield {"kind": "done", "case": case.name}


def people(case: MatmulCase, job: Row) -> list[str]:
    """Who is timed; a peer only where it was compiled before."""
    if not job["peers"]:
        return [EAGER, TUNED]
    return [EAGER, *([PEER_MAX] if case.name in job["ready"] else []), US, TUNED]


def time_case(case: MatmulCase, job: Row, reference: quiet.Reference) -> Iterator[Row]:
    device = reference.device
    args = case.arguments(device)
    exact = case.fn(*[a.double() for a in args])
    eager_error = distance(case.fn(*args), exact)
    fns: dict[str, Callable[[], Any]] = {}
    about: dict[str, Row] = {}
    for who in people(case, job):
        if [case.name, who] in job["skip"]:
            continue
        yield {"kind": "trying", **case.facts, "who": who}
        about[who] = {**case.facts, "who": who}
        try:
            fn, found = compiled(who, case)
            poison([exact], case.dtype)
            seconds, got = first_call(fn, args, device)
            about[who] |= {"compile_s": seconds, **found()}
            problem = wrong(got, exact, case.dtype, eager_error, who in (US, TUNED))
            del got
        except Exception as error:
            still_alive(device)
            problem = brief(error)
        if problem:
            yield {**about[who], "us": None, "note": problem}
        else:
            fns[who] = functools.partial(fn, *args)
    del exact
    yield {"kind": "trying", **case.facts, "who": "timing"}
    found_times, shared = quiet.time_quietly(fns, reference, job["rounds"], job["seconds"])
    for who, s in found_times.items():
        row = {**about[who], **shared}
        if isinstance(s, Samples):
            row |= {"us": s.median * 1e6, "spread": s.spread / s.median, "worst": max(s.seconds) / s.median}
            yield {**row, "clock": s.clock, "note": s.note, "rounds": len(s.seconds)}
        else:
            yield {**row, "us": None, "note": s.note or s.status}


def compiled(who: str, case: MatmulCase) -> tuple[Callable[..., Tensor], Callable[[], dict[str, Any]]]:
    """What to call, and what there is to tell of it after its first call."""
    fn = own_copy(case.fn)
    if who == PEER_MAX:
        from torch._dynamo.utils import counters

        counters["inductor"].clear()
        # its own compile seconds are of the first time, in `prepare`; these are what loading took
        return contenders.compiled(who, fn), lambda: {"cache_hit": bool(counters["inductor"]["fxgraph_cache_hit"])}
    if who == EAGER:
        return fn, dict
    from reflib.options import Options
    from reflib.pipeline import Backend, Stages

    stages: list[Stages] = []
    backend = Backend(Options(autotune="blocking" if who == TUNED else "off"), stages.append)
    return torch.compile(fn, backend=backend, dynamic=False), lambda: decisions(stages)


def decisions(stages: list[Any]) -> dict[str, Any]:
    """What was chosen for each choice, and the candidates. How plain kernels are launched is left out."""
    kept = []
    for d in (d for s in stages for d in s.decisions):
        if d.config is None:
            tried = [{f: getattr(c, f, None) for f in _TOLD} for c in d.candidates]
            kept.append({"winner": d.winner, "reason": d.reason, "members": list(d.members), "candidates": tried})
    return {"choice": ", ".join(k["winner"] for k in kept) or None, "decisions": kept}


_TOLD = ("name", "status", "time_us", "warm_us", "cold_us", "spread", "error", "why")
