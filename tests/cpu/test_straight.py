"""Calls without AOTAutograd's wrapper: which they are, and the same results, aliases, versions and modes as eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import reflib
from reflib.capture import straight
from reflib.wrap import cuda_graphs, host  # noqa: F401 - asked when a test begins
from tests.checking import check
from tests.cpu.test_cuda_graphs import layer, recorder  # noqa: F401 - a fixture


def calls(fn: Callable[..., Any], *args: Any, **how: Any) -> tuple[Callable[..., Any], list[bool]]:
    """``fn``, compiled and called once, and whether each of its graphs is called straight."""
    seen: list[bool] = []
    before = straight._nothing_else

    def nothing_else(*given: Any) -> bool:
        seen.append(before(*given))
        return seen[-1]

    straight._nothing_else = nothing_else
    try:
        torch._dynamo.reset()
        f = reflib.compile(fn, **how)
        f(*args)
    finally:
        straight._nothing_else = before
    return f, seen


def plain(x: Tensor, y: Tensor) -> Any:
    return torch.relu(x @ y), x.sum(0), 3


def viewed(x: Tensor, y: Tensor) -> Any:
    return x[1:], (x + y).t()


def returned(x: Tensor, y: Tensor) -> Any:
    """(Dynamo returns it, not its graph.)"""
    return x, x + y


def two_views(x: Tensor, y: Tensor) -> Any:
    """(Of no input.)"""
    z = x + y
    return z[0], z[1], z


def written(x: Tensor, y: Tensor) -> Any:
    x.add_(y)
    return x * 2


def transposed_in_place(x: Tensor, y: Tensor) -> Any:
    """(Python does that, between graphs.)"""
    x.t_()
    return x + y.t()


def without_gradients(x: Tensor, y: Tensor) -> Any:
    with torch.no_grad():
        return (x @ y).sin()


def left_without(x: Tensor, y: Tensor) -> Any:
    torch._C._set_grad_enabled(False)
    return x @ y


def views(results: Any) -> list[bool]:
    return [x._is_view() for x in pytree.tree_leaves(results) if isinstance(x, Tensor)]


@pytest.mark.each
@pytest.mark.parametrize("fn", [plain, viewed, returned, two_views, written, transposed_in_place, without_gradients])
@pytest.mark.parametrize("grad", [False, True])
def test_as_eager(fn: Callable[..., Any], grad: bool) -> None:
    args = [torch.randn(4, 4) for _ in range(2)]
    with torch.set_grad_enabled(grad):
        f, is_straight = calls(fn, *[a.clone() for a in args])
        assert is_straight == [fn not in (viewed, written)]
        mine, theirs = ([a.clone() for a in args] for _ in range(2))
        check(fn, f, *args)
        for _ in range(2):
            got, want = f(*mine), fn(*theirs)
            torch.testing.assert_close(got, want)
            assert torch.is_grad_enabled() == grad
            if fn not in (viewed, two_views):  # (a result that is a view of a result need not be one)
                assert views(got) == views(want)
        assert [x._version for x in mine] == [x._version for x in theirs]
        torch.testing.assert_close(mine, theirs)


def test_results_of_what_requires_grad_do_not() -> None:
    """Of an inference graph in a place without gradients; the mode is as before when it raises an error."""
    x, y = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)
    with torch.no_grad():
        f, is_straight = calls(plain, x, y)
        assert is_straight == [True] and not f(x, y)[0].requires_grad
    g, is_straight = calls(without_gradients, x, y)
    assert is_straight == [True] and not g(x, y).requires_grad and torch.is_grad_enabled()
    h, is_straight = calls(lambda x, i: x[i], y, torch.tensor([1]))
    assert is_straight == [True]
    with pytest.raises(IndexError):
        h(y, torch.tensor([9]))
    assert torch.is_grad_enabled()
    _, is_straight = calls(plain, x, y)
    assert not any(is_straight), "training is autograd's"


def test_modes_and_subclasses_keep_the_wrapper() -> None:
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        f, is_straight = calls(plain, x, y)
        assert is_straight == [False] and f(x, y)[0].dtype == torch.bfloat16
    two = TwoTensor(x, y)
    f, is_straight = calls(lambda a: a + 1, two)
    assert not any(is_straight) and torch.equal(f(two).b, y + 1)
    before = torch.is_grad_enabled()
    try:
        f, is_straight = calls(left_without, x, y)
        torch.set_grad_enabled(True)
        f(x, y)
        assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(before)


def test_sizes_and_the_same_tensor_twice() -> None:
    """Sizes of results are marked, so that the next graph that takes them is for any size too."""
    args = torch.randn(3, 2), torch.randn(3, 2), 4
    f, is_straight = calls(lambda x, y, k: (x + y) * k + x.shape[0], *args, dynamic=True)
    assert is_straight == [False]
    for n, k in ((5, 2), (7, 9)):
        x = torch.randn(n, 2)
        torch.testing.assert_close(f(x, x, k), (x + x) * k + n)
    torch.testing.assert_close(f(x, torch.ones(7, 2), 3), (x + 1) * 3 + 7)


@pytest.mark.skipif("not host.has_entries()", reason="without the extension in C")
def test_a_fitting_call_goes_to_the_recording_at_once(recorder: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Past AOTAutograd's and the graph's own callables, without gradients; what does not fit goes through them."""
    f, x, w = reflib.compile(layer, cuda_graphs=True), torch.randn(8, 16), torch.randn(16, 16)
    for _ in range(4):
        f(x, w)
    slow: list[int] = []
    real = cuda_graphs.Graphed.__call__
    monkeypatch.setattr(cuda_graphs.Graphed, "__call__", lambda self, args: slow.append(len(args)) or real(self, args))
    before = recorder.replayed
    with torch.enable_grad():
        for _ in range(3):
            got = f(x, w)
            torch.testing.assert_close(got, layer(x, w))
            assert not got[0].requires_grad and torch.is_grad_enabled()
            del got
    assert recorder.replayed == before + 3 and not slow
    torch.testing.assert_close(f(torch.randn(8, 16).copy_(x), w), layer(x, w))
    assert slow == [2]
