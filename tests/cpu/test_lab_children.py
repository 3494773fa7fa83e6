"""Child processes of measurements that start side by side."""

import json
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest

from reflib.lab import children, session

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
