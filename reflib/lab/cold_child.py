"""Child process of `lab.cold_starts`: compiles one program in one way."""

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from reflib.lab.children import Failure, Job, serve, turn

KEPT = 60  # single calls in the report
PAUSE_S = 0.002  # between calls, standing in for other work of a program
AFTER_S = 0.5  # calls continue this long after all tuning is done
PATIENCE = 0.7  # fraction of the time limit after which calls stop, tuned or not


@dataclass
class CompiledProgram:
    """A compiled program: the function, whether all tuning is done, and its graphs (reflib only)."""

    call: Callable[..., Any]
    done: Callable[[], bool] = lambda: True
    graphs: list[Any] = field(default_factory=list)


def start(job: Job) -> Job:
    import torch

    from reflib.lab import session
    from reflib.lab.measuring import time_cases
    from reflib.lab.timing import synchronize

    way, here = dict(job["way"]), session.setup(**job["here"], quiet=True)
    device, program = here.device, importlib.import_module("cold_program")
    compiler = way.pop("compiler")
    if compiler != "eager" and hasattr(program, "register"):
        program.register(compiler)
    f, args = program.make(device=device, dtype=here.dtype, **job["arguments"])
    with torch.no_grad():
        want = f(*args)  # initializes libraries and the device before timing starts
        synchronize(device)
        turn()
        begin = time.perf_counter()
        compiled = COMPILERS[compiler](f, way)
        limit = begin + PATIENCE * job["timeout_s"]
        calls = list(watched(lambda: compiled.call(*args), compiled.done, device, begin, limit))
        right = close(compiled.call(*args), want)
        samples = time_cases({"it": lambda: compiled.call(*args)}, "auto", "warm", 30, 0.5, device)["it"]
    if isinstance(samples, Failure):
        return {"status": samples.status, "note": samples.note}
    ends = [end for end, _, _ in calls]
    return {
        "first": ends[0], "tuned": next((end for end, _, done in calls if done), None), "right": right,
        "longest": max((us for _, us, _ in calls[1:]), default=None),
        "calls": thinned([(round(end, 4), round(us, 2)) for end, us, _ in calls[1:]]),
        "service": service(calls[1:]),
        "samples": {"seconds": samples.seconds, "clock": samples.clock, "note": samples.note},
        **explained(compiled.graphs),
    }  # fmt: skip


def watched(
    call: Callable[[], Any], done: Callable[[], bool], device: Any, begin: float, limit: float
) -> Iterator[tuple[float, float, bool]]:
    """Call until AFTER_S past the end of tuning, or until ``limit``; yields (seconds since ``begin``, µs of this call,
    whether tuning is done)."""
    from reflib.lab.timing import synchronize

    finished: float | None = None
    while time.perf_counter() < (limit if finished is None else finished + AFTER_S):
        start = time.perf_counter()
        call()
        synchronize(device)
        end = time.perf_counter()
        if finished is None and done():
            finished = end
        yield end - begin, (end - start) * 1e6, finished is not None
        time.sleep(PAUSE_S)


def thinned(calls: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """About KEPT of the calls, evenly spaced in time: the median call of each interval."""
    if len(calls) <= KEPT:
        return calls
    first, last = calls[0][0], calls[-1][0]
    pieces: dict[int, list[tuple[float, float]]] = {}
    for end, us in calls:
        pieces.setdefault(int((end - first) / max(last - first, 1e-9) * (KEPT - 1)), []).append((us, end))
    middles = (sorted(piece)[len(piece) // 2] for piece in pieces.values())
    return [(end, us) for us, end in middles]


def service(calls: list[tuple[float, float, bool]]) -> dict[str, dict[str, float]]:
    """What the callers saw while tuning and afterwards: the number of calls, and µs of the median one, of one in a
    hundred, of the longest. The first call after the end of tuning, which may load kernels, is among those before."""
    from reflib.lab.timing import quantile

    first = next((i for i, (_, _, done) in enumerate(calls) if done), len(calls))
    end = first + 2 if first else 0  # 0: nothing was left to tune
    phases = {"while tuning": calls[:end], "afterwards": calls[end:]}
    found = {phase: tuple(us for _, us, _ in some) for phase, some in phases.items() if some}
    return {
        phase: {"calls": len(us), "p50": quantile(us, 0.5), "p99": quantile(us, 0.99), "longest": max(us)}
        for phase, us in found.items()
    }


def close(results: Any, wanted: Any) -> bool:
    """Equal up to the rounding of a different summation order."""
    from torch.utils._pytree import tree_leaves

    return all(_close(got, want) for got, want in zip(tree_leaves(results), tree_leaves(wanted), strict=True))


def _close(got: Any, want: Any) -> bool:
    if got.shape != want.shape or not want.numel():
        return bool(got.shape == want.shape)
    worst, largest = (got.double() - want.double()).abs().max().item(), want.double().abs().max().item()
    return bool(worst <= 0.02 * max(largest, 1e-3))


# -- the compilers ----------------------------------------------------------------------------------
def eager(f: Callable[..., Any], way: dict[str, Any]) -> CompiledProgram:
    return CompiledProgram(f)


def reflib_way(f: Callable[..., Any], way: dict[str, Any]) -> CompiledProgram:
    import torch

    import reflib
    from reflib.pipeline import Backend
    from reflib.tuning import expect_tuning

    way.pop("again", None)
    graphs: list[Any] = []
    options = reflib.Options.make(way)
    expect_tuning(options)  # as reflib.compile does, which does not expose its graphs
    compiled = torch.compile(f, backend=Backend(options, graphs.append), dynamic=False)
    if options.autotune != "background":
        return CompiledProgram(compiled, graphs=graphs)
    return CompiledProgram(compiled, lambda: reflib.tuning_progress().finished, graphs)


def inductor_way(f: Callable[..., Any], way: dict[str, Any]) -> CompiledProgram:
    import torch
    import torch._inductor.config as config

    for name, value in way.get("config", {}).items():
        if not hasattr(config, name):
            raise AttributeError(f"torch {torch.__version__} has no torch._inductor.config.{name}")
        setattr(config, name, value)
    compiled = torch.compile(f, mode=way.get("mode"), dynamic=False)
    if "progressive" not in way.get("environment", {}).get("TORCHINDUCTOR_FX_COMPILE_MODE", ""):
        return CompiledProgram(compiled)
    from torch._inductor.compile_fx_async import _ProgressiveFxCompile

    return CompiledProgram(compiled, lambda: _ProgressiveFxCompile._stat_optimized_runs > 0)


COMPILERS = {"eager": eager, "reflib": reflib_way, "TorchInductor": inductor_way}


def explained(graphs: list[Any]) -> dict[str, Any]:
    """Timeline events and candidates of all graphs of a compilation."""
    from reflib.observe.explain import Explanation

    explanations = [Explanation(graphs, i) for i in range(len(graphs))]
    # decisions of background tuning are not in the stages of the first compilation
    background = [getattr(g.call, "background", None) for g in graphs]
    decisions = [d for e in explanations for d in e.decisions]
    decisions += [d for b in background if b is not None and b.tuned is not None for d in b.tuned.decisions]
    return {
        "events": [asdict(event) for e in explanations for event in e.timeline],
        "candidates": [
            {"op": d.op, "sizes": d.sizes, "name": c.name, "status": c.status, "time_us": c.time_us, "why": c.why}
            for d in decisions if len(d.candidates) > 1 for c in d.candidates
        ],
    }  # fmt: skip


if __name__ == "__main__":
    serve(lambda job: [partial(start, job)])
