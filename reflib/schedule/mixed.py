"""How to launch a kernel that reduces rows and sums columns (``fuse.mix_order``): one program per row of partial sums.

A thread holds 16 elements of each tensor: 2048 elements take 4 warps, a row of 8192 takes 16. Of 4-byte elements it
holds 8, since the next rows are read ahead and take as many registers as there are bytes.
"""

from __future__ import annotations

from typing import Any

from ..fuse.mix_order import BLOCK, block, column_sums
from ..ir.program import Assume, Config
from ..options import Options
from ..target import Target


def mixed(traffic: list[Any], target: Target, options: Options, general: bool) -> tuple[Config, tuple[Assume, ...]] | None:
    """The launch of a kernel with column sums, which is one part; None for others."""
    t = traffic[0]
    if not column_sums(t.part):
        return None
    rblock = block(int(t.space.r.size))
    xblock = max(1, BLOCK // rblock)
    elements = 16 if t.width <= 2 else 8
    warps = max(1, min(1024 // target.warp, xblock * rblock // (target.warp * elements)))
    return Config("mixed", xblock, rblock, warps), ()
