"""Chains of ops on integers of 8 and 16 bits, drawn at random: every result wraps before the next op reads it."""

import random
from collections.abc import Callable
from typing import Any

import torch

DTYPES = (torch.int8, torch.uint8, torch.int16)
_STEPS: dict[str, Callable[[Any, Any, int], Any]] = {
    "add": lambda x, y, c: x + c, "sub": lambda x, y, c: c - x, "mul": lambda x, y, c: x * y,
    "scale": lambda x, y, c: x * c, "shl": lambda x, y, c: x << (c & 7), "shr": lambda x, y, c: x >> (c & 7),
    "shl by": lambda x, y, c: x << (y & 7),
    "low": lambda x, y, c: x.clamp(min=c), "high": lambda x, y, c: x.clamp(max=c),
    "max": lambda x, y, c: torch.maximum(x, y), "xor": lambda x, y, c: x ^ c, "not": lambda x, y, c: ~x,
    "where": lambda x, y, c: torch.where(x > y, x, c), "div": lambda x, y, c: x // (abs(c) + 1),
    "mod": lambda x, y, c: x % (abs(c) + 1), "abs": lambda x, y, c: x.abs(), "neg": lambda x, y, c: -x,
}  # fmt: skip


def chain(seed: int, dtype: torch.dtype, length: int = 12) -> Callable[..., Any]:
    """(x, y) of ``dtype`` -> a result of it, and the same as int32."""
    rng = random.Random(seed)
    least = 0 if dtype == torch.uint8 else -20
    steps = [(_STEPS[rng.choice(sorted(_STEPS))], rng.randint(least, 100)) for _ in range(length)]

    def run(x: torch.Tensor, y: torch.Tensor) -> Any:
        for step, c in steps:
            x = step(x, y, c)
        return x, x.to(torch.int32)

    return run


def operands(seed: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    info, g = torch.iinfo(dtype), torch.Generator().manual_seed(seed)
    x, y = torch.randint(info.min, info.max + 1, (2, 30, 33), generator=g).to(dtype)
    return x, y
