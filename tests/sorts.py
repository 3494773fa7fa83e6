"""Sorts of rows, and rows that are hostile to them: shared by tests/cpu and tests/gpu."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

INTS = (torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, *INTS)
WIDE = (torch.float64, torch.int64)  # with a position, more than 64 bits


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    z = x.sort(dim=-1, descending=True).values
    k = torch.arange(1, x.shape[-1] + 1, device=x.device, dtype=x.dtype)
    c = z.cumsum(-1) - 1
    support = (k * z > c).sum(-1, keepdim=True)
    return (x - c.gather(-1, support - 1) / support.to(x.dtype)).clamp(min=0)


def gate(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights and the numbers of a token's experts."""
    weights, experts = x.float().softmax(-1).topk(2, -1)
    return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), experts.to(torch.int32)


Function = Callable[[torch.Tensor, int], Any]

# Stable: each result has one right value.
STABLE: dict[str, Function] = {
    "sort": lambda x, d: x.sort(dim=d, stable=True),
    "descending": lambda x, d: x.sort(dim=d, stable=True, descending=True),
    "argsort": lambda x, d: (x.argsort(dim=d, stable=True), x.argsort(dim=d, stable=True, descending=True)),
    "values": lambda x, d: (x.sort(d).values * 1,),
}
# [values, positions]: of equals any position.
CHOSEN: dict[str, Function] = {
    "unstable": lambda x, d: x.sort(d, descending=True),
    "two greatest": lambda x, d: x.topk(min(2, x.shape[d]), d),
    "three least": lambda x, d: x.topk(min(3, x.shape[d]), d, largest=False),
    "all but one": lambda x, d: x.topk(max(1, x.shape[d] - 1), d),
    "kthvalue": lambda x, d: x.kthvalue((x.shape[d] + 1) // 2, d, keepdim=True),
    "median": lambda x, d: x.median(d),
    "nanmedian": lambda x, d: x.nanmedian(d, keepdim=True),
}
FUNCTIONS = {**STABLE, **CHOSEN}


def hostile(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Ties; in floats also NaN, infinities, both zeros and the ends of the range."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(-3, 4, shape, generator=g)
    if not dtype.is_floating_point:
        return x.to(dtype)
    x, info = x.to(dtype) / 2, torch.finfo(dtype)
    for value in (float("nan"), float("inf"), float("-inf"), -0.0, info.tiny, info.max, -info.max, info.tiny / 2):
        x[torch.rand(shape, generator=g) < 0.04] = value
    return x


def cases(dtype: torch.dtype, count: int, longest: int = 40) -> Iterator[tuple[torch.Tensor, int]]:
    """Tensors and dimensions, drawn: contiguous, transposed, strided."""
    rng = random.Random(str(dtype))
    for i in range(count):
        shape = [rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(rng.randint(1, 3))]
        d = rng.randrange(len(shape))
        shape[d] = rng.randint(1, longest)
        x = hostile(tuple(shape), i, dtype)
        if i % 3 == 1 and len(shape) > 1:
            x = x.transpose(0, -1)
        elif i % 3 == 2:
            x = x.repeat_interleave(2, -1)[..., ::2]
        yield x, d


def wrong(name: str, x: torch.Tensor, d: int, got: Any, want: Any) -> str:
    """What is wrong with ``got``, of FUNCTIONS[name](x, d); nothing if all is right."""
    for g, w in zip(got, want, strict=True):
        if (g.shape, g.dtype) != (w.shape, w.dtype):
            return f"{g.dtype}{list(g.shape)} for {w.dtype}{list(w.shape)}"
    values = want[:1] if name in CHOSEN else want
    for g, w in zip(got, values):
        if not torch.equal(g.double().nan_to_num(77.0), w.double().nan_to_num(77.0)):
            return f"{g.tolist()} for {w.tolist()}"
    if name not in CHOSEN or not x.dim():
        return ""
    keep = got[1].dim() == x.dim()
    of, at = (t if keep else t.unsqueeze(d) for t in got)
    if not torch.equal(x.gather(d, at).double().nan_to_num(77.0), of.double().nan_to_num(77.0)):
        return f"positions {at.tolist()} of {of.tolist()}"
    rows = at.movedim(d, -1).reshape(-1, at.shape[d]).tolist()
    return "" if all(len(set(row)) == len(row) for row in rows) else f"positions {rows} twice"
