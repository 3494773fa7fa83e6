"""fuse.sums: a sum of several products is one buffer; what is not such a sum is left alone."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import reflib
from reflib.observe.memory import report

aten = torch.ops.aten


class Tied(nn.Module):
    """One weight, ``uses`` times."""

    def __init__(self, uses: int, width: int):
        super().__init__()
        self.layer, self.uses = nn.Linear(width, width), uses

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.uses):
            x = torch.tanh(self.layer(x))
        return x


def products(e: Any) -> list[Any]:
    return [n for n in e.graphs[-1].scheduled.nodes if getattr(n, "target", None) is aten.addmm.default and n.mutates]


@pytest.mark.parametrize("wrapper, dtype", [("python", torch.float32), ("cpp", torch.bfloat16)])
def test_gradients_of_a_weight_used_several_times(wrapper: str, dtype: torch.dtype) -> None:
    uses, width, rows = random.Random(0).randint(4, 7), 48, 6
    torch.manual_seed(0)
    ours, x = Tied(uses, width).to(dtype), torch.randn(rows, width, dtype=dtype)
    theirs, right = copy.deepcopy(ours), copy.deepcopy(ours).double()
    reflib.compile(ours, wrapper=wrapper, verify=True)(x).square().sum().backward()
    theirs(x).square().sum().backward()
    right(x.double()).square().sum().backward()
    for a, b, c in zip(ours.parameters(), theirs.parameters(), right.parameters()):
        error, own = ((t.grad - c.grad).abs().max().item() for t in (a, b))  # type: ignore[operator]
        assert error <= 2 * own + 1e-5
    e = reflib.explain(Tied(uses, width), torch.randn(rows, width), target="cpu")
    assert len(products(e)) == uses - 1
    backward = report(e.graphs[-1], e.graphs, (), e._eager)
    assert backward.eager_peak_bytes is not None and backward.peak_bytes <= backward.eager_peak_bytes


def test_sizes_that_are_symbols() -> None:
    ours = Tied(4, 16)
    theirs = copy.deepcopy(ours)
    compiled = reflib.compile(ours, dynamic=True)
    for rows in (3, 8, 5):
        x = torch.randn(rows, 16)
        for model in (compiled, theirs):
            model(x).sum().backward()
    torch.testing.assert_close(ours.layer.weight.grad, theirs.layer.weight.grad, rtol=1e-4, atol=1e-4)


def left_alone(x: Tensor, w: Tensor) -> list[Tensor]:
    a, b, c, d = (x[i] @ w for i in range(4))
    two = (x[0] + 1) @ w + (x[1] + 1) @ w
    read = a + b  # (which is a result)
    return [two, read, read + c, d.t() + (x[2] @ w.t()), c * 2]


def test_other_sums() -> None:
    args = torch.randn(4, 8, 8), torch.randn(8, 8)
    torch.testing.assert_close(reflib.compile(left_alone, verify=True)(*args), left_alone(*args), rtol=1e-4, atol=1e-4)
    assert not products(reflib.explain(left_alone, *args, target="cpu"))


def test_an_operand_that_is_written_to_in_between() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        a, b, c = x[0] @ w, x[1] @ w, x[2] @ w
        x[2] = a * 0 + 3
        return (a + b).sin() + ((x[0] @ w + x[1] @ w) + c)

    ours, theirs = ([t.clone() for t in (torch.ones(3, 8, 8), torch.eye(8))] for _ in range(2))
    torch.testing.assert_close(reflib.compile(fn, verify=True)(*ours), fn(*theirs))
    torch.testing.assert_close(ours, theirs)


def test_eagers_bits() -> None:
    x, w = torch.randn(4, 8, 8), torch.randn(8, 8)
    fn = lambda x, w: x[0] @ w + x[1] @ w + x[2] @ w  # noqa: E731
    assert torch.equal(reflib.compile(fn, numerics="eager")(x, w), fn(x, w))
    assert products(reflib.explain(fn, x, w, target="cpu"))
