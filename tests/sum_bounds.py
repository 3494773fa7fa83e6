"""How far a sum, norm or softmax may be from its exact value on a GPU with ``numerics="eager"``.

There these are kernels of our own: eager's have another order of additions, so that no bits can be promised. Halves are
read as float32, in which everything is computed, and rounded once, at the end. So the result is

    within  bound * eps(what is computed in) / eps(the result's dtype) + (0.5 for a half)  ULP  of the exact result,

in units in the last place of the *size* below, which is that of the result where nothing cancels: what its terms would
be if they were added without their signs. A bound is no proof: it is what random sizes up to 2^20 terms must hold to
(``tests/sum_bounds_interpreting.py``, ``tests/gpu/test_sum_bounds.py``), two to four times what they take.
"""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Sum(NamedTuple):
    """``size``: of the exact result, from x in float64; ``text``: the same, for a reader."""

    fn: Callable[..., Tensor]
    size: Callable[..., Tensor]
    bound: float
    text: str
    stored: float = 0.5  # ULP of a half, that the roundings of its results take


def _spread(x: Tensor, dim: Any = -1) -> Tensor:
    """Of (x - mean) / deviation."""
    return (x.abs() + x.abs().mean(dim, keepdim=True)) * (x.var(dim, correction=0, keepdim=True) + 1e-5).rsqrt()


def _groups(x: Tensor, fn: Callable[..., Tensor]) -> Tensor:
    return fn(x.view(1, x.shape[0], -1), (0, 1, 2)).view(1, x.shape[0], -1)


def _rms_norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=1e-5)


def _log_sum(x: Tensor) -> Tensor:
    most = x.amax(-1, keepdim=True)
    return most.abs() + 1 + (x - most).exp().sum(-1, keepdim=True).log()


TERMS, SPREAD = "the terms' magnitudes, added", "(the magnitude of x + the mean magnitude) / deviation"
LOG_SUM = "1 + the magnitude of the largest + the log of the sum"
SUMS: dict[str, Sum] = {
    "sum": Sum(lambda x: x.sum(-1), lambda x: x.abs().sum(-1), 4, TERMS),
    "sum, columns": Sum(lambda x: x.sum(0), lambda x: x.abs().sum(0), 4, TERMS),
    "mean": Sum(lambda x: x.mean(-1), lambda x: x.abs().mean(-1), 4, "the mean magnitude"),
    "cumsum": Sum(lambda x: x.cumsum(-1), lambda x: x.abs().cumsum(-1), 16, TERMS),
    "var": Sum(lambda x: x.var(-1), lambda x: x.square().sum(-1) / (x.shape[-1] - 1), 4, "the mean square"),
    "norm": Sum(lambda x: x.norm(dim=-1), lambda x: x.norm(dim=-1), 4, "the result"),
    "logsumexp": Sum(lambda x: x.logsumexp(-1), lambda x: _log_sum(x).squeeze(-1), 4, LOG_SUM, 2),
    "softmax": Sum(
        lambda x: x.softmax(-1), lambda x: x.softmax(-1) * (1 + x.amax(-1, True) - x), 4,
        "the result times 1 + the distance of x to the largest",
    ),
    "log_softmax": Sum(lambda x: x.log_softmax(-1), lambda x: _log_sum(x) + x.abs(), 4, LOG_SUM + " + that of x"),
    "layer_norm": Sum(lambda x: F.layer_norm(x, x.shape[-1:]), _spread, 8, SPREAD),
    "rms_norm": Sum(_rms_norm, _rms_norm, 4, "the result"),
    "group_norm": Sum(
        lambda x: F.group_norm(x.view(1, x.shape[0], -1), 1), lambda x: _groups(x, _spread), 8, SPREAD,
    ),
}  # fmt: skip


def allowed(name: str, dtype: torch.dtype) -> float:
    """ULP of the result's size."""
    eps = torch.finfo(dtype).eps
    bound, stored = SUMS[name].bound, SUMS[name].stored
    return bound if eps < 1e-6 else stored + bound * torch.finfo(torch.float32).eps / eps


def off(name: str, x: Tensor, got: Tensor) -> float:
    """By how many ULP of its size a result is off."""
    exact, size = SUMS[name].fn(x.double()), SUMS[name].size(x.double())
    info = torch.finfo(got.dtype)
    unit = info.eps * torch.exp2(torch.frexp(size.abs().clamp(min=info.tiny))[1] - 1.0)
    right = got == exact.to(got.dtype)  # (both infinite, if the sum is beyond the range)
    return float(torch.where(right, 0, (got.double() - exact).abs() / unit).max())


def numbers(rng: random.Random, most: int, dtype: torch.dtype, device: str) -> Tensor:
    """A matrix of up to ``most`` numbers, on a GPU of long columns as well: about 0, positive, or far from 0."""
    columns = int(2 ** rng.uniform(1, rng.uniform(2, most.bit_length() - 1)))
    rows = max(2, int(2 ** rng.uniform(1, 10)) if columns < most >> 10 else most // columns // 2)
    if device != "cpu" and rng.random() < 0.5:
        rows, columns = columns, rows
    g = torch.Generator().manual_seed(rng.randrange(2**31))
    x = torch.randn(rows, columns, generator=g, dtype=torch.float64)
    return rng.choice((lambda: x, x.abs, lambda: x + 100, lambda: x * 5))().to(device, dtype)


def broken(run: Callable[[Tensor], list[Tensor]], x: Tensor) -> list[str]:
    """Which of the results of all of SUMS are further off than allowed."""
    found = {n: off(n, x, t) for n, t in zip(SUMS, run(x), strict=True)}
    return [f"{n}: {v:.2f} in {x.dtype}, {tuple(x.shape)}" for n, v in found.items() if not v <= allowed(n, x.dtype)]


def program(x: Tensor) -> list[Tensor]:
    return [s.fn(x) for s in SUMS.values()]
