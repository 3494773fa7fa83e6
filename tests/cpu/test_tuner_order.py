"""The tuner's part alone: jobs are ended by hand, in any order."""

import threading
from collections.abc import Mapping
from typing import Any

import pytest

from reflib.autotune.inputs import InputSpec
from reflib.autotune.request import RACE, Request, Result
from reflib.autotune.tuner import Tuner
from reflib.autotune.tuner import _tuners as tuners
from reflib.autotune.winner import pick_winner
from reflib.errors import MeasureError
from reflib.ir.decision import Candidate, Key
from reflib.options import Options

NAMES = ("aten", "a", "b", "c")


@pytest.fixture(autouse=True)
def alone() -> None:
    """Tuners of one device take turns: earlier tests' do not count."""
    tuners.clear()


class Hands:
    """In place of the pool: what was submitted, to be ended by the test."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.closed = False

    def submit(self, job: Any) -> None:
        assert not self.closed, "nothing is started after Ctrl-C"
        if not job.what.endswith(("begin", "close")):
            self.jobs.append(job)

    def cancel(self, job: Any) -> None:
        self.end(job, "cancelled")

    def close(self) -> None:
        self.closed = True

    def what(self) -> list[tuple[str, str]]:
        return [kind_of(j) for j in self.jobs]

    def take(self, what: str, name: str = "") -> Any:
        for job in self.jobs:
            if what == kind_of(job)[0] and name in ("", kind_of(job)[1]):
                return job
        raise AssertionError(f"no job {what} {name} among {self.what()}")

    def end(self, job: Any, status: str, at: str | None = None, **data: Any) -> None:
        if job in self.jobs:
            self.jobs.remove(job)
            job.started = 1.0
            if at is not None:
                job.said({"kind": "at", "name": at})
            job.ended(status, data)


def kind_of(job: Any) -> tuple[str, str]:
    """compile, try or race; and the candidate's name."""
    if "program" in job.data:
        return "compile", job.data["program"]
    return ("race", "") if job.data["race"] else ("try", job.data["names"][0])


class Kept:
    """In place of the store."""

    def __init__(self, *rows: Candidate) -> None:
        self.before, self.added = list(rows), list[str]()

    def rows(self, key: str) -> list[Candidate]:
        return self.before

    def add_row(self, key: str, row: Candidate) -> None:
        self.added.append(row.name)


def request(names: tuple[str, ...] = NAMES) -> Request:
    spec = InputSpec("x", "activation", 0, (4,), (1,), "float32", "cpu")
    return Request({n: n for n in names}, "aten", "aten", (spec,))  # type: ignore[misc]


def row(name: str, us: float, status: str = "ok") -> Candidate:
    return Candidate(Key(name), status, us if status == "ok" else None, us, spread=0.0)


def begun(store: Any = None, prune: Any = None, **options: Any) -> tuple[Hands, Tuner, Any]:
    hands = Hands()
    tuner = Tuner(hands, Options(**options), {}, [], store)  # type: ignore[arg-type]
    return hands, tuner, tuner.ask("key", request(), "mm", prune=prune)


def compiled(hands: Hands, *names: str) -> None:
    for name in names:
        hands.end(hands.take("compile", name), "done", reports=[])


def tried(hands: Hands, **times: float) -> None:
    for name, us in times.items():
        hands.end(hands.take("try", name), "done", rows=[row(name, us)])


def race(hands: Hands, **times: float) -> None:
    rows = tuple(row(n, t) for n, t in times.items())
    hands.end(hands.take("race"), "done", rows=[], result=Result(rows, *pick_winner(rows, "aten")))


def test_a_candidate_is_tried_as_soon_as_it_is_ready() -> None:
    hands, tuner, asked = begun()
    assert hands.what() == [("compile", n) for n in NAMES]
    compiled(hands, "b")
    assert not [w for w, _ in hands.what() if w == "try"], "nothing without the default"
    compiled(hands, "aten")
    assert [n for w, n in hands.what() if w == "try"] == ["aten"], "nor before it"
    tried(hands, aten=10)
    assert ("try", "b") in hands.what() and len([w for w, _ in hands.what() if w == "compile"]) == 2
    tried(hands, b=5)
    compiled(hands, "a", "c")
    tried(hands, a=7)
    assert not [w for w, _ in hands.what() if w == "race"]
    tried(hands, c=70)
    assert hands.take("race").data["names"] == ["aten", "b", "a"], "c is far from the best"
    race(hands, aten=10, b=5, a=6)
    result = tuner.wait(asked)
    assert result.winner == "b" and [r.name for r in result.rows] == list(NAMES) and result.row("c").time_us == 70
    assert tuner.count() == (4, 4) and not tuner.running()


