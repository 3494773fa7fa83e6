"""Scans: ``%i = scan kind %j`` along the r axis of a loop nest (``cumsum``, ``cummax`` ...).

**What it is.** The value at a point of r is the combination of ``%j`` at all points up to and with it, in order. A loop
nest with a scan has exactly one r axis, whose points are visited in order; its p axes are rows, independent of each
other. Statements before and after a scan are those of any loop nest: what comes before ``cumsum`` and what comes after
it fuse with it, and a row's reductions too (``cumsum(softmax(x))``).

**Passes.** The value at r depends on no later point. So a scan does not end a pass over the row, as a reduction does:
``phases`` counts it as an op. A later pass that needs its values computes them again, as any value along r. Few, long
rows are cut into pieces (``fuse/split_scans``).

**Numbers.** A half dtype is loaded as float32 and accumulated so; it is rounded where it is stored. C++ accumulates
float32 sums and products in double, as eager does on a CPU.

References: Blelloch, "Prefix sums and their applications", 1990 (recurrences as scans); PyTorch's
aten/src/ATen/native/cuda/ScanUtils.cuh (order of ties and NaN); Merrill and Garland, "Single-pass parallel prefix scan
with decoupled look-back", NVIDIA 2016 (not used: programs would wait for each other).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .ops import identity


@dataclass(frozen=True)
class ScanSpec:
    """``meaning(dim, value)``, in torch. ``by``: the reduction whose total the last value is, None if it has none."""

    meaning: Callable[..., torch.Tensor]
    by: str | None = None


def _linear(d: int, factor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    so_far: torch.Tensor | float = 0.0
    out: list[torch.Tensor] = []
    for f, v in zip(factor.unbind(d), value.unbind(d)):
        so_far = f * so_far + v
        out.append(so_far)
    return torch.stack(out, d) if out else value.clone()


def _position(extreme: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    return lambda d, value, index: index.gather(d, extreme(value, d).indices)


# max/min: NaN wins. arg*: operands (value, index: int64); the index of the extreme value so far, the last of equals,
# and the last NaN if there was one (unlike the reductions of these names). linear: operands (factor, value); the value
# plus the factor times what came before, from 0: a recurrence of first order, whose steps compose. sort: a permutation
# of the row's integers, which depends on all of them: a GPU has the whole row in one block (``lower/sorts.py``), a CPU
# has none.
SCANS: dict[str, ScanSpec] = {
    "sum": ScanSpec(lambda d, v: v.cumsum(d, dtype=v.dtype), "sum"),
    "prod": ScanSpec(lambda d, v: v.cumprod(d, dtype=v.dtype), "prod"),
    "max": ScanSpec(lambda d, v: v.cummax(d).values, "max"),
    "min": ScanSpec(lambda d, v: v.cummin(d).values, "min"),
    "logsumexp": ScanSpec(lambda d, v: v.logcumsumexp(d)),
    "linear": ScanSpec(_linear),
    "argmax": ScanSpec(_position(torch.cummax)),
    "argmin": ScanSpec(_position(torch.cummin)),
    "sort": ScanSpec(lambda d, v: v.sort(d).values),
}


def start(kind: str, dtype: torch.dtype) -> float | int | bool:
    """What precedes the first element: combined with it, it changes nothing. (Of an arg*: the value.)"""
    return float("-inf") if kind == "logsumexp" else identity("sum" if kind == "linear" else kind, dtype)
