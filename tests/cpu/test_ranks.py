"""Several processes: models that are trained in parallel, and what ranks agree on."""

import contextlib
import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reflib.autotune.measure import request
from reflib.lab.rank_group import ENDED, Failed, Ranks
from reflib.options import Options
from reflib.ranks import meeting, swap, tune
from reflib.ranks.simulate import World, simulate
from tests import rank_tasks as tasks
from tests.races import small


@pytest.mark.parametrize("parallel", [tasks.data_parallel, tasks.sharded, tasks.tensor_parallel])
def test_models_train_as_in_eager(two: Ranks, parallel: Any) -> None:
    wrapper = "cpp" if parallel is tasks.tensor_parallel else "python"
    collectives = two.run(tasks.train, parallel, wrapper, limit=300.0)
    assert not any(isinstance(r, Failed) for r in collectives), collectives
    assert collectives[0] == collectives[1]
    assert (collectives[0] > 0) == (parallel is tasks.tensor_parallel)  # (the others' are in hooks around the graphs)


def test_a_graph_with_more_collectives_than_the_one_before(two: Ranks) -> None:
    first, _ = two.run(tasks.same_then_other, False)
    torch.testing.assert_close(first, torch.full((4,), 5.0))


def test_the_same_collectives_may_be_started_from_other_lines(two: Ranks) -> None:
    for r in two.run(tasks.other_lines):
        torch.testing.assert_close(r, torch.full((4,), 5.0))


def test_a_rank_may_compile_anew_alone_for_another_size(two: Ranks) -> None:
    for i, r in enumerate(two.run(tasks.anew_for_another_size, timeout=20.0)):
        torch.testing.assert_close(r, [torch.full((5,), 5.0), torch.full((7,), 5.0 + i)])


@pytest.mark.slow  # a candidate that hangs is found out after its limit
def test_an_op_that_communicates_is_tuned_by_all_ranks(two: Ranks) -> None:
    names = ("crashes", "hangs", "fills_memory", "alone", "by_reduce")
    first, second = two.run(tasks.tune_twice, *names, limit=1000.0)
    assert not isinstance(first, Failed), first
    assert first == second  # rows, times, winner; then what only rank 0 knew
    (winner, rows, total, _), (again, known, _, _) = first
    assert winner == again == "by_reduce" and total == 2.0  # (the users' process group goes on)
    expected = dict(zip(names, ("crashed", "hung", "error", "wrong", "ok")))
    assert {n: rows[n][0] for n in names} == expected
    assert "rank 1: crashed (segmentation fault" in rows["crashes"][2]
    assert "rank 0: error (ended, as another rank has failed)" in rows["crashes"][2]
    assert "rank 1: error (out of memory)" in rows["fills_memory"][2] and "slowest of 2 ranks" in rows["by_reduce"][2]
    assert known["by_reduce"][1] == rows["by_reduce"][1] and rows["eager"][1] > 8e3  # nothing was measured again


