"""A fixed part of PyTorch's OpInfo samples; ``make test-opinfo`` runs all of them (see tests/opinfo)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import python


def run(out: Path, root: Path, *args: str) -> None:
    command = [sys.executable, "-m", "tests.opinfo", "--fresh", "--out", str(out / "results.jsonl"), *args]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_one_sample_of_every_twentieth_op(tmp_path: Path, root: Path) -> None:
    run(tmp_path, root, "--limit", "1", "--shard", "1/20")


def test_through_torch_compile(tmp_path: Path, root: Path) -> None:
    run(tmp_path, root, "--limit", "1", "--shard", "3/300", "--entry", "dynamo")


def test_a_crash_is_one_sample() -> None:
    """A child that dies is one result, and the others are had all the same."""
    script = """
import os, signal
from tests.opinfo import batch, samples, workers
group = samples.Group("add", "float32", "forward")
real = samples.samples(group)
def bad(cases, say, **how):
    for c in cases:
        say(at=c.key, phase="run")
        if c.key.endswith("|2"):
            os.kill(os.getpid(), signal.SIGSEGV)
        say(result=batch.Result(c.key, "ok"))
workers.run_batch = bad
got = {}
workers.run_tasks([workers.Task(((group, (0, 1, 2, 3)),))], 1, lambda r: got.__setitem__(r.key[-1], r.status))
assert got == {"0": "ok", "1": "ok", "2": "crash", "3": "ok"}, got
"""
    python(script)
