"""Decompose-K: a product with a long K and a small result, as many products side by side and a sum.

    a[M, K] @ b[K, N]  =  sum over s of  a[M, s, K/S] @ b[s, K/S, N]

One product of 32 x 32 x 16384 is a single tile: one multiprocessor reads 2 MB, the others are idle. Cut into S = 64
it is a batched product of 64 tiles that are read by 64 multiprocessors, and a sum over 64 x 32 x 32 float32 partial
results (256 KB written and read again, in L2), which fuses with whatever follows. Partial results and their sum are
float32, rounded once, as in the plain product.

The idea, its name and the two switches are TorchInductor's (PyTorch PR #150654; switches: #154421). Here it is an
implementation registered like a user's, for ``aten.mm`` and ``aten.addmm``; a batched product has tiles enough.
NB: TorchInductor takes the first divisors of K in a fixed order; we take those that fill the device first.
"""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from reflib.errors import DeviceError, OptionError
from reflib.ir.program import Variant, View
from reflib.options import Options
from reflib.target import device_target, parse_target

from .candidates import Failed, arguments, fake_tensors, variants
from .context import LoweringContext
from .custom_ops import CustomOpConfig

aten = torch.ops.aten

_TILE = 64  # rows and columns of an output tile of such small products
_LEAST_PART = 64  # a shorter part of K is over before its pipeline is full
_UNITS = 132  # multiprocessors of a GPU that is not here
# What users of TorchInductor set, and its defaults.
_ENVIRONMENT = {
    "num_decompose_k_splits": ("TORCHINDUCTOR_NUM_DECOMPOSE_K_SPLITS", 10),
    "decompose_k_threshold": ("TORCHINDUCTOR_DECOMPOSE_K_THRESHOLD", 32),
}


def limits(options: Options) -> tuple[int, int]:
    """(splits to try, threshold), from options or environment. Raises OptionError if that is not a number."""
    splits, threshold = (
        _from_environment(variable, default) if getattr(options, name) is None else getattr(options, name)
        for name, (variable, default) in _ENVIRONMENT.items()
    )
    return splits, threshold


def _from_environment(variable: str, default: int) -> int:
    text = os.environ.get(variable, "").strip() or str(default)
    if not text.isdecimal():
        raise OptionError(f"environment variable {variable}={text!r}: must be an integer of at least 0")
    return int(text)


# -- the implementations ----------------------------------------------------------------------------
def partial_products(a: torch.Tensor, b: torch.Tensor, k_splits: int) -> torch.Tensor:
    """[S, M, N] in float32 (float64): products of a's columns and b's rows, a contiguous part of K each."""
    a3 = a.unflatten(1, (k_splits, a.shape[1] // k_splits)).transpose(0, 1)
    b3 = b.unflatten(0, (k_splits, b.shape[0] // k_splits))
    if a.dtype not in (torch.float16, torch.bfloat16):
        return torch.bmm(a3, b3)
    if a.device.type == "cuda" and torch.version.hip is None:
        return torch.bmm(a3, b3, out_dtype=torch.float32)
    return torch.bmm(a3.float(), b3.float())


def decompose_k(self: torch.Tensor, mat2: torch.Tensor, *, k_splits: int) -> torch.Tensor:
    """``aten.mm``."""
    return partial_products(self, mat2, k_splits).sum(0).to(self.dtype)


def decompose_k_addmm(
    self: torch.Tensor, mat1: torch.Tensor, mat2: torch.Tensor, *, beta: Any = 1, alpha: Any = 1, k_splits: int
) -> torch.Tensor:
    """``aten.addmm``: alpha and the bias come before the one rounding, as in eager's kernel."""
    out = partial_products(mat1, mat2, k_splits).sum(0)
    out = out if alpha == 1 else out * alpha
    if beta != 0:  # else not even a NaN of the bias counts
        bias = self.to(out.dtype)
        out = out + (bias if beta == 1 else bias * beta)
    return out.to(mat1.dtype)


# -- which splits -----------------------------------------------------------------------------------
def splits(m: int, n: int, k: int, limit: int, threshold: int, units: int = _UNITS) -> list[int]:
    """At most ``limit`` numbers of parts for an M x N x K product, the best guesses first; none if K is shorter than
    ``threshold`` times M or N, or cannot be cut into aligned parts.

    Best is what makes about two programs for each of ``units`` multiprocessors; then parts that are a multiple of 32,
    the depth of a tile. Partial results may not outweigh the operands (counted in elements).

    >>> splits(32, 32, 16384, 4, 32)
    [256, 128, 64, 32]
    >>> splits(1024, 1024, 4096, 4, 32)
    []
    """
    if limit <= 0 or min(m, n, k) <= 0 or k < threshold * m or k < threshold * n:
        return []
    tiles = math.ceil(m / _TILE) * math.ceil(n / _TILE)

    def badness(s: int) -> tuple[float, int]:
        fill = abs(math.log2(s * tiles / (2 * units)))
        part = k // s
        return fill + (0 if part % 32 == 0 else 1 if part % 16 == 0 else 2), -s

    fits = [s for s in _divisors(k) if s > 1 and k // s >= _LEAST_PART and k // s % 8 == 0]
    fits = [s for s in fits if s * m * n <= k * (m + n)]
    return sorted(fits, key=badness)[:limit]


def _divisors(k: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(k) + 1) if k % d == 0]
    return [*low, *(k // d for d in reversed(low) if d * d != k)]


def _mm_configs(fakes: Mapping[str, torch.Tensor], options: Options, units: int) -> list[CustomOpConfig]:
    (m, k), n = fakes["self"].shape, fakes["mat2"].shape[1]
    return [CustomOpConfig(decompose_k, k_splits=s) for s in splits(m, n, k, *options.decompose_k(), units)]


def _addmm_configs(fakes: Mapping[str, torch.Tensor], options: Options, units: int) -> list[CustomOpConfig]:
    (m, k), n = fakes["mat1"].shape, fakes["mat2"].shape[1]
    return [CustomOpConfig(decompose_k_addmm, k_splits=s) for s in splits(m, n, k, *options.decompose_k(), units)]


# Config generators that need no registering. What users register for the same op comes beside them.
BUILT_IN: dict[Any, Callable[[Mapping[str, torch.Tensor], Options, int], list[CustomOpConfig]]] = {
    aten.mm.default: _mm_configs,
    aten.addmm.default: _addmm_configs,
}


def matmul_variants(
    cx: LoweringContext, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: View
) -> tuple[list[Variant], Failed]:
    """Decompose-K's variants of a call of ``target`` that writes ``out``, and those that could not become one."""
    configs = BUILT_IN.get(target)
    if configs is None or cx.low.options.decompose_k()[0] == 0:
        return [], ()
    given = arguments(target, args, kwargs)
    made = configs(fake_tensors(cx, target, given), cx.low.options, _units(cx))
    return variants(cx, target, made, given, [out], choices=False)


def _units(cx: LoweringContext) -> int:
    """Multiprocessors, or cores, of the device it will run on."""
    target = cx.low.options.target
    try:
        known = parse_target(target) if target else device_target(cx.device.type, cx.device.index or 0)
    except DeviceError:  # captured for a GPU that is not here
        return _UNITS
    return known.units if known.is_gpu else os.cpu_count() or 1
