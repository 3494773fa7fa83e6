"""The matmul sets in child processes (see child.py), several at once per device.

Each takes the next case that no process has taken yet, compiles all contenders, checks them against float64, and times
them in turn: CUDA-graph replay, inputs warm in L2. Whatever measures holds reflib's ``device_lock`` meanwhile, also
TorchInductor when it chooses and reflib when it tunes: another process's kernels would be in the numbers.
"""

import contextlib
import functools
import gc
import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reflib.autotune.lock import device_lock
from reflib.lab.rivals import own_copy
from reflib.lab.timing import Samples, synchronize
from reflib.sweep.child import brief

from . import matmul_cases, quiet
from .contenders import EAGER, PEER_MAX, TUNED, US
from .matmul_cases import MatmulCase

Row = dict[str, Any]


def wanted(job: Row) -> list[MatmulCase]:
    """The cases in order; ``first``: what this process has claimed already, before one like it was killed."""
    every = {c.name: c for found in matmul_cases.cases(job["device"]).values() for c in found}
    return [every[name] for name in [*job["first"], *job["cases"]]]


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


def still_alive(device: torch.device) -> None:
    """Raises if the device's context is lost: this process must end, and a new one go on, or all that comes fails."""
    if device.type == "cuda":
        torch.ones(1, device=device).add_(1)
        torch.cuda.synchronize(device)


@torch.no_grad()
def measured(job: Row) -> Iterator[Row]:
    device, claims = device_of(job), Path(job["claims"])
    lock_measuring(device)
    picks = listen_to_choices()
    with device_lock(str(device)):
        reference = quiet.Reference(device)
    for case in wanted(job):
        if time.time() > job["until"]:
            break
        if case.name in job["first"] or claim(claims, case):
            start_afresh(device)
            yield from measure_case(case, job, reference, picks)
            yield {"kind": "done", "set": case.set, "case": case.name}


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


def lock_measuring(device: torch.device) -> None:
    """TorchInductor measures only while it holds the device's lock."""
    from torch._inductor.runtime import benchmarking

    held = threading.local()

    @contextlib.contextmanager
    def lock() -> Iterator[None]:
        if getattr(held, "now", False):  # one way of measuring calls another
            yield
            return
        with device_lock(str(device)):
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


# --- right or wrong ----------------------------------------------------------------------------
def distance(got: Tensor, exact: Tensor) -> tuple[float, float]:
    """Relative in the norm, and of the worst element relative to the largest."""
    off = got.double().sub_(exact)
    far = off.abs().max().item() / max(exact.abs().max().item(), 1e-30)
    return (off.norm() / exact.norm().clamp(min=1e-30)).item(), far


def wrong(got: Tensor, exact: Tensor, dtype: torch.dtype, allowed: tuple[float, float], ours: bool) -> str:
    """Nothing if the result is right: no further from float64 than twice eager's own distance and a little. So strict a
    definition of wrong is for us; a peer's sum in another order is not what this is about."""
    if got.dtype != dtype or got.shape != exact.shape or got.stride() != exact.stride():
        return f"wrong: {got.dtype} {tuple(got.shape)} strides {got.stride()}"
    found, floor = distance(got, exact), torch.finfo(dtype).eps * (0.5 if ours else 32)
    if all(f <= 2 * a + floor for f, a in zip(found, allowed, strict=True)):  # NaN never passes
        return ""
    shown = ["{:.2g} worst {:.2g}".format(*pair) for pair in (found, allowed)]
    return f"wrong: error {shown[0]}; eager {shown[1]}"


# --- a case: all contenders, then their times in turn ------------------------------------------
def contenders(case: MatmulCase, job: Row) -> list[str]:
    """Which contenders run; the peer only while there is time for its compiling."""
    if not job["peers"]:
        return [EAGER, TUNED]
    return [EAGER, *([PEER_MAX] if time.time() < job["peers_until"] else []), US, TUNED]


def measure_case(case: MatmulCase, job: Row, reference: quiet.Reference, picks: list[str]) -> Iterator[Row]:
    device = reference.device
    with device_lock(str(device)):
        args = case.arguments(device)
        exact = case.fn(*[a.double() for a in args])
        eager_error = distance(case.fn(*args), exact)
    fns: dict[str, Callable[[], Any]] = {}
    about: dict[str, Row] = {}
    for who in contenders(case, job):
        if [case.name, who] in job["skip"]:
            continue
        yield {"kind": "trying", **case.facts, "who": who}
        about[who] = {**case.facts, "who": who}
        picks.clear()
        try:
            fn, found = compiled(who, case, job)
            seconds, _ = first_call(fn, args, device)
            about[who] |= {"compile_s": seconds, **found()}
            with device_lock(str(device)):
                # the next allocation of this size finds NaN, not an earlier contender's right answer
                torch.full_like(exact, math.nan, dtype=case.dtype)
                problem = wrong(fn(*args), exact, case.dtype, eager_error, who in (US, TUNED))
        except Exception as error:
            still_alive(device)
            problem = brief(error)
        if who == PEER_MAX:
            about[who] |= {"choice": picks[-1] if picks else None}
            yield {**about[who], "kind": "prepared", **({"compile_s": None, "note": problem} if problem else {})}
        elif problem:
            yield {**about[who], "us": None, "note": problem}
        if not problem:
            fns[who] = functools.partial(fn, *args)
    del exact
    yield {"kind": "trying", **case.facts, "who": "timing"}
    with device_lock(str(device)):
        found_times, shared = quiet.time_quietly(fns, reference, job["rounds"], job["seconds"])
    for who, s in found_times.items():
        row = {**about[who], **shared}
        if isinstance(s, Samples):
            row |= {"us": s.median * 1e6, "spread": s.spread / s.median, "worst": max(s.seconds) / s.median}
            yield {**row, "clock": s.clock, "note": s.note, "rounds": len(s.seconds)}
        else:
            yield {**row, "us": None, "note": s.note or s.status}


def compiled(who: str, case: MatmulCase, job: Row) -> tuple[Callable[..., Tensor], Callable[[], dict[str, Any]]]:
    """What to call, and what there is to tell of it after its first call."""
    fn = own_copy(case.fn)
    if who == PEER_MAX:
        return torch.compile(fn, dynamic=False, mode="max-autotune-no-cudagraphs"), dict
    if who == EAGER:
        return fn, dict
    from reflib.options import Options
    from reflib.pipeline import Backend, Stages

    stages: list[Stages] = []
    options = Options(autotune="blocking" if who == TUNED else "off", compile_threads=job["compile_threads"])
    backend = Backend(options, stages.append)
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
