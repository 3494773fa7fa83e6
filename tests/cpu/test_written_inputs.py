"""Gradients of calls that also write an input that the backward's values come from."""

import pytest
import torch

import reflib


def scaled(w, b):
    y = w * b.exp()
    b.mul_(0.5)
    return y


def transposed(w, b):
    y = (w * b.t().exp()).sin()
    b[1:].add_(y[1:].detach())
    return y * b


def largest(w, b):
    y = w * (b * 2).max(0).values
    b.zero_()
    return y


def written_first(w, b):
    c = b.clone()
    b.add_(1)
    return w * b.exp() * c


@pytest.mark.parametrize("leaf", [False, True], ids=["plain", "requires grad"])  # the graph writes it, or AOTAutograd
@pytest.mark.parametrize("fn", [scaled, transposed, largest, written_first], ids=lambda f: f.__name__)
def test_as_in_eager(fn, leaf):
    w, values, results = torch.randn(4, 4, requires_grad=True), torch.randn(4, 4, requires_grad=leaf), []
    for f in (fn, reflib.compile(fn)):
        b = values * 2  # not a leaf: it may be written
        y = f(w, b)
        results.append([y, b, *torch.autograd.grad(y.sum(), (w, values)[: 1 + leaf])])
    torch.testing.assert_close(results[1], results[0])


def test_what_eager_refuses():
    def fn(w, b):
        y = w * b
        b.mul_(0.5)
        return y

    w, b = torch.randn(4, requires_grad=True), torch.randn(4)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        reflib.compile(fn)(w, b).sum().backward()
