"""Weight-only products (8 and 4 bits), row-wise scaled 8-bit floats, and grouped products, for the sweep:

    reflib sweep --models tests/bench/products.py --dtype bfloat16 --out runs/products
        --backend TorchInductor,max-autotune,reflib,autotune=blocking,eager

A step multiplies with several copies of the weights, so that these come from memory; a model's name says how many.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from reflib.sweep import Model

ROWS = (16, 1, 64, 256, 8)
LAYERS = ((8192, 1280), (1024, 8192), (8192, 7168), (3584, 8192))  # K, N of Llama-2-70B on 8 GPUs
SCALED = ((4096, 7168, 8192), (256, 8192, 3584), (16, 1280, 8192))  # M, N, K
GROUP = 128  # weights of 4 bits per scale
FROM_MEMORY = 2**28  # bytes of weights in all copies: five times an H200's L2
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
Call = Callable[..., Tensor]
Make = Callable[[int, int, int], tuple[Tensor, ...]]  # M, N, K -> arguments, the weights second


class Product(nn.Module):
    """``fn`` of each of the arguments, whose dtypes are its own. ``exact``: the same of float64, for the reference."""

    def __init__(self, fn: Call, exact: Call, arguments: list[tuple[Tensor, ...]]):
        super().__init__()
        self.fn, self.exact, self.arguments = fn, exact, arguments

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        like = fn(torch.zeros(()))
        self.arguments = [tuple(t.to(like.device) for t in args) for args in self.arguments]
        if like.dtype == torch.float64:
            self.fn = self.exact
            self.arguments = [tuple(t.double() if t.is_floating_point() else t for t in a) for a in self.arguments]
        return self

    def forward(self) -> list[Tensor]:
        return [self.fn(*args) for args in self.arguments]


# -- products; each with its arguments ------------------------------------------------------------------
def int8(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype) * s[:, None])


def of_int8(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    return torch.randn(m, k).to(BF16), torch.randint(-127, 128, (n, k)).to(torch.int8), (torch.rand(n) / 99).to(BF16)


def int4(x: Tensor, p: Tensor, s: Tensor) -> Tensor:
    """Two weights per byte, one scale per GROUP of a row."""
    n = p.shape[0]
    w = torch.stack([p & 15, p >> 4], -1).view(n, s.shape[1], -1)
    return F.linear(x, ((w.to(x.dtype) - 8) * s[:, :, None]).view(n, -1))


def of_int4(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    p = torch.randint(0, 256, (n, k // 2)).to(torch.uint8)
    return torch.randn(m, k).to(BF16), p, (torch.rand(n, k // GROUP) / 9).to(BF16)


def scaled(a: Tensor, b: Tensor, r: Tensor, c: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), r, c, out_dtype=BF16)


def exactly_scaled(a: Tensor, b: Tensor, r: Tensor, c: Tensor) -> Tensor:
    return a @ b.t() * r * c


def of_fp8(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    return torch.randn(m, k).to(FP8), torch.randn(n, k).to(FP8), torch.rand(m, 1), torch.rand(1, n)


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, offs=ends)


def exactly_grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    return torch.cat([x[i:j] @ w[g] for g, (i, j) in enumerate(itertools.pairwise([0, *ends.tolist()]))])


def of_groups(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    share = torch.tensor([0.05, 0.2, 0.1, 0.15, 0.02, 0.18, 0.2, 0.1]).cumsum(0)
    ends = (share * m / 8).round().mul(8).to(torch.int32).clamp(max=m)
    return torch.randn(m, k).to(BF16), torch.randn(8, k, n).to(BF16) / k**0.5, ends


def gradient(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return torch._grouped_mm(x.t(), y, offs=ends)


def exact_gradient(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return torch.stack([x[i:j].t() @ y[i:j] for i, j in itertools.pairwise([0, *ends.tolist()])])


def of_gradient(m: int, n: int, k: int) -> tuple[Tensor, ...]:
    x, _, ends = of_groups(m, 1, k)
    return x, torch.randn(m, n).to(BF16), ends


# -- the models -----------------------------------------------------------------------------------------
def model(name: str, fn: Call, exact: Call, make: Make, sizes: tuple[int, ...], weights: float) -> Model:
    """``sizes``: M, N, K.   weights: their bytes."""
    copies = min(24, max(1, math.ceil(FROM_MEMORY / weights)))

    def build(real: bool) -> tuple[nn.Module, tuple[()]]:
        m, n, k = sizes if real else (64, 48, 256)
        return Product(fn, exact, [make(m, n, k) for _ in range(copies if real else 2)]), ()

    return Model(f"{name} {'x'.join(map(str, sizes))} on {copies} copies", build, modes=("inference",))


def models() -> list[Model]:
    out = []
    for m, (k, n) in itertools.product(ROWS, LAYERS):
        out.append(model("int8", int8, int8, of_int8, (m, n, k), n * k))
        out.append(model("int4", int4, int4, of_int4, (m, n, k), n * k / 2))
    for m, n, k in SCALED:
        out.append(model("fp8", scaled, exactly_scaled, of_fp8, (m, n, k), n * k))
        gelu = (lambda *a: F.gelu(scaled(*a))), (lambda *a: F.gelu(exactly_scaled(*a)))
        out.append(model("fp8 gelu", *gelu, of_fp8, (m, n, k), n * k))
    for m in (128, 1024, 8192):
        out.append(model("grouped", grouped, exactly_grouped, of_groups, (m, 7168, 4096), FROM_MEMORY))
    return [*out, model("grouped gradient", gradient, exact_gradient, of_gradient, (8192, 7168, 4096), FROM_MEMORY)]


MODELS = models()
