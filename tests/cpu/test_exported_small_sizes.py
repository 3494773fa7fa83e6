"""Sizes and ints of 0 and 1, which torch.export promises although it traced with 2 or more; ops with effects."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from reflib.errors import ReflibError

DYNAMIC = torch.export.Dim.DYNAMIC


class TimesAtLeastTwo(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> Any:
        return x.sum() * max(n, 2), n // 2


class AtLeastTwoOnes(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return x.new_ones(max(x.shape[0], 2)), x.sum()


class OneWay(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
        return x + 1 if max(n, 1) == n else x - 1


class Reshaped(torch.nn.Module):
    def forward(self, x: torch.Tensor, n: int, k: int) -> torch.Tensor:
        return x.view(n, k) + n


class Solved(torch.nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return torch.linalg.solve(a, b) + 1, torch.linalg.inv(a)


@pytest.fixture(params=["python", "cpp", "package"])
def compiled(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., Any]:
    """(model, args, dynamic_shapes) -> it, compiled ahead of its call."""

    def make(model: torch.nn.Module, args: tuple[Any, ...], dynamic_shapes: Any = None) -> Callable[..., Any]:
        if request.param == "package":
            path = tmp_path / "model.reflib"
            return reflib.load(reflib.aot_compile(model, args, path, "cpu", dynamic_shapes=dynamic_shapes))
        exported = torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
        return reflib.compile(exported, wrapper=request.param)

    return make


@pytest.mark.sample(3)
def test_ints(compiled: Callable[..., Any]) -> None:
    model, x = TimesAtLeastTwo(), torch.randn(6)
    f = compiled(model, (x, 5), ({0: DYNAMIC}, DYNAMIC))
    for n in (0, 1, 2, 3, 7):
        torch.testing.assert_close(f(x, n), model(x, n))


@pytest.mark.sample(3)
def test_sizes(compiled: Callable[..., Any]) -> None:
    model, x = AtLeastTwoOnes(), torch.randn(6)
    f = compiled(model, (x,), ({0: torch.export.Dim("rows", min=0)},))
    for n in (0, 1, 2, 6):
        torch.testing.assert_close(f(x[:n]), model(x[:n]))


@pytest.mark.sample(3)
def test_a_guard_that_only_small_ones_break(compiled: Callable[..., Any]) -> None:
    model, x = OneWay(), torch.randn(6)
    f = compiled(model, (x, 3), ({0: DYNAMIC}, DYNAMIC))
    torch.testing.assert_close(f(x, 1), x + 1)
    with pytest.raises(ReflibError, match=r"it was exported where Eq\(Max\(1, \w+\), \w+\) holds"):
        f(x, 0)


@pytest.mark.sample(3)
def test_a_guard_on_a_product(compiled: Callable[..., Any]) -> None:
    model = Reshaped()
    f = compiled(model, (torch.randn(12), 3, 4), ({0: DYNAMIC}, DYNAMIC, DYNAMIC))
    x = torch.randn(20)
    for n, k in ((5, 4), (4, 5), (10, 2)):
        torch.testing.assert_close(f(x, n, k), model(x, n, k))
    for n, k in ((5, 5), (1, 20)):  # torch.export looked whether it is 1, and checks that too
        with pytest.raises(ReflibError, match="it was exported where"):
            f(x, n, k)


def test_compiling_leaves_the_program_as_it_was() -> None:
    x = torch.randn(6)
    exported = torch.export.export(OneWay(), (x, 3), dynamic_shapes=({0: DYNAMIC}, DYNAMIC))
    for wrapper in ("python", "cpp", "python"):
        torch.testing.assert_close(reflib.compile(exported, wrapper=wrapper)(x, 1), x + 1)


@pytest.mark.sample(3)
def test_ops_with_effects(compiled: Callable[..., Any]) -> None:
    """torch.export threads a token through them, so that they stay, and in order."""
    a, b = torch.randn(4, 4) + 4 * torch.eye(4), torch.randn(4, 2)
    f = compiled(Solved(), (a, b))
    torch.testing.assert_close(f(a, b), Solved()(a, b))
    with pytest.raises(Exception, match="singular"):
        f(torch.zeros(4, 4), b)