def test_after_a_crash_the_others_go_on() -> None:
    hands, tuner, asked = begun()
    compiled(hands, *NAMES)
    tried(hands, aten=10, a=5)
    hands.end(hands.take("try", "b"), "crashed", "b", why="segmentation fault")
    hands.end(hands.take("try", "c"), "done", rows=[row("aten", 10), row("c", 5)])  # in a new worker
    race(hands, aten=10, a=5, c=6)
    result = tuner.wait(asked)
    assert result.winner == "a" and result.row("b").status == "crashed"


def test_a_race_that_crashes_is_run_again_and_then_given_up() -> None:
    hands, tuner, asked = begun()
    compiled(hands, *NAMES)
    tried(hands, aten=10, a=5, b=6, c=6)
    for _ in range(3):
        hands.end(hands.take("race"), "hung", RACE, why="no answer for 60 s")
    result = tuner.wait(asked)
    assert result.winner == "a" and "short rounds" in result.reason


def test_one_that_crashes_when_it_is_tried_again_is_not_raced() -> None:
    hands, tuner, asked = begun()
    compiled(hands, *NAMES)
    tried(hands, aten=10, a=5, b=6, c=6)
    hands.end(hands.take("race"), "crashed", RACE, why="signal 11")
    hands.end(hands.take("race"), "crashed", "a", why="signal 11")
    assert hands.take("race").data["names"] == ["aten", "b", "c"]
    race(hands, aten=10, b=6, c=7)
    result = tuner.wait(asked)
    assert result.winner == "b" and result.row("a").status == "crashed"


def test_a_default_that_crashes_ends_it_when_nothing_can_be_opened() -> None:
    hands, tuner, asked = begun()
    compiled(hands, *NAMES)
    hands.end(hands.take("try"), "crashed", "", why="signal 11")
    job = hands.take("try", "a")
    assert [r.name for r in job.data["failed"]] == ["aten"] and set(job.data["request"].programs) == {"aten", "a"}
    hands.end(job, "crashed", "", why="signal 11")
    result = tuner.wait(asked)
    assert result.winner == "aten" and result.row("aten").status == "crashed"
    assert {r.status for r in result.rows[1:]} == {"skipped"} and not hands.jobs


def test_without_a_default_that_crashes_the_others_are_measured() -> None:
    hands, tuner, asked = begun()
    compiled(hands, *NAMES)
    hands.end(hands.take("try"), "hung", "", why="no answer for 60 s")
    tried(hands, a=5, b=6, c=7)
    rows = (row("aten", 0, "hung"), row("a", 5), row("b", 6), row("c", 7))
    hands.end(hands.take("race"), "done", rows=[], result=Result(rows, *pick_winner(rows, "aten")))
    assert tuner.wait(asked).winner == "a"


def test_a_verdict_may_have_to_wait() -> None:
    def prune(name: str, reports: Mapping[str, Any]) -> str | None:
        if name != "a":
            return ""
        return None if "b" not in reports else "as b"

    hands, _, asked = begun(prune=prune)
    assert [w for w, _ in hands.what()] == ["compile"] * 3, "it is not even compiled"
    compiled(hands, "aten")
    tried(hands, aten=10)
    hands.end(hands.take("compile", "b"), "failed", why="ptxas")
    compiled(hands, "c")
    assert asked.rows["a"].status == "pruned" and asked.rows["b"].status == "error"


def test_what_an_earlier_process_found_is_not_run_again() -> None:
    store = Kept(row("a", 1, "crashed"), row("b", 3), row("zzz", 1, "hung"))
    hands, tuner, asked = begun(store)
    assert [w for w, _ in hands.what()] == ["compile"] * 3, "b was fine: it is timed again"
    compiled(hands, "aten", "b", "c")
    tried(hands, aten=10, b=20, c=20)
    assert store.added == ["aten", "b", "c"]
    race(hands, aten=10, b=20, c=20)
    assert "seen before" in tuner.wait(asked).row("a").why

    hands, _, asked = begun(Kept(row("a", 5), row("b", 50)))  # b was far from the best
    assert [w for w, _ in hands.what()] == ["compile"] * 3
    assert asked.rows["b"].dropped and asked.stage["b"] == "done"


