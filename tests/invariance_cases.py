"""Programs whose result for a row must not depend on the number of rows, on any device (``batch_invariant``)."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

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


def variant(run: Callable[..., Any], args: Case, rng: random.Random) -> list[str]:
    """What of ``run``, a compiled function, differs between calls: by the first call's results in all later ones. The
    first is compiled for its sizes, the second for any number of rows, that of one row again for one."""
    _, mine, others = args
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


def _scaled(x: Any) -> float:
    return float(x.shape[-1]) ** -0.5


# Of rows x (B, ..., L) and a function that makes or takes weights: one step of a chain. Few change the sizes.
STEPS: dict[str, Callable[[Any, Callable[..., torch.Tensor]], Any]] = {
    "softmax": lambda x, w: x.softmax(-1),
    "log_softmax": lambda x, w: x.log_softmax(-1),
    "logsumexp": lambda x, w: x.logsumexp(-1, keepdim=True) + x,
    "layer_norm": lambda x, w: F.layer_norm(x, x.shape[-1:]),
    "rms_norm": lambda x, w: F.rms_norm(x, x.shape[-1:]),
    "group_norm": lambda x, w: F.group_norm(x, 1),
    "normalize": lambda x, w: F.normalize(x, dim=-1),
    "sum": lambda x, w: x + x.sum(-1, keepdim=True) / 7,
    "mean": lambda x, w: x - x.mean(-1, keepdim=True),
    "var": lambda x, w: x * torch.rsqrt(x.var(-1, keepdim=True) + 0.1),
    "std": lambda x, w: x / (x.std(-1, keepdim=True) + 0.5),
    "max": lambda x, w: x - x.amax(-1, keepdim=True),
    "median": lambda x, w: x - x.median(-1, keepdim=True)[0],
    "topk": lambda x, w: x * x.topk(2, -1)[0].sum(-1, keepdim=True),
    "prod": lambda x, w: x * (1 + x / 50).prod(-1, keepdim=True),
    "cumsum": lambda x, w: x.cumsum(-1) / 9,
    "cumprod": lambda x, w: (1 + x / 50).cumprod(-1),
    "logcumsumexp": lambda x, w: x.logcumsumexp(-1),
    "all but rows": lambda x, w: x + x.flatten(1).sum(1).view(-1, *[1] * (x.dim() - 1)) / 50,
    "mean of 1": lambda x, w: x - x.mean(1, keepdim=True),
    "softmax of 1": lambda x, w: x.softmax(1),
    "linear": lambda x, w: F.linear(x, w(x.shape[-1], x.shape[-1])) * _scaled(x),
    "bias": lambda x, w: x + F.linear(x, w(x.shape[-1], x.shape[-1]), w(x.shape[-1])) * _scaled(x),
    "vector": lambda x, w: x + (x @ w(x.shape[-1]))[..., None] / 9,
    "einsum": lambda x, w: torch.einsum("b...k,kj->b...j", x, w(x.shape[-1], x.shape[-1])) * _scaled(x),
    "attention": lambda x, w: F.scaled_dot_product_attention(x, x, x) if x.dim() > 2 else x * x,
    "products of rows": lambda x, w: x @ x.mT / x.shape[-1] if x.dim() > 2 else x + 1,
    "transpose": lambda x, w: x.mT.contiguous() if x.dim() > 2 else x.flip(-1),
    "gelu": lambda x, w: F.gelu(x),
    "silu": lambda x, w: F.silu(x),
    "functions": lambda x, w: torch.exp(x.clamp(-5, 5) / 3) + torch.tanh(x) * torch.erf(x),
    "more functions": lambda x, w: torch.sin(x) + x.abs() ** 1.3 - torch.log1p(x.abs()),
    "glu": lambda x, w: F.glu(torch.cat([x, x * 2], -1), -1),
    "cat": lambda x, w: torch.cat([x, x.sum(-1, keepdim=True) / 5], -1),
    "pad": lambda x, w: F.pad(x, (1, 2)),
    "where": lambda x, w: torch.where(x > 0, x, x * 0.1).roll(1, -1),
}  # fmt: skip


def chains(rng: random.Random, count: int = 5) -> Case:
    """``count`` programs of a few such steps each, on rows of their own sizes and dtypes, of which some are strided."""
    n, made, rows = rng.randint(5, 40), [], []
    weights: list[torch.Tensor] = []
    for _ in range(count):
        dtype = rng.choice((*DTYPES, torch.float32, torch.float64))
        length = rng.randint(3, 900)
        sizes = rng.choice(((length,), (rng.randint(2, 9), length // 8 + 3), (2, 5, length // 20 + 3)))
        rows.append(torch.randn(n, *sizes).to(dtype))
        if rng.random() < 0.2:
            rows[-1] = torch.randn(n, *sizes[::-1]).to(dtype).permute(0, *range(len(sizes), 0, -1))
        names = rng.choices([s for s in STEPS if len(sizes) > 1 or "of 1" not in s], k=rng.randint(1, 5))
        first, x = len(weights), rows[-1]
        for name in names:
            x = STEPS[name](x, lambda *s, d=dtype: weights.append(torch.randn(s).to(d)) or weights[-1])
        made.append((names, first))

    def run(*args: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for x, (names, first) in zip(args[:count], made, strict=True):
            taken = iter(args[count + first :])
            for name in names:
                x = STEPS[name](x, lambda *_, taken=taken: next(taken))
            out.append(x)
        return out

    run.__doc__ = str([names for names, _ in made])
    return run, tuple(rows), tuple(weights)
