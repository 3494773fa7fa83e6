"""A run's folder. The folders of jobs are complete or absent: they are written under a temporary name and renamed.

    runs/<name>/run.json                the request, and the version of reflib
                jobs/<id>/              notebook.ipynb  log.txt  rows.jsonl  result.json
                .lock                   locked by the process that executes the run
"""

import contextlib
import dataclasses
import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reflib import atomic
from reflib.batch.jobs import NotebookJob
from reflib.batch.work import FILES, JobOutcome, content
from reflib.errors import LabError
from reflib.lab import runner


class RunStore:
    """Stores the finished jobs of a run in `folder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.jobs = folder / "jobs"

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Context with a lock on the run. LabError if another process executes it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise LabError(f"{runner.shown(self.folder)} is being executed by another process") from None
            for left in self.jobs.glob(".*"):  # of a process that was killed while writing
                shutil.rmtree(left, ignore_errors=True)
            yield

    def write(self, name: str, data: Mapping[str, Any]) -> Path:
        """Write a JSON file atomically."""
        atomic.write(self.folder / name, json.dumps(data, indent=1) + "\n")
        return self.folder / name

    def keep(self, job: NotebookJob, outcome: JobOutcome) -> None:
        """Store a job. On OSError (no disk space) the previous state is unchanged."""
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
        """result.json of a job; {} without one."""
        try:
            return dict(json.loads((self.jobs / identity / "result.json").read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def outcome(self, identity: str) -> JobOutcome | None:
        """The stored outcome of a job, without the notebook and the log; None without a record."""
        known = {f.name for f in dataclasses.fields(JobOutcome)}
        found = {name: value for name, value in self.record(identity).items() if name in known}
        if not found:
            return None
        rows = content(self.jobs / identity / FILES["rows"])
        return JobOutcome(**{**found, "earlier": tuple(found["earlier"]), "rows": rows})


def load(folder: Path) -> dict[str, Any]:
    """run.json of a run. LabError without one."""
    try:
        return dict(json.loads((folder / "run.json").read_text(encoding="utf-8")))
    except OSError:
        raise LabError(f"{runner.shown(folder)} is not a run: it has no run.json") from None
    except ValueError as error:
        raise LabError(f"{runner.shown(folder / 'run.json')} is damaged: {error}") from None


def find(root: Path, name: str) -> Path:
    """The folder of a run, given as a path, a name under runs/, or "last". LabError if there is none."""
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