def test_a_worker_says_itself_why_it_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where another rank was first to say that it has failed; and none waits for another in a collective no longer
    than it may be silent: what hangs is found first."""
    store = torch.distributed.HashStore()
    jobs: list[Any] = []

    def submit(job: Any) -> None:
        jobs.append(job)
        job.said({"kind": "lost", "status": "error", "why": "out of memory"})
        store.set("reflib/team/t/0/failed", "")

    workers = SimpleNamespace(submit=submit, cancel=lambda job: job.ended("cancelled", {}))
    monkeypatch.setattr(tune, "GRACE", 0.0)
    monkeypatch.setattr(tune, "store_of", lambda group: store)
    monkeypatch.setattr(tune, "pool", lambda threads: workers)
    monkeypatch.setattr(tune._Team, "_where", lambda team: {"prefix": "reflib/team/t/0"})
    sent = request({"it": small()}, "it")
    work = SimpleNamespace(background="", options=Options(candidate_seconds=900.0))
    row = tune._Team(None, "t", sent, work)._job("try_one", {"name": "it"}, 900.0)
    assert (row.status, row.why) == ("error", "out of memory") and jobs[0].data["limit"] > jobs[0].limit


@pytest.mark.slow
def test_ranks_may_have_tuned_different_numbers_of_choices(two: Ranks) -> None:
    first, second = two.run(tasks.tune_after_some, limit=200.0)
    assert not isinstance(first, Failed) and first == second and first[0] == "by_reduce", (first, second)


@pytest.mark.parametrize("how", ["answered", "failed"])
def test_what_is_not_measured_after_all_is_not_claimed(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    import reflib
    from reflib.autotune import points
    from reflib.ranks import share

    monkeypatch.setattr(share, "store_of", lambda group: torch.distributed.HashStore())
    s = share.Sharing(Member(0, 2))
    monkeypatch.setattr(share, "sharing", lambda: s)
    claimed, measuring = set[str](), s.measuring
    monkeypatch.setattr(s, "measuring", lambda key: (claimed.add(key), measuring(key)))
    reflib.register_custom_op_autotuning(tasks.doubled, [tasks.by_product])
    if how == "failed":

        def fails(*_: Any) -> Any:
            raise RuntimeError("while it measured")

        monkeypatch.setattr(points, "measure_range", fails)
    options = {"autotune": "blocking", "isolate": False, "cache_decisions": False}
    fn = torch.compile(lambda x: tasks.doubled(x).sum(0), backend="reflib", options=options)
    with pytest.raises(Exception, match="while it measured") if how == "failed" else contextlib.nullcontext():
        fn(torch.ones(24, 4))
    assert claimed and not s.mine
    owners = {s.run(claimed_by_other(key)) for key in claimed}
    assert owners == ({"1"} if how == "failed" else {share.DONE})


@pytest.mark.parametrize("error", [ValueError("of the words"), KeyboardInterrupt()])
def test_what_ends_the_first_rank_in_a_meeting_is_said_to_the_others(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    store = torch.distributed.HashStore()
    monkeypatch.setattr(meeting, "store_of", lambda group: store)
    first, second = (meeting.Meeting(Member(i, 2), "order", "a graph", 0.1) for i in range(2))

    def conclude(words: list[Any]) -> Any:
        raise error

    for m in (first, second):
        m.tell("here")
    with pytest.raises(type(error)):
        first.hear(conclude)
    with pytest.raises(meeting.RanksError, match=f"rank 0 .* ended with {type(error).__name__}"):
        second.hear(conclude)


def test_a_team_that_is_interrupted_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker has a process group: the next question's would not get one in it."""
    left = []

    class Team:
        def __init__(self, *_: Any) -> None: ...

        def measure(self, *_: Any) -> Any:
            raise KeyboardInterrupt

        def leave(self) -> None:
            left.append(self)

    any_request = SimpleNamespace(request=SimpleNamespace(default="a", programs={"a": 0}), makers={}, default="a")
    monkeypatch.setattr(tune, "_Team", Team)
    monkeypatch.setattr(tune, "_group", lambda choice: None)
    monkeypatch.setattr(tune, "isolated", lambda *_: SimpleNamespace())
    monkeypatch.setattr(tune, "Meeting", lambda *_: SimpleNamespace(tell=len, hear=lambda conclude: conclude([""])))
    q = SimpleNamespace(choice=SimpleNamespace(op="op"), region=SimpleNamespace(constants={}))
    with pytest.raises(KeyboardInterrupt):
        tune.measured_by_all(q, any_request, SimpleNamespace(options=None, background=""))
    assert len(left) == 1


class Member:
    """Rank ``number`` of a process group whose ranks are threads."""

    group_name = "g"

    def __init__(self, number: int, size: int):
        self.rank, self.size = lambda: number, lambda: size


