"""Split-K in one launch: SPLITS programs share a tile's depth, and the last ones add the parts up.

Each program stores its float32 part of the tile in the workspace. The last PIECES programs of the tile then take a
piece of it each: they read that piece of all parts, add in the order of the parts' numbers (so results repeat bit for
bit), run the epilogue, and put the workspace back to zeros.

**A part is its own flag.** Zero says "not here yet", so nobody counts arrivals and nobody fences: a reader reads again
what is zero. A part is stored with the bits of HOLE flipped, a signalling NaN; arithmetic gives quiet NaNs only, so no
part is ever stored as zero. On an H200 that takes 2 us less than a counter with its fence (Stream-K's fix-up:
Osama et al., PPoPP 2023).

**Waiting.** Programs start in the order of their numbers, parts outermost. A single last program (PIECES = 1) waits for
programs that have started only. Several wait for each other as well; they must all fit on the GPU at once, so there
are at most half as many as multiprocessors. One that waits for longer than any kernel takes stops with an error.

Deep products of little else: the warps of a program may share a block's depth (``warps_k``), in a product of three
dimensions that is added up over the first.
"""

from __future__ import annotations

import torch

from ..errors import GenerateError
from ..ir.expr import Expr, expr
from ..ir.program import Buffer, Tiling
from .matmul import MatmulPrinter

HOLE = -5855578  # 0xFFA6A6A6, a signalling NaN
IN_REGISTERS = 64  # words of parts that a thread holds at once
ROUNDS = 1 << 24  # of waiting, some 10 seconds


def print_split(p: MatmulPrinter) -> Expr:
    """Programs of one split come one after another, so that neighbours share operands."""
    t = p.tiling
    if t.splits < 2 and t.warps_k < 2:
        raise GenerateError(f"{p.template.name}: a tiling of kind split with nothing split")
    if t.splits > 1 and p.target.kind != "cuda":
        raise GenerateError(f"{p.template.name}: programs that wait for each other are for CUDA, not {p.target.arch}")
    tiles = expr(1) if p.tiles == 0 else p.tiles
    p.pdl = p.target.kind == "cuda" and p.target.capability >= 90
    if p.pdl:
        p.imports.append("from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait\n")
        p.put("gdc_wait()  # for the kernel before: this one may be launched early")
    if t.splits > 1:
        p.constants["SPLITS"] = t.splits
        p.put(f"pid = {p.pid()}")
        count = p.count("tiles", tiles)
        p.put("tile, split = 0, pid" if tiles == 1 else f"tile, split = pid % {count}, pid // {count}")
    else:
        p.put(f"tile = {p.pid()}")
    p.tile()
    p.product("split" if t.splits > 1 else "", t.splits, t.warps_k)
    if p.pdl:
        p.put("gdc_launch_dependents()")
    if t.warps_k > 1:
        p.helpers.append(sum_ways(t.warps_k))
        p.put("acc = sum_ways(acc, MBLOCK, NBLOCK)")
    if t.splits == 1:
        p.epilogue()
        return p.tiles
    _store_part(p, tiles)
    _add_parts(p, pieces(t, tiles, p.target.units))
    return p.tiles * t.splits


