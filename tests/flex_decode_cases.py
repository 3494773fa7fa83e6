"""Calls of ``flex_attention`` with few queries and many keys, drawn at random, for tests on both devices."""

import random
from collections.abc import Callable
from typing import Any

import torch

from tests.flex_cases import AUX, GQA, LSE, Case, alibi, capped, relative


def slopes(s, b, h, i, j, t):  # type: ignore[no-untyped-def]
    """A number for all, one per head, and a bias per key."""
    return s * t[0, 0] + 0.01 * t[h, 1] * (j - i) + t[h, j]


def at_end(n: int, m: int) -> Callable[..., Any]:
    """Causal: the queries are the last of ``n`` positions."""
    return lambda b, h, i, j, c: i + (n - m) >= j


def window(n: int, m: int) -> Callable[..., Any]:
    return lambda b, h, i, j, c: (i + (n - m) >= j) & (i + (n - m) - j < 150)


def document(n: int, m: int) -> Callable[..., Any]:
    return lambda b, h, i, j, c: (c["documents"][b, i + (n - m)] == c["documents"][b, j]) & (i + (n - m) >= j)


def padded(n: int, m: int) -> Callable[..., Any]:
    """Every third query has no keys at all."""
    return lambda b, h, i, j, c: (j < c["lengths"][b]) & (i % 3 != m % 3)


def by_head(n: int, m: int) -> Callable[..., Any]:
    return lambda b, h, i, j, c: i + (n - m) - j <= (h + 1) * 90


MASKS = [None, None, at_end, window, document, padded, by_head]
SCORES = [None, None, alibi, relative, slopes, capped]


def drawn(r: random.Random, dtype: torch.dtype, large: bool = False) -> Case:
    b, hk, groups, m = r.choice([1, 2, 3]), r.choice([1, 2]), r.choice([1, 2, 3, 4]), r.choice([1, 1, r.randint(2, 20)])
    n = r.randint(256, 20000 if large else 700) | 1
    d, e = r.choice([(64, 64), (128, 128), (192, 128), (40, 24)] if large else [(16, 16), (24, 40), (32, 16)])
    mask, score = r.choice(MASKS), r.choice(SCORES)
    options: tuple[tuple[str, Any], ...] = r.choice([(), (), LSE])
    if r.random() < 0.4:
        options += (("kernel_options", {"SPLIT_KV": r.randint(2, 9)}),)
    kv = (r.choice([1, b]) if mask else b, hk, n)
    return Case(
        (b, hk * groups, m, d), kv, e, mask and mask(n, m), score, options + GQA, trains=False,
        block=r.choice([32, 128]), dtype=dtype,
    )  # fmt: skip


def many(count: int, dtype: torch.dtype = torch.float32, large: bool = False, seed: int = 0) -> list[Case]:
    r = random.Random(seed)
    return [drawn(r, dtype, large) for _ in range(count)]


FORCED = (("kernel_options", {"BACKEND": "TRITON_DECODE"}),)
DECODE = {f"drawn {i}": c for i, c in enumerate(many(16))} | {
    "maximum": Case((2, 2, 5, 16), (2, 2, 300), mask=padded(300, 5), score=alibi, options=AUX, trains=False),
    "half": Case(
        (1, 8, 2, 32), (1, 2, 400), mask=at_end(400, 2), score=capped, options=GQA, trains=False, dtype=torch.float16
    ),
    "rows of several blocks": Case((1, 6, 50, 16), (1, 2, 300), mask=at_end(300, 50), options=GQA, trains=False),
    "lengths that change": Case((2, 2, 1, 16), (2, 2, 300), score=relative, options=LSE, trains=False, dynamic=True),
    "lists that change": Case((1, 2, 1, 16), (1, 2, 333), mask=at_end(333, 1), trains=False, dynamic=True),
    "misaligned": Case((1, 4, 3, 16), (1, 2, 301), score=slopes, options=GQA, trains=False, misaligned=True),
    "trained": Case((1, 2, 3, 16), (1, 2, 301), mask=at_end(301, 3), score=relative, options=FORCED),
}