# what the last of the ranks does -> what the others come to
LAST = {
    "": "the same call",
    "late": "the same call",
    "unchanged": "the same call",
    "fails": "error",
    "never": "nothing",
}
LAST |= {"fails alone": "the same call", "never alone": "the same call"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("last", LAST)
@pytest.mark.parametrize("seed", range(4))
def test_ranks_swap_at_the_same_call(last: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(f"{last} {seed}")
    size, store = rng.randint(2, 5), torch.distributed.HashStore()
    monkeypatch.setattr(swap, "store_of", lambda group: store)
    monkeypatch.setattr(swap, "LOOK", 0.01)
    turns = [swap.Turn(Member(i, size), "graph", "alone" not in last, 0.2) for i in range(size)]
    ready, pause = ([rng.choice(some) for _ in range(size)] for some in ((1, 7, 50), (0.0, 1e-4, 1e-3)))
    what = last.partition(" ")[0]
    first = [0] * size
    over = time.monotonic() + (0.5 if LAST[last] == "nothing" else 30.0)

    def calls(i: int) -> None:
        if what in ("unchanged", "fails", "never") and i == size - 1:
            return None if what == "never" else turns[i].say(0 if what == "unchanged" else "no luck")
        if what == "late" and i == size - 1:
            time.sleep(0.3)
        for number in itertools.count(1):
            if number >= ready[i] and turns[i].comes(number):
                first[i] = number
            if first[i] or turns[i].why or time.monotonic() > over:
                return None
            time.sleep(pause[i])

    with ThreadPoolExecutor(size) as threads:
        list(threads.map(calls, range(size)))
    if what in ("unchanged", "fails", "never"):
        first.pop()
    assert {"the same call": first[0] > 0 and len({*first}) == 1, "nothing": not any(first), "error": not any(first)}[
        LAST[last]
    ], (first, ready, pause)
    assert all(t.why for t in turns[:-1]) == (LAST[last] == "error"), [t.why for t in turns]
    assert not any(t.why for t in turns) or turns[0].why == f"tuning failed on rank {size - 1}: no luck"


@pytest.mark.parametrize(
    ("op", "last"),
    [
        ("alone", "late"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("communicates", ""), ("alone", "fails"))),
    ],
)
def test_a_graph_tuned_in_the_background_is_swapped_on_all_ranks_together(two: Ranks, op: str, last: str) -> None:
    first, second = two.run(tasks.in_background, op, last, limit=300.0)
    assert not isinstance(first, Failed) and first[0] == "swapped" and first[1] > 2, (first, second)
    if last != "fails":
        assert first == second and first[2][0].startswith("by_")
    else:
        assert first[2] == ["by_product"] and second[0] == "failed" and "ZeroDivisionError" in second[3]


def claimed_by_other(key: str) -> Any:
    """Who has it when rank 1 claims it."""
    return (yield "compare_set", f"{key}/claim", "", "1")


def test_a_choice_is_measured_by_one_rank(two: Ranks) -> None:
    results = two.run(tasks.share, limit=200.0)
    assert not any(isinstance(r, Failed) for r in results), results
    for found, again in results:
        assert [w for w, _ in (*found, *again)] == ["by_product"] * 4
    for i in range(2):  # mostly rank i; the other one, if rank i comes late
        told = [found[i][1] for found, _ in results]
        assert sum(f"measured by rank {1 - rank} for all" in reason for rank, reason in enumerate(told)) == 1, told


@pytest.mark.parametrize("late", [0.0, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_choice_between_many_is_measured_in_parts(two: Ranks, late: float) -> None:
    results = two.run(tasks.share_parts, late, limit=200.0)
    assert not any(isinstance(r, Failed) for r in results), results
    assert results[0] == results[1]  # one decision, of the same rows
    for winner, reason, rows in results:
        assert winner == "by_product" and "; measured in 2 parts" in reason, reason
        assert [name for name, *_ in rows] == ["eager", "by_product", *(f"way{i}" for i in range(1, 9))]
        assert all(status == "ok" and us for _, status, us in rows), rows


def test_a_rank_with_another_device_measures_for_itself(four: Ranks) -> None:
    results = four.run(tasks.share, True, limit=200.0)
    assert not any(isinstance(r, Failed) for r in results), results
    assert all([w for w, _ in (*found, *again)] == ["by_product"] * 4 for found, again in results)
    told = [["for all" in reason for _, reason in found] for found, _ in results]
    assert told[3] == [False, False] and sum(map(sum, told)) == 4, told  # (the others: each was measured once)


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_simulation_is_as_real_ranks(size: int, request: pytest.FixtureRequest) -> None:
    group: Ranks = request.getfixturevalue("two" if size == 2 else "four")
    seconds = [0.6, 1.1, 0.4, 0.9, 0.7, 0.5]
    model = simulate(World(size, seconds))
    took = []
    while len(took) < 4 and min(took, default=100.0) > 1.15 * model.seconds + 0.5:  # (others run beside)
        real = group.run(tasks.rules, seconds, -1, size)
        assert not any(isinstance(r, Failed) for r in real), real
        assert sum(n for _, n in real) == model.measured == 6
        took.append(max(t for t, _ in real))
    assert abs(min(took) - model.seconds) < 0.15 * model.seconds + 0.5, (took, model.seconds)


@pytest.mark.slow  # four processes that import torch; of two, others are late, are killed, or end
def test_a_rank_that_fails_while_it_measures(four: Ranks) -> None:
    real = four.run(tasks.rules, [0.3] * 6, 2)
    assert real[2] == ENDED and sum(n for _, n in (real[0], real[1], real[3])) in (6, 7, 8)  # its two, by others


def test_a_thousand_simulated_ranks() -> None:
    recorded = [2.1, 3.4, 1.8, 4.2, 2.7, 3.0]  # seconds for six products, on an H200
    alone, few, many = (simulate(World(n, recorded)) for n in (1, 8, 1000))
    assert alone.seconds > 17 and few.seconds < 4.4 and many.seconds < 1.2 * few.seconds and many.measured == 6
    for n in (4, 12, 16):  # in parts, so that no rank is idle
        whole, parts = (simulate(World(n, [0.85] * 6, parts=most)).seconds for most in (1, 4))
        assert parts < 0.92 * whole
    assert simulate(World(1000, recorded, parts=4)).measured == 6  # of so many ranks, none
    hard = {"late": 2.0, "stragglers": 0.05, "failures": 0.02}
    few, many = (simulate(World(n, recorded, **hard)) for n in (8, 1000))
    assert many.seconds < 2 * few.seconds and many.ended > 5
    slow = simulate(World(1000, recorded, service=300e-6))  # what comes first to its limit is the store
    assert slow.busy > 0.9 * slow.seconds > few.seconds
    failing = simulate(World(40, recorded, failures=0.5, fail_within=1.0))  # half of those that have claimed, say
    assert failing.ended > 10 and failing.measured > 6 and failing.seconds < 60


COMES = "rank 3 of process group '0' did not come within 3 s to a graph that starts with _c10d_functional."
OTHER = "ranks of process group '0' are at different points: rank 0 came to the choice of rank_tasks.sum_product"
# what the last of four ranks does -> (task, its arguments, what the others are told, what it comes to itself)
FAULTS: dict[str, tuple[Any, tuple[Any, ...], str, str]] = {
    "is late": (tasks.late, (5.0,), COMES, "RanksError"),
    "ends": (tasks.late, (0.0, "exit"), COMES, ENDED),
    "is killed": (tasks.interrupted, ("killed",), COMES, ENDED),
    "is interrupted": (tasks.interrupted, ("ctrl-c",), COMES, "KeyboardInterrupt"),
    "has other code": (tasks.other_options, (True,), OTHER, "RanksError"),
    "has other options": (tasks.other_options, (False,), COMES.partition(" to ")[0], "Error"),
    "has other collectives": (
        tasks.same_then_other,
        (True,),
        "number 2 is _c10d_functional.all_reduce.default(float32[4], sum) at rank_tasks.py:",
        "on rank 0, and _c10d_functional.broadcast.default(float32[4], 0) at rank_tasks.py:",
    ),
    "has a full store": (tasks.full_store, (), COMES, "cannot write to the process group's store: "),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_on_one_of_four_ranks_is_an_error_on_all(four: Ranks, what: str) -> None:
    task, args, told, own = FAULTS[what]
    waits = told is not OTHER  # for its limit
    *others, last = four.run(task, *args, timeout=3.0 if waits else 30.0)
    for text in others:
        assert "RanksError" in text and told in text and int(text.split()[2]) < 30, others
    assert own in last, last


def test_a_rank_that_is_late_within_the_limit(two: Ranks) -> None:
    for r in two.run(tasks.late, 2.0):
        torch.testing.assert_close(r, torch.full((4,), 5.0))


@pytest.mark.slow
def test_programs_and_storage_outlive_their_process_group(four: Ranks) -> None:
    assert four.run(tasks.another_world, limit=200.0) == [[True] * 3] * 4
