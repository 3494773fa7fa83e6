"""A backward stores over what was saved for it (``plan.taken``), but not while anything else refers to that."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.dlpack import from_dlpack, to_dlpack

from reflib.lab.peak_memory import peak_bytes
from reflib.options import Options
from reflib.pipeline import Backend, Stages
from reflib.wrap.steps import owned

CPU = torch.device("cpu")


def f(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).exp().sin()


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    y = (x * 2).exp()
    return y, y.sin()  # y is saved, and the caller's


def compiled(fn: Any, **options: Any) -> tuple[Any, list[Stages]]:
    torch._dynamo.reset()
    seen: list[Stages] = []
    return torch.compile(fn, backend=Backend(Options(**options), seen.append)), seen


def takes(seen: list[Stages]) -> bool:
    return "UNSHARED" in (seen[1].wrapper or "")


def inputs() -> tuple[Tensor, ...]:
    rng = random.Random(5)
    n, d, m = (8 * rng.randint(9, 20) for _ in range(3))
    torch.manual_seed(5)
    return tuple(t.requires_grad_() for t in (torch.randn(n, d) / d, torch.randn(d, m)))


def same(got: Any, want: Any) -> None:
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def peak_of_backward(g: Any, x: Tensor, w: Tensor) -> int:
    for _ in range(2):  # (the first one compiles)
        y, grads = g(x, w), list[Tensor]()
        dy = torch.ones_like(y)
        backward = partial(torch.autograd.grad, y, (x, w), dy)
        peak = peak_bytes(partial(lambda grads, backward: grads.extend(backward()), grads, backward), CPU)
    same(grads, torch.autograd.grad(f(x, w), (x, w), dy))
    return peak


def test_one_tensor_less_is_in_memory() -> None:
    x, w = inputs()
    peaks = []
    for inplace in (True, False):
        g, seen = compiled(f, inplace_buffers=inplace)
        peaks.append(peak_of_backward(g, x, w))
        assert takes(seen) == inplace
    assert peaks[0] == peaks[1] - x.shape[0] * w.shape[1] * 4


def test_graph_is_retained() -> None:
    """In any order of backwards that retain it and of those that do not."""
    x, w = inputs()
    g, seen = compiled(f)
    want = torch.autograd.grad(f(x, w).sum(), (x, w))
    for keep in ((False,), (True, True, False), (False,), (True, False)):
        y = g(x, w).sum()
        for retain in keep:
            same(torch.autograd.grad(y, (x, w), retain_graph=retain), want)
    assert takes(seen)


@pytest.mark.parametrize("keep", [lambda t: t, Tensor.detach, to_dlpack])
def test_hooks_that_keep_what_is_saved(keep: Any) -> None:
    """The tensor, another one of its memory, or something in C++ that refers to it."""
    x, w = inputs()
    kept: list[tuple[Any, Tensor]] = []
    g, seen = compiled(f)
    g(x, w).sum().backward()

    def pack(t: Tensor) -> Tensor:
        kept.append((keep(t.detach()) if t.requires_grad else keep(t), t.detach().clone()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = g(x, w).sum()
    same(torch.autograd.grad(y, (x, w)), torch.autograd.grad(f(x, w).sum(), (x, w)))
    now = [from_dlpack(k) if keep is to_dlpack else k for k, _ in kept]
    assert takes(seen) and len(kept) > 2 and all(torch.equal(a, b) for a, (_, b) in zip(now, kept))


def test_results_that_are_saved_too() -> None:
    """Also where the caller has dropped the result, or has its memory only: a gradient has no history."""
    x = inputs()[0]
    g, _ = compiled(both)
    for keep in (lambda y: y, lambda y: y.untyped_storage(), lambda y: None):
        y, z = g(x)
        kept, total, before = keep(y), z.sum(), y.detach().clone()
        del y
        (grad,) = torch.autograd.grad(total, x)
        same((grad,), torch.autograd.grad(both(x)[1].sum(), x))
        assert not grad.requires_grad and grad.grad_fn is None
        if kept is not None:
            storage = kept.untyped_storage() if isinstance(kept, Tensor) else kept
            assert torch.equal(torch.empty(0).set_(storage), before.view(-1))


def test_storage_that_a_hook_keeps() -> None:
    x, w = inputs()
    kept: list[tuple[Any, Tensor]] = []

    def pack(t: Tensor) -> Any:
        kept.append((t.untyped_storage(), t.clone()))
        return kept[-1][0], t.stride(), t.shape, t.storage_offset()

    g, seen = compiled(f)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda p: torch.empty(0).set_(p[0], p[3], p[2], p[1])):
        y = g(x, w).sum()
    same(torch.autograd.grad(y, (x, w)), torch.autograd.grad(f(x, w).sum(), (x, w)))
    assert takes(seen) and len(kept) > 2
    assert all(torch.equal(torch.empty(0).set_(s, 0, t.shape, t.stride()), t) for s, t in kept)


@pytest.mark.parametrize("first", [True, False])
def test_graph_of_subclasses_is_retained(first: bool) -> None:
    x, w = (TwoTensor(t.detach(), 2 * t.detach()).requires_grad_() for t in inputs())
    g, seen = compiled(f)
    want = torch.autograd.grad(f(x, w).sum(), (x, w))
    for keep in ((first, False)[not first :], (True, False)):
        y = g(x, w).sum()
        for retain in keep:
            got = torch.autograd.grad(y, (x, w), retain_graph=retain)
            same([t.b for t in got], [t.b for t in want])
    assert takes(seen)


def test_who_owns_its_memory() -> None:
    w = torch.ones(8, requires_grad=True)
    for other in (
        lambda t: None, lambda t: t.requires_grad_(), lambda t: t.untyped_storage(), Tensor.detach, Tensor.numpy,
        lambda t: t[2:], lambda t: t * w, to_dlpack,
    ):  # fmt: skip
        t = torch.ones(8)
        kept = other(t)  # the product has ``t`` for its gradient
        assert owned(t) == (kept is None), other
    assert not owned(torch.ones(8)[4:]) and not owned(torch.from_numpy(torch.ones(8).numpy()))


def numpy_kept(kept: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """The array is the hook's, and has the memory of the tensor that autograd gets back."""

    def pack(t: Tensor) -> Any:
        array = t.detach().clone().numpy()
        kept.append((array, array.copy()))
        return array

    return pack, torch.from_numpy


