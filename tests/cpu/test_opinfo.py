"""A fixed part of PyTorch's OpInfo samples; ``make test-opinfo`` runs all of them (see tests/opinfo)."""

from pathlib import Path

import pytest

from tests.forking import printed


@pytest.mark.parametrize("which", [pytest.param(["--shard", "1/20"], marks=pytest.mark.slow), ["--shard", "3/1200"]])
def test_one_sample_of_some_ops(tmp_path: Path, which: list[str]) -> None:
    printed("tests.opinfo", "--fresh", "--out", str(tmp_path / "results.jsonl"), "--limit", "1", *which)


def test_a_crash_is_one_sample() -> None:
    """A child that dies is one result, and the others are had all the same."""
    script = """
import os, signal
from tests.opinfo import judging, samples, workers
group = samples.Group("add", "float32", "forward")
def bad(case, say, until):
    say(at=case.key, phase="run")
    if case.key.endswith("|2"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return judging.Result(case.key, "ok")
workers.run_case = bad
got = {}
workers.run_tasks([workers.Task(((group, (0, 1, 2, 3)),))], 1, lambda r: got.__setitem__(r.key[-1], r.status))
assert got == {"0": "ok", "1": "ok", "2": "crash", "3": "ok"}, got
"""
    printed("-c", script)
