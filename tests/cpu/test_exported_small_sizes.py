"""Sizes and ints of 0 and 1, which torch.export promises although it traced with 2 or more; ops with effects."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import reflib
from tests.exporting import Alone

DYNAMIC = torch.export.Dim.DYNAMIC


def solved(a: torch.Tensor, b: torch.Tensor) -> Any:
    return torch.linalg.solve(a, b) + 1, torch.linalg.inv(a)


X, A, B = torch.randn(20), torch.randn(4, 4) + 4 * torch.eye(4), torch.randn(4, 2)
ROWS = {0: torch.export.Dim("rows", min=0)}
Some = tuple[Any, ...]
# what it is, example arguments, which sizes and ints may change, calls that are right, calls that are refused, and why
CASES: dict[str, tuple[Callable[..., Any], Some, Some | None, list[Some], list[Some], str]] = {
    "ints": (lambda x, n: (x.sum() * max(n, 2), n // 2), (X[:6], 5), ({0: DYNAMIC}, DYNAMIC),
             [(X[:6], n) for n in (0, 1, 2, 3, 7)], [], ""),
    "sizes": (lambda x: (x.new_ones(max(x.shape[0], 2)), x.sum()), (X[:6],), (ROWS,),
              [(X[:n],) for n in (0, 1, 2, 6)], [], ""),
    "a guard that only small ones break": (
        lambda x, n: x + 1 if max(n, 1) == n else x - 1, (X[:6], 3), ({0: DYNAMIC}, DYNAMIC),
        [(X[:6], 1)], [(X[:6], 0)], r"it was exported where Eq\(Max\(1, \w+\), \w+\) holds"),
    # (torch.export looked whether a size is 1, and checks that too)
    "a guard on a product": (
        lambda x, n, k: x.view(n, k) + n, (X[:12], 3, 4), ({0: DYNAMIC}, DYNAMIC, DYNAMIC),
        [(X, 5, 4), (X, 4, 5), (X, 10, 2)], [(X, 5, 5), (X, 1, 20)], "it was exported where"),
    # torch.export threads a token through them, so that they stay, and in order
    "ops with effects": (solved, (A, B), None, [(A, B)], [(torch.zeros(4, 4), B)], "singular"),
}  # fmt: skip


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
@pytest.mark.parametrize("name", CASES)
def test_small_sizes(name: str, compiled: Callable[..., Any]) -> None:
    fn, args, shapes, right, refused, why = CASES[name]
    f = compiled(Alone(fn), args, shapes and (shapes,))
    for call in right:
        torch.testing.assert_close(f(*call), fn(*call))
    for call in refused:
        with pytest.raises(Exception, match=why):
            f(*call)


def test_compiling_leaves_the_program_as_it_was() -> None:
    fn, args, shapes, *_ = CASES["a guard that only small ones break"]
    exported = torch.export.export(Alone(fn), args, dynamic_shapes=(shapes,))
    for wrapper in ("python", "cpp", "python"):
        torch.testing.assert_close(reflib.compile(exported, wrapper=wrapper)(X[:6], 1), X[:6] + 1)
