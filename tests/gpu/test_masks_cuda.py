"""Masks of attention on a GPU: the kernels that are taken, and that they are right."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.checking import check
from tests.cpu.test_masks import everything, of_documents, of_the_input, window
from tests.semantics import Compiled

Mask = Callable[[torch.Tensor], torch.Tensor]


def hiding(q, keep):
    return torch.zeros_like(keep, dtype=q.dtype).masked_fill(~keep, torch.finfo(q.dtype).min)[:, None, None]


def by_keys(q, k, v, keep):
    return (q @ k.mT * 0.3 + hiding(q, keep)).softmax(-1) @ v


def written_later(q, k, v, keep):
    mask = torch.zeros_like(keep, dtype=q.dtype)
    mask[~keep] = torch.finfo(q.dtype).min
    return (q @ k.mT * 0.3 + mask[:, None, None]).softmax(-1) @ v


def learned(q, k, v, keep):
    """(As T5's bias.)"""
    mask = hiding(q, keep) + (q[:1, :1, :1, :1] * 0).expand(1, 1, q.shape[2], k.shape[2])
    return (q @ k.mT * 0.3 + mask).softmax(-1) @ v


@pytest.mark.parametrize("mask", [everything, of_documents, of_the_input, window])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("length", [37, 96])
def test_a_fused_kernel_takes_the_call(mask: Mask, dtype: torch.dtype, length: int) -> None:
    """None of these is taken apart in products of float32, whose weights a backward would need."""

    def fn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask(q)).transpose(1, 2).flatten(2) * 2

    compiled = Compiled(fn, dynamic=False)
    g = torch.Generator().manual_seed(length)
    made = (torch.randn(2, 4, length, 64, generator=g).to("cuda", dtype) for _ in range(3))
    check(fn, compiled, *(t.requires_grad_() for t in made), backward=True)
    names = [str(n.target) for n in compiled.stages[0].graph.module.graph.nodes]
    assert any("attention" in n for n in names), names
    assert not any("bmm" in n or "softmax" in n for n in names), names


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fn", [by_keys, learned, written_later], ids=lambda f: f.__name__)
def test_gradients_of_rows_that_a_number_hides(fn: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """Of attention that was written by hand and is a call: all eager's."""
    g = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, 3, 200, 64, generator=g).to("cuda", dtype).requires_grad_() for _ in range(3))
    keep = torch.rand(2, 200, generator=g).cuda() < 0.7
    keep[1] = False
    compiled = Compiled(fn, dynamic=False)
    check(fn, compiled, q, k, v, keep, backward=True)
    names = [str(n.target) for n in compiled.stages[0].graph.module.graph.nodes]
    assert any("attention" in n for n in names) and not any("softmax" in n for n in names), names
