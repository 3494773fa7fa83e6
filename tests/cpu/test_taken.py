"""A backward stores over what was saved for it (``plan.taken``), but not while anything else refers to that."""

import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor

from reflib.lab.peak_memory import peak_bytes
from reflib.options import Options
from reflib.pipeline import Backend, Stages

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


def test_hooks_that_keep_what_is_saved() -> None:
    x, w = inputs()
    kept: list[Tensor] = []
    g, seen = compiled(f)
    g(x, w).sum().backward()

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = g(x, w).sum()
    before = [t.clone() for t in kept]
    same(torch.autograd.grad(y, (x, w)), torch.autograd.grad(f(x, w).sum(), (x, w)))
    assert len(kept) > 2 and all(map(torch.equal, kept, before)) and takes(seen)


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


@pytest.mark.parametrize("options", [{"arena": True}, {"check_nan": True}])
def test_not_where_memory_is_planned_otherwise(options: dict[str, Any]) -> None:
    x, w = inputs()
    g, seen = compiled(f, **options)
    same(torch.autograd.grad(g(x, w).sum(), (x, w)), torch.autograd.grad(f(x, w).sum(), (x, w)))
    assert not takes(seen)
