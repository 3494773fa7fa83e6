"""Triton kernels over symmetric storage: they read all ranks' memory by address, and do not wait.

``table``: on the device, the address of each rank's memory. Its first eight bytes are the offset at which that rank's
values lie; memory as ``symmetric.Storage`` counts it begins ``front`` bytes later. Values are added in the order of
ranks, so all ranks have the same bits; halves in float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def add_parts(table, out, start, n, front: tl.constexpr, WORLD: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = the sum over ranks of their value ``start + i``, for i < n."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], WIDE)
    for rank in tl.static_range(WORLD):
        memory = tl.load(table + rank)
        at = tl.load(memory.to(tl.pointer_type(tl.int64)))
        values = (memory + front + at).to(tl.pointer_type(out.dtype.element_ty))
        total += tl.load(values + start + i, i < n).to(WIDE)
    tl.store(out + i, total.to(out.dtype.element_ty), i < n)


@triton.jit
def gather_parts(table, out, at, n, part, front: tl.constexpr, BLOCK: tl.constexpr):
    """out[rank * part + i] = what lies at ``at`` in the memory of ``rank``. Grid: (blocks of a part, ranks)."""
    rank = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = (tl.load(table + rank) + front + at).to(tl.pointer_type(out.dtype.element_ty))
    here = (i < part) & (rank * part + i < n)
    tl.store(out + rank * part + i, tl.load(values + i, here), here)
