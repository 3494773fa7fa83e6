"""Functions that move memory in an order of their own, with rows of odd numbers of elements."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import randn


def shuffled_channels(x: torch.Tensor) -> torch.Tensor:
    n, c, h, w = x.shape
    return x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w) + 1


def differences_in_time(x: torch.Tensor) -> torch.Tensor:
    p, t = F.pad(x, (2, 2), mode="replicate"), x.shape[-1]
    return sum(i * (p[..., 2 + i : 2 + i + t] - p[..., 2 - i : 2 - i + t]) for i in (1, 2)) / 10


def normalized_pixels(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """From bytes, channels last, to numbers, channels first."""
    return ((x.permute(0, 3, 1, 2).float() / 255 - mean[:, None, None]) / std[:, None, None]).contiguous()


def bytes_of(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


Function = tuple[Callable[..., Any], Callable[[], tuple[torch.Tensor, ...]], dict[str, Any]]
LAYOUTS: dict[str, Function] = {
    "rows: channels shuffled": (shuffled_channels, lambda: (randn(3, 8, 5, 11),), {}),
    "rows: gathered": (lambda x, i: x[i] * 2, lambda: (randn(9, 333), torch.randint(-9, 9, (7,))), {}),
    "rows: gathered with a bias": (
        lambda x, i, b: F.embedding(i, x) + b,
        lambda: (randn(9, 129), torch.randint(0, 9, (2, 13)), randn(129)), {},
    ),
    "rows: gathered, out of range": (
        lambda x, i: torch.where((i < 0)[:, None], 0, x[i.clamp(0)]),
        lambda: (randn(9, 65), torch.randint(-3, 9, (40,))), {},
    ),
    "rows: differences": (differences_in_time, lambda: (randn(3, 5, 301),), {}),
    "rows: interpolated": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="linear"), lambda: (randn(2, 3, 151),), {},
    ),
    "rows: frames": (lambda x: x.unfold(-1, 41, 16) * 0.5, lambda: (randn(3, 403),), {}),
    "rows: folded": (lambda x: F.fold(x, (14, 21), 7, stride=7), lambda: (randn(2, 147, 6),), {}),
    "rows: folded, overlapping": (
        lambda x: F.fold(x, (13, 13), 3, padding=1, stride=2), lambda: (randn(2, 45, 49),), {},
    ),
    "rows: pixels apart": (lambda x: F.pixel_unshuffle(x, 2) + 1, lambda: (randn(2, 3, 10, 34),), {}),
    "rows: pixels together": (lambda x: F.pixel_shuffle(x, 2) + 1, lambda: (randn(2, 12, 5, 17),), {}),
    "rows: rolled": (lambda x: torch.roll(x, (2, -1), (1, 2)) + 1, lambda: (randn(2, 7, 5, 33),), {}),
    "rows: windows": (
        lambda x: x.view(2, 2, 7, 3, 7, 33).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, 33) * 2,
        lambda: (randn(2, 14, 21, 33),), {},
    ),
    "rows: pixels normalized": (normalized_pixels, lambda: (bytes_of(2, 9, 15, 3), randn(3), torch.rand(3) + 1), {}),
    "rows: bytes in place": (
        lambda x, m, s: (x.float() / 255 - m) / s, lambda: (bytes_of(2, 9, 15, 3), randn(3), torch.rand(3) + 1), {},
    ),
}  # fmt: skip
