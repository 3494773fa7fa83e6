"""`sweep_ways`: programs of growing size, compiled in several ways, each in a separate process with empty caches.

The first program of a process includes the one-time initialization of the compiler; the later ones show the cost of a
compilation itself. ``python -m reflib.lab.way_sweep FOLDER`` is the child process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reflib.lab.cold_child import COMPILERS, close, flat, own_caches, synchronize
from reflib.lab.measuring import time_cases
from reflib.lab.peers import Failure, _run_child
from reflib.lab.rows import Row, Rows, append, stamp
from reflib.lab.timing import Samples
from reflib.lab.tuning import _ended

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
    from reflib.lab.session import current

    here = current()
    rows: list[Row] = []
    for label, way in ways.items():
        job = {
            "way": dict(way), "places": [dict(p) for p in places], "device": str(here.device), "seed": here.seed,
            "dtype": str(here.dtype).removeprefix("torch."), "budget_s": budget_s, "timeout_s": timeout_s,
        }  # fmt: skip
        outcomes = outcomes_of(CHILD, job, {"way_program.py": source}, len(places), timeout_s)
        for place, found in zip(places, outcomes, strict=True):
            rows += _rows(found, {"name": name, "case": label, "at": dict(place), **stamp()})
    append({"kind": "row", **row.to_data()} for row in rows)
    return Rows(rows)


def outcomes_of(
    child: str, job: dict[str, Any], files: Mapping[str, str], count: int, timeout_s: float
) -> list[dict[str, Any] | Failure]:
    """Run the module `child` in a folder with the job and `files`; the `count` results that it wrote, with a Failure
    for each missing one."""
    with tempfile.TemporaryDirectory(prefix="reflib-ways-") as root:
        folder = Path(root)
        job = {**job, "caches": str(folder / "caches")}
        for name, text in {**files, "job.json": json.dumps(job)}.items():
            (folder / name).write_text(text, encoding="utf-8")
        code, errors = _run_child(root, timeout_s, child)
        written = folder / "results.jsonl"
        text = written.read_text(encoding="utf-8") if written.exists() else ""
    found: list[dict[str, Any] | Failure] = []
    for line in text.splitlines():
        data = json.loads(line)
        found.append(Failure(data["status"], data["note"]) if "status" in data else data)
    return found + [_ended(code, errors, timeout_s)] * (count - len(found))


def _rows(found: dict[str, Any] | Failure, shared: Mapping[str, Any]) -> list[Row]:
    return failed_rows(found, shared) if isinstance(found, Failure) else start_rows(found, shared, "own process")


def failed_rows(why: Failure, shared: Mapping[str, Any]) -> list[Row]:
    return [Row(metric="time", value=None, unit="µs", status=why.status, note=why.note, **shared)]


def start_rows(found: Mapping[str, Any], shared: Mapping[str, Any], note: str = "") -> list[Row]:
    """Rows for a result of `start_up`: "first call" (seconds) and "time" (µs)."""
    samples = Samples(tuple(found["samples"]), "wall")
    fields = {"clock": "wall", "note": note if found["right"] else "WRONG RESULTS", **shared}
    return [
        Row(metric="first call", value=found["first"], unit="s", **fields),
        Row(metric="time", value=samples.median * 1e6, unit="µs", spread=samples.spread * 1e6, **fields),
    ]


# -- the child process ------------------------------------------------------------------------------
def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    own_caches(Path(job["caches"]))
    sys.path.insert(0, str(folder))
    from reflib.lab.peer_child import refusal

    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        for place in job["places"]:
            try:
                result = one_place(job, place)
            except Exception as error:
                result = refusal(error)
            file.write(json.dumps(result) + "\n")
            file.flush()


def one_place(job: Mapping[str, Any], place: Place) -> dict[str, Any]:
    import importlib

    import torch

    from reflib.lab import session

    here = session.setup(device=job["device"].split(":")[0], dtype=job["dtype"], seed=job["seed"], quiet=True)
    device, way = torch.device(job["device"]), dict(job["way"])
    f, args = importlib.import_module("way_program").make(device=device, dtype=here.dtype, **place)
    torch._dynamo.reset()
    with torch.no_grad():
        want = f(*args)
        return start_up(lambda: COMPILERS[way.pop("compiler")](f, way).call, args, want, job["budget_s"], device)


def start_up(
    make: Callable[[], Callable[..., Any]], args: Sequence[Any], want: Any, budget_s: float, device: Any
) -> dict[str, Any]:
    """Seconds until `make` has returned ("made"), until its result was called once ("first"), and per warm call
    ("samples"); whether the first call returned `want` ("right"). {status, note} if timing fails."""
    synchronize(device)
    begin = time.perf_counter()
    call = make()
    made = time.perf_counter() - begin
    got = call(*args)
    synchronize(device)
    first = time.perf_counter() - begin
    right = all(close(x, y) for x, y in zip(flat(got), flat(want), strict=True))
    samples = time_cases({"it": lambda: call(*args)}, "wall", "warm", 15, budget_s, device)["it"]
    if isinstance(samples, Failure):
        return {"status": samples.status, "note": samples.note}
    return {"made": made, "first": first, "right": right, "samples": samples.seconds}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