def history(kept: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    return lambda t: t.detach().clone(), lambda t: t.clone().requires_grad_()


def part_of_a_storage(kept: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """(Whose other part would be in memory for as long as the gradient.)"""

    def unpack(t: Tensor) -> Tensor:
        return t.new_empty(0).set_(t.new_empty(2 * t.numel()).untyped_storage(), 0, t.shape, t.stride()).copy_(t)

    return lambda t: t.detach().clone(), unpack


@pytest.mark.parametrize("hooks", [numpy_kept, history, part_of_a_storage])
def test_hooks_that_bring_other_memory(hooks: Any) -> None:
    x = inputs()[1]
    fn = lambda x: torch.cumsum((x / 4).exp(), 0).sin()  # noqa: E731 (x's gradient is stored over the exponential)
    g, seen = compiled(fn)
    g(x).sum().backward()
    kept: list[tuple[Any, Any]] = []
    with torch.autograd.graph.saved_tensors_hooks(*hooks(kept)):
        y = g(x).sum()
    (grad,) = torch.autograd.grad(y, x)
    same((grad,), torch.autograd.grad(fn(x).sum(), x))
    assert takes(seen) and not grad.requires_grad and grad.untyped_storage().nbytes() == grad.nbytes
    assert all((a == b).all() for a, b in kept)


def views(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).sigmoid().chunk(2, -1)
    return (torch.nn.functional.silu(a) * b.sin()).exp()


def arguments(x: Tensor, w: Tensor) -> Tensor:
    return (x.sin() * x.cos()) @ (w * w)


def in_turn(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(3):
        x = (x @ (w @ w.t()) / w.numel()).tanh().sigmoid()
    return x.softmax(-1) @ w


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [views, arguments, in_turn])
def test_what_others_have_is_as_before(fn: Any, dynamic: bool) -> None:
    """Arguments, which are saved as they are, and saved views of one storage; for sizes that vary, too."""
    torch._dynamo.reset()
    g = torch.compile(fn, backend=Backend(Options()), dynamic=dynamic)
    for rows in (64, 64, 96):
        x, w = torch.randn(rows, 32, requires_grad=True), torch.randn(32, 48, requires_grad=True)
        before, y = [x.detach().clone(), w.detach().clone()], g(x, w)
        want = torch.autograd.grad(fn(x, w).sum(), (x, w))
        for retain in (True, False):
            same(torch.autograd.grad(y.sum(), (x, w), retain_graph=retain), want)
        assert torch.equal(x, before[0]) and torch.equal(w, before[1])


def test_regions_that_share_a_tensor() -> None:
    """A result of one graph is saved by two others, and by eager code."""
    torch._dynamo.reset()
    made, left, right = (
        lambda x: (x * 2).exp(), lambda y: y.sin().exp(), lambda y: (y * y).tanh(),
    )  # fmt: skip
    fns = [torch.compile(fn, backend=Backend(Options())) for fn in (made, left, right)]
    x = (torch.randn(40, 56) / 4).requires_grad_()

    def total(made: Any, left: Any, right: Any) -> tuple[Tensor, Tensor]:
        y = made(x)
        return y, left(y).sum() + right(y).sum() + y.cos().sum()

    (want,) = torch.autograd.grad(total(made, left, right)[1], x)
    for keep in (True, False, True):
        y, loss = total(*fns)
        kept, before = (y, y.detach().clone()) if keep else (None, None)
        del y
        for retain in (True, False):
            same(torch.autograd.grad(loss, x, retain_graph=retain), (want,))
            assert kept is None or torch.equal(kept, before)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing(reentrant: bool, inside: bool) -> None:
    x, w = inputs()
    twice = lambda fn: lambda x, w: fn(x, w) + fn(x * 2, w)  # noqa: E731
    again = partial(checkpoint, use_reentrant=reentrant)
    g, _ = compiled(twice(partial(again, f)) if inside else f)
    g = g if inside else twice(partial(again, g))
    want = torch.autograd.grad(twice(f)(x, w).sum(), (x, w))
    for _ in range(2):
        x.grad = w.grad = None
        y = g(x, w).sum()
        if not reentrant:
            same(torch.autograd.grad(y, (x, w), retain_graph=True), want)
        y.backward()
        same((x.grad, w.grad), want)


def test_a_second_derivative_is_refused() -> None:
    x, w = inputs()
    g, seen = compiled(f)
    g(x, w).sum().backward()
    assert takes(seen)
    grads = torch.autograd.grad(g(x, w).sum(), (x, w), create_graph=True)
    same(grads, torch.autograd.grad(f(x, w).sum(), (x, w)))
    with pytest.raises(RuntimeError, match="double backward"):
        grads[0].sum().backward()


@pytest.mark.parametrize("options", [{"arena": True}, {"check_nan": True}])
def test_not_where_memory_is_planned_otherwise(options: dict[str, Any]) -> None:
    x, w = inputs()
    g, seen = compiled(f, **options)
    same(torch.autograd.grad(g(x, w).sum(), (x, w)), torch.autograd.grad(f(x, w).sum(), (x, w)))
    assert not takes(seen)
