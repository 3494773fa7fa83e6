"""Child processes of measurements: side by side, and of programs compiled from nothing; ways that fail say why."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from reflib import lab
from reflib.errors import LabError
from reflib.lab import children, cold_child, session
from reflib.lab.rows import ROWS_FILE
from reflib.lab.tuning import METRICS

CHILD = """
import sys, time
from reflib.lab.children import serve, turn

def tasks(job):
    def one():
        time.sleep(job["before"])
        turn()
        began = time.time()
        time.sleep(job["after"])
        return {"began": began, "ended": time.time()}
    return [one] * job.get("tasks", 1)

if __name__ == "__main__":
    serve(tasks)
"""


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module that runs there."""
    session.setup(device="cpu", quiet=True)
    monkeypatch.setattr(children, "cores", lambda: 16)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "child_of_a_test.py").write_text(CHILD)
    return "child_of_a_test"


def test_children_that_take_turns_overlap_before_their_turn_alone(child: str) -> None:
    jobs = [{"before": 0.3 * i, "after": 0.1} for i in (2, 0, 1)]
    found = [results[0] for results, _ in children.run_all(child, jobs, {}, 20)]
    assert all(isinstance(one, dict) for one in found)
    assert all(a["ended"] <= b["began"] for a, b in pairwise(found)), "in the order of the jobs"


def test_what_waits_is_not_late_and_what_hangs_is(child: str) -> None:
    jobs = [{"before": 0, "after": 100}, {"before": 0, "after": 0}]
    (none, why), (results, _) = children.run_all(child, jobs, {}, 3)
    assert not none and why.status == "timed out" and len(results) == 1, "it waited 3 s, which do not count"


def test_a_second_task_does_not_count_the_waiting_before_the_first(child: str) -> None:
    jobs = [{"before": 0, "after": 2.5}, {"before": 0, "after": 0.4, "tasks": 3}]
    _, (results, why) = children.run_all(child, jobs, {}, 3)
    assert len(results) == 3 and why.status == "crashed", why


def test_an_interrupt_ends_them(child: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(children, "_wait_until_ready", interrupted)
    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        children.run_all(child, [{"before": 0, "after": 100}] * 2, {}, 60)
    assert time.monotonic() - begin < 30


def test_alone_there_is_no_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "job.json").write_text(json.dumps({}))
    monkeypatch.setattr(sys, "argv", ["child", str(tmp_path)])
    children.turn()
    assert not (tmp_path / "ready").exists()


# -- one program compiled from nothing in several ways ------------------------------------------------
PROGRAM = """
import ctypes, os, time, torch

def register(compiler):
    if os.environ.get("MISDEED") == "crash":
        ctypes.string_at(0)
    if os.environ.get("MISDEED") == "sleep":
        time.sleep(100)

def make(device, dtype, n):
    return lambda x: torch.relu(x + n), (torch.randn(n, n, device=device, dtype=dtype),)
"""


@pytest.fixture(autouse=True)
def here():
    return lab.setup(device="cpu", quiet=True)


@pytest.mark.slow  # (three chapters use it)
def test_a_way_has_its_times_its_calls_and_what_the_compiler_said(tmp_path, monkeypatch):
    monkeypatch.setenv(ROWS_FILE, str(tmp_path / "rows"))
    ways = {"eager": {"compiler": "eager"}, "reflib": {"compiler": "reflib"}}
    found = lab.cold_starts("t", PROGRAM, ways, n=64)
    assert found.rows.cases == ["eager", "reflib"] and all(found.right.values())
    for case in ways:
        assert [(r.metric, r.unit, r.ok) for r in found.rows.where(case=case)] == [(m, u, True) for m, u in METRICS]
    assert found.value("reflib", "first call") == found.value("reflib", "tuned"), "nothing is tuned later"
    assert found.value("reflib", "first call") > found.value("eager", "first call")
    assert found.value("nobody", "tuned") is None
    stages = [s.name for s in found.timelines["reflib"].only("stage")]
    assert stages[0] == "lower" and stages[-1] == "wrap" and "eager" not in found.timelines
    assert found.candidates["reflib"] == [] and found.statuses("reflib") == {}
    seconds = [r.at["second"] for r in found.calls.where(case="reflib")]
    assert seconds == sorted(seconds) and 5 < len(seconds) <= cold_child.KEPT
    written = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert len(written) == len(found.rows) + len(found.calls) + len(found.service)
    assert {w["name"] for w in written} == {"t", "t, calls", "t, service"}
    assert {r.at["phase"] for r in found.service} == {"afterwards"}, "nothing is tuned later"


