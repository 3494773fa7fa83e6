"""The matmul sets: what is computed, on which shapes, in which order.

    splitk   relu(a @ b), M = N small, K = 4096 * {1..8}: the set of TritonBench's split-K operator
    long     relu(a @ b): longer K on larger outputs, squares, skinny ones
    llm      the weights of a transformer with 7 billion parameters: linear + GELU, linear + residual

On a GPU a set has one 16-bit dtype: the other has the same bytes, the same rate and the same candidates. A budget may
cut a set short, so sizes are interleaved: any first part of a set has small and large ones in it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SETS = ("splitk", "long", "llm")

# name: (in, out). Hidden 4096, feed-forward 11008, 32 heads of 128 (8 of them for grouped keys and values).
WEIGHTS = {
    "qkv": (4096, 12288), "o": (4096, 4096), "kv_gqa": (4096, 1024), "qkv_gqa": (4096, 6144), "up": (4096, 11008),
    "gate_up": (4096, 22016), "down": (11008, 4096), "lm_head": (4096, 32000),
}  # fmt: skip
BATCHES = (1, 16, 256, 4096)
LONG = ((256, 65536, 1024), (256, 16384, 256), (512, 32768, 512), (128, 65536, 128))
SQUARE = tuple((n, n, n) for n in (512, 1024, 2048, 4096))
SKINNY = ((1, 4096, 4096), (16, 4096, 11008), (4096, 4096, 64), (64, 4096, 4096))

TINY_WEIGHTS = {"qkv": (64, 192), "o": (64, 64), "down": (172, 64)}
TINY_LONG = ((16, 8192, 32), (64, 64, 64), (1, 256, 256), (128, 128, 8))


def matmul_relu(a: Tensor, b: Tensor) -> Tensor:
    return torch.relu(a @ b)


def linear_gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def linear_residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return x @ w.t() + r


@dataclass(frozen=True)
class MatmulCase:
    """[m, k] times [k, n]. ``label``: what tells it from the others of its set, dtype apart."""

    set: str
    fn: Callable[..., Tensor]
    m: int
    k: int
    n: int
    dtype: torch.dtype
    label: str

    @property
    def name(self) -> str:
        return f"{self.set} {self.label} {_SHORT[self.dtype]}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    @property
    def facts(self) -> dict[str, Any]:
        """What a row says of its case."""
        return {"set": self.set, "case": self.name, "op": self.fn.__name__, "dtype": _SHORT[self.dtype],
                "m": self.m, "k": self.k, "n": self.n}  # fmt: skip

    def arguments(self, device: torch.device, seed: int = 0) -> list[Tensor]:
        """Normal values; a weight is scaled so that what the epilogue sees is about 1."""
        gen = torch.Generator(device).manual_seed(seed)

        def normal(*shape: int, scale: float = 1.0) -> Tensor:
            made = torch.randn(shape, generator=gen, device=device, dtype=FP32)
            return (made * scale).to(self.dtype)

        if self.fn is matmul_relu:
            return [normal(self.m, self.k), normal(self.k, self.n)]
        last = (self.n,) if self.fn is linear_gelu else (self.m, self.n)
        return [normal(self.m, self.k), normal(self.n, self.k, scale=self.k**-0.5), normal(*last)]


_SHORT = {BF16: "bf16", FP16: "fp16", FP32: "fp32"}


def cases(device: str, quick: bool = False) -> dict[str, list[MatmulCase]]:
    """{set: its cases, in the order they are measured}: one dtype after the other, sizes interleaved."""
    big = device == "cuda"
    small = (FP32, BF16)
    made = {
        "splitk": _relu("splitk", _splitk_shapes(big), (FP16,) if big else small),
        "long": _relu("long", LONG + SQUARE + SKINNY if big else TINY_LONG, (FP16,) if big else small),
        "llm": _llm(WEIGHTS if big else TINY_WEIGHTS, BATCHES if big else (1, 16), (BF16,) if big else small),
    }
    return {name: found[: 6 if big else 3] if quick else found for name, found in made.items()}


def chosen(found: list[MatmulCase], words: list[str]) -> list[MatmulCase]:
    """The cases whose name holds one of the words, all parts of it that are joined with ``+``."""
    return [c for c in found if not words or any(all(p in c.name for p in w.split("+")) for w in words)]


def mixed(sets: Iterable[list[MatmulCase]]) -> list[str]:
    """The names of all, each set in its order: any first part of the list has as large a part of every set."""
    placed = [((i + 0.5) / len(found), c.name) for found in sets for i, c in enumerate(found)]
    return [name for _, name in sorted(placed, key=lambda p: p[0])]


def _splitk_shapes(big: bool) -> tuple[tuple[int, int, int], ...]:
    if big:
        return tuple((mn, 4096 * i, mn) for mn in (16, 32, 48, 64) for i in range(1, 9))
    return tuple((mn, 2048 * i, mn) for mn in (4, 16) for i in (1, 4))


def _relu(name: str, shapes: tuple[tuple[int, int, int], ...], dtypes: tuple[torch.dtype, ...]) -> list[MatmulCase]:
    mixed = interleaved(shapes)
    return [MatmulCase(name, matmul_relu, m, k, n, d, f"{m}x{k}x{n}") for d in dtypes for m, k, n in mixed]


def _llm(
    weights: dict[str, tuple[int, int]], batches: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> list[MatmulCase]:
    every = [(fn, w, b) for fn in (linear_gelu, linear_residual) for w in weights for b in batches]
    return [
        MatmulCase("llm", fn, b, *weights[w], dtype, f"{fn.__name__.removeprefix('linear_')} {w} b{b}")
        for dtype in dtypes
        for fn, w, b in interleaved(every)
    ]


def interleaved(items: Sequence[Any]) -> list[Any]:
    """Every item once, each about 0.62 of the length after the last: neighbours in the list end up far apart."""
    count = len(items)
    step = next((s for s in range(round(0.618 * count), 2 * count) if math.gcd(s, count) == 1), 1)
    return [items[i * step % count] for i in range(count)]
