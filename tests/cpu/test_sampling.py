"""``grid_sample`` as a loop nest gives eager's results, on positions inside, outside, on the edges and far away."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.semantics import compare


def grid(dims: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dims)
    g = torch.rand(2, *(4, 5, 3)[:dims], dims, generator=generator) * 3 - 1.5
    g.view(-1)[:6] = torch.tensor([-1.0, 1.0, 0.0, 1.5, -1e5, 1e6])
    return g.to(dtype)


WAYS = list(itertools.product(("bilinear", "nearest"), ("zeros", "border", "reflection"), (False, True)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.sample(2)
def test_every_way(dims: int, dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, *(5, 7, 4)[:dims], generator=torch.Generator().manual_seed(0)).to(dtype)

    def fn(x: torch.Tensor, g: torch.Tensor) -> Any:
        return [F.grid_sample(x, g, mode=m, padding_mode=p, align_corners=a) for m, p, a in WAYS]

    assert not compare(fn, x, grid(dims, dtype)).externs
    if dtype == torch.float32:
        assert not compare(fn, x.transpose(-1, -2), grid(dims, dtype), dynamic=True).externs


def test_trained_and_fused() -> None:
    x, g = torch.randn(2, 3, 5, 7, requires_grad=True), grid(2, torch.float32).requires_grad_()
    compiled = compare(lambda x, g: F.grid_sample(x * 2, g.tanh(), align_corners=False).relu(), x, g, backward=True)
    assert [str(e.target) for e in compiled.externs] == ["aten.grid_sampler_2d_backward.default"]


@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_positions_that_are_no_numbers(mode: str) -> None:
    """Eager's kernel for images on a CPU gives NaN there where it interpolates."""
    x, g = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(1)), grid(2, torch.float32)
    g[0, 1, 2, 0], g[1, 0, 0, 1], g[1, 2, 3, 0] = float("nan"), float("inf"), float("-inf")
    compare(lambda x, g: F.grid_sample(x, g, mode=mode, align_corners=False), x, g)
