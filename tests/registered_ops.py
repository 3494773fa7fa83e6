"""Custom ops for tests to register implementations of."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from reflib.lower import custom_ops


@torch.library.custom_op("rtest::mm_relu", mutates_args=())
def mm_relu(x: Tensor, w: Tensor, k_splits: int = 1) -> Tensor:
    return (x @ w).relu()


@mm_relu.register_fake
def _(x: Tensor, w: Tensor, k_splits: int = 1) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[1])


@torch.library.custom_op("rtest::stats", mutates_args=())
def stats(xs: list[Tensor], shift: Tensor | None = None, scale: float = 1.0, *, dim: int = -1) -> tuple[Tensor, Tensor]:
    x = torch.stack(xs) * scale
    x = x if shift is None else x + shift
    return x.sum(dim), x.amax(dim, keepdim=True).transpose(0, 1).contiguous()


@stats.register_fake
def _(xs: Any, shift: Any = None, scale: float = 1.0, *, dim: int = -1) -> Any:
    x = torch.stack(xs)
    return x.sum(dim), x.amax(dim, keepdim=True).transpose(0, 1).contiguous()


@torch.library.custom_op("rtest::double", mutates_args=())
def double(x: Tensor) -> Tensor:
    return x * 2


@double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rtest::fill_", mutates_args={"x"})
def fill_(x: Tensor) -> None:
    x.fill_(1)


def plain(x: Tensor, w: Tensor) -> Tensor:
    return torch.mm(x, w).relu()


def split(x: Tensor, w: Tensor, k_splits: int) -> Tensor:
    m, k = x.shape
    a = x.view(m, k_splits, k // k_splits).transpose(0, 1)
    return torch.bmm(a, w.view(k_splits, k // k_splits, w.shape[1])).sum(0).relu()


@pytest.fixture(autouse=True)
def empty_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(custom_ops, "_REGISTERED", {})
    monkeypatch.setattr(custom_ops, "_WARNED", set())
    yield
    torch._dynamo.reset()


def tensors(m: int = 8, k: int = 64, n: int = 16) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(m, k), torch.randn(k, n)


def around(x: Tensor, w: Tensor) -> Tensor:
    return mm_relu(x * 2, w) + 1
