"""Programs of growing size, in processes of their own."""

import pytest

from reflib.lab import session
from reflib.lab.way_sweep import sweep_ways

SOURCE = """
import torch


def make(device, dtype, steps):
    if steps == 3:
        raise ValueError("three is too many")

    def f(x):
        for _ in range(steps):
            x = torch.relu(x + 1)
        return x

    return f, [torch.randn(8, device=device, dtype=dtype)]
"""


@pytest.mark.slow
def test_a_row_for_the_first_call_and_one_for_the_time_of_a_call() -> None:
    session.setup(device="cpu", quiet=True)
    ways = {"eager": {"compiler": "eager"}, "reflib": {"compiler": "reflib"}}
    rows = sweep_ways("t", SOURCE, ways, [{"steps": 1}, {"steps": 3}, {"steps": 2}], timeout_s=100, budget_s=0.01)
    for case in ways:
        for steps in (1, 2):
            assert rows.value(case, "time", steps=steps) > 0
            assert rows.value(case, "first call", steps=steps) > 0
        refused = [r for r in rows.where(case=case) if r.at["steps"] == 3]
        assert [r.status for r in refused] == ["refused"] and "three is too many" in refused[0].note


def test_what_is_not_reached_says_so() -> None:
    session.setup(device="cpu", quiet=True)
    rows = sweep_ways("t", "import time\ntime.sleep(60)", {"eager": {"compiler": "eager"}}, [{}, {}], timeout_s=1)
    assert [r.status for r in rows] == ["timed out"] * 2
