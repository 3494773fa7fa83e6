"""What the kernels of ``user_kernels.py`` use from another module, partly under the same names."""

from __future__ import annotations

import triton
import triton.language as language

FACTOR = language.constexpr(3)


@triton.jit
def scaled(x):
    return x * FACTOR


@triton.jit
def shift(x, by):
    return scaled(x) + by  # ünïcode before a name: columns are counted in bytes


class Numbers:
    one = language.constexpr(1)
