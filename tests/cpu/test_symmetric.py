"""Memory that all ranks read: sums over it, and what ranks that fail do to the others."""

import pytest

from reflib.lab.rank_group import ENDED, Failed, Ranks
from tests import symmetric_tasks as tasks


def on(size: int, request: pytest.FixtureRequest) -> Ranks:
    return request.getfixturevalue("two" if size == 2 else "four")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_sums_are_as_right_as_eagers_and_the_same_on_all(seed: int, size: int, request: pytest.FixtureRequest) -> None:
    found = on(size, request).run(tasks.reduce_many, seed)
    assert found == [[]] * size, found


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_products_and_shares_through_storage(size: int, request: pytest.FixtureRequest) -> None:
    assert on(size, request).run(tasks.through_storage, 0) == [[]] * size


def test_a_group_of_one_rank(two: Ranks) -> None:
    assert two.run(tasks.in_a_group_of_one) == [[], []]


@pytest.mark.parametrize("how", ["one_shot", "two_shot"])
def test_what_lies_in_storage_is_read_in_place(two: Ranks, how: str) -> None:
    for right, meetings, kept in two.run(tasks.in_place, how):
        assert right and meetings == 2, "ranks meet twice when storage is made, and never again"
        assert kept


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_memory_may_be_written_again_when_a_call_returns(size: int, request: pytest.FixtureRequest) -> None:
    for how in ("one_shot", "two_shot"):
        assert on(size, request).run(tasks.often, how, 300) == [0] * size


FAULTS = {
    "late": "rank {last} did not come within 2 s",
    "nothing": "rank {last} has left",
    "ctrl-c": "rank {last} failed: KeyboardInterrupt",
    "other op": "of 256 bytes of float32 on rank",
    "other size": "one_shot of 260 bytes of float32 on rank {last}",
    "other dtype": "one_shot of 128 bytes of bfloat16 on rank {last}",
    "other product": "product and scatter of 32 bytes of float32 on rank {last}",
    "raises": "rank {last} failed: MemoryError: no room",
}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_rank_is_an_error_on_all_others(size: int, fault: str, request: pytest.FixtureRequest) -> None:
    found = on(size, request).run(tasks.faulty, fault, timeout=2.0)
    assert not any(isinstance(f, Failed) for f in found), found
    words = FAULTS[fault].format(last=size - 1)
    for i, (first, again) in enumerate(found[:-1]):
        assert first.startswith("RanksError") and int(first.split()[2]) < 20, first
        assert "symmetric storage of process group '0'" in first
        assert words in first or i > 0 and "ranks exchange different things" in first, first
        assert first.split("s: ", 1)[1] == again.split("s: ", 1)[1], "the same error again"
    first, again = found[-1]
    mine = {"nothing": "nothing", "ctrl-c": "KeyboardInterrupt", "raises": "MemoryError"}.get(fault, "RanksError")
    assert first.startswith(mine), first
    assert again.startswith("nothing" if fault == "nothing" else "RanksError"), again
    assert on(size, request).run(tasks.often, "one_shot", 5) == [0] * size  # a new group has new storage


def test_storage_that_cannot_be_made_is_an_error_on_all(two: Ranks) -> None:
    first, second = two.run(tasks.meets_alone, timeout=4.0)
    assert "rank 1 of process group '0' did not come within 4 s to symmetric storage" in first and second == "nothing"
    for text in two.run(tasks.no_room, "full"):
        assert "RanksError" in text and "no room for symmetric storage of 32 MiB" in text, text
    for text in two.run(tasks.no_room, "open"):
        assert "RanksError" in text and "rank 1 cannot open the first rank's shared memory" in text, text
    assert two.run(tasks.left_over) == [[], []]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_candidates_are_compiled_right(size: int, request: pytest.FixtureRequest) -> None:
    assert on(size, request).run(tasks.compiled_candidates, limit=300.0) == [[]] * size


@pytest.mark.slow
def test_the_tuner_measures_the_candidates(two: Ranks) -> None:
    first, second = two.run(tasks.tuned_candidates, limit=400.0)
    assert not isinstance(first, Failed) and first == second, (first, second)
    for name, (winner, rows) in first.items():
        assert len(rows) > 2 and winner in rows, (name, rows)
        assert all(r.strip() == "ok" for r in rows.values()), (name, rows)


@pytest.mark.parametrize(("wrapper", "arena"), [("python", False), ("cpp", True)])
def test_what_all_read_is_planned_into_storage(two: Ranks, wrapper: str, arena: bool) -> None:
    first, second = two.run(tasks.planned, wrapper, {"arena": arena}, limit=300.0)
    assert not isinstance(first, Failed) and first == second, (first, second)
    assert first["right"] and first["copied"] == [False, False, False, True] * 4
    a, _, c, outside = first["places"]
    assert a == c == 0 and outside is None, "memory is used again"


def test_ranks_may_have_planned_differently(two: Ranks) -> None:
    assert two.run(tasks.planned_apart) == [[True] * 3] * 2


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_killed_rank_is_found_out_at_once(size: int, request: pytest.FixtureRequest) -> None:
    found = on(size, request).run(tasks.faulty, "killed", timeout=60.0)
    assert found[-1] == ENDED
    for first, _ in found[:-1]:
        assert f"rank {size - 1} has left: its process has ended" in first and int(first.split()[2]) < 20, first


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_of_all_ranks_losses(two: Ranks, compiled: bool) -> None:
    assert two.run(tasks.gradients, compiled) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
def test_random_programs_with_buffers_in_storage(two: Ranks, dynamic: bool) -> None:
    assert two.run(tasks.random_programs, 0, 8, dynamic) == [[], []]