def pieces(t: Tiling, tiles: Expr, units: int) -> int:
    """How many programs share the adding up of one tile: 16 bytes each at least, and all can be there at once."""
    if tiles.constant is None:
        return 1
    count = 1 << (t.splits.bit_length() - 1)
    while count > 1 and (t.m * t.n < 4 * count or count * tiles.constant > units // 2):
        count //= 2
    return count


def _workspace(p: MatmulPrinter, tiles: Expr) -> Buffer:
    t, found = p.tiling, p.workspace.get("zeros")
    words = tiles * (t.splits * t.m * t.n)
    if found is None or found.dtype != torch.int32 or (p.tiles != 0 and found.numel != words):
        raise GenerateError(f"{p.template.name}: a split tiling needs a workspace of {words} int32 of kind zeros")
    return found


def _store_part(p: MatmulPrinter, tiles: Expr) -> None:
    t, name = p.tiling, p.body.pointer(_workspace(p, tiles).name)
    small = tiles.constant is not None and tiles.constant * t.splits * t.m * t.n < 2**31
    tile = "tile" if small or p.wide else "tile.to(tl.int64)"
    p.constants["HOLE"] = HOLE
    p.put("# zero means: not here yet; what is stored is never zero, since no sum is a signalling NaN")
    p.put(f"parts = {name}" + ("" if tiles == 1 else f" + {tile} * (SPLITS * MBLOCK * NBLOCK)"))
    p.put("place = tl.arange(0, MBLOCK)[:, None] * NBLOCK + tl.arange(0, NBLOCK)[None, :]")
    p.put("tl.store(parts + split * (MBLOCK * NBLOCK) + place, acc.to(tl.int32, bitcast=True) ^ HOLE)")


def _add_parts(p: MatmulPrinter, count: int) -> None:
    """The programs from SPLITS - PIECES on go on, each with a piece of YBLOCK x XBLOCK points."""
    t = p.tiling
    words = t.m * t.n // count
    y, x = p.points = (max(1, words // t.n), min(t.n, words))
    p.constants |= {"PIECES": count, "YBLOCK": y, "XBLOCK": x}
    p.put("piece = split - (SPLITS - PIECES)")
    p.put("if piece >= 0:")
    p.indent(1)
    _sum_parts(p, words)
    p.put("total = tl.reshape(total, [YBLOCK, XBLOCK])")
    p.body.acc = "total"
    across = t.n // x
    row = "piece * YBLOCK" if across == 1 else f"piece // {across}"
    column = "" if across == 1 else f" + piece % {across} * XBLOCK"
    wide = p.wide
    p.epilogue(
        f"tile_m * MBLOCK + {row} + tl.arange(0, YBLOCK)[:, None]{wide}" if count > 1 else "m[:, None]",
        f"tile_n * NBLOCK{column} + tl.arange(0, XBLOCK)[None, :]{wide}" if column else "n[None, :]",
    )
    p.indent(-1)


def _sum_parts(p: MatmulPrinter, words: int) -> None:
    """``total``: the sum of this program's piece of all parts, as one row."""
    t, threads = p.tiling, 32 * p.tiling.num_warps
    all_parts = 1 << (t.splits - 1).bit_length()
    count = min(all_parts, max(1, IN_REGISTERS * threads // words))  # parts at once, a power of two
    loop = count < all_parts
    p.helpers.append(arrived(max(1, min(32, count * words // threads))))
    p.put("e = piece * (YBLOCK * XBLOCK) + tl.arange(0, YBLOCK * XBLOCK)")
    if loop:
        p.put("total = tl.zeros([YBLOCK * XBLOCK], tl.float32)")
        p.put(f"for first in tl.range(0, SPLITS, {count}):")
        p.indent(1)
    p.put(f"s = {'first + ' if loop else ''}tl.arange(0, {count})[:, None]")
    more = t.splits % count != 0
    p.put(f"at = parts + {'tl.minimum(s, SPLITS - 1)' if more else 's'} * (MBLOCK * NBLOCK) + e[None, :]")
    p.put("part = (arrived(at) ^ HOLE).to(tl.float32, bitcast=True)")
    if more:
        p.put("part = tl.where(s < SPLITS, part, 0.0)")
    p.put(f"total {'+=' if loop else '='} tl.sum(part, axis=0)")
    p.put("tl.debug_barrier()  # all threads have read")
    p.put(f"tl.store(at, tl.zeros([{count}, YBLOCK * XBLOCK], tl.int32))")
    if loop:
        p.indent(-1)


# -- helpers ----------------------------------------------------------------------------------------
def sum_ways(ways: int) -> str:
    """The text of a function. Triton's own sum over the first dimension takes several shuffles per element."""
    halves = ways.bit_length() - 1
    lines = [
        "@triton.jit",
        "def sum_ways(acc, M: tl.constexpr, N: tl.constexpr):",
        f'    """[{ways}, M, N] to [M, N]: once through shared memory, so that each thread has all of its points."""',
        f"    acc = tl.reshape(tl.permute(acc, (1, 2, 0)), (M, N{', 2' * halves}))",
    ]
    for _ in range(halves):
        lines += ["    even, odd = tl.split(acc)", "    acc = even + odd"]
    return "\n".join([*lines, "    return acc", ""])


def arrived(words: int) -> str:
    """The text of a function that reads ``words`` words a thread (a power of two, at most 32), again while zero."""
    each = range(words)
    first = [f"ld.relaxed.gpu.global.b32 ${i}, [${words + i}];" for i in each]
    again = [
        f"setp.eq.b32 q, ${i}, 0; or.pred any, any, q; @q ld.relaxed.gpu.global.b32 ${i}, [${words + i}];" for i in each
    ]
    lines = [
        "{ .reg .pred q, any; .reg .u32 rounds; mov.u32 rounds, 0;", *first,
        "AGAIN: setp.ne.u32 any, 0, 0;", *again,
        f"add.u32 rounds, rounds, 1; setp.gt.u32 q, rounds, {ROUNDS}; @q trap;", "@any bra AGAIN; }",
    ]  # fmt: skip
    registers = ",".join(["=&r"] * words + ["l"] * words)
    return "\n".join([
        "@triton.jit",
        "def arrived(at):",
        '    """The words at ``at``, once none is zero."""',
        "    return tl.inline_asm_elementwise(",
        '        """', *(f"        {line}" for line in lines), '        """,',
        f'        "{registers}",',
        f"        [at], dtype=tl.int32, is_pure=False, pack={words},",
        "    )",
        "",
    ])  # fmt: skip
