"""One notebook in a process of its own: `execute` starts `python -m reflib.lab.executing FOLDER` and waits.

papermill changes its process's working folder, and a kernel that does not answer can keep it from ending; so
each notebook has a process, and what is left of it is killed. FOLDER is private to one notebook:

    job.json     what to execute, from the parent
    k.json       the kernel's connection file; k-ipc-1 and so on are its sockets
    kernel       the kernel's process id
    result.json  {status, error}, written last

The process ends with its parent, however that ended: a pipe between them, on which nothing is said, closes then.
Sockets named by a relative path, jupyter's default, are shared by all kernels in one working folder.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from reflib import atomic
from reflib.lab import recording as recordings
from reflib.lab.machine import ROOT

CELL_TIMEOUT = 1800
SHUTDOWN_SECONDS = 20  # for a kernel to end once its last cell is done; then it is killed
STOP_SECONDS = 5  # for a notebook to end when the whole run is stopped
DISK_FULL = 74  # an exit status, sysexits.h's for trouble with a file: there was no room to say more
LONGEST_TEMPORARY = 60  # bytes of a folder's name: with a socket's after it, the system allows about 100


class Stop(Protocol):
    """A `threading.Event`, or what answers as one: whether to stop, after waiting for it this long."""

    def wait(self, timeout: float, /) -> bool: ...


@dataclass
class Result:
    """What came of one notebook."""

    notebook: str
    device: str
    seconds: float
    status: str  # "ok" | "failed" | "interrupted"
    error: str = ""
    rows: list[dict[str, Any]] = field(default_factory=list)
    claims: list[dict[str, Any]] = field(default_factory=list)


# ---- the parent's side


def execute(
    path: Path,
    out: Path,
    parameters: Mapping[str, Any],
    device: str,
    progress: Mapping[str, Any] | bool,
    environment: Mapping[str, str] | None = None,
    stop: Stop | None = None,
    limit: float | None = None,
) -> Result:
    """Run one notebook into `out` (notebooks/, logs/, rows/ under it); its failure is not raised.

    Its working folder is out/work/<slug>. Setting `stop` interrupts it; after `limit` seconds it is ended, and failed.
    """
    out = out.resolve()
    work = out / "work" / path.stem
    for made in (*(out / name for name in ("notebooks", "logs", "rows")), work):
        made.mkdir(parents=True, exist_ok=True)
    rows_file = out / "rows" / f"{path.stem}.jsonl"
    log = out / "logs" / f"{path.stem}.log"
    for stale in (rows_file, log):
        stale.unlink(missing_ok=True)
    job = {
        "path": str(path.resolve()),
        "copy": str(out / "notebooks" / path.name),
        "log": str(log),
        "work": str(work),
        "parameters": dict(parameters),
        "progress": progress,
    }
    start = time.perf_counter()
    own = {"REFLIB_LAB_ROWS": str(rows_file), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    with tempfile.TemporaryDirectory(prefix="rl-", dir=short_folder(), ignore_cleanup_errors=True) as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
        with contextlib.nullcontext() if progress else open(log, "ab") as told:  # a bar needs the terminal
            status, problem = watch(Path(folder), {**os.environ, **own, **(environment or {})}, stop, limit, told)
    seconds = time.perf_counter() - start
    rows, claims = records_of(rows_file.read_bytes() if rows_file.exists() else b"")
    return Result(path.stem, device, round(seconds, 1), status, problem, rows, claims)


def records_of(appended: bytes) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows, claims) of what a notebook appended; a line that a killed kernel left half-written is passed over."""
    whole = []
    for line in appended.decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            if isinstance(json.loads(line), dict):
                whole.append(line)
    return recordings.split_records(whole)


def short_folder() -> str:
    """Where temporary folders go, unless sockets in it would have names too long."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > LONGEST_TEMPORARY and os.path.isdir("/tmp") else usual


def watch(
    folder: Path,
    environment: Mapping[str, str],
    stop: Stop | None,
    limit: float | None = None,
    told: IO[bytes] | None = None,
) -> tuple[str, str]:
    """(status, error) of the job in `folder`. Neither its process nor its kernel is there afterwards.

    `told` is where they write what they have to say besides.
    """
    command = [sys.executable, "-m", "reflib.lab.executing", str(folder)]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stderr=told)
    until = time.monotonic() + limit if limit else float("inf")
    stopped = late = False
    try:
        while child.poll() is None and not (stopped or late):
            if stop is not None:
                stopped = stop.wait(0.05)
            else:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(None if limit is None else max(0.0, until - time.monotonic()))
            late = time.monotonic() > until and child.poll() is None
    except KeyboardInterrupt:
        stopped = True
    finally:
        end(child, folder)
    if stopped:
        return "interrupted", "stopped by Ctrl-C"
    if late:
        return "failed", f"it took longer than its limit of {(limit or 0) / 60:.3g} min"
    try:
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        if child.returncode == DISK_FULL:
            return "failed", f"no space is left on the disk of {folder.parent}: free some, or set TMPDIR"
        return "failed", f"the process that executes it ended with status {child.returncode}"
    return found["status"], found["error"]


def end(child: subprocess.Popen[bytes], folder: Path) -> None:
    """Ask the child to end, then insist; then its kernel, which has a process group of its own."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_SECONDS)
    kill_kernel(folder)
    child.kill()
    child.wait()
    if child.stdin:
        child.stdin.close()


