"""What the benchmark rests on: nothing of a child is left, and a disturbed device is noticed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from reflib.lab.timing import Samples
from tests.bench import children, matmul_report, matmul_worker, quiet
from tests.bench.contenders import EAGER, PEER_MAX, TUNED, US

# a worker in a session of its own, whose parent does not wait for it
PARENT = """import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open(sys.argv[1], "w").write(str(worker.pid))
time.sleep(float(sys.argv[2]))
"""


@pytest.fixture
def module(tmp_path: Path) -> tuple[str, dict[str, str]]:
    (tmp_path / "a_parent.py").write_text(PARENT)
    return "a_parent", {"PYTHONPATH": str(tmp_path)}


def worker_of(pid: Path) -> int:
    until = time.monotonic() + 30
    while not (pid.exists() and pid.read_text()) and time.monotonic() < until:
        time.sleep(0.02)
    return int(pid.read_text())


def test_a_childs_workers_end_with_it(tmp_path: Path, module: tuple[str, dict[str, str]]) -> None:
    name, environment = module
    with children.started(name, [str(tmp_path / "pid"), "600"], environment, subprocess.DEVNULL) as child:
        worker = worker_of(tmp_path / "pid")
        assert children.running(worker)
    assert child.returncode and not children.running(worker)


def test_a_child_that_ended_well_leaves_nothing(tmp_path: Path, module: tuple[str, dict[str, str]]) -> None:
    name, environment = module
    assert children.run(name, [str(tmp_path / "pid"), "0"], 60, environment) == ""
    assert not children.running(worker_of(tmp_path / "pid"))


def test_all_that_is_left_is_found(tmp_path: Path, module: tuple[str, dict[str, str]]) -> None:
    name, environment = module
    child = children.start(name, [str(tmp_path / "pid"), "600"], environment, subprocess.DEVNULL)
    worker = worker_of(tmp_path / "pid")
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        children.end_all()
        assert not children.running(worker) and not children.running(child.pid) and other.poll() is None
    finally:
        other.kill()
        other.wait()
        children.end(child)


class Scripted(quiet.Reference):
    """A reference whose samples are given: times idle, the last for ever."""

    def __init__(self, *values: float):
        self.device, self.patience, self.idle, self.fn = torch.device("cpu"), 1e9, 1.0, lambda: None
        self.values = values

        def told() -> Iterator[float]:
            yield from values
            while True:
                yield values[-1]

        self.sample = told().__next__


@pytest.mark.parametrize(
    "readings, attempts, disturbed",
    [([1.0], 1, False), ([1.0, 1.1, 1.0], 1, False), ([1.0, 1.0, 3.0, 1.0], 2, False), ([2.0], 3, True)],
)
def test_a_disturbed_case_is_timed_again_then_labelled(
    readings: list[float], attempts: int, disturbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reading is a number of samples: before, among the contenders and after, attempt by attempt."""
    reference = Scripted(*(r for r in readings for _ in range(quiet.SAMPLES)))

    def timed(fns: dict, *_: object) -> dict[str, Samples]:
        among = tuple(reference.sample() for _ in range(quiet.SAMPLES))
        return {who: Samples(among if who == quiet.REFERENCE else (1.0,) * 5, "own") for who in fns}

    monkeypatch.setattr(quiet, "time_cases", timed)
    monkeypatch.setattr(quiet, "WAIT", 0.0)
    found, about = quiet.time_quietly({"a": lambda: None}, reference, 5, 0.1)
    assert list(found) == ["a"] and (about["attempts"], about["disturbed"]) == (attempts, disturbed)


def test_a_real_reference_reads_about_one() -> None:
    reference = quiet.Reference(torch.device("cpu"))
    assert reference.read() >= 1.0 and reference.idle > 0


def test_without_peers_only_eager_and_ours_are_timed() -> None:
    class Case:
        name = "x"

    def asked(peers: bool, ready: list[str]) -> list[str]:
        return matmul_worker.people(Case, {"peers": peers, "ready": ready})  # type: ignore[arg-type]

    assert asked(False, ["x"]) == [EAGER, TUNED]
    assert asked(True, []) == [EAGER, US, TUNED]
    assert asked(True, ["x"]) == [EAGER, PEER_MAX, US, TUNED]


def test_the_report_marks_what_was_disturbed() -> None:
    fact = {"kind": "row", "set": "splitk", "case": "splitk 16x4096x16 fp16", "spread": 0.01}
    state = {"reference": [1.0, 2.5, 1.0], "disturbed": True, "attempts": 3}
    rows = [{**fact, **state, "who": EAGER, "us": 10.0}, {**fact, **state, "who": TUNED, "us": 5.0}]
    text, promises = matmul_report.of_set("splitk", rows, 1, "cuda", rivals=False)
    assert "1.0%!" in text and "disturbed; reference before, among, after: 1.00, 2.50, 1.00" in text
    assert not any(PEER_MAX in str(p) for p in promises) and len(promises) == 2
    text, promises = matmul_report.of_set("splitk", rows, 1, "cuda")
    assert len(promises) == 3
