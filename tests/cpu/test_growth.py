"""Compile time and memory grow linearly with the program: counted, not timed. And long programs compute what eager does.

A chain of writes to slices, of the forms that recurrences are written in; many kernels; sizes that are products and
quotients of symbols.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from reflib.options import Options
from reflib.pipeline import Backend, Stages
from tests.checking import check


def compiled(fn: Callable[..., Any], stages: list[Stages], dynamic: bool | None = None, **options: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(fn, backend=Backend(Options(**{"verify": True, **options}), stages.append), dynamic=dynamic)


def compare(fn: Callable[..., Any], *args: Any, dynamic: bool | None = None, **more: Any) -> Stages:
    """The stages of the graph (the first) that ``fn`` gives; its results are eager's."""
    stages: list[Stages] = []
    check(fn, compiled(fn, stages, dynamic), *args, **more)
    return stages[0]


# -- chains of writes -------------------------------------------------------------------------------------
def tridiagonal(n: int, a: Any, b: Any, c: Any, d: Any) -> Any:
    """Thomas' algorithm: forward elimination, back substitution."""
    x, e = torch.zeros_like(d), torch.zeros_like(c)
    e[:, 0] = c[:, 0] / b[:, 0]
    x[:, 0] = d[:, 0] / b[:, 0]
    for i in range(1, n):
        m = b[:, i] - a[:, i] * e[:, i - 1]
        e[:, i] = c[:, i] / m
        x[:, i] = (d[:, i] - a[:, i] * x[:, i - 1]) / m
    for i in range(n - 2, -1, -1):
        x[:, i] = x[:, i] - e[:, i] * x[:, i + 1]
    return x


def forward(n: int, a: Any, d: Any) -> Any:
    x = torch.zeros_like(d)
    for i in range(1, n):
        x[:, i] = d[:, i] - a[:, i] * x[:, i - 1]
    return x


def backward(n: int, a: Any, d: Any) -> Any:
    x = d.clone()
    for i in range(n - 2, -1, -1):
        x[:, i] = d[:, i] - a[:, i] * x[:, i + 1]
    return x


def scattered(n: int, a: Any, d: Any) -> Any:
    for i in range(1, n):
        d = torch.select_scatter(d, d[:, i] - a[:, i] * d[:, i - 1], 1, i)
    return d


def one_wide(n: int, a: Any, d: Any) -> Any:
    x = torch.zeros_like(d)
    for i in range(1, n):
        x[:, i : i + 1] = d[:, i : i + 1] - a[:, i : i + 1] * x[:, i - 1 : i]
    return x


def rows(n: int, a: Any, d: Any) -> Any:
    a, d = a.t(), d.t().contiguous()
    x = torch.empty_like(d).fill_(0.5)
    for i in range(1, n):
        x[i] = d[i] - a[i] * x[i - 1]
    return x


def middle(n: int, a: Any, d: Any) -> Any:
    """Slices of the middle of three dimensions."""
    a, d = a[:, :, None], torch.stack([d, -d, d * 2], 2)
    x = torch.zeros_like(d)
    for i in range(1, n):
        x[:, i] = d[:, i] - a[:, i] * x[:, i - 1]
    return x


def onto_input(n: int, a: Any, d: Any) -> Any:
    for i in range(1, n):
        d[:, i] -= a[:, i] * d[:, i - 1]
    return d.sum(1)


def constants(n: int, a: Any, d: Any) -> Any:
    """Numbers written to elements, and the rest read again."""
    x = d * a
    for i in range(0, n, 2):
        x[:, i] = float(i)
    return x, x[:, 1] + x[:, 2]


CHAINS = (tridiagonal, forward, backward, scattered, one_wide, rows, middle, onto_input, constants)


def operands(fn: Callable[..., Any], n: int, m: int = 5) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(n)
    count = fn.__code__.co_argcount - 1
    return [torch.rand(m, n, generator=g) + (4 if i == 1 and count == 4 else 0) for i in range(count)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", CHAINS, ids=lambda f: f.__name__)
def test_a_chain_computes_what_eager_does(fn: Callable[..., Any], dynamic: bool) -> None:
    n = random.Random(fn.__name__).randrange(9, 30)
    compare(lambda *args: fn(n, *args), *operands(fn, n), dynamic=dynamic or None)
