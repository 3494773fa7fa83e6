"""Steps of a stencil: what is read at several places is computed once and stored, unless that takes longer."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import reflib
from reflib.fuse.inline_loads import work_of
from reflib.ir.loops import LoopNest


def averaged(y: Tensor, steps: int) -> Tensor:
    p = torch.zeros_like(y)
    for _ in range(steps):
        q = F.pad(p, (1, 1, 1, 1))
        p = (q[:, 1:-1, 2:] + q[:, 1:-1, :-2] + q[:, 2:, 1:-1] + q[:, :-2, 1:-1] - y) / 4
    return p


def advected(y: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        y = y * y + 0.1 * y * y * y - y.abs() * 0.5 + y.clamp(-1, 1)
        y = y.roll(1, 1) - y.roll(-1, 1)
    return y


def swapped(y: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        y = 2 - y.roll((1, 1), (1, 2))
    return y


def work(f: Callable[[Tensor, int], Tensor], steps: int) -> list[int]:
    """Operations per element of each kernel."""
    made = reflib.explain(lambda y: f(y, steps), torch.empty(16, 1024, 1024), target="sm_90").fused
    return [work_of(n) for n in made.nodes if isinstance(n, LoopNest)]


@pytest.mark.parametrize("step", [averaged, advected])
def test_a_step_is_not_computed_at_each_place_where_it_is_read(step: Callable[[Tensor, int], Tensor]) -> None:
    """Its kernel would do four times, or twice, what the steps before it take together."""
    assert max(work(step, 6)) == max(work(step, 4))


def test_a_step_that_is_read_at_one_place_is() -> None:
    assert len(work(swapped, 3)) == 1
