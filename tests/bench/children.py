"""Child processes: their rows, time limits and fresh caches, and that nothing is left of them.

Each carries a mark in its environment, and so does all that it starts: a worker that has a session of its own,
or whose parent was killed, is found by that. A process is waited for until the system has closed its files: a
GPU works for it until then.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.processes import running, stat

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[2]
MARK = "REFLIB_BENCH_CHILD"
OURS = uuid.uuid4().hex[:12]  # the first part of every mark of this process
END_SECONDS = 30
ATTEMPTS = 8  # a process that a contender killed is started again without that contender
CACHES = ("REFLIB_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


@contextlib.contextmanager
def fresh_caches() -> Iterator[dict[str, str]]:
    """Environment variables that name empty cache folders."""
    with tempfile.TemporaryDirectory(prefix="reflib-bench-") as folder:
        named = {name: str(Path(folder, name.lower())) for name in CACHES}
        for path in named.values():
            Path(path).mkdir(mode=0o700)
        yield named


def start(module: str, words: list[str], environment: dict[str, str], errors: Any) -> subprocess.Popen[str]:
    """``python -m module words`` with ``errors`` for its stderr."""
    mark = f"{OURS}-{uuid.uuid4().hex[:12]}"
    child = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, **environment, MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,  # so that a time-out ends its own children too
        text=True,
        errors="replace",
    )
    child.mark = mark  # type: ignore[attr-defined]
    return child


@contextlib.contextmanager
def started(module: str, words: list[str], environment: dict[str, str], errors: Any) -> Iterator[subprocess.Popen[str]]:
    """The same; whatever is left of it and of its children is killed on the way out."""
    child = start(module, words, environment, errors)
    try:
        yield child
    finally:
        end(child)


def end(child: subprocess.Popen[str]) -> None:
    """Kill it and all that it started, and wait until they are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    end_marked(child.mark, child.pid)  # type: ignore[attr-defined]
    child.wait()


def end_all() -> None:
    """The same for every child of this process, should one be left."""
    end_marked(OURS)


def end_marked(mark: str, session: int = -1) -> None:
    """Kill the processes whose mark begins so or that are in the session; wait until they have ended."""
    seen: set[int] = set()
    end = time.monotonic() + END_SECONDS
    while True:
        seen |= set(marked(mark, session))
        left = {pid for pid in seen if running(pid)}
        if not left:
            return
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > end:
            print(f"still there after {END_SECONDS} s: processes {sorted(left)}", file=sys.stderr, flush=True)
            return
        time.sleep(0.05)


def marked(mark: str, session: int) -> Iterator[int]:
    """Process ids. (None where there is no /proc.)"""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        with contextlib.suppress(OSError):
            begins = any(v.startswith(wanted) for v in (folder / "environ").read_bytes().split(b"\0"))
            if pid != os.getpid() and (begins or stat(pid)[3] == str(session)):
                yield pid


def why(code: int, errors: str) -> str:
    """A line about a process that ended badly."""
    if code < 0:
        return f"crashed: {signal.Signals(-code).name}"
    last = [line for line in errors.splitlines() if line.strip()][-1:] or [""]
    return f"exit code {code}: {last[0][:200]}"


@dataclass
class Ended:
    """problem: "" if all went well. late: it was out of time, or told to stop. at: what it was trying last."""

    problem: str
    late: bool = False
    at: Row = field(default_factory=dict)


def follow(
    function: str, job: Row, environment: dict[str, str], deadline: float, keep: Callable[[Row], None],
    stall: float = float("inf"), stopped: threading.Event | None = None,
) -> Ended:  # fmt: skip
    """One run of a function (see child.py) until it ends, or says nothing for ``stall`` seconds; ``keep`` gets each
    row as soon as it is there."""
    with tempfile.TemporaryDirectory(prefix="reflib-job-") as folder:
        job_file, results, errors = (Path(folder, n) for n in ("job.json", "rows.jsonl", "stderr"))
        job_file.write_text(json.dumps(job))
        results.touch()
        words = [function, str(job_file), str(results)]
        # (errors go to a file: a worker may keep a pipe open)
        with (
            errors.open("wb") as err, results.open(encoding="utf-8") as file,
            started("tests.bench.child", words, environment, err) as child,
        ):  # fmt: skip
            part, at, heard = "", {}, time.monotonic()
            while True:
                code, now = child.poll(), time.monotonic()
                *lines, part = (part + file.read()).split("\n")
                for row in map(json.loads, lines):
                    heard = now
                    if row["kind"] == "trying":
                        at = row
                    else:
                        keep(row)
                if code is not None:
                    return Ended(why(code, errors.read_text(errors="replace")) if code else "", at=at)
                if now > deadline or (stopped and stopped.is_set()):
                    return Ended("out of time", True, at)
                if now - heard > stall:
                    return Ended(f"hung: nothing for {stall:.0f} s", at=at)
                time.sleep(0.05)


def one(function: str, job: Row, seconds: float, environment: dict[str, str]) -> Row:
    """What a function that yields one row found, or {"error": why it did not}."""
    rows: list[Row] = []
    ended = follow(function, job, environment, time.monotonic() + max(1.0, seconds), rows.append)
    return {"error": ended.problem} if ended.problem else rows[-1]
