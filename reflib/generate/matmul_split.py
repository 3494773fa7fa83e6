"""Split-K in one launch: SPLITS programs share a tile's depth, and the last one to finish does the rest.

Each writes its float32 part of the tile to a workspace and counts itself; who counts last puts the counter back to
zero, reads all parts, adds them in the order of their numbers (so results repeat bit for bit, whoever was last) and
runs the epilogue. That order of things is Stream-K's fix-up (Osama et al., PPoPP 2023) without its waiting.

The parts are visible to the one who counts last: the barrier puts the program's stores before its atomic, which
releases them; the last atomic acquires them.
"""

from __future__ import annotations

from ..errors import GenerateError
from ..ir.expr import Expr, expr
from ..ir.program import Buffer
from .matmul import MatmulPrinter

IN_REGISTERS = 128  # values of the parts a thread holds at once


def print_split(p: MatmulPrinter) -> Expr:
    """Programs of one split come one after another, so that neighbours share operands."""
    t = p.tiling
    if t.splits < 2 and t.warps_k < 2:
        raise GenerateError(f"{p.template.name}: a tiling of kind split with nothing split")
    tiles = expr(1) if p.tiles == 0 else p.tiles
    if t.splits > 1:
        p.constants["SPLITS"] = t.splits
        p.put(f"pid = {p.pid()}")
        if tiles == 1:
            p.put("tile, split = 0, pid")
        else:
            count = p.count("tiles", tiles)
            p.put(f"tile, split = pid % {count}, pid // {count}")
    else:
        p.put(f"tile = {p.pid()}")
    p.tile()
    p.product("split" if t.splits > 1 else "", t.splits, t.warps_k)
    if t.warps_k > 1:
        p.put("acc = tl.sum(acc, axis=0)")
    if t.splits == 1:
        p.epilogue()
        return p.tiles
    _hand_in(p, tiles)
    return p.tiles * t.splits


def _workspace(p: MatmulPrinter, kind: str) -> Buffer:
    if kind not in p.workspace:
        raise GenerateError(f"{p.template.name}: a split tiling needs a workspace of kind {kind}")
    return p.workspace[kind]


def _hand_in(p: MatmulPrinter, tiles: Expr) -> None:
    """Store this program's part; the last one of the tile adds them all and goes on."""
    t = p.tiling
    partials, counters = (p.body.pointer(_workspace(p, k).name) for k in ("temp", "zeros"))
    top = tiles.constant
    small = top is not None and top * t.splits * t.m * t.n < 2**31
    tile = "tile" if small or p.wide else "tile.to(tl.int64)"
    p.put("place = tl.arange(0, YBLOCK)[:, None] * XBLOCK + tl.arange(0, XBLOCK)[None, :]")
    p.put(f"parts = {partials} + {tile} * (SPLITS * YBLOCK * XBLOCK) + place" if tiles != 1 else
          f"parts = {partials} + place")  # fmt: skip
    p.put("tl.store(parts + split * (YBLOCK * XBLOCK), acc)")
    p.put("tl.debug_barrier()")
    p.put(f'if tl.atomic_add({counters} + tile, 1, sem="acq_rel") == SPLITS - 1:')
    p.indent(1)
    p.put(f"tl.store({counters} + tile, 0)")
    _add_parts(p)
    p.epilogue()
    p.indent(-1)


def _add_parts(p: MatmulPrinter) -> None:
    t = p.tiling
    most = max(1, IN_REGISTERS * 32 * t.num_warps // (t.m * t.n))
    count = min(1 << (t.splits - 1).bit_length(), most)  # parts read at once, a power of two
    mask = "mask=s < SPLITS, other=0.0, " if t.splits % count else ""
    read = f'tl.load(parts[None, :, :] + s * (YBLOCK * XBLOCK), {mask}cache_modifier=".cg")'
    if count >= t.splits:
        p.put(f"s = tl.arange(0, {count})[:, None, None]")
        p.put(f"part = {read}")
        p.put("acc = tl.sum(part, axis=0)")
        return
    p.put("acc = tl.zeros([YBLOCK, XBLOCK], tl.float32)")
    p.put(f"for first in tl.range(0, SPLITS, {count}):")
    p.put(f"    s = first + tl.arange(0, {count})[:, None, None]")
    p.put(f"    part = {read}")
    p.put("    acc += tl.sum(part, axis=0)")
