"""Fourier transforms of pairs of real numbers: ``reflib::fft_r2c``, ``fft_c2c`` and ``fft_c2r``.

ATen's transforms with a last dimension (real, imaginary) in the place of each complex tensor: the same memory seen
otherwise, so nothing is copied. ``complex_pairs`` writes graphs with them; a C++ wrapper calls ATen's (``wrap/aten``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .random import LIBRARY

aten = torch.ops.aten
LIBRARY.define("fft_r2c(Tensor x, int[] dim, int normalization, bool onesided) -> Tensor")
LIBRARY.define("fft_c2c(Tensor x, SymInt[] dim, int normalization, bool forward) -> Tensor")
LIBRARY.define("fft_c2r(Tensor x, int[] dim, int normalization, SymInt last_dim_size) -> Tensor")


def _of_pairs(op: Any) -> Callable[..., torch.Tensor]:
    def transform(x: torch.Tensor, *args: Any) -> torch.Tensor:
        out = op(x if op is aten._fft_r2c.default else torch.view_as_complex(x), *args)
        return torch.view_as_real(out) if out.is_complex() else out

    return transform


SPECTRA: dict[Any, Any] = {}  # ATen's op: ours
for _name in ("fft_r2c", "fft_c2c", "fft_c2r"):
    _op = getattr(aten, f"_{_name}").default
    LIBRARY.impl(_name, _of_pairs(_op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"reflib::{_name}", _of_pairs(_op), lib=LIBRARY)
    SPECTRA[_op] = getattr(torch.ops.reflib, _name).default
