"""Child processes: one run of a module, its time limit, its fresh caches."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
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
    return subprocess.Popen(
        [sys.executable, "-m", module, *words],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        start_new_session=True,  # so that a time-out ends its own children too
        text=True,
        errors="replace",
    )


@contextlib.contextmanager
def started(
    module: str, words: list[str], environment: dict[str, str], errors: Any
) -> Iterator[subprocess.Popen[str]]:
    """The same; whatever is left of it and of its children is killed on the way out."""
    child = start(module, words, environment, errors)
    try:
        yield child
    finally:
        end(child)


def end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def run(module: str, words: list[str], timeout: float, environment: dict[str, str]) -> str:
    """Run ``python -m module words``; "" if it went well, else why not."""
    child = start(module, words, environment, subprocess.PIPE)
    try:
        _, errors = child.communicate(timeout=max(1.0, timeout))
    except BaseException as error:
        end(child)
        if isinstance(error, subprocess.TimeoutExpired):
            return f"timed out after {timeout:.0f} s"
        raise
    return why(child.returncode, errors) if child.returncode else ""


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
