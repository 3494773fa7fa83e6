"""Casts to 8-bit floats in Triton; ``ir/float8`` says which.

The hardware's instruction makes the largest number of what is out of range; where eager makes something else of it,
that is put in its place, made from the number that is cast: computing with the bits of the result is miscompiled. (The
instruction casts two at a time; of ``or`` with both as halves of 32 bits, ptxas 12.8 makes wrong code.)
"""

import torch

from ..ir.float8 import BEYOND, CASTS, E4M3, E5M2, LIMITS
from .triton_ops import Printer

TYPES = {E4M3: "tl.float8e4nv", E5M2: "tl.float8e5"}
BEYOND_TESTS = {E4M3: f"tl.abs(x) > {LIMITS[E4M3]}", E5M2: f"tl.abs(x) >= {LIMITS[E5M2]}"}


def _helper(dtype: torch.dtype) -> str:
    to = TYPES[dtype]
    if BEYOND[dtype] == int(torch.tensor([torch.finfo(dtype).max]).to(dtype).view(torch.uint8)):
        return f'''
def {CASTS[dtype]}(x):
    """The nearest; of what is out of range, the largest."""
    return x.to(tl.float32).to({to})
'''
    low, high = BEYOND[dtype] | 128, BEYOND[dtype]
    return f'''
def {CASTS[dtype]}(x):
    """The nearest; what is out of range as eager stores it."""
    x = x.to(tl.float32)
    bits = x.to({to}).to(tl.uint8, bitcast=True)
    beyond = tl.where(x < 0, {low}, {high}).to(tl.uint8)
    return tl.where({BEYOND_TESTS[dtype]}, beyond, bits).to({to}, bitcast=True)
'''


PRINTERS: dict[str, Printer] = {n: lambda needs, t, a, n=n: f"{needs.helper(n)}({a[0]})" for n in CASTS.values()}  # type: ignore[misc]
HELPERS: dict[str, str] = {name: _helper(dtype) for dtype, name in CASTS.items()}
