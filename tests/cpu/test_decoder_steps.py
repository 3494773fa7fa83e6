"""A decoder's step with a key-value cache stores as many bytes of the cache's size as it must, and no more."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import reflib
from reflib.ir.loops import LoopNest

B, H, S, D = 2, 4, 40, 16
torch.manual_seed(11)
KEYS, VALUES = torch.randn(B, H, S, D), torch.randn(B, H, S, D)
Q, K, V = (torch.randn(B, H, 1, D) for _ in range(3))
ONE = B * H * D * 4  # bytes, of a position


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def turned(x: Tensor) -> Tensor:
    """As rotary positions: halves of it, put together."""
    return torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * 0.3 + x * 0.7


def past_and_present(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = torch.cat([keys, turned(k)], 2), torch.cat([values, v], 2)
    return attention(turned(q), keys, values), keys, values


def by_hand(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = torch.cat([keys, turned(k)], 2), torch.cat([values, v], 2)
    return ((turned(q) @ keys.mT) * 0.25).softmax(-1) @ values, keys, values


def new_cache(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    keys, values = torch.slice_scatter(keys, k, 2, 7, 8), torch.slice_scatter(values, v, 2, 7, 8)
    return attention(q, keys, values), keys, values


def same_cache(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    keys.copy_(torch.slice_scatter(keys, turned(k), 2, 7, 8))
    values[:, :, 7:8] = v
    return attention(q, keys[:, :, :8], values[:, :, :8])


def window(keys: Tensor, values: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """The oldest position leaves: what moves in its own memory is stored beside it before."""
    keys.copy_(torch.cat([keys[:, :, 1:], k], 2))
    values.copy_(torch.cat([values[:, :, 1:], v], 2))
    return attention(q, keys, values)


# bytes stored for the caches, at least, by anything that stores more than a few positions
CASES: dict[str, tuple[Callable[..., Any], int]] = {
    "past and present": (past_and_present, 2 * (S + 1) * ONE),
    "by hand": (by_hand, 2 * (S + 1) * ONE),
    "a new cache": (new_cache, 2 * S * ONE),
    "the same cache": (same_cache, 0),
    "a window": (window, 4 * S * ONE),
}


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
@pytest.mark.parametrize("case", CASES)
def test_bytes_of_the_cache(case: str, target: str) -> None:
    fn, least = CASES[case]
    with torch.no_grad():
        nodes = reflib.explain(fn, KEYS, VALUES, Q, K, V, target=target).fused.nodes
    kernels = [n for n in nodes if isinstance(n, LoopNest)]
    stored = sum(len(n.stores()) * n.numel.hint() * 4 for n in kernels if n.numel.hint() * 4 > 8 * ONE)
    assert stored == least
    if target == "cpu":
        mine, theirs = ([t.clone() for t in (KEYS, VALUES, Q, K, V)] for _ in range(2))
        with torch.no_grad():
            torch.testing.assert_close(reflib.compile(fn)(*mine), fn(*theirs))
        torch.testing.assert_close(mine, theirs)