@pytest.mark.slow
def test_ways_that_fail_are_rows_that_say_why():
    ways = {
        "crashes": {"compiler": "TorchInductor", "environment": {"MISDEED": "crash"}},
        "has no such setting": {"compiler": "TorchInductor", "config": {"no_such_setting": 1}},
    }
    rows = lab.cold_starts("t", PROGRAM, ways, n=8).rows
    assert [r.status for r in rows] == ["crashed", "refused"] and rows[0].note == "SIGSEGV"
    assert "no_such_setting" in rows[1].note
    slow = {"is too slow": {"compiler": "reflib", "environment": {"MISDEED": "sleep"}}}
    late = lab.cold_starts("t", PROGRAM, slow, n=8, timeout_s=5).rows
    assert [(r.status, r.value) for r in late] == [("timed out", None)]
    assert lab.bars(rows + late, metric="tuned", caption="c") is None, "nothing has a number"


def test_ways_are_looked_at_before_anything_runs():
    with pytest.raises(LabError, match="compiler='gcc'"):
        lab.cold_starts("t", PROGRAM, {"a": {"compiler": "gcc"}})
    with pytest.raises(LabError, match="no earlier way"):
        lab.cold_starts("t", PROGRAM, {"a": {"compiler": "reflib", "again": "b"}, "b": {"compiler": "reflib"}})


def watch(done_after: int | None, limit_s: float):
    calls = []
    begin = cold_child.time.perf_counter()
    done = (lambda: len(calls) >= done_after) if done_after is not None else (lambda: False)
    return list(cold_child.watched(lambda: calls.append(0), done, torch.device("cpu"), begin, begin + limit_s)), len(
        calls
    )


def test_calls_go_on_until_tuning_is_done_and_a_little_longer(monkeypatch):
    monkeypatch.setattr(cold_child, "AFTER_S", 0.05)
    found, calls = watch(done_after=3, limit_s=5.0)
    assert len(found) == calls > 3 and [done for _, _, done in found[:3]] == [False, False, True]
    assert found[-1][0] - found[2][0] < 1.0
    found, _ = watch(done_after=None, limit_s=0.05)
    assert found and not any(done for _, _, done in found), "none waits for ever"


def test_what_callers_saw_while_tuning_and_afterwards():
    quick = [(0.0, 10.0, False)] * 98
    calls = [*quick, (1.0, 50.0, False), (2.0, 20.0, True), (3.0, 900.0, True), *[(4.0, 5.0, True)] * 7]
    said = cold_child.service(calls)
    assert said["while tuning"] == {"calls": 101, "p50": 10.0, "p99": 50.0, "longest": 900.0}, "it loads what is tuned"
    assert said["afterwards"] == {"calls": 7, "p50": 5.0, "p99": 5.0, "longest": 5.0}
    assert list(cold_child.service(calls[99:])) == ["afterwards"] and cold_child.service([]) == {}
    assert list(cold_child.service(quick)) == ["while tuning"]


def test_results_are_compared_up_to_the_order_of_additions():
    x = torch.randn(100)
    assert cold_child.close(x + 1e-4, x) and not cold_child.close(x + 1, x) and not cold_child.close(x[:1], x)
    assert cold_child.close(torch.empty(0), torch.empty(0))
    assert not cold_child.close(x * float("nan"), x)
