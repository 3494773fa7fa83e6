"""`reflib sweep`: jobs, their processes, what was found. Per step of a model each compiler has its own process; eager
and reflib with options are measured in the last of them, for to start one takes longer than to time. Results are
stored as they come.

    job     = model x mode x dtype x backend, on one device
    folder  = { results.jsonl      one line per job that ended: the job, seconds, rows (``lab.rows.Row``)
                sweep.<gpu>.json   the rows as a recording: for the book, and for `reflib compare`
                summary.json  report.html }

A job whose line has the same versions, commit, device and sizes is skipped: so a second call goes on where the first
one stopped, and after a commit everything is measured again. A crash, a hang or a missing library is a row with its
reason.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reflib.errors import LabError
from reflib.lab import machine, recording
from reflib.lab.children import crash
from reflib.lab.executing import ended_by_sigterm
from reflib.lab.rows import Row, Rows
from reflib.sweep import report
from reflib.sweep.model import models

MODES = ("inference", "training")
DTYPES = ("bfloat16", "float32")
BACKENDS = ("TorchInductor", "reflib", "eager")  # those that take longest begin first
COSTS = {"inference": 1.0, "training": 2.0}
LIBRARIES = ("transformers", "timm", "torchvision")
UNITS = {"error": "", "eager's error": "", "cold compile": "s", "graph breaks": "", "peak memory": "MiB", "kernels": ""}
Job = dict[str, Any]


@dataclass(frozen=True)
class Request:
    """What to sweep. ``limit``: seconds per job; ``seconds``: for all, after which nothing begins and what runs is
    ended without a row. ``models``: a file with a list ``MODELS``; "" for the registry. ``size``: see ``Model``."""

    device: str = "auto"
    only: tuple[str, ...] = ()
    modes: tuple[str, ...] = MODES
    dtypes: tuple[str, ...] = DTYPES
    backends: tuple[str, ...] = BACKENDS
    models: str = ""
    size: str = "auto"
    workers: int | None = None
    limit: float = 300.0
    seconds: float = float("inf")


def sweep(request: Request, out: Path | None = None, say: Callable[[str], Any] = print) -> int:
    """Measure into ``out`` (default: ``runs/sweep-<gpu>``). Returns 0, or 1 if a row of reflib is not ok, or if jobs
    are left. Raises LabError for a bad request, before anything runs."""
    device = machine.pick_device(request.device)
    about = stamp(device)
    slug = "cpu" if device.type == "cpu" else machine.gpu_slug(about["device"])
    folder = out or machine.ROOT / "runs" / f"sweep-{slug}"
    folder.mkdir(parents=True, exist_ok=True)
    jobs = plan(request, device)
    found = {key(line): line for line in stored(folder / "results.jsonl") if same(line, about)}
    todo = [job for job in jobs if key({"job": job}) not in found]
    say(f"{len(jobs)} measurements on {about['device']}, {len(jobs) - len(todo)} there already: {folder}")
    workers = request.workers or (min(8, max(1, (os.cpu_count() or 2) // 2)) if device.type == "cuda" else 1)
    try:
        with ended_by_sigterm(), open(folder / "results.jsonl", "a", encoding="utf-8") as file:
            for number, line in enumerate(carry_out(todo, workers, request, about, folder), 1):
                found[key(line)] = line
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                say(f"[{number}/{len(todo)}] {told(line)}")
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
    asked = [found.get(key({"job": job})) for job in jobs]
    left = asked.count(None)
    rows = Rows(Row.from_data({**line["about"], **row}) for line in found.values() for row in line["rows"])
    recording.dump(folder / f"sweep.{slug}.json", [row.to_data() for row in rows], [])
    text = report.write(folder, rows)
    say(text + (f"\n{left} measurements are left: the same command goes on" if left else ""))
    say(f"report: {folder / 'report.html'}")
    ended = [line["rows"][0].get("status", "ok") for line in asked if line and line["job"]["backend"] == "reflib"]
    return 1 if left or set(ended) - {"ok", "not installed"} else 0


def stamp(device: Any) -> dict[str, Any]:
    """The fields that all rows share; the versions of the models' libraries too."""
    versions = machine.versions()
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions = {**versions, name: importlib.metadata.version(name)}
    name, today = machine.describe(device).name, datetime.date.today().isoformat()
    return {"device": name, "versions": versions, "commit": machine.commit(), "date": today}


# -- jobs -------------------------------------------------------------------------------------------
def plan(request: Request, device: Any) -> list[Job]:
    """By dtype, then models that take longest first; the backends of one step one after the other."""
    every = {m.name: m for m in models(request.models)}
    checked("model", request.only, every)
    for what, given, known in (("mode", request.modes, MODES), ("dtype", request.dtypes, DTYPES)):
        checked(what, given, known)
    checked("backend", request.backends, (*BACKENDS, "max-autotune", *report.CHOICES))
    chosen = [m for m in every.values() if not request.only or m.name in request.only]
    real = device.type == "cuda" if request.size == "auto" else request.size == "real"
    steps = [
        (-m.cost * COSTS[mode], m, mode) for m in chosen for mode in request.modes if mode in m.modes
    ]  # fmt: skip
    steps.sort(key=lambda step: step[0])
    return [
        {"model": m.name, "mode": mode, "dtype": dtype, "backend": backend, "device": str(device), "real": real,
         "models": str(Path(request.models).resolve()) if request.models else "", "needs": m.needs}
        for dtype, (_, m, mode), backend in itertools.product(request.dtypes, steps, request.backends)
    ]  # fmt: skip


