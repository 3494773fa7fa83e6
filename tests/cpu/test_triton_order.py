"""generate.triton_order: what a kernel reads and does not write is loaded before the stores in between."""

import random
import re

import pytest
import torch
from torch import Tensor

from tests.semantics import Compiled

STEPS = 14


def places(fn, *args: Tensor) -> list[str]:
    """load and store, in the order of the kernel's text (of a whole block)."""
    torch._dynamo.reset()
    compiled = Compiled(fn, dynamic=False, target="sm_90")
    compiled(*args)
    (stages,) = compiled.stages
    source = next(iter(stages.kernels.values())).source.partition("else:")[0]  # type: ignore[union-attr]
    return re.findall(r"tl\.(load|store)\((\w+)_ptr", source)


@pytest.mark.parametrize("seed", range(2))
def test_a_recurrence_loads_ahead(seed: int) -> None:
    r = random.Random(seed)

    def gated(x: Tensor, g: Tensor) -> Tensor:
        h, out = x[0], []
        for i in range(STEPS):
            h = h * g[i] + x[i + 1]
            out.append(h)
        return torch.stack(out)

    n = r.randrange(200_000, 300_000)
    order = [what for what, _ in places(gated, torch.randn(STEPS + 1, n), torch.randn(STEPS, n))]
    assert order.count("store") == STEPS and order.count("load") == 2 * STEPS + 1
    assert order.index("store") > 3 and "load" in order[order.index("store") :]


def test_what_is_written_is_read_in_its_turn() -> None:
    def steps(x: Tensor, y: Tensor) -> Tensor:
        x.copy_(x * 2 + y)
        y.copy_(y - x)
        return x + y

    order = places(steps, torch.randn(1000), torch.randn(1000))
    assert [what for what, _ in order].index("store") == 2
