"""Measured upper limits of the device: bandwidth of a copy, rate of a matmul, cost of a launch."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TRIES = 3  # a ceiling is the best of three medians, since other load can only lower it


@dataclass(frozen=True)
class Roofline:
    """The ceilings of one device, as measured."""

    device: str
    bandwidth: float  # GB/s of a large copy, read and write together
    flops: float  # TFLOP/s of a large square matmul in `dtype`
    launch: float  # µs from one small call to the next, host time included
    dtype: str

    @property
    def ridge(self) -> float:
        """FLOPs per byte at which the two ceilings meet."""
        return self.flops * 1e3 / self.bandwidth

    def limit(self, intensity: float) -> float:
        """Upper limit in TFLOP/s at ``intensity`` FLOPs per byte."""
        return min(self.flops, intensity * self.bandwidth / 1e3)

    def time(self, bytes: float, flops: float = 0.0) -> float:
        """Lower limit in µs for this work, without launches."""
        return max(bytes / self.bandwidth / 1e3, flops / self.flops / 1e6)


def roofline(device: torch.device | None = None, dtype: torch.dtype | None = None) -> Roofline:
    """Measure the ceilings of ``device`` (default: the notebook's), once per process."""
    from reflib.lab.session import current

    here = current()
    return measured(device or here.device, dtype or here.dtype)


@functools.cache
def measured(device: torch.device, dtype: torch.dtype) -> Roofline:
    """Of this device, by products of this dtype."""
    from reflib.lab.machine import describe
    from reflib.lab.measuring import measure

    on_gpu = device.type == "cuda"
    copied = _copy_bytes(device)
    edge = 8192 if on_gpu else 1024
    if on_gpu and describe(device).memory_bytes < 40 * 2**30:
        edge = 4096
    cases = {"copy": _copy(copied, device), "matmul": _matmul(edge, device, dtype)}
    tries = [
        measure(
            "ceilings",
            cases,
            at={"try": n},
            bytes={"copy": 2 * copied},
            flops={"matmul": 2 * edge**3},
            budget_s=0.3,
            device=device,
        )
        for n in range(TRIES)
    ]
    launch = measure("launch", {"launch": _tiny(device)}, clock="wall", device=device)
    return Roofline(
        device=describe(device).name,
        bandwidth=max(rows.value("copy", "bandwidth") or 0.0 for rows in tries),
        flops=max(rows.value("matmul", "rate") or 0.0 for rows in tries),
        launch=launch.value("launch") or 0.0,
        dtype=str(dtype).removeprefix("torch."),
    )


def _copy_bytes(device: torch.device) -> int:
    """A size well above the last-level cache, so that the copy cannot be served from it."""
    from reflib.lab.machine import describe

    cache = describe(device).cache_bytes
    return max(4 * cache, 256 * 2**20) if device.type == "cuda" else max(2 * cache, 64 * 2**20)


def _copy(size: int, device: torch.device):
    import torch

    source = torch.empty(size // 4, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    if device.type == "cuda":  # a kernel: in a CUDA graph a large copy_ may go to the (slower) copy engine
        return lambda: torch.neg(source, out=target)
    return lambda: target.copy_(source)


def _matmul(edge: int, device: torch.device, dtype: torch.dtype):
    import torch

    a = torch.randn(edge, edge, device=device).to(dtype)
    b = torch.randn(edge, edge, device=device).to(dtype)
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _tiny(device: torch.device):
    import torch

    x = torch.zeros(16, device=device)
    return lambda: torch.add(x, x, out=x)
