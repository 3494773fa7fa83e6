"""`lab.measure_peer`: a peer at several places of a sweep, in one child process.

Imports and the first compilation take seconds, so one child measures all places and writes each result immediately. A
place at which it crashes becomes a labelled row, and a new child continues with the rest.

``python -m reflib.lab.peer_sweep FOLDER`` is the child process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from reflib.lab.measuring import Samples, _rows
from reflib.lab.peers import Failure, _run_child, _signal_name
from reflib.lab.rows import Row, Rows, append, stamp

Place = Mapping[str, Any]
ATTEMPTS = 4


def measure_peer(
    name: str,
    case: str,
    source: str,
    places: Sequence[Place],
    *,
    bytes: Callable[[Place], float] | None = None,
    cache: str = "warm",
    clock: str = "auto",
    rounds: int = 30,
    budget_s: float = 0.5,
    timeout_s: float = 180.0,
) -> Rows:
    """Rows as from `lab.measure`, with `at` each place. `source` defines `make(device, dtype, **place)`, as for
    `lab.peer`. `bytes`: moved per call, by place. `timeout_s` is for all places; the rest are rows with that status."""
    from reflib.lab.session import current

    here = current()
    job = {
        "clock": clock, "cache": cache, "rounds": rounds, "budget_s": budget_s, "device": str(here.device),
        "dtype": str(here.dtype).removeprefix("torch."), "seed": here.seed, "places": [dict(p) for p in places],
    }  # fmt: skip
    found = _walk(job, source, timeout_s)
    rows: list[Row] = []
    for number, place in enumerate(places):
        shared = {"name": name, "at": dict(place), "cache": cache, "clock": clock, **stamp()}
        moved = bytes(place) if bytes else None
        rows += _rows(case, found[number], moved, None, shared)
    append({"kind": "row", **row.to_data()} for row in rows)
    return Rows(rows)


def _walk(job: dict[str, Any], source: str, timeout_s: float) -> dict[int, Samples | Failure]:
    """One result per place, from as many child processes as needed."""
    deadline = time.monotonic() + timeout_s
    found: dict[int, Samples | Failure] = {}
    left = list(range(len(job["places"])))
    for _ in range(ATTEMPTS):
        if not left or time.monotonic() >= deadline:
            break
        with tempfile.TemporaryDirectory(prefix="reflib-peer-") as folder:
            (Path(folder) / "peer_source.py").write_text(source, encoding="utf-8")
            (Path(folder) / "job.json").write_text(json.dumps({**job, "todo": left}), encoding="utf-8")
            code, errors = _run_child(folder, max(1.0, deadline - time.monotonic()), "reflib.lab.peer_sweep")
            results = Path(folder) / "results.jsonl"
            for line in results.read_text(encoding="utf-8").splitlines() if results.exists() else []:
                number, data = json.loads(line)
                found[number] = _outcome(data)
        left = [n for n in left if n not in found]
        if left and code is not None:  # it crashed at this place
            last = errors.strip().splitlines()[-1:] or [""]
            why = _signal_name(-code) if code < 0 else f"exit code {code} {last[0][:120]}".strip()
            found[left.pop(0)] = Failure("crashed", why)
    return found | {n: Failure("timed out", f"after {timeout_s:g} s") for n in left}


def _outcome(data: dict[str, Any]) -> Samples | Failure:
    if "seconds" in data:
        note = "; ".join(p for p in ("own process", data["note"]) if p)
        return Samples(tuple(data["seconds"]), data["clock"], note)
    return Failure(data["status"], data["note"])


def main(folder: Path) -> None:
    """The child process: writes one line per place as soon as it is measured."""
    from reflib.lab.peer_child import refusal, time_peer

    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        for number in job["todo"]:
            try:
                result = time_peer(folder / "peer_source.py", {**job, "arguments": job["places"][number]})
            except Exception as error:
                result = refusal(error)
            file.write(json.dumps([number, result]) + "\n")
            file.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
