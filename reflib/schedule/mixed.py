"""How to launch a kernel that reduces rows and sums columns (``fuse.mix_order``): one program per row of partial sums,
which is one per multiprocessor.

It holds about 4096 elements of each tensor, and of the next rows, which are being read meanwhile: of two bfloat16
tensors 32 KB, which is what a multiprocessor's bandwidth needs (``heuristics``). Few threads with many registers each
do better than many: on an H200 the backward of a layer norm with 781 columns takes 64 us with 8 warps and 4 rows, 109
with 16 and 8; only long rows want 16.
"""

from __future__ import annotations

from typing import Any

from ..errors import GenerateError
from ..fuse.mix_order import block, column_sums
from ..ir.program import Assume, Config
from ..options import Options
from ..target import Target
from .heuristics import nearest_pow2

BLOCK = 4096  # elements of a program


def mixed(
    traffic: list[Any], target: Target, options: Options, general: bool
) -> tuple[Config, tuple[Assume, ...]] | None:
    """The launch of a kernel with column sums, which is one part (``heuristics.Traffic``); None for others."""
    t = traffic[0]
    sums = column_sums(t.part)
    if not sums:
        return None
    s = t.space
    if s.r is None:
        raise GenerateError(f"{t.part.name} sums columns and reduces no rows: fusion should not have left it so")
    length = int(s.r.size)
    rblock, xblock = block(length), nearest_pow2(BLOCK / length)
    rows = s.x.size.hint() // int(t.buffers[sums[0].buffer].shape[0])
    while xblock > 1 and rows < xblock:
        xblock //= 2
    warps = 16 if xblock == 1 and rblock >= BLOCK else 8
    return Config("mixed", xblock, rblock, max(1, min(warps, xblock * rblock // (4 * target.warp)))), ()
