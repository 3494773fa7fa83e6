"""Child processes of measurements: what may crash, or needs empty caches, runs there, with a time limit.

    parent    results, why = run("reflib.lab.way_sweep", job, {"way_program.py": source}, timeout_s)
    child     if __name__ == "__main__": serve(tasks)             # python -m reflib.lab.way_sweep FOLDER

FOLDER has `job.json` and the source texts. The child appends each result to `results.jsonl` as soon as it has it, so a
crash or the time limit costs only the results that are missing, and those are labelled rows.

`run_all` starts several such children together. A child that calls `turn` waits there, after its imports and before it
measures, until those before it have ended.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reflib.lab.machine import ROOT
from reflib.lab.rows import ROWS_FILE
from reflib.worker import cores

Job = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """The reason why a measurement is missing."""

    status: str
    note: str


# -- the parent -------------------------------------------------------------------------------------
def run(
    module: str, job: Mapping[str, Any], files: Mapping[str, str], timeout_s: float, cold: bool = False
) -> tuple[list[Job | Failure], Failure]:
    """Run `module` in a folder with the job and `files`: the results that it wrote, and why there are no more.

    Its device, dtype and seed are this notebook's, unless the job has others under "here". `cold`: with empty caches,
    or those in the folder that the job names under "caches"."""
    with _folder(job, files, cold) as folder:
        return _outcome(folder, timeout_s, module)


def run_all(
    module: str,
    jobs: Sequence[Mapping[str, Any]],
    files: Mapping[str, str],
    timeout_s: float,
    *,
    cold: bool = False,
    in_turn: bool = True,
) -> list[tuple[list[Job | Failure], Failure]]:
    """As `run`, for each job. Where there are cores enough, several children start side by side.

    in_turn: they wait for each other at `turn`, so only imports and the like overlap; the time limit does not count the
    waiting. Else they run side by side to the end, which is for what keeps one core busy each, with three to spare.
    """
    count = max(1, cores() // (2 if in_turn else 4))
    found: list[tuple[list[Job | Failure], Failure]] = []
    for i in range(0, len(jobs), count):
        some = jobs[i : i + count]
        if len(some) == 1:
            found.append(run(module, some[0], files, timeout_s, cold))
        else:
            found += _together(module, [{**job, "in turn": in_turn} for job in some], files, timeout_s, cold)
    return found


def _together(
    module: str, jobs: Sequence[Job], files: Mapping[str, str], timeout_s: float, cold: bool
) -> list[tuple[list[Job | Failure], Failure]]:
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(_folder(job, files, cold)) for job in jobs]
        pool = stack.enter_context(ThreadPoolExecutor(len(jobs)))
        for folder in folders:
            stack.callback((folder / "stop").touch)
        ends = [pool.submit(_outcome, folder, timeout_s, module) for folder in folders]
        for folder, end in zip(folders, ends, strict=True):
            _wait_until_ready(folder, end)
        found = []
        for folder, end in zip(folders, ends, strict=True):
            (folder / "go").touch()
            found.append(end.result())
        return found


def _wait_until_ready(folder: Path, end: Future[Any]) -> None:
    """Until the child waits for its turn, or has ended. One that takes no turns is not waited for."""
    takes_turns = json.loads((folder / "job.json").read_text(encoding="utf-8"))["in turn"]
    while takes_turns and not (folder / "ready").exists() and not end.done():
        time.sleep(0.01)


@contextlib.contextmanager
def _folder(job: Mapping[str, Any], files: Mapping[str, str], cold: bool) -> Iterator[Path]:
    """A child's folder, with its job and the files in it."""
    from reflib.lab.session import current

    with tempfile.TemporaryDirectory(prefix="reflib-child-") as root:
        folder = Path(root)
        caches = {"caches": str(folder / "caches")} if cold else {}
        job = {"here": current().arguments(), **caches, **job}
        for name, text in {**files, "job.json": json.dumps(job)}.items():
            (folder / name).write_text(text, encoding="utf-8")
        yield folder


def _outcome(folder: Path, timeout_s: float, module: str) -> tuple[list[Job | Failure], Failure]:
    code, errors = _run_child(str(folder), timeout_s, module)
    written = folder / "results.jsonl"
    lines = written.read_text(encoding="utf-8").splitlines() if written.exists() else []
    results = [Failure(**data) if "status" in data else data for data in map(json.loads, lines)]
    return results, Failure("timed out", f"after {timeout_s:g} s") if code is None else crash(code, errors)


def crash(code: int, errors: str) -> Failure:
    """What an exit code and the last words of a process say."""
    last = errors.strip().splitlines()[-1:] or [""]
    return Failure("crashed", _signal_name(-code) if code < 0 else f"exit code {code} {last[0][:120]}".strip())


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _run_child(folder: str, timeout_s: float, module: str) -> tuple[int | None, str]:
    """The exit code (None after a timeout) and stderr."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH", "")) if p)
    inherited = {k: v for k, v in os.environ.items() if k != ROWS_FILE}
    child = subprocess.Popen(
        [sys.executable, "-m", module, folder], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, env={**inherited, "PYTHONPATH": path}, text=True, errors="replace",
        start_new_session=True,  # so that a timeout kills its children too
    )  # fmt: skip
    begin = time.time()
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                _, errors = child.communicate(timeout=0.2)
                return child.returncode, errors
            if _is_late(Path(folder), begin, timeout_s):
                raise subprocess.TimeoutExpired(module, timeout_s)
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        return None, ""


def _is_late(folder: Path, begin: float, timeout_s: float) -> bool:
    """Whether a child has had its time, without what it waited for its turn, or is to stop."""
    ready, go = folder / "ready", folder / "go"
    if (folder / "stop").exists():
        return True
    if ready.exists():
        waited = (go.stat().st_mtime if go.exists() else time.time()) - ready.stat().st_mtime
        begin += max(0.0, waited)
    return time.time() - begin > timeout_s


# -- the child --------------------------------------------------------------------------------------
def turn() -> None:
    """In a child of `run_all`: wait until those before it have ended. In others, and the second time, nothing."""
    folder, parent = Path(sys.argv[1]), os.getppid()
    if (folder / "go").exists() or not json.loads((folder / "job.json").read_text(encoding="utf-8")).get("in turn"):
        return
    (folder / "ready").touch()  # once: from when to when it waited is not counted (`_is_late`)
    while not (folder / "go").exists():
        if os.getppid() != parent:
            raise SystemExit("the parent has ended")
        time.sleep(0.002)


def serve(tasks: Callable[[Job], Iterable[Callable[[], Job]]]) -> None:
    """Write what each of the job's tasks returns; of one that raises, that it was refused."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    if "caches" in job:
        own_caches(Path(job["caches"]))
    os.environ.update(job.get("environment", {}))
    sys.path.insert(0, str(folder))  # worker processes can import the sources too
    with (folder / "results.jsonl").open("a", encoding="utf-8") as file:
        for task in tasks(job):
            try:
                result = task()
            except Exception as error:
                result = refusal(error)
            file.write(json.dumps(result) + "\n")
            file.flush()


def own_caches(folder: Path) -> None:
    """Use the caches in `folder`, which may be empty. Must run before torch is imported."""
    for name in ("REFLIB_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        path = folder / name.lower()
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.environ[name] = str(path)
    os.environ["REFLIB_CACHE_DECISIONS"] = "1"  # lab.setup defaults to 0


def refusal(error: Exception) -> Job:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    # skip a first line that only names the backend
    reason = next((line for line in lines if not line.endswith("raised:")), lines[0])
    return {"status": "refused", "note": f"{type(error).__name__}: {reason[:120]}"}
