"""Child processes: one run of a module, its time limit, its fresh caches, and that nothing is left of it.

Each carries a mark in its environment, and so does all that it starts: a worker that has a session of its own,
or whose parent was killed, is found by that. A process is waited for until the system has closed its files: a
GPU works for it until then.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.processes import running, stat

ROOT = Path(__file__).resolve().parents[2]
MARK = "REFLIB_BENCH_CHILD"
OURS = uuid.uuid4().hex[:12]  # the first part of every mark of this process
END_SECONDS = 30
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


def run(module: str, words: list[str], timeout: float, environment: dict[str, str]) -> str:
    """Run ``python -m module words``; "" if it went well, else why not."""
    with tempfile.TemporaryFile("w+", errors="replace") as errors:  # no pipe: a worker may keep that open
        with started(module, words, environment, errors) as child:
            try:
                code = child.wait(timeout=max(1.0, timeout))
            except subprocess.TimeoutExpired:
                return f"timed out after {timeout:.0f} s"
        errors.seek(0)
        return why(code, errors.read()) if code else ""


def why(code: int, errors: str) -> str:
    """A line about a process that ended badly."""
    if code < 0:
        return f"crashed: {signal.Signals(-code).name}"
    last = [line for line in errors.splitlines() if line.strip()][-1:] or [""]
    return f"exit code {code}: {last[0][:200]}"


def one_job(job: dict[str, Any], timeout: float, environment: dict[str, str]) -> dict[str, Any]:
    """A run of ``compiling`` and what it found, or {"error": why}."""
    with tempfile.TemporaryDirectory(prefix="reflib-job-") as folder:
        result, job_file = Path(folder, "result.json"), Path(folder, "job.json")
        job_file.write_text(json.dumps({**job, "result": str(result)}))
        problem = run("tests.bench.compiling", [str(job_file)], timeout, environment)
        return {"error": problem} if problem else json.loads(result.read_text())


def section(name: str, job: dict[str, Any], timeout: float, environment: dict[str, str]) -> list[dict[str, Any]]:
    """All rows of a section of ``worker``. A contender that kills the process is a row; the rest goes on."""
    rows: list[dict[str, Any]] = []
    job = {**job, "skip": [], "done": []}
    with tempfile.TemporaryDirectory(prefix="reflib-job-") as folder:
        for attempt in range(6):
            results, job_file = Path(folder, f"{attempt}.jsonl"), Path(folder, "job.json")
            job_file.write_text(json.dumps(job))
            problem = run("tests.bench.worker", [name, str(job_file), str(results)], timeout, environment)
            lines = results.read_text().splitlines() if results.exists() else []
            found = [json.loads(line) for line in lines]
            job["done"] += [r["case"] for r in found if r["kind"] == "done"]
            last = next((r for r in reversed(found) if r["kind"] == "trying"), {})
            rows += [r for r in found if r["kind"] == "row"]
            if not problem:
                break
            rows.append(
                {
                    "kind": "row",
                    "case": last.get("case", name),
                    "who": last.get("who", ""),
                    "us": None,
                    "note": problem,
                }
            )
            if not last or problem.startswith("timed out"):
                break
            if name != "kernels":  # these have no list of finished cases: only what was not reached is run again
                job["skip"] += [[r["case"], r["who"]] for r in rows if "case" in r]
            elif last["who"] == "timing":
                job["done"].append(last["case"])
            else:
                job["skip"].append([last["case"], last["who"]])
                rows = [r for r in rows if r["case"] != last["case"] or r["who"] == last["who"]]
    return rows
