"""Runs one job on a worker, in a temporary folder; all results are returned as bytes."""

import contextlib
import errno
import os
import socket
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from reflib.lab import executing
from reflib.lab.executing import last_line


@dataclass
class JobOutcome:
    """The result of a job. `rows`: rows and claims that the notebook appended, as JSON lines."""

    status: str  # "ok" | "failed" | "interrupted"
    error: str = ""
    seconds: float = 0.0
    began: float = 0.0  # Unix time in seconds, by the worker's clock
    worker: str = ""
    attempt: int = 1
    beside: int = 1  # number of jobs that ran at that time, including this one
    earlier: tuple[str, ...] = ()  # the errors of earlier attempts
    notebook: bytes = field(default=b"", repr=False)
    log: bytes = field(default=b"", repr=False)
    rows: bytes = field(default=b"", repr=False)

    def to_data(self) -> dict[str, Any]:
        """The fields that are not stored in separate files."""
        return {k: v for k, v in asdict(self).items() if k not in FILES}

    def records(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """(rows, claims)."""
        return executing.records_of(self.rows)


FILES = {"notebook": "notebook.ipynb", "log": "log.txt", "rows": "rows.jsonl"}


class Cancelled:
    """An executing.Stop: set when the task is cancelled or its client is gone."""

    def __init__(self) -> None:
        from distributed import get_worker

        self.worker = get_worker()
        self.key = self.worker.get_current_task()

    def wait(self, timeout: float, /) -> bool:
        time.sleep(timeout)
        task = self.worker.state.tasks.get(self.key)
        return task is None or task.state == "cancelled"


def do(text: str, slug: str, parameters: Mapping[str, Any], device: str, limit: float | None, bar: bool) -> JobOutcome:
    """Execute a notebook, as a Dask task. Errors are in the outcome, with the log, not raised.

    limit: seconds.   bar: whether to show a progress bar, if this process has the terminal.
    """
    from distributed import get_worker

    worker = get_worker()
    name = worker.name if isinstance(worker.name, str) else f"worker {worker.name}"
    began = time.time()
    environment = {}
    gpu = gpu_of(worker)
    if device == "cuda" and gpu:
        environment["CUDA_VISIBLE_DEVICES"] = gpu
    progress = {"desc": slug, "position": int(worker.name), "leave": False} if bar else False
    try:
        with tempfile.TemporaryDirectory(prefix="rl-", ignore_cleanup_errors=True) as folder:
            source, out = Path(folder) / f"{slug}.ipynb", Path(folder) / "out"
            source.write_text(text, encoding="utf-8")
            result = executing.execute(
                source, out, parameters, device, progress, environment, stop=Cancelled(), limit=limit
            )
            paths = {"notebook": f"notebooks/{slug}.ipynb", "log": f"logs/{slug}.log", "rows": f"rows/{slug}.jsonl"}
            files = {key: content(out / path) for key, path in paths.items()}
        return JobOutcome(result.status, result.error, result.seconds, began, name, **files)  # type: ignore[arg-type]
    except Exception as error:
        return JobOutcome("failed", because(error), round(time.time() - began, 1), began, name)


def gpu_of(worker: Any) -> str:
    """The GPU of a worker: in this process the number it was started with, elsewhere its first visible GPU."""
    if "GPU" not in worker.state.total_resources:
        return ""
    own = getattr(worker, "reflib_gpu", "")
    return own or os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]


def because(error: BaseException, place: Path | None = None) -> str:
    """An error in one line, with a remedy for a full disk. `place`: the folder (default: the temporary one)."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free some" if place else "free some, or set TMPDIR"
        return f"no space is left on the disk of {place or tempfile.gettempdir()} ({socket.gethostname()}): {remedy}"
    return last_line(error)


def content(path: Path) -> bytes:
    """The bytes of a file; empty if the job ended before writing it."""
    with contextlib.suppress(FileNotFoundError):
        return path.read_bytes()
    return b""
