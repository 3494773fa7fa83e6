"""Executes one notebook in a separate process: `execute` starts `python -m reflib.lab.executing FOLDER` and waits.

papermill changes the working folder of its process and can hang on an unresponsive kernel. So each notebook has its
own process, which is killed with its children at the end. FOLDER is private to one notebook:

    job.json     the job, written by the parent
    k.json       the kernel's connection file; k-ipc-1 etc. are its sockets
    kernel       the kernel's process id
    result.json  {status, error}, written last

The process ends when its parent ends for any reason, because a pipe from the parent then closes. The sockets need
absolute paths: with relative ones, jupyter's default, all kernels in one working folder would share them.
"""

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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

from reflib import atomic
from reflib.lab.machine import ROOT

CELL_TIMEOUT = 1800
SHUTDOWN_SECONDS = 20  # for a kernel to end after its last cell; then it is killed
STOP_SECONDS = 5  # for a notebook to end when the whole run is stopped
DISK_FULL = 74  # exit status (EX_IOERR of sysexits.h) when not even the error can be written
LONGEST_TEMPORARY = 60  # bytes of a path; socket paths are limited to about 100


class Stop(Protocol):
    """A `threading.Event` or compatible: `wait` returns whether to stop, after at most `timeout` seconds."""

    def wait(self, timeout: float, /) -> bool: ...


@dataclass
class NotebookResult:
    """The result of executing one notebook."""

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
) -> NotebookResult:
    """Run one notebook, with outputs in `out` (notebooks/, logs/, rows/). A failure is in the result, not raised.

    Its working folder is out/work/<slug>. Setting `stop` interrupts it; after `limit` seconds it is killed and failed.
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
        with contextlib.nullcontext() if progress else open(log, "ab") as output:  # a bar needs the terminal
            status, problem = watch(Path(folder), {**os.environ, **own, **(environment or {})}, stop, limit, output)
    seconds = time.perf_counter() - start
    rows, claims = records_of(rows_file.read_bytes() if rows_file.exists() else b"")
    return NotebookResult(path.stem, device, round(seconds, 1), status, problem, rows, claims)


def records_of(appended: bytes) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(rows, claims) that a notebook appended. An incomplete line of a killed kernel is skipped."""
    found: dict[Any, list[dict[str, Any]]] = {"row": [], "claim": []}
    for line in appended.decode("utf-8", "replace").splitlines():
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and record.get("kind") in found:
                found[record.pop("kind")].append(record)
    return found["row"], found["claim"]


def short_folder() -> str:
    """The system's temporary folder, or /tmp if socket paths in it would be too long."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > LONGEST_TEMPORARY and os.path.isdir("/tmp") else usual


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Context in which SIGTERM ends what runs in the block, then this process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def watch(
    folder: Path,
    environment: Mapping[str, str],
    stop: Stop | None,
    limit: float | None = None,
    output: IO[bytes] | None = None,
) -> tuple[str, str]:
    """Run the job in `folder`; returns (status, error). Its process and kernel have ended afterwards.

    `output`: file for their stderr.
    """
    command = [sys.executable, "-m", "reflib.lab.executing", str(folder)]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stderr=output)
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
    """Interrupt the child, then kill it; then kill its kernel, which has its own process group."""
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
    """Kill the remaining processes of the kernel's group."""
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
    except KeyboardInterrupt:  # while papermill is imported, which takes a second
        status, problem = "interrupted", "stopped by Ctrl-C"
    except OSError as error:  # the log, on a full disk
        status, problem = "failed", last_line(error)
    finish(folder, status, problem)


def end_with_parent(folder: Path) -> None:
    """Exit when standard input, a pipe that only the parent holds open, is closed."""
    with contextlib.suppress(OSError):
        while os.read(0, 1):
            pass
    kill_kernel(folder)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def interrupt(*_: Any) -> NoReturn:
    """Raise once: a second signal must not interrupt the kernel's shutdown."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_papermill(folder: Path, job: Mapping[str, Any]) -> tuple[str, str]:
    import papermill

    guard = ShutdownTimer(folder, Path(job["copy"]))
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
            if type(error).__name__ == "DeadKernelError":  # of nbclient, without details
                return "failed", "its kernel died: killed, out of memory, or crashed"
            return "failed", last_line(error)
    return "ok", ""


def kernel_config(folder: Path) -> Any:
    """Kernels use Unix sockets in a private folder, not TCP ports, which other users of the host could reach."""
    from traitlets.config import Config

    return Config({"KernelManager": {"transport": "ipc", "connection_file": str(folder / "k.json")}})


class ShutdownTimer:
    """Ends this process SHUTDOWN_SECONDS after the last cell if the kernel has become unresponsive.

    papermill's requests for the kernel's language and shutdown have the long time limit of a cell. The methods are
    hooks of nbclient. By then `copy` has the outputs of all cells.
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


def kernel_manager(folder: Path, guard: ShutdownTimer, log: IO[str]) -> Any:
    """A kernel manager that saves its kernel's process id, starts the guard's timer at shutdown and sends the kernel's
    own output to the log."""
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
    """(status, error) read from the copy that papermill saves after each cell."""
    from reflib.lab import notebook as nb

    for cell in nb.read(copy).cells:
        broke = cell.metadata.get("papermill", {}).get("exception")
        for output in cell.get("outputs", []):
            if broke and output.output_type == "error":
                return "failed", f"{output.ename}: {output.evalue}"[:200]
    return "ok", ""


def finish(folder: Path, status: str, problem: str) -> NoReturn:
    """Write the result and exit at once, without waiting for threads that a library left running."""
    try:
        atomic.write(folder / "result.json", json.dumps({"status": status, "error": problem}))
    except OSError as error:
        os._exit(DISK_FULL if error.errno == errno.ENOSPC else 1)
    sys.stderr.flush()
    os._exit(0)


def last_line(error: BaseException) -> str:
    """The last line of an error, short enough for a table."""
    name, value = getattr(error, "ename", ""), getattr(error, "evalue", "")
    text = f"{name}: {value}" if name else f"{type(error).__name__}: {error}"
    lines = [line for line in re.sub(r"\x1b\[[\d;]*m", "", text).splitlines() if line.strip()]
    return (lines or ["?"])[0][:200]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
