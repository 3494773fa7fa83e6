"""One notebook in a process of its own: `execute` starts `python -m reflib.lab.executing FOLDER` and waits.

papermill changes its process's working folder, and a kernel that does not answer can keep it from ending; so
each notebook has a process, and what is left of it is killed. FOLDER is private to one notebook:

    job.json     what to execute, from the parent
    k.json       the kernel's connection file; k-ipc-1 and so on are its sockets
    kernel       the kernel's process id
    result.json  {status, error}, written last

Sockets named by a relative path, jupyter's default, are shared by all kernels in one working folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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
from typing import Any, NoReturn

from reflib.lab import recording as recordings
from reflib.lab.machine import ROOT

CELL_TIMEOUT = 1800
SHUTDOWN_SECONDS = 20  # for a kernel to end once its last cell is done; then it is killed
STOP_SECONDS = 5  # for a notebook to end when the whole run is stopped
LONGEST_TEMPORARY = 60  # bytes of a folder's name: with a socket's after it, the system allows about 100


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
    stop: threading.Event | None = None,
) -> Result:
    """Run one notebook into `out` (notebooks/, logs/, rows/ under it); its failure is not raised.

    Its working folder is out/work/<slug>. Setting `stop` interrupts it.
    """
    out = out.resolve()
    work = out / "work" / path.stem
    for made in (*(out / name for name in ("notebooks", "logs", "rows")), work):
        made.mkdir(parents=True, exist_ok=True)
    rows_file = out / "rows" / f"{path.stem}.jsonl"
    rows_file.unlink(missing_ok=True)
    job = {
        "path": str(path.resolve()),
        "copy": str(out / "notebooks" / path.name),
        "log": str(out / "logs" / f"{path.stem}.log"),
        "work": str(work),
        "parameters": dict(parameters),
        "progress": progress,
    }
    start = time.perf_counter()
    own = {"REFLIB_LAB_ROWS": str(rows_file), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
    with tempfile.TemporaryDirectory(prefix="rl-", dir=short_folder(), ignore_cleanup_errors=True) as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job), encoding="utf-8")
        status, problem = watch(Path(folder), {**os.environ, **own, **(environment or {})}, stop)
    seconds = time.perf_counter() - start
    lines = rows_file.read_text().splitlines() if rows_file.exists() else []
    rows, claims = recordings.split_records(lines)
    return Result(path.stem, device, round(seconds, 1), status, problem, rows, claims)


def short_folder() -> str:
    """Where temporary folders go, unless sockets in it would have names too long."""
    usual = tempfile.gettempdir()
    return "/tmp" if len(os.fsencode(usual)) > LONGEST_TEMPORARY and os.path.isdir("/tmp") else usual


def watch(folder: Path, environment: Mapping[str, str], stop: threading.Event | None) -> tuple[str, str]:
    """(status, error) of the job in `folder`. Neither its process nor its kernel is there afterwards."""
    command = [sys.executable, "-m", "reflib.lab.executing", str(folder)]
    child = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL)
    stopped = False
    try:
        while child.poll() is None and not stopped:
            if stop is None:
                child.wait()
            else:
                stopped = stop.wait(0.05)
    except KeyboardInterrupt:
        stopped = True
    finally:
        end(child, folder)
    if stopped:
        return "interrupted", "stopped by Ctrl-C"
    try:
        found = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
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


def kill_kernel(folder: Path) -> None:
    """Whatever is left of the kernel and of the processes in its group."""
    with contextlib.suppress(OSError, ValueError):
        os.killpg(int((folder / "kernel").read_text()), signal.SIGKILL)


# ---- the child's side


def main(folder: Path) -> NoReturn:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    status, problem = run_papermill(folder, job)
    finish(folder, status, problem)


def interrupt(*_: Any) -> NoReturn:
    """Once: a second signal must not break off the kernel's shutdown."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_papermill(folder: Path, job: Mapping[str, Any]) -> tuple[str, str]:
    import papermill

    guard = Guard(folder, Path(job["copy"]))
    warnings.simplefilter("ignore")
    with open(job["log"], "w", buffering=1) as log:
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
                kernel_manager_class=kernel_manager(folder, guard),
                on_notebook_start=guard.begun,
                on_cell_executed=guard.executed,
                on_cell_error=guard.broke,
            )
        except KeyboardInterrupt:
            return "interrupted", "stopped by Ctrl-C"
        except Exception as error:
            log.write(f"\n{error}\n")
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


def kernel_manager(folder: Path, guard: Guard) -> Any:
    """A manager that writes down its kernel's process id, and tells the guard when it is to end."""
    import jupyter_client

    base: Any = jupyter_client.AsyncKernelManager

    class Manager(base):  # type: ignore[misc]
        async def start_kernel(self, **options: Any) -> None:
            await super().start_kernel(**options)
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
    temporary = folder / f"result.{threading.get_ident()}"
    temporary.write_text(json.dumps({"status": status, "error": problem}), encoding="utf-8")
    os.replace(temporary, folder / "result.json")
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
