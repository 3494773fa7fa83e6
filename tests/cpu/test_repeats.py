"""``capture/repeats``: joint graphs compute nothing twice."""

import operator
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from reflib.capture.repeats import merge_repeats
from tests.forking import printed

aten = torch.ops.aten


def merged(fn: Callable, *args: torch.Tensor) -> list:
    """What the graph of ``fn`` calls after the pass, which keeps the results."""
    gm = make_fx(fn, tracing_mode="fake")(*args)
    merge_repeats(gm)
    gm.recompile()
    torch.manual_seed(1)
    results = gm(*args)
    torch.manual_seed(1)
    for mine, eager in zip(results, fn(*args), strict=True):
        torch.testing.assert_close(mine, eager, rtol=0, atol=0, equal_nan=True)
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


def test_a_chain_is_computed_once() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple:
        a, b = (x + y).exp().sum(0), (x + y).exp().sum(0)
        return a * b, (x.max(1)[0] - x.max(1)[1]).sin()

    calls = merged(f, torch.randn(5, 7), torch.randn(5, 7))
    assert len(calls) == len(set(calls)) + 1 and calls.count(operator.getitem) == 2


@pytest.mark.parametrize("numbers", [(1, 1.0), (0.0, -0.0), (1, True), (2.5, 2.0)])
def test_numbers_that_differ(numbers: tuple) -> None:
    def fn(x: torch.Tensor) -> tuple:
        return tuple(torch.full((), n).div(x).sum() for n in numbers)

    assert merged(fn, torch.tensor([2.0, 0.0])).count(aten.full.default) == 2


def test_random_numbers_and_memory_without_values_stay() -> None:
    def f(x: torch.Tensor) -> tuple:
        a, b = (torch.empty_like(x).fill_(k) for k in (1, 2))
        return torch.rand_like(x) + torch.rand_like(x), a + b

    calls = merged(f, torch.randn(9))
    assert calls.count(aten.rand_like.default) == calls.count(aten.empty_like.default) == 2


def test_what_is_read_before_and_after_a_write() -> None:
    def f(x: torch.Tensor) -> tuple:
        y = x.clone()
        before = y.sum() * 2
        y.add_(1)
        return before, y.sum() * 2

    assert merged(f, torch.randn(4)).count(aten.sum.default) == 2


def test_results_are_tensors_of_their_own() -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple:
        return (x * y).relu(), (x * y).relu()

    x, y = (torch.randn(6, requires_grad=True) for _ in range(2))
    a, b = torch.compile(f, backend="reflib")(x, y)
    assert a.data_ptr() != b.data_ptr()
    (a.sum() + (b * 3).sum()).backward()
    torch.testing.assert_close(x.grad, 4 * y.detach() * (x * y > 0))


@pytest.mark.parametrize("op", [lambda x: x.max(-1)[0], lambda x: torch.var_mean(x, -1)[1]])
def test_results_of_an_op_with_several(op: Callable) -> None:
    x = torch.randn(5, 6, requires_grad=True)
    a, b = torch.compile(lambda x: (op(x * 2), op(x * 2)), backend="reflib")(x)
    with torch.no_grad():
        a.zero_()
    torch.testing.assert_close(b, op(x * 2))


def test_registered_ops_are_called_as_often_as_written() -> None:
    @torch.library.custom_op("test_repeats::noise", mutates_args=())
    def noise(x: torch.Tensor) -> torch.Tensor:  # (it does not say that it is random)
        return torch.rand_like(x)

    noise.register_fake(torch.empty_like)
    noise.register_autograd(lambda _, grad: torch.zeros_like(grad))
    f = torch.compile(lambda x: (noise(x) - noise(x)).abs().sum(), backend="reflib")
    assert f(torch.ones(9, requires_grad=True)) > 0


def test_complex_zeros_and_sizes_of_several_results() -> None:
    def f(x: torch.Tensor) -> tuple:
        zeros = [torch.full((), z).div(x[0]).real for z in (complex(0.0, 0.0), complex(-0.0, 0.0))]
        found = [torch.unique(x, return_inverse=True)[0] for _ in range(2)]
        return (*zeros, (found[0] * 2).sum() + (found[1] * 3).sum())

    gm = make_fx(f, tracing_mode="symbolic")(x := torch.tensor([2.0, 2.0, 1.0]))
    merge_repeats(gm)
    calls = [n.target for n in gm.graph.nodes]
    assert calls.count(aten.full.default) == calls.count(aten._unique2.default) == 2
    torch.testing.assert_close(gm(x), f(x))


def test_sizes_of_two_results_of_nonzero() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x[x > 0].sum() * x[x > 0].exp().mean()

    x = torch.randn(50, requires_grad=True)
    want = torch.autograd.grad(f(x), x)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(torch.autograd.grad(torch.compile(f, backend="reflib")(x), x), want)


def test_training_does_not_import_torch_inductors_lowerings() -> None:
    code = (
        "import sys, torch; assert 'torch._inductor.lowering' not in sys.modules\n"
        "f = torch.compile(lambda x: x.sin().relu(), backend='reflib')\n"
        "f(torch.ones(8, requires_grad=True)).sum().backward()\n"
        "sys.exit('torch._inductor.lowering' in sys.modules)"
    )
    printed("-c", code)
