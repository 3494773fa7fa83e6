"""`lab.measure`: times cases and returns tidy rows; the notebooks' only entry point for measurements."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from reflib.errors import LabError
from reflib.lab import timing
from reflib.lab.children import Failure
from reflib.lab.peers import Peer, run_peer
from reflib.lab.rows import Row, Rows, record, stamp
from reflib.lab.timing import Samples

if TYPE_CHECKING:
    import torch

Case = Callable[[], Any] | Peer
PerCase = float | Mapping[str, float] | None


def measure(
    name: str,
    cases: Mapping[str, Case],
    *,
    at: Mapping[str, Any] | None = None,
    bytes: PerCase = None,
    flops: PerCase = None,
    clock: str | timing.Clock = "auto",
    cache: str = "warm",
    rounds: int = 30,
    budget_s: float = 1.0,
    device: torch.device | None = None,
) -> Rows:
    """Time all cases, interleaved, and return one row per number.

    Each case is a function of no arguments, or `lab.peer(source)` for one that may crash. `bytes` and `flops` are what
    one call moves and computes, for all cases or as a mapping by case; they add rows in GB/s and TFLOP/s. `at` is the
    point in a sweep. `clock` is "auto" (graph replay on a GPU, wall on a CPU, processor on a busy one), "graph",
    "events", "wall", "processor" (this process's time on the cores), or a function `(fn, device) -> sampler`.
    `cache="cold"` flushes the last-level cache before each call. Times are in µs.
    """
    from reflib.lab.session import current

    if not cases:
        raise LabError(f"measure({name!r}): no cases")
    device = device or current().device
    results = time_cases(cases, clock, cache, rounds, budget_s, device)
    clock_name = clock if isinstance(clock, str) else getattr(clock, "__name__", "own")
    shared = {"name": name, "at": dict(at or {}), "cache": cache, **stamp()}
    return record(
        row
        for case, result in results.items()
        for row in result_rows(case, result, bytes, flops, {"clock": clock_name, **shared})
    )


def time_cases(
    cases: Mapping[str, Case],
    clock: str | timing.Clock,
    cache: str,
    rounds: int,
    budget_s: float,
    device: torch.device,
) -> dict[str, Samples | Failure]:
    """Samples of each case, in the order given. Cases in this process are timed first, then the peers."""
    results: dict[str, Samples | Failure] = {}
    samplers: dict[str, tuple[timing.Sampler, str, str]] = {}
    with on_device(device):
        for case, fn in cases.items():
            if isinstance(fn, Peer):
                continue
            try:
                samplers[case] = timing.make_sampler(fn, clock, cache, device)
            except Exception as error:
                results[case] = explain_failure(case, error)
        budget = budget_s * max(1, len(samplers))
        fns = {case: sampler for case, (sampler, _, _) in samplers.items()}
        taken = timing.interleave(fns, max(1, round(rounds * share())), budget * share()) if fns else {}
    for case, seconds in taken.items():
        results[case] = Samples(seconds, samplers[case][1], samplers[case][2])
    del samplers, fns
    for case, peer in cases.items():
        if isinstance(peer, Peer):
            results[case] = run_peer(peer, clock, cache, rounds, budget_s, device)
    return {case: results[case] for case in cases}


def share() -> float:
    """REFLIB_LAB_BUDGET=0.1 takes a tenth of the time, where the numbers are not used, as in `make test`."""
    return float(os.environ.get("REFLIB_LAB_BUDGET", "1"))


def explain_failure(case: str, error: Exception) -> Failure:
    """A limitation of the machine as a Failure; errors of the notebook are raised."""
    if isinstance(error, timing.NotHere):
        return Failure("not here", str(error))
    if timing.is_out_of_memory(error):
        return Failure("out of memory", "")
    error.add_note(f"while measuring the case {case!r}")
    raise error


def on_device(device: torch.device) -> Any:
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def result_rows(
    case: str, result: Samples | Failure, bytes: PerCase, flops: PerCase, shared: Mapping[str, Any]
) -> list[Row]:
    """The rows of one case: the time, and the rates computed from it."""
    if isinstance(result, Failure):
        return failed_rows(result, {**shared, "case": case})
    fields = {**shared, "clock": result.clock, "note": result.note, "case": case}
    middle, spread = result.median, result.spread
    rows = [Row(metric="time", value=middle * 1e6, unit="µs", spread=spread * 1e6, **fields)]
    for metric, unit, scale, amount in (
        ("bandwidth", "GB/s", 1e-9, _of(bytes, case)),
        ("rate", "TFLOP/s", 1e-12, _of(flops, case)),
    ):
        if amount is not None and middle > 0:
            rate = amount * scale / middle
            rows.append(Row(metric=metric, value=rate, unit=unit, spread=rate * spread / middle, **fields))
    return rows


def failed_rows(why: Failure, shared: Mapping[str, Any]) -> list[Row]:
    """The row in place of those of a case that has no numbers."""
    return [Row(metric="time", value=None, unit="µs", status=why.status, note=why.note, **shared)]


def _of(amount: PerCase, case: str) -> float | None:
    return amount.get(case) if isinstance(amount, Mapping) else amount
