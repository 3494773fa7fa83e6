"""How to launch a kernel that reduces rows and sums columns (``fuse.mix_order``): one program per row of partial sums,
which is one per multiprocessor.

Its 512 threads hold up to 16 elements of each tensor each, and of the next rows, which are being read meanwhile: of two
bfloat16 tensors 32 KB are on their way at any time, which is what a multiprocessor's bandwidth needs (``heuristics``).
Short rows are taken several at a time, as many as a program has.
"""

from __future__ import annotations

from typing import Any

from ..errors import GenerateError
from ..fuse.mix_order import ELEMENTS, REGISTERS, THREADS, block, column_sums, per_element
from ..ir.program import Assume, Config
from ..options import Options
from ..target import Target


def mixed(
    traffic: list[Any], target: Target, options: Options, general: bool
) -> tuple[Config, tuple[Assume, ...]] | None:
    """The launch of a kernel with column sums, which is one part (``heuristics._Traffic``); None for others."""
    t = traffic[0]
    sums = column_sums(t.part)
    if not sums:
        return None
    s = t.space
    if s.r is None:
        raise GenerateError(f"{t.part.name} sums columns and reduces no rows: fusion should not have left it so")
    rblock = block(int(s.r.size))
    reads = {(ld.buffer, ld.index): ld.index.has(s.x) for ld in s.loads if ld.index.has(s.r)}
    each = per_element(len(sums), [(t.buffers[name], by_row) for (name, _), by_row in reads.items()])
    elements = ELEMENTS
    while elements > 4 and elements * each > REGISTERS:
        elements //= 2
    xblock = max(1, THREADS * elements // rblock)
    rows = s.x.size.hint() // int(t.buffers[sums[0].buffer].shape[0])
    while xblock > 1 and rows < xblock:
        xblock //= 2
    warps = max(1, min(THREADS, xblock * rblock // elements) // target.warp)
    return Config("mixed", xblock, rblock, warps), ()
