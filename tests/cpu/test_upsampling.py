"""Interpolation is one kernel; its backward gathers, and calls nothing of ATen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.semantics import compare

WAYS: dict[str, dict[str, Any]] = {
    "nearest": {"scale_factor": 2, "mode": "nearest"},
    "three times": {"scale_factor": 3, "mode": "nearest"},
    "exact": {"size": (7, 11), "mode": "nearest-exact"},
    "smaller": {"size": (3, 4), "mode": "nearest"},
    "bilinear": {"scale_factor": 2, "mode": "bilinear"},
    "corners": {"size": (9, 13), "mode": "bilinear", "align_corners": True},
    "odd": {"scale_factor": 1.7, "mode": "bilinear"},
    "smaller bilinear": {"size": (3, 4), "mode": "bilinear"},
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.sample(3)
def test_forward_and_backward(name: str) -> None:
    x = torch.randn(2, 3, 5, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    compiled = compare(lambda x: F.interpolate(x.sin(), **WAYS[name]), x, backward=True)
    assert not compiled.externs


def test_one_dimension_and_three() -> None:
    for shape in ((2, 3, 9), (1, 2, 3, 4, 3)):
        x = torch.randn(shape).requires_grad_()
        compiled = compare(lambda x: F.interpolate(x, **WAYS["nearest"]), x, backward=True, dynamic=False)
        assert not compiled.externs


def test_unknown_positions_are_a_call() -> None:
    def fn(x: torch.Tensor, i: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return x.index_put((i,), v, accumulate=True)

    x, i, v = torch.randn(9, 3), torch.tensor([1, 1, 4]), torch.randn(3, 3)
    assert [str(e.target) for e in compare(fn, x, i, v).externs] == ["aten.index_put.default"]
    grow = torch.randn(2, 3, 5, 6).requires_grad_()
    compare(lambda x: F.interpolate(x, scale_factor=2, mode="nearest"), grow, backward=True, dynamic=True)


@pytest.mark.parametrize("shape", [(4, 3), (4, 1), (3,), (1,)])
def test_known_positions_in_inference(shape: tuple[int, ...]) -> None:
    def f(x: Any, v: Any) -> Any:
        return x.index_put((torch.arange(4)[:, None] % 3, torch.arange(3)), v, accumulate=True)

    compare(f, torch.randn(3, 3), torch.randn(shape))
