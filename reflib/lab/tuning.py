"""`lab.cold_starts`: compiles one program in several ways, each in a separate process with empty caches.

Measures the time to the first result and to the end of tuning, the time per call after that, and that of single calls
before. A way that crashes, fails or exceeds the time limit becomes a labelled row.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reflib.errors import LabError
from reflib.lab.children import Failure, Job, run_all
from reflib.lab.measuring import failed_rows, share
from reflib.lab.rows import Row, Rows, record, stamp
from reflib.lab.timing import Samples
from reflib.timeline import Event, Timeline

CHILD = "reflib.lab.cold_child"
SMALL = """
import torch


def make(device, dtype):
    return lambda x: torch.relu(x + 1), [torch.ones(64, device=device, dtype=dtype)]
"""
METRICS = (("first call", "s"), ("tuned", "s"), ("time", "µs"), ("longest call", "µs"))
SERVICE = (("calls", ""), ("p50", "µs"), ("p99", "µs"), ("longest", "µs"))


@dataclass(frozen=True)
class ColdStarts:
    """The measurements, with one case per way.

    rows: the metrics of METRICS.   calls: single calls, with ``at`` in seconds after the start.
    service: the metrics of SERVICE, of the calls "while tuning" and "afterwards"; each with a pause of 2 ms before it.
    right: whether the results are those of eager, up to the order of summation.
    timelines, candidates: of reflib's ways; a candidate is a dict with ``op``, ``sizes``, ``name``, ``status``,
        ``time_us`` and ``why``.
    """

    rows: Rows
    calls: Rows = field(default_factory=Rows)
    service: Rows = field(default_factory=Rows)
    timelines: Mapping[str, Timeline] = field(default_factory=dict)
    candidates: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    right: Mapping[str, bool] = field(default_factory=dict)

    def statuses(self, case: str) -> dict[str, int]:
        """Number of this way's candidates by status."""
        return dict(Counter(c["status"] for c in self.candidates.get(case, ())))

    def value(self, case: str, metric: str) -> float | None:
        """The value of a metric; None if the way was not measured or failed."""
        return self.rows.value(case, metric) if (case, metric) in {(r.case, r.metric) for r in self.rows} else None

    def _repr_html_(self) -> str:
        return self.rows._repr_html_()

    def __repr__(self) -> str:
        return repr(self.rows)


def cold_starts(
    name: str, source: str, ways: Mapping[str, Mapping[str, Any]], *, timeout_s: float = 120.0, **arguments: Any
) -> ColdStarts:
    """Compile the program of ``make`` in each of the ways in turn, and measure its calls. Where there are
    cores enough, the processes import and make the inputs side by side before that; see `run_all`.

    `source` is Python text that defines `make(device, dtype, **arguments)`, returning a function and its arguments as a
    tuple. reflib's measuring processes import it too, so it may define custom ops. If it defines `register(compiler)`,
    that is called first, with "reflib" or "TorchInductor".

    A way is a dict: `compiler` is "reflib", "TorchInductor" or "eager"; `again` names an earlier way whose caches are
    used; `mode`, `config` (a dict) and `environment` (a dict) are for TorchInductor; all others are reflib's options.
    `timeout_s` applies per way, imports included. First, each compiler compiles a small program in a similar process,
    so that the first way does not include reading the compiler's files from disk (unless REFLIB_LAB_BUDGET is below 1).
    """
    _check(ways)
    json.dumps([dict(w) for w in ways.values()])
    json.dumps(arguments)
    found = ColdStarts(Rows())
    with tempfile.TemporaryDirectory(prefix="reflib-cold-") as root:
        if share() >= 1:
            compilers = dict.fromkeys(w["compiler"] for w in ways.values())
            small = [_job({"compiler": c}, Path(root) / c, timeout_s) for c in compilers]
            run_all(CHILD, small, {"cold_program.py": SMALL}, timeout_s, in_turn=False)
        labels = list(ways)
        caches = [Path(root) / str(labels.index(way.get("again", label))) for label, way in ways.items()]
        jobs = [_job(way, at, timeout_s, arguments) for way, at in zip(ways.values(), caches, strict=True)]
        for label, (one, why) in zip(ways, run_all(CHILD, jobs, {"cold_program.py": source}, timeout_s), strict=True):
            found = _joined(found, name, label, (*one, why)[0])
    record((*found.rows, *found.calls, *found.service))
    return found


def _check(ways: Mapping[str, Mapping[str, Any]]) -> None:
    seen: list[str] = []
    for label, way in ways.items():
        if way.get("compiler") not in ("reflib", "TorchInductor", "eager"):
            raise LabError(f"way {label!r}: compiler={way.get('compiler')!r} is not reflib, TorchInductor or eager")
        if "again" in way and way["again"] not in seen:
            raise LabError(f"way {label!r}: again={way['again']!r} is no earlier way")
        seen.append(label)


def _job(way: Mapping[str, Any], caches: Path, timeout_s: float, arguments: Mapping[str, Any] | None = None) -> Job:
    return {"way": dict(way), "arguments": dict(arguments or {}), "caches": str(caches), "timeout_s": timeout_s,
            "environment": way.get("environment", {})}  # fmt: skip


def _joined(found: ColdStarts, name: str, label: str, data: Job | Failure) -> ColdStarts:
    """``found`` extended by one way."""
    shared: dict[str, Any] = {"name": name, "case": label, "cache": "cold start", **stamp()}
    if isinstance(data, Failure):
        return replace(found, rows=found.rows + failed_rows(data, shared))
    events = Timeline(Event(**e) for e in data["events"])
    one = {**shared, "name": f"{name}, calls", "metric": "time", "unit": "µs", "cache": "", "clock": "wall"}
    seen = {**shared, "name": f"{name}, service", "cache": "", "clock": "wall"}
    return ColdStarts(
        found.rows + list(_rows(data, shared)),
        found.calls + [Row(value=us, at={"second": second}, **one) for second, us in data["calls"]],
        found.service + [
            Row(value=said[metric], metric=metric, unit=unit, at={"phase": phase}, **seen)
            for phase, said in data["service"].items() for metric, unit in SERVICE
        ],
        {**found.timelines, **({label: events} if events else {})},
        {**found.candidates, label: data["candidates"]},
        {**found.right, label: data["right"]},
    )


def _rows(data: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[Row]:
    note = "" if data["right"] else "WRONG RESULTS"
    for metric, unit in METRICS:
        if metric == "time":
            samples = Samples(tuple(data["samples"]["seconds"]), data["samples"]["clock"], data["samples"]["note"])
            yield Row(metric=metric, value=samples.median * 1e6, unit=unit, spread=samples.spread * 1e6,
                      clock=samples.clock, note=note or samples.note, **shared)  # fmt: skip
        else:
            value = data[metric.split()[0]]
            status = "ok" if value is not None else "not done"
            yield Row(metric=metric, value=value, unit=unit, clock="wall", status=status, note=note, **shared)
