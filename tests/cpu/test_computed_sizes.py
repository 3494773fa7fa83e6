"""Sizes that are computed with roots, fractions and bits: no index expression says them, forward or backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import reflib
from tests.checking import check


def square(x: torch.Tensor) -> torch.Tensor:
    """Tokens of an image, as an image. (Backward is given the size as that of a gradient.)"""
    n = int(x.shape[1] ** 0.5)
    return (x * 2).view(x.shape[0], n, n, -1).sin().transpose(1, 2)


def saved(x: torch.Tensor) -> Any:
    """Backward is given the size as a number."""
    n = int(x.shape[1] ** 0.5)
    return (torch.arange(n) * x[:, :n, 0].sin()).exp(), x.new_ones(n, n) @ x[0, :n].cos()


def scaled(x: torch.Tensor) -> torch.Tensor:
    return F.interpolate(x[None], scale_factor=1.5, mode="bilinear")


def bits(x: torch.Tensor) -> torch.Tensor:
    return x[:, : x.shape[1] & 6].exp() * x.new_ones(x.shape[1] ^ 3, 1, 1, 1)


@pytest.mark.parametrize("fn, wrapper", [(square, "cpp"), (saved, "python"), (scaled, "python"), (bits, "cpp")])
def test_backward(fn: Callable[..., Any], wrapper: str) -> None:
    compiled = reflib.compile(fn, dynamic=True, wrapper=wrapper)
    for n in (16, 36):
        x = torch.randn(3, n, 5, generator=torch.Generator().manual_seed(n)).requires_grad_()
        check(fn, compiled, x, backward=True)