def kill_kernel(folder: Path) -> None:
    """Whatever is left of the kernel and of the processes in its group."""
    with contextlib.suppress(OSError, ValueError):
        os.killpg(int((folder / "kernel").read_text()), signal.SIGKILL)


# ---- the child's side


def main(folder: Path) -> NoReturn:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    threading.Thread(target=end_with_parent, args=(folder,), daemon=True).start()
    try:
        status, problem = run_papermill(folder, job)
    except KeyboardInterrupt:  # while papermill was imported, which takes a second
        status, problem = "interrupted", "stopped by Ctrl-C"
    except OSError as error:  # the log, on a full disk
        status, problem = "failed", last_line(error)
    finish(folder, status, problem)


def end_with_parent(folder: Path) -> None:
    """Standard input is a pipe that only the parent holds: its end is the parent's."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    kill_kernel(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def interrupt(*_: Any) -> NoReturn:
    """Once: a second signal must not break off the kernel's shutdown."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_papermill(folder: Path, job: Mapping[str, Any]) -> tuple[str, str]:
    import papermill

    guard = Guard(folder, Path(job["copy"]))
    warnings.simplefilter("ignore")
    with open(job["log"], "a", buffering=1) as log:
        try:
            papermill.execute_notebook(
                job["path"],
                job["copy"],
                parameters=job["parameters"],
                kernel_name="python3",
                progress_bar=job["progress"],
                stdout_file=log,
                stderr_file=log,
                start_timeout=120,
                execution_timeout=CELL_TIMEOUT,
                cwd=job["work"],
                config=kernel_config(folder),
                kernel_manager_class=kernel_manager(folder, guard, log),
                on_notebook_start=guard.begun,
                on_cell_executed=guard.executed,
                on_cell_error=guard.broke,
            )
        except KeyboardInterrupt:
            return "interrupted", "stopped by Ctrl-C"
        except Exception as error:
            log.write(f"\n{error}\n")
            if type(error).__name__ == "DeadKernelError":  # nbclient's; it has no more to say
                return "failed", "its kernel died: killed, out of memory, or crashed"
            return "failed", last_line(error)
    return "ok", ""


def kernel_config(folder: Path) -> Any:
    """Kernels talk over files in a private folder, not over TCP ports open to the host's other users."""
    from traitlets.config import Config

    return Config({"KernelManager": {"transport": "ipc", "connection_file": str(folder / "k.json")}})


class Guard:
    """Ends this process SHUTDOWN_SECONDS after the last cell, when a kernel no longer answers.

    papermill asks the kernel what language it speaks, and to end; it waits as long as for a cell. Its methods
    are nbclient's hooks. What every cell gave is in `copy` by then.
    """

    def __init__(self, folder: Path, copy: Path):
        self.folder, self.copy, self.last = folder, copy, -1
        self.timer = threading.Timer(SHUTDOWN_SECONDS, self.too_late)
        self.timer.daemon = True

    def begun(self, notebook: Any) -> None:
        code = [i for i, c in enumerate(notebook.cells) if c.cell_type == "code" and c.source.strip()]
        self.last = max(code, default=-1)

    def executed(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        if cell_index == self.last:
            self.over()

    def broke(self, cell: Any, cell_index: int, execute_reply: Any) -> None:
        if "raises-exception" not in cell.metadata.get("tags", []):
            self.over()

    def over(self) -> None:
        if not self.timer.is_alive():
            self.timer.start()

    def too_late(self) -> None:
        kill_kernel(self.folder)
        finish(self.folder, *state_of(self.copy))


def kernel_manager(folder: Path, guard: Guard, log: IO[str]) -> Any:
    """A manager that writes down its kernel's process id, and tells the guard when it is to end. What the kernel's
    process says by itself goes to the log."""
    import jupyter_client

    base: Any = jupyter_client.AsyncKernelManager

    class Manager(base):  # type: ignore[misc]
        async def start_kernel(self, **options: Any) -> None:
            await super().start_kernel(**{**options, "stderr": log})
            (folder / "kernel").write_text(str(getattr(self.provisioner, "pid", "")))

        async def shutdown_kernel(self, now: bool = False, restart: bool = False) -> None:
            guard.over()
            await super().shutdown_kernel(now=now, restart=restart)

    return Manager


def state_of(copy: Path) -> tuple[str, str]:
    """(status, error) from the copy that papermill saves after every cell."""
    from reflib.lab import notebook as nb

    for cell in nb.read(copy).cells:
        broke = cell.metadata.get("papermill", {}).get("exception")
        for output in cell.get("outputs", []):
            if broke and output.output_type == "error":
                return "failed", f"{output.ename}: {output.evalue}"[:200]
    return "ok", ""


def finish(folder: Path, status: str, problem: str) -> NoReturn:
    """Write the result and end now: nothing that a library left behind can keep this process."""
    try:
        atomic.write(folder / "result.json", json.dumps({"status": status, "error": problem}))
    except OSError as error:
        os._exit(DISK_FULL if error.errno == errno.ENOSPC else 1)
    sys.stderr.flush()
    os._exit(0)


def last_line(error: BaseException) -> str:
    """The line of a notebook's failure that a table has room for."""
    name, value = getattr(error, "ename", ""), getattr(error, "evalue", "")
    text = f"{name}: {value}" if name else f"{type(error).__name__}: {error}"
    lines = [line for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if line.strip()]
    return (lines or ["?"])[0][:200]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
