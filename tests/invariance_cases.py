"""Programs whose result for a row must not depend on the number of rows, on any device (``batch_invariant``)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import reflib

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
Case = tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]  # fn(*rows, *others)


def products(x: Any, y: Any, w: Any, b: Any, m: Any, v: Any) -> list[Any]:
    """Of rows x (B, K) and matrices y (B, S, K)."""
    return [
        F.linear(x, w), F.gelu(F.linear(x, w, b)), torch.addmm(b, x, m, beta=0.3, alpha=1.7) * x.sum(1, keepdim=True),
        x @ v, torch.baddbmm(y, y @ y.mT, y), F.silu(y @ m), torch.einsum("bsk,bk->bs", y, x),
    ]  # fmt: skip


def rows(x: Any, where: Any, table: Any, b: Any) -> list[Any]:
    """Norms, softmax, losses and sums of rows x (B, 4, L); where: (B, L), of int64."""
    flat, lookup = x.reshape(x.shape[0], -1), F.embedding(where, table)
    return [
        F.layer_norm(x, x.shape[-1:], b), F.rms_norm(flat, flat.shape[1:]), F.group_norm(x, 2), x.softmax(-1),
        flat.log_softmax(-1), F.cross_entropy(flat, where[:, 0], reduction="none"), x.softmax(1), x.mean((1, 2)),
        flat.var(1), (1 + x / 99).prod(-1), flat.logsumexp(1), flat.norm(dim=1), x.amax(-1), x.sum(1), lookup,
        F.layer_norm(lookup, lookup.shape[-1:]).sum(-1), flat.double().sum(-1), torch.sin(x).abs() ** x,
    ]  # fmt: skip


def attention(q: Any, k: Any, v: Any, mask: Any) -> list[Any]:
    """q: (B, 4, S, D); k, v: (B, 2, S, D); mask: (B, 1, S, S)."""
    k4, v4 = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    return [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        F.scaled_dot_product_attention(q, k4, v4, attn_mask=mask, scale=0.3),
        (q @ k4.mT / q.shape[-1] ** 0.5).softmax(-1) @ v4,
    ]


class Block(nn.Module):
    """A transformer's block with grouped keys: RMS norm, rotated positions, attention, gated MLP; logits and losses."""

    def __init__(self, width: int = 48, heads: int = 4, groups: int = 2, words: int = 101):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.words, self.first, self.second = nn.Embedding(words, width), nn.RMSNorm(width), nn.LayerNorm(width)
        self.q, self.kv = nn.Linear(width, width), nn.Linear(width, 2 * groups * self.size, bias=False)
        self.out, self.gate = nn.Linear(width, width), nn.Linear(width, 2 * width)
        self.down, self.head = nn.Linear(width, width), nn.Linear(width, words, bias=False)

    def forward(self, where: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b, t = where.shape
        x = self.words(where)
        h = self.first(x)
        q = self.q(h).view(b, t, self.heads, self.size).transpose(1, 2)
        k, v = self.kv(h).view(b, t, 2, self.groups, self.size).permute(2, 0, 3, 1, 4)
        a = torch.arange(t, device=where.device)[:, None] * 0.1
        q, k = (z * a.cos().to(z.dtype) + z.flip(-1) * a.sin().to(z.dtype) for z in (q, k))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, -1))
        left, right = self.gate(self.second(x)).chunk(2, -1)
        logits = self.head(x + self.down(F.silu(left) * right))
        return logits, F.cross_entropy(logits.float().transpose(1, 2), where, reduction="none").mean(1)


def case(name: str, dtype: torch.dtype, rng: random.Random, device: str = "cpu", scale: int = 1) -> Case:
    """A program of ``CASES`` and its tensors, for some rows; sizes at random."""
    n = rng.randint(5, 40)
    k, m, s = rng.randint(3, 300) * scale, rng.randint(3, 90) * scale, rng.randint(3, 20) * scale

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(device, dtype)

    if name == "products":
        return products, (some(n, k), some(n, s, k)), (some(m, k), some(m), some(k, m), some(k))
    if name == "rows":
        where = torch.randint(3, (n, k), device=device)
        return rows, (some(n, 4, k), where), (some(3, m), some(k))
    if name == "attention":
        d = 8 * rng.randint(1, 4)
        return attention, (some(n, 4, s, d), some(n, 2, s, d), some(n, 2, s, d), some(n, 1, s, s)), ()
    model = Block().to(device, dtype).eval()
    return model, (torch.randint(101, (n, s), device=device),), ()


CASES = ("products", "rows", "attention", "block")


def parts(rng: random.Random, n: int) -> Iterator[slice]:
    """Some rows, others, and one, which may begin anywhere in memory."""
    first = rng.randrange(2, n)
    yield slice(0, first)
    yield slice(n - rng.randrange(2, n), n)
    i = rng.randrange(1, n)
    yield slice(i, i + 1)


def variant(fn: Callable[..., Any], args: Case, rng: random.Random, **options: Any) -> list[str]:
    """What of ``fn``, compiled, differs between calls: by the first call's results in all later ones. The first is
    compiled for its sizes, the second for any number of rows, that of one row again for one."""
    _, mine, others = args
    run = reflib.compile(fn, **options)
    with torch.no_grad():
        whole = [t.clone() for t in run(*mine, *others)]
        found = [f"{i}: again" for i, (a, b) in enumerate(zip(whole, run(*mine, *others))) if not same(a, b)]
        for part in parts(rng, len(mine[0])):
            got = run(*(t[part] for t in mine), *others)
            assert len(got) == len(whole)
            other = [i for i, (a, b) in enumerate(zip(whole, got)) if not same(a[part], b)]
            found += [f"{i}: rows {part.start} to {part.stop}" for i in other]
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the last bit, signs of zeros included."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    if a.is_floating_point():
        a, b = (t.contiguous().view(bits[t.itemsize]) for t in (a, b))
    return torch.equal(a, b)
