"""``torch.utils.checkpoint`` around what draws random numbers: the backward draws the forward's again."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import reflib

BOTH = pytest.mark.parametrize("wrapper", ["python", "cpp"])


def dropout(q):
    return F.dropout(q, 0.5).sin()


def noise(q):
    return (q * torch.rand(2, 3, 16, 8)).sin()


def attention(q):
    return F.scaled_dot_product_attention(q, q, q, dropout_p=0.25)


def plain_attention(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


@pytest.mark.sample(3)
@BOTH
@pytest.mark.parametrize("inner", [dropout, noise, attention, plain_attention], ids=lambda f: f.__name__)
def test_the_same_numbers_as_eager(inner, wrapper):
    def fn(q):
        return checkpoint(inner, q * 2, use_reentrant=False).cos()

    f, results = reflib.compile(fn, wrapper=wrapper), []
    q = torch.randn(2, 3, 16, 8, requires_grad=True)
    for g in (fn, f, f):
        torch.manual_seed(7)
        out = g(q)
        drawn = torch.rand(3)  # the state goes on from where it is
        results.append((out, torch.autograd.grad(out.sum(), q), drawn, torch.rand(3)))
    for got in results[1:]:
        torch.testing.assert_close(got, results[0], rtol=1e-4, atol=1e-5)


@BOTH
def test_with_dynamic_sizes(wrapper):
    def fn(q):
        return checkpoint(dropout, q * 2, use_reentrant=False)

    f = reflib.compile(fn, wrapper=wrapper, dynamic=True)
    for n in (5, 8):
        q = torch.randn(n, 4, requires_grad=True)
        got = []
        for g in (fn, f):
            torch.manual_seed(n)
            out = g(q)
            got.append((out, torch.autograd.grad(out.sum(), q)))
        torch.testing.assert_close(*got)