def checked(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    for name in given:
        if name not in known:
            raise LabError(f"no {what} {name!r}; there are: {', '.join(known)}")


def stored(path: Path) -> list[dict[str, Any]]:
    """The lines of an earlier call; the last one may be cut."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    found = []
    for line in lines:
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


def key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line["job"][name] for name in ("model", "mode", "dtype", "backend", "device", "real", "models"))


def same(line: dict[str, Any], about: dict[str, Any]) -> bool:
    return all(line["about"][name] == about[name] for name in ("device", "versions", "commit"))


# -- processes --------------------------------------------------------------------------------------
@dataclass
class Child:
    """A process, in a folder of its own, for jobs that differ in their backend only."""

    jobs: list[Job]
    folder: tempfile.TemporaryDirectory[str]
    process: Any = None
    since: float = field(default_factory=time.monotonic)  # when the first of ``jobs`` began
    told: int = 0  # results that were read
    over: bool = False

    def start(self, lock: Path, threads: int) -> Child:
        here, backends = Path(self.folder.name), [job["backend"] for job in self.jobs]
        job = {**self.jobs[0], "backends": backends, "lock": str(lock)}
        (here / "job.json").write_text(json.dumps(job), encoding="utf-8")
        path = os.pathsep.join(p for p in (str(machine.ROOT), os.environ.get("PYTHONPATH", "")) if p)
        with open(here / "stderr", "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "reflib.sweep.child", str(here)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, cwd=here,
                env={**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        return self

    def outcomes(self, limit: float) -> Iterator[tuple[Job, dict[str, Any], float]]:
        """(job, {status, note, values}, seconds) of those that ended since the last call. The process is over after the
        last job, a result that is not ok, and a job that takes longer than ``limit``; ``jobs`` has those left."""
        code, here = self.process.poll(), Path(self.folder.name)
        for outcome in stored(here / "results.jsonl")[self.told :]:
            self.told += 1
            job = self.jobs.pop(0)
            self.over = not self.jobs or outcome["status"] != "ok"
            yield job, outcome, self.lap()
        if not self.over and (code is not None or time.monotonic() - self.since > limit):
            why = {"status": "timed out", "note": f"after {limit:g} s"}
            if code is not None:
                why = asdict(crash(code, (here / "stderr").read_text(errors="replace")))
            self.over = True
            yield self.jobs.pop(0), {**why, "values": {}}, self.lap()

    def lap(self) -> float:
        """Seconds since the last one, or since the start."""
        last, self.since = self.since, time.monotonic()
        return self.since - last

    def end(self) -> None:
        """Kill it and its children, and remove its caches."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        with contextlib.suppress(OSError):  # a child of the child may still write
            self.folder.cleanup()


def carry_out(todo: Sequence[Job], workers: int, request: Request, about: dict[str, Any], folder: Path) -> Any:
    """Yields a line per job that ended, ``workers`` processes at once, until ``request.seconds`` are over."""
    waiting = deque[list[Job]]()
    for job in todo:  # a second compiler would find what the first has left in Dynamo's and Python's caches
        own = job["backend"] not in ("eager", *report.CHOICES)
        if not own and waiting and {**waiting[-1][0], "backend": job["backend"]} == job:
            waiting[-1].append(job)
        else:
            waiting.append([job])
    running, stop = list[Child](), time.monotonic() + request.seconds
    threads = max(1, (os.cpu_count() or 1) // workers)
    try:
        while (waiting or running) and time.monotonic() < stop:
            while waiting and len(running) < workers:
                jobs = waiting.popleft()
                if (needed := jobs[0]["needs"]) and importlib.util.find_spec(needed) is None:
                    missing = {"status": "not installed", "note": f"no module {needed}", "values": {}}
                    yield from (line_of(job, missing, 0.0, about) for job in jobs)
                    continue
                made = tempfile.TemporaryDirectory(prefix="reflib-sweep-", ignore_cleanup_errors=True)
                running.append(Child(jobs, made).start(folder / ".lock", threads))
            for child in list(running):
                yield from (line_of(*ended, about) for ended in child.outcomes(request.limit))
                if child.over:
                    child.end()
                    running.remove(child)
                    waiting.extendleft([child.jobs] if child.jobs else [])
            time.sleep(0.02)
    finally:
        for child in running:
            child.end()


# -- what was found ---------------------------------------------------------------------------------
def line_of(job: Job, outcome: dict[str, Any], seconds: float, about: dict[str, Any]) -> dict[str, Any]:
    rows = [row.to_data() for row in rows_of(job, outcome)]
    return {"job": job, "seconds": round(seconds, 1), "about": about, "rows": rows}


def rows_of(job: Job, outcome: dict[str, Any]) -> list[Row]:
    """A row per number; of a job that failed, the time's row says why."""
    at = {"model": job["model"], "mode": job["mode"], "dtype": job["dtype"]}
    shared: dict[str, Any] = {"name": "sweep", "case": job["backend"], "at": at}
    values = dict(outcome["values"])
    times = values.pop("times", {})
    rows = [
        Row(metric="time", value=us, unit="µs", spread=spread, clock=clock, note=outcome["note"], **shared)
        for clock, (us, spread) in times.items()
    ]
    if outcome["status"] != "ok":
        rows = [Row(metric="time", value=None, unit="µs", status=outcome["status"], note=outcome["note"], **shared)]
    numbers = {name: value for name, value in values.items() if value is not None and abs(value) < float("inf")}
    return rows + [Row(metric=name, value=value, unit=UNITS[name], **shared) for name, value in numbers.items()]


def told(line: dict[str, Any]) -> str:
    """A line of progress."""
    job, first = line["job"], Row.from_data(line["rows"][0])
    what = f"{first.value:,.0f} µs" if first.value is not None else first.status
    note = f" ({first.note})" if first.note else ""
    return f"{job['model']} {job['mode']} {job['dtype']} {job['backend']}: {what}{note}, {line['seconds']:.0f} s"
