"""`sweep_ways`: programs of growing size, compiled in several ways, each in a separate process with empty caches
(unless REFLIB_LAB_BUDGET is below 1).

The first program of a process includes the one-time initialization of the compiler; the later ones show the cost of a
compilation itself. This module is the child process too.
"""

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from reflib.lab.children import Failure, Job, run_all, serve, turn
from reflib.lab.cold_child import COMPILERS, close
from reflib.lab.measuring import failed_rows, share, time_cases
from reflib.lab.rows import Row, Rows, record, stamp
from reflib.lab.timing import Samples, synchronize

CHILD = "reflib.lab.way_sweep"
Place = Mapping[str, Any]


def sweep_ways(
    name: str,
    source: str,
    ways: Mapping[str, Mapping[str, Any]],
    places: Sequence[Place],
    *,
    timeout_s: float = 120.0,
    budget_s: float = 0.2,
) -> Rows:
    """Two rows per way and place: "first call" (seconds, compiling included) and "time" (µs per call, wall clock around
    a loop of calls).

    `source` is Python text that defines `make(device, dtype, **place)`, returning a function and its arguments. Ways
    are as for `lab.cold_starts`. `timeout_s` applies per way; places not reached in time are rows with that status.
    """
    rows: list[Row] = []
    jobs = [{"way": dict(way), "places": [dict(p) for p in places], "budget_s": budget_s} for way in ways.values()]
    outcomes = run_all(CHILD, jobs, {"way_program.py": source}, timeout_s, cold=share() >= 1)
    for label, (found, why) in zip(ways, outcomes, strict=True):
        for place, one in zip(places, found + [why] * (len(places) - len(found)), strict=True):
            rows += start_rows(one, {"name": name, "case": label, "at": dict(place), **stamp()}, "own process")
    return record(rows)


def start_rows(found: Job | Failure, shared: Mapping[str, Any], note: str = "") -> list[Row]:
    """Rows for a result of `start_up`: "first call" (seconds) and "time" (µs)."""
    if isinstance(found, Failure):
        return failed_rows(found, shared)
    samples = Samples(tuple(found["samples"]), "wall")
    fields = {"clock": "wall", "note": note if found["right"] else "WRONG RESULTS", **shared}
    return [
        Row(metric="first call", value=found["first"], unit="s", **fields),
        Row(metric="time", value=samples.median * 1e6, unit="µs", spread=samples.spread * 1e6, **fields),
    ]


# -- the child process ------------------------------------------------------------------------------
def tasks(job: Job) -> Iterator[Any]:
    return (partial(one_place, job, place) for place in job["places"])


def one_place(job: Job, place: Place) -> Job:
    import torch

    from reflib.lab import session

    here, way = session.setup(**job["here"], quiet=True), dict(job["way"])
    f, args = importlib.import_module("way_program").make(device=here.device, dtype=here.dtype, **place)
    torch._dynamo.reset()
    with torch.no_grad():
        want = f(*args)
        return start_up(lambda: COMPILERS[way.pop("compiler")](f, way).call, args, want, job["budget_s"], here.device)


def start_up(
    make: Callable[[], Callable[..., Any]], args: Sequence[Any], want: Any, budget_s: float, device: Any
) -> Job:
    """Seconds until `make` has returned ("made"), until its result was called once ("first"), and per warm call
    ("samples"); whether the first call returned `want` ("right"). {status, note} if timing fails."""
    synchronize(device)
    turn()
    begin = time.perf_counter()
    call = make()
    made = time.perf_counter() - begin
    got = call(*args)
    synchronize(device)
    first = time.perf_counter() - begin
    right = close(got, want)
    samples = time_cases({"it": lambda: call(*args)}, "wall", "warm", 15, budget_s, device)["it"]
    if isinstance(samples, Failure):
        return {"status": samples.status, "note": samples.note}
    return {"made": made, "first": first, "right": right, "samples": samples.seconds}


if __name__ == "__main__":
    serve(tasks)
