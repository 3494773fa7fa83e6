"""A run's folder. A job's folder is whole or not there: it is written beside its place, and renamed.

    runs/<name>/run.json                what was asked, and by which reflib
                jobs/<id>/              notebook.ipynb  log.txt  rows.jsonl  result.json
                .lock                   held by the process that executes the run
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reflib import atomic
from reflib.batch.jobs import Job
from reflib.batch.work import FILES, Outcome, content
from reflib.errors import LabError
from reflib.lab import runner


class Store:
    """The jobs that are done, in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.jobs = folder / "jobs"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process executes this run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise LabError(f"{runner.shown(self.folder)} is being executed by another process") from None
            for left in self.jobs.glob(".*"):  # by a process that was killed as it wrote
                shutil.rmtree(left, ignore_errors=True)
            yield

    def write(self, name: str, data: Mapping[str, Any]) -> Path:
        """A file of JSON, whole or not at all."""
        atomic.write(self.folder / name, json.dumps(data, indent=1) + "\n")
        return self.folder / name

    def keep(self, job: Job, outcome: Outcome) -> None:
        """OSError where there is no room; then what was there before is there still."""
        self.jobs.mkdir(parents=True, exist_ok=True)
        record = {
            "job": job.id,
            "notebook": job.notebook,
            "parameters": dict(job.parameters),
            "device": job.device,
            **outcome.to_data(),
        }
        with atomic.folder(self.jobs / job.id) as new:
            for key, name in FILES.items():
                (new / name).write_bytes(getattr(outcome, key))
            (new / "result.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    def record(self, identity: str) -> dict[str, Any]:
        """result.json of a job; nothing without one."""
        try:
            return dict(json.loads((self.jobs / identity / "result.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def outcome(self, identity: str) -> Outcome | None:
        """What is kept of a job, without the notebook and the log; None without a record."""
        known = {f.name for f in dataclasses.fields(Outcome)}
        found = {name: value for name, value in self.record(identity).items() if name in known}
        if not found:
            return None
        rows = content(self.jobs / identity / FILES["rows"])
        return Outcome(**{**found, "earlier": tuple(found["earlier"]), "rows": rows})


def load(folder: Path) -> dict[str, Any]:
    """run.json of a run; LabError where there is none."""
    try:
        return dict(json.loads((folder / "run.json").read_text(encoding="utf-8")))
    except OSError:
        raise LabError(f"{runner.shown(folder)} is no run: it has no run.json") from None
    except ValueError as error:
        raise LabError(f"{runner.shown(folder / 'run.json')} is damaged: {error}") from None


def find(root: Path, name: str) -> Path:
    """A run by its folder, by its name under runs/, or "last"."""
    runs = root / "runs"
    if name == "last":
        every = [p.parent for p in runs.glob("*/run.json")]
        if not every:
            raise LabError(f"there is no run in {runner.shown(runs)} yet")
        return max(every, key=lambda p: (p / "run.json").stat().st_mtime)
    for folder in (Path(name), runs / name):
        if (folder / "run.json").exists():
            return folder.resolve()
    there = ", ".join(sorted(p.parent.name for p in runs.glob("*/run.json"))) or "none"
    raise LabError(f"no run {name!r}; in {runner.shown(runs)} there are: {there}")
