"""Gradients of parameters that every step of a loop reads: one reduction, where no product is between the steps."""

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import reflib
from reflib.capture.slice_sums import joint_sums
from reflib.options import Options

aten = torch.ops.aten
SUMS = {aten.sum.dim_IntList, aten.sum.default}


def looped(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    c, out = torch.zeros_like(x[0]), []
    for t in range(x.shape[0]):
        c = torch.tanh(c * w + x[t] * v)
        out.append(c)
    return torch.stack(out)


def with_products(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    c = x[0]
    for _ in range(x.shape[0]):
        c = torch.tanh(c @ v.T @ v * w)
    return c


def inputs(dtype: torch.dtype = torch.float32, rows: int = 50) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(rows)
    shapes = (5, rows, 16), (16,), (rows, 1)
    return tuple(torch.randn(s, generator=g).to(dtype).requires_grad_() for s in shapes)


def reductions(fn: Any, *args: torch.Tensor, **options: Any) -> int:
    e = reflib.explain(fn, *args, target="sm_90", **options)
    return sum(n.target in SUMS for n in e.backward.graph.nodes)


def test_one_per_parameter() -> None:
    assert reductions(looped, *inputs()) == 2
    assert reductions(looped, *inputs(), numerics="eager") >= 8  # (the first step's are of zeros)


def with_sums(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    c = x[0]
    for _ in range(x.shape[0]):
        c = torch.tanh(c.softmax(-1) * w)
    return c


@pytest.mark.parametrize("fn", [with_products, with_sums])
def test_not_across_products_and_reductions(fn: Any) -> None:
    x, w, _ = inputs()
    e = reflib.explain(fn, x, w, torch.randn(16, 16), target="sm_90")
    assert sum(n.target in SUMS and n.args[1] == [0] for n in e.backward.graph.nodes) == x.shape[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients(dtype: torch.dtype) -> None:
    args = inputs(dtype)
    exact = [a.detach().double().requires_grad_() for a in args]
    want = torch.autograd.grad(looped(*exact).square().sum(), exact)
    eager = torch.autograd.grad(looped(*args).square().sum(), args)
    got = torch.autograd.grad(reflib.compile(looped)(*args).square().sum(), args)
    for g, e, w in zip(got, eager, want, strict=True):
        assert g.dtype == dtype and g.shape == w.shape
        assert (g - w).norm() <= 2 * (e - w).norm() + 1e-5 * w.norm()


def two_groups(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    x = x[0]
    for _ in range(2):
        x = torch.tanh(torch.tanh(x * w) * w) @ torch.ones(16, 16)
    return x * v


def test_two_groups_in_one_sum() -> None:
    args = inputs()
    got = torch.autograd.grad(reflib.compile(two_groups)(*args).sum(), args)
    for g, w in zip(got, torch.autograd.grad(two_groups(*args).sum(), args), strict=True):
        torch.testing.assert_close(g, w, rtol=1e-4, atol=1e-4)


def test_not_added_up_in_what_overflows() -> None:
    big = torch.full((1, 4), 3e38)
    assert (
        reflib.compile(lambda a, b: a.sum(0, dtype=torch.float64) + b.sum(0, dtype=torch.float64))(big, big).max()
        > 5e38
    )
    half = torch.tensor([[3e4], [-3e4]]).half()
    assert not reflib.compile(lambda *x: sum(t.sum(0) for t in x))(*[half] * 60).isnan().any()


def test_a_sum_that_others_read_stays() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, b, c = x.sum(0), x.exp().sum(0), x.tanh().sum(0, keepdim=True)[0] + x.sum(0)
        return a + b + c + x.abs().amax(0), b

    x = torch.randn(7, 5)
    made = joint_sums(make_fx(fn, tracing_mode="fake")(x), Options(), False)
    assert [n.target in SUMS for n in made.graph.nodes].count(True) == 3  # a and the last of c; b; the first of c
    torch.testing.assert_close(made(x), fn(x))


def test_an_expanded_gradient_and_a_dense_one() -> None:
    """Their sum has a number per element, though all of the first's are one in memory (stride 0)."""
    x, w, _ = inputs()
    grad = torch.func.grad(lambda w, x: (x + w).sum() + (x * w).sin().sum())
    plain = make_fx(grad, tracing_mode="fake")(w.detach(), x.detach())
    made = joint_sums(plain, Options(), False)
    assert made is not plain
    assert all(0 not in n.meta["val"].stride() for n in made.graph.nodes if n.target is aten.add.Tensor)
