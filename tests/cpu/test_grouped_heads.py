"""Heads of queries that share keys and values become rows of one product: no key is copied."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import reflib
from tests.checking import check

rng = random.Random("grouped heads")
B, G, TIMES, S, D = 2, 3, 4, rng.randint(9, 40), 16


def tensors(length: int = 1, grad: bool = False) -> list[Tensor]:
    g = torch.Generator().manual_seed(length)
    shapes = (B, G * TIMES, length, D), (B, G, S, D), (B, G, S, D)
    return [torch.randn(*shape, generator=g).requires_grad_(grad) for shape in shapes]


def interleaved(t: Tensor) -> Tensor:
    return t.repeat_interleave(TIMES, dim=1)


def expanded(t: Tensor) -> Tensor:
    """As transformers does it."""
    b, n, s, d = t.shape
    return t[:, :, None, :, :].expand(b, n, TIMES, s, d).reshape(b, n * TIMES, s, d)


def keep(q: Tensor) -> Tensor:
    return torch.arange(S) < 5 + torch.arange(q.shape[2])[:, None] + torch.arange(q.shape[0])[:, None, None, None]


def per_head(q: Tensor) -> Tensor:
    return q.mean(-1, keepdim=True) * torch.arange(S)


def attended(repeat: Callable[[Tensor], Tensor], mask: Callable[[Tensor], Tensor] | None, **how: Any) -> Any:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        m = None if mask is None else mask(q)
        out = F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=m, **how)
        return out.transpose(1, 2).flatten(2) * 2

    return fn


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = interleaved(k), interleaved(v)
    score = (q @ k.transpose(-1, -2) / D**0.5).masked_fill(~keep(q), float("-inf"))
    return score.softmax(-1) @ v


def keys(fn: Any, args: list[Tensor]) -> list[int]:
    """How many heads of keys each call of attention reads."""
    graph = reflib.explain(fn, *args, target="sm_90").graphs[0].graph.module.graph
    calls = [n for n in graph.nodes if "attention" in str(n.target) and "backward" not in str(n.target)]
    return [n.args[1].meta["val"].shape[1] for n in calls]


@pytest.mark.sample(3)
@pytest.mark.parametrize("repeat", [interleaved, expanded, None])
@pytest.mark.parametrize("mask", [None, keep, per_head])
@pytest.mark.parametrize("length", [1, 3])
def test_keys_are_read_where_they_are(repeat: Any, mask: Any, length: int) -> None:
    fn = attended(repeat or (lambda t: t), mask, enable_gqa=repeat is None)
    compiled = torch.compile(fn, backend="reflib", dynamic=False)
    torch._dynamo.reset()
    check(fn, compiled, *tensors(length, grad=True), backward=True)
    assert keys(fn, tensors(length)) == [G]


def test_by_hand() -> None:
    fn = lambda q, k, v: by_hand(q.bfloat16(), k.bfloat16(), v.bfloat16())  # noqa: E731
    assert keys(fn, tensors()) == [G]
    torch._dynamo.reset()
    check(fn, torch.compile(fn, backend="reflib", dynamic=False), *tensors())


def test_many_queries_and_triangles_stay() -> None:
    q, k, v = tensors(40)
    assert keys(attended(expanded, keep), [q, k, v]) == [G * TIMES]
    q, k, v = tensors(3)
    assert keys(attended(interleaved, None, is_causal=True), [q, k, v]) == [G * TIMES]
    swapped = lambda t: expanded(t)[:, torch.arange(G * TIMES - 1, -1, -1)]  # noqa: E731
    assert keys(attended(swapped, None), [q, k, v]) == [G * TIMES]
    order = torch.tensor([2, 0, 1])
    picked = lambda t: t[:, order, None].expand(-1, -1, TIMES, -1, -1).reshape(B, G * TIMES, S, D)  # noqa: E731
    assert keys(attended(picked, None), [q, k, v]) == [G * TIMES]
    other = lambda q, k, v: F.scaled_dot_product_attention(q, interleaved(k), v.repeat(1, TIMES, 1, 1))  # noqa: E731
    assert keys(other, [q, k, v]) == [G * TIMES]


def test_keys_that_are_written_to_meanwhile_are_copied_before() -> None:
    def fn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.clone()
        wide, other = interleaved(k), interleaved(v)
        k.mul_(2)
        return F.scaled_dot_product_attention(q, wide, other) + k.sum()

    assert keys(fn, tensors()) == [G * TIMES]
    torch._dynamo.reset()
    check(fn, torch.compile(fn, backend="reflib", dynamic=False), *tensors())


@pytest.mark.parametrize("repeat", [interleaved, expanded])
def test_a_cache_is_written_to_before_it_is_read(repeat: Callable[[Tensor], Tensor]) -> None:
    """The writes' results are not used, and must stay when the copies go."""

    def fn(q: Tensor, new: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        k.index_copy_(2, at, new)
        v[:, :, at] = new * 2
        return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=keep(q))

    q, k, v = tensors()
    at, new = torch.tensor([3]), torch.randn(B, G, 1, D)
    want, got = [k.clone(), v.clone()], [k.clone(), v.clone()]
    expected = fn(q, new, *want, at)
    torch.testing.assert_close(torch.compile(fn, backend="reflib")(q, new, *got, at), expected)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert keys(fn, [q, new, k, v, at]) == [G]
