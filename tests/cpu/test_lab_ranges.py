"""`lab.told_times`, `lab.variants`, `lab.range_picture`: choosing by formula, and what was chosen, shown."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import reflib
from reflib import lab
from reflib.errors import LabError

N = iter(range(1000))


def ranged_op(splits: list[int], **more: Any) -> Callable[..., Any]:
    @torch.library.custom_op(f"lab_ranges::double{next(N)}", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    def small(x: torch.Tensor) -> torch.Tensor:
        return x + x

    def fours(x: torch.Tensor) -> torch.Tensor:
        assert x.shape[0] % 4 == 0
        return x + x

    configs = [fours] if more.pop("only_fours", False) else [small]
    on = {"tensor_name": "x", "dim": 0, "range_upper_bound": 64}
    ranges = {"dispatch_on": on, "split_points": splits} if splits else {}
    reflib.register_custom_op_autotuning(double, configs=configs, **ranges, **more)
    return lambda x: torch.relu(double(x))


def rows_of(n: int) -> torch.Tensor:
    torch._dynamo.reset()
    x = torch.randn(n, 4)
    torch._dynamo.mark_dynamic(x, 0)
    return x


def size(sizes: Any) -> int:
    return next(iter(sizes.values()), 1)


def test_what_is_told_decides_for_a_target_that_is_not_here() -> None:
    f = ranged_op([8])
    with lab.told_times(lambda name, s: size(s) if name == "small" else 10.0) as asked:
        e = reflib.explain(f, rows_of(16), autotune="blocking", target="sm_90")
    table = lab.variants(e)
    assert [line["runs"].split(": ")[1] for line in table] == ["small", "eager"]
    assert table[0]["if"].endswith("<= 8") and table[1]["if"] == "otherwise"
    assert [(line["kernels"], line["calls"]) for line in table] == [(1, 0), (1, 1)]
    assert lab.served(e, 64) == [(1, 8, "small"), (9, 64, "eager")]
    assert sorted({size(s) for _, s in asked}) == [3, 5, 8, 16, 32, 64]  # a size that is open starts at 2
    points = __import__("sys").modules["reflib.autotune.points"]
    assert points.measure.__module__ == "reflib.autotune.measure"  # put back


def test_one_winner_has_no_variants_and_predicates_are_conditions() -> None:
    with lab.told_times(lambda name, s: 2.0 if name == "eager" else 1.0):
        e = reflib.explain(ranged_op([8]), rows_of(16), autotune="blocking")
        assert lab.variants(e) == [] and lab.served(e, 64) == [(1, 64, "small")]
        e = reflib.explain(ranged_op([], only_fours=True), rows_of(16), autotune="blocking")
    assert [line["if"].split(" ", 1)[-1] for line in lab.variants(e)] == ["% 4 == 0", "otherwise"]


def test_the_picture_says_who_serves() -> None:
    lab.setup(device="cpu", quiet=True)
    rows = lab.Rows(
        row
        for n in (2, 16)
        for row in lab.measure("t", {"a": lambda: None, "b": lambda: None}, at={"size": n}, rounds=5, budget_s=0.01)
    )
    picture = lab.range_picture(rows, [(1, 8, "a"), (9, 64, "c")], caption="Who serves.", tuned=[2, 8])
    assert picture is not None and "a from 1 to 8; c from 9 to 64" in picture.alt
    assert lab.range_picture(lab.Rows(), [(1, 8, "a")], caption="None.") is None
    with pytest.raises(LabError, match="served"):
        lab.range_picture(rows, [], caption="x")