def test_time_is_up() -> None:
    hands, tuner, asked = begun(tuning_seconds=0.2)
    compiled(hands, "aten", "a")
    tried(hands, aten=10, a=5)
    result = tuner.wait(asked)
    assert result.winner == "a" and {r.status for r in result.rows} == {"ok", "skipped"}
    assert result.row("b").status == "skipped" and "time limit of 0.2 s" in result.row("b").why


def test_ctrl_c_ends_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    hands, tuner, asked = begun()

    def interrupted(*args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tuner.changed, "wait", interrupted)
    compiled(hands, *NAMES)
    tried(hands, aten=10)
    with pytest.raises(KeyboardInterrupt):
        tuner.wait(asked)
    assert hands.closed
    tuner.close()  # as the pipeline does
    assert asked.result is not None


def test_when_the_pool_is_closed_elsewhere_waiting_ends() -> None:
    hands, tuner, asked = begun()
    threading.Timer(0.1, lambda: [hands.end(j, "cancelled") for j in list(hands.jobs)]).start()
    with pytest.raises(MeasureError, match="stopped"):
        tuner.wait(asked)


@pytest.mark.parametrize("room, at_once", [(2**30, 6), (0, 3)])
def test_few_measurements_hold_inputs_at_once(monkeypatch: Any, room: int, at_once: int) -> None:
    """Small ones all; of large ones three."""
    monkeypatch.setattr("reflib.autotune.tuner.OPEN_BYTES", room)
    hands, tuner, _ = begun()
    for _ in range(5):
        tuner.ask("", request())
    for job in list(hands.jobs):
        hands.end(job, "done", reports=[])
    assert sum(w == "try" for w, _ in hands.what()) == at_once


def test_measurements_of_several_programs_share_the_device(monkeypatch: Any) -> None:
    monkeypatch.setattr("reflib.autotune.tuner.OPEN_BYTES", 0)
    hands, first, asked = begun()
    others = [Tuner(hands, Options(), {}, [], None) for _ in range(4)]  # type: ignore[arg-type]
    for t in others:
        t.ask("", request())
    for job in list(hands.jobs):
        hands.end(job, "done", reports=[])
    assert sum(w == "try" for w, _ in hands.what()) == 3
    first.close()
    assert sum(w == "try" for w, _ in hands.what()) == 3, "another takes its place"
    assert asked.result is not None and not asked.result.complete


def test_a_candidate_may_have_any_name() -> None:
    hands = Hands()
    tuner = Tuner(hands, Options(), {}, [], None)  # type: ignore[arg-type]
    asked = tuner.ask("", request(("aten", "race", "a")))
    compiled(hands, "aten", "race", "a")
    tried(hands, aten=10, race=9, a=5)
    assert asked.result is None
    race(hands, aten=10, race=9, a=5)
    assert tuner.wait(asked).winner == "a"


def test_a_worker_that_is_lost_before_it_ran_anything_is_no_candidates_fault() -> None:
    hands, tuner, asked = begun()
    compiled(hands, *NAMES)
    tried(hands, aten=10)
    hands.end(hands.take("try", "a"), "crashed", why="signal 9")
    assert ("try", "a") in hands.what() and "a" not in asked.rows
    for _ in range(2):
        hands.end(hands.take("try", "b"), "crashed", why="signal 9")
    result = tuner.wait(asked)
    assert result.winner == "aten" and "it cannot be measured" in result.reason and not result.complete
    assert {r.status for r in result.rows} == {"ok", "skipped"}


def test_a_job_that_no_worker_could_start_is_not_remembered() -> None:
    kept = Kept()
    hands, _, asked = begun(kept)
    job = hands.take("compile", "a")
    hands.jobs.remove(job)
    job.ended("crashed", {"why": "the worker processes cannot be started", "output": ""})
    assert asked.rows["a"].status == "error" and "cannot be started" in asked.rows["a"].why
