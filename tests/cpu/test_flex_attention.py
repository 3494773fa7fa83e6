"""``flex_attention``: as eager, in few kernels, forward and backward."""

import sys

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import reflib

flex = sys.modules["torch.nn.attention.flex_attention"]  # (the name is also a function's)
flex_attention = flex.flex_attention
B, H, S, D = 2, 4, 70, 16
DOCUMENT = (torch.arange(S) // 23).expand(B, S).clone()


def causal(b, h, i, j):
    return i >= j


def same_document(b, h, i, j):
    return (DOCUMENT[b, i] == DOCUMENT[b, j]) & (i >= j)


@pytest.fixture(scope="module")
def masks():
    return {m.__name__: create_block_mask(m, B, None, S, S, device="cpu") for m in (causal, same_document)}


def softcap(q, k, v, table, masks):
    out, lse = flex_attention(q, k, v, lambda s, b, h, i, j: torch.tanh(s / 20) * 20, masks["causal"], return_lse=True)
    return out + lse.unsqueeze(-1)


def documents(q, k, v, table, masks):
    return flex_attention(q, k, v, block_mask=masks["same_document"], scale=0.3)


def relative(q, k, v, table, masks):
    return flex_attention(q, k, v, lambda s, b, h, i, j: s + table[i - j + S] * h)


def grouped(q, k, v, table, masks):
    return flex_attention(q, k[:, :2], v[:, :2], block_mask=masks["causal"], enable_gqa=True)


def one_key(q, k, v, table, masks):
    return flex_attention(q, k[:1], v[:1], lambda s, b, h, i, j: s * 2, masks["causal"])


FORMS = pytest.mark.parametrize("form", [softcap, documents, relative, grouped, one_key], ids=lambda f: f.__name__)


def given():
    torch.manual_seed(0)
    tensors = [torch.randn(B, H, S, D).transpose(1, 2).contiguous().transpose(1, 2) for _ in range(3)]
    return [t.requires_grad_() for t in (*tensors, torch.randn(2 * S))]


@FORMS
@pytest.mark.sample(2)
@pytest.mark.parametrize("wrapper", ["python", "cpp"])
def test_as_eager(form, wrapper, masks, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *a: None)  # PyTorch has the backward for GPUs only
    results = []
    for f in (form, reflib.compile(form, wrapper=wrapper)):
        args = given()
        out = f(*args, masks)
        grads = torch.autograd.grad(out.sin().sum(), args, allow_unused=True)
        results.append([out, *(g for g in grads if g is not None)])
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-4)
    assert [t.stride() for t in results[1]] == [t.stride() for t in results[0]]


@FORMS
def test_between_two_products(form, masks):
    """The functions of scores and masks are in the softmax's kernels: the scores are stored where a product needs them,
    and by no call of the whole op."""
    e = reflib.explain(form, *(t.detach() for t in given()), masks, target="sm_90")
    calls = [str(n.target) for n in e.program.nodes if type(n).__name__ == "Extern"]
    assert not any("flex" in c for c in calls)
    assert len(e.kernels) <= 5


def test_sizes_that_change_and_eagers_bits(masks):
    def fn(q):
        return flex_attention(q, q, q, lambda s, b, h, i, j: s - (i - j).abs())

    f, exact = reflib.compile(fn), reflib.compile(fn, numerics="eager")
    for n in (40, 56, 33):
        q = torch.randn(1, 2, n, 8)
        torch.testing.assert_close(f(q), fn(q))
        torch.testing.assert_close(exact(q), fn(q), rtol=0, atol=0)
