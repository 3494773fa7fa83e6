"""Programs that ``numerics="eager"`` must compute to eager's bits, on any device."""

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import reflib

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SPECIAL = (1e-40, -3e-39, 0.0, -0.0, 1.0, -1.0, 0.5, 3.0, float("inf"), float("-inf"), float("nan"), 1e-8, 6e4, -7.25)
UNARY: dict[str, Callable[..., Any]] = {
    name: getattr(torch, name)
    for name in (
        "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac log log10 log1p log2 neg reciprocal relu round"
        " rsqrt sigmoid sign sin sinh sqrt square tan tanh trunc".split()
    )
} | {
    "gelu": F.gelu, "silu": F.silu, "mish": F.mish, "softplus": F.softplus, "elu": F.elu, "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu, "hardsigmoid": F.hardsigmoid, "logsigmoid": F.logsigmoid,
    "x * 0.3": lambda x: x * 0.3, "x + 0.1": lambda x: x + 0.1, "x / 3": lambda x: x / 3, "x / 8": lambda x: x / 8,
    "2 / x": lambda x: 2 / x, "x ** 2": lambda x: x**2, "x ** 3": lambda x: x**3, "x ** 0.5": lambda x: x**0.5,
    "x ** 1.7": lambda x: x**1.7, "2 ** x": lambda x: 2**x, "clamp": lambda x: x.clamp(-0.3, 0.7),
    "nan_to_num": lambda x: x.nan_to_num(), "to half and back": lambda x: x.half().to(x.dtype),
    "1 - x": lambda x: 1 - x, "add, alpha": lambda x: torch.add(x, x.flip(0), alpha=0.7),
}  # fmt: skip
BINARY: dict[str, Callable[..., Any]] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div, "maximum": torch.maximum,
    "minimum": torch.minimum, "fmod": torch.fmod, "remainder": torch.remainder, "atan2": torch.atan2,
    "hypot": torch.hypot, "copysign": lambda x, y: torch.copysign(x, y.nan_to_num()), "pow": lambda x, y: x.abs() ** y,
    "floor_divide": torch.floor_divide, "trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3), "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.7),
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x), "where": lambda x, y: torch.where(x > y, x, y),
    "logaddexp": torch.logaddexp, "xlogy": torch.xlogy, "mse": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth_l1": lambda x, y: F.smooth_l1_loss(x, y, reduction="none"),
}  # fmt: skip


def equal_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same values and places of NaN. (Which zero the maximum of two zeros is, no standard says.)"""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def numbers(rng: random.Random, device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Of many sizes, with special ones among them."""
    g = torch.Generator().manual_seed(rng.randrange(2**31))
    x = torch.randn(shape, generator=g, dtype=torch.float64) * 10 ** (torch.randn(shape, generator=g) / 2)
    flat = x.view(-1)
    for v in SPECIAL:
        flat[rng.randrange(flat.numel())] = v
    return x.to(dtype).to(device)


def chain(rng: random.Random, length: int = 12) -> Callable[..., list[torch.Tensor]]:
    """A random program of pointwise ops over three tensors; all of what it computed is returned, and a row's sum."""
    steps = []
    for k in range(length):
        if rng.random() < 0.5:
            steps.append((UNARY[rng.choice(sorted(UNARY))], (rng.randrange(k + 3),)))
        else:
            steps.append((BINARY[rng.choice(sorted(BINARY))], (rng.randrange(k + 3), rng.randrange(k + 3))))

    def program(*tensors: torch.Tensor) -> list[torch.Tensor]:
        values = list(tensors)
        for fn, args in steps:
            values.append(fn(*(values[a] for a in args)))
        return [*values[3:], values[-1].sum(-1)]

    return program


class Block(nn.Module):
    """A transformer's block: norms, attention, GELU, residuals, dropout off."""

    def __init__(self, width: int = 48, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT) * (c // self.heads) ** -0.5
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.second(x)))) / 3


class Convolutions(nn.Module):
    """Convolution, batch norm, activation, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(8, 8, 3, groups=8, padding=1)
        self.norm, self.head = nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.silu(self.norm(self.a(x))), 2)
        return self.head((F.hardswish(self.b(x)) + x).mean((2, 3))).log_softmax(-1)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "block": lambda: (Block(), (2, 17, 48)), "convolutions": lambda: (Convolutions(), (3, 3, 18, 14)),
}  # fmt: skip


def model_in(name: str, dtype: torch.dtype) -> tuple[nn.Module, tuple[int, ...]]:
    """The model in ``dtype`` and its input's sizes. (Statistics are float32: see ``lower.like_eager._batch_norm``.)"""
    model, shape = MODELS[name]()
    model.to(dtype)
    if isinstance(model, Convolutions):
        model.norm.float()
    return model, shape


def step(model: nn.Module, run: Callable[..., torch.Tensor], x: torch.Tensor) -> list[torch.Tensor]:
    """The output, the gradients, and running statistics after one step of training from the same state."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    out = run(x)
    out.float().square().sum().backward()
    found = [out.detach(), x.grad, *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    for name, b in model.named_buffers():
        b.copy_(buffers[name])
    return [t for t in found if t is not None]


def different(fn: Callable[..., Any], args: tuple[torch.Tensor, ...], **options: Any) -> list[int]:
    """Which results of ``fn`` differ in a bit from eager's."""
    want = fn(*args)
    got = reflib.compile(fn, dynamic=False, **options)(*args)
    pairs = zip(want, got) if isinstance(want, (list, tuple)) else [(want, got)]
    return [i for i, (a, b) in enumerate(pairs) if not equal_bits(a, b)]
