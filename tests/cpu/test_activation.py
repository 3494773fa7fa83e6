"""A product and its activation as one choice: every alternative means what the two meant."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import reflib
from reflib.autotune import activation
from reflib.autotune.subprogram import splice
from reflib.ir.interpret import interpret
from reflib.ir.program import Program
from reflib.ir.verify import verify
from tests.choices import choices


@pytest.fixture(autouse=True)
def cublaslt(monkeypatch: Any) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(activation, "_has_cublaslt", lambda device: True)


def lowered(fn: Any, *args: torch.Tensor) -> tuple[Program, Program]:
    before = reflib.explain(fn, *args, autotune="blocking", target="cpu").program
    verify(before)
    after = activation.with_activations(before)
    verify(after)
    return before, after


def linear_relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(F.linear(x, w, b)) + 1


def product_relu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(x @ w.t()).sum(-1)


def product_gelu(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.gelu(x @ w.t(), approximate="tanh")


@pytest.mark.parametrize("fn", [linear_relu, product_relu, product_gelu])
def test_every_alternative_means_the_same(fn: Any) -> None:
    args = torch.randn(2, 4, 512), torch.randn(16, 512), torch.randn(16)
    before, after = lowered(fn, *args)
    assert len(after.nodes) == len(before.nodes) - 1
    (choice,) = choices(after)
    assert choice.op.endswith("+ gelu" if fn is product_gelu else "+ relu")
    assert len(choice.variants) == len(choices(before)[0].variants) + 1
    given = [torch.randn([int(s) for s in before.buffers[i].shape]) for i in before.inputs]
    want = interpret(before, given)
    for a in choice.variants:
        one = splice(after, choice, a)
        verify(one)
        # on a CPU the library's GELU is the other form
        tolerance = 1e-3 if "gelu" in a.name else 1e-4
        for x, y in zip(want, interpret(one, given)):
            assert x.stride() == y.stride() and torch.allclose(x, y, atol=tolerance, rtol=1e-4), a.name


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, b: F.gelu(x @ w.t()),  # the erf form
        lambda x, w, b: torch.relu(y := x @ w.t()) + y,  # the product is needed by itself
        lambda x, w, b: torch.relu((x @ w.t()) * 2),
        lambda x, w, b: torch.sigmoid(x @ w.t()),
    ],
)
def test_what_the_library_does_not_know_stays_two(fn: Any) -> None:
    before, after = lowered(fn, torch.randn(2, 4, 512), torch.randn(16, 512), torch.randn(16))
    assert after is before


@pytest.mark.parametrize("fn", [linear_relu, product_relu])
def test_it_is_measured_and_may_win(fn: Any, monkeypatch: Any) -> None:
    """From end to end, on a CPU that is taken for a GPU: constants and all."""
    module = importlib.import_module("reflib.autotune.points")
    real = module.measure

    def measured(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        winner = next(r for r in result.rows if "_addmm_activation" in r.name)
        assert winner.status == "ok", winner
        return replace(result, winner=winner.name)

    monkeypatch.setattr(module, "measure", measured)
    args = torch.randn(8, 512), torch.randn(16, 512), torch.randn(16)
    compiled = reflib.compile(fn, autotune="blocking", isolate=False)
    assert torch.allclose(compiled(*args), fn(*args), atol=1e-4, rtol=1e-4)
    assert torch.allclose(compiled(*args), fn(*args), atol=1e-4, rtol=1e-4)
