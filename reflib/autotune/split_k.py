"""Tilings of split-K: few results of great depth, in one launch (``generate.matmul_split``).

For results of up to 64 x 64, or of 16 rows, the tilings are those that were fastest on an H200 (M = N in 16..64, K in
4096..32768, half precision, by replay of CUDA graphs): the model of ``roofline`` is too coarse for kernels of 2 to
4 us. Others are made from all blocks, and ranked by it.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ..ir.program import Tiling
from ..target import Target
from .roofline import NARROW, Problem, shared_bytes, tensor_cores

BLOCKS = (16, 32, 64, 128, 256)
# Parts of a wave that split-K's programs make up. Fewer have more depth each, and fewer parts to add.
WAVES = (1 / 4, 1 / 3, 1 / 2, 2 / 3, 5 / 6, 1, 2)
MORE_WAVES = (*WAVES, 3, 4)  # where an operand is computed: that takes warps
DEEP = 2048  # depth from which on few results are surely split
WORDS = 16  # of all parts, that a thread adds up: they are on their way at once
LEAST = 16  # points that a program adds up: rows of 8 are slower
STAGES = 8


def able(target: Target) -> bool:
    return target.kind == "cuda" and tensor_cores(target)


# -- measured ---------------------------------------------------------------------------------------
Block = tuple[int, int, int, int, int]  # m, n, k, warps, warps_k


def known(p: Problem, target: Target) -> list[Tiling]:
    """What was best for such sizes, the best guess first; nothing for others."""
    b, m, n, depth = p.sizes
    if not able(target) or b != 1 or depth < DEEP:
        return []
    if max(m, n) <= 64:
        blocks = _blocks(max(m, n), depth)
    elif m <= 16:
        blocks = [((16, 64, 128, 2, 2), -(-depth // max(2, parts * target.units // -(-n // 64)))) for parts in (2, 1)]
    else:
        return []
    found = []
    for (rows, columns, k, warps, ways), each in blocks:
        if p.dtype not in NARROW:  # twice the bytes: half the depth a step
            k = max(k // 2, 16 * ways)
        while k > 16 * ways and 2 * k > each:
            k //= 2
        steps = max(2, -(-each // k))
        t = Tiling("split", rows, columns, k, warps, splits=-(-depth // (steps * k)), warps_k=ways)
        if t.splits < 2 or p.tiles(t) * t.splits > 2 * target.units:
            continue
        t = deepest(p, t, target)
        r = reducers(p, t, target.units)
        found += [replace(t, reducers=r), replace(t, reducers=min(2 * r, t.m * t.n // LEAST))]
    return list(dict.fromkeys(found))


def _blocks(most: int, depth: int) -> list[tuple[Block, int]]:
    """(block, the depth of a part), best guess first."""

    def least(of: tuple[int, ...], parts: int) -> int:
        return next((d for d in of if -(-depth // d) <= parts), of[-1])

    if most <= 16:
        each = least((128,) if depth <= 4096 else (192, 256, 384, 512, 768, 1024), 90)
        first = ((16, 16, 64 if each <= 192 else 128, 2, 2), each)
        return [first, ((16, 16, 64, 2, 2), 192), ((16, 16, 128, 2, 2), 256), ((16, 16, 128, 2, 2), 384)]
    if most <= 32:
        each = least((256, 384, 512, 768, 1024), 90 if depth > 16384 else 64)
        deep = [((32, 32, 128, 4, 1), each), ((32, 32, 128, 4, 1), 384)]
        middle = [((32, 32, 64, 4, 1), 192), ((32, 32, 64, 4, 1), 128)]
        shallow = [((16, 32, 64, 4, 1), 128)]
        return shallow + middle + deep if depth <= 4096 else middle + deep if depth <= 12288 else deep + middle
    each = least((256, 384, 512, 768, 1024), 32 if depth <= 16384 else 64)
    wide = [((64, 32, 128, 4, 1), each if depth <= 16384 else max(512, each)), ((64, 32, 128, 4, 1), 384)]
    narrow = [((64, 16, 64, 4, 1), 128), ((64, 16, 128, 4, 1), 384), ((64, 16, 128, 4, 1), 768)]
    return narrow[:1] + wide + narrow[1:] if depth <= 4096 else wide + narrow[1:]


# -- all others -------------------------------------------------------------------------------------
def all_splits(p: Problem, target: Target) -> Iterator[Tiling]:
    """Depth shared among programs: one per multiprocessor or fewer, or a few where they compute an operand. Each takes
    its depth in two steps or more, so that the first is multiplied while the second is loaded, and keeps as many blocks
    in flight as shared memory holds."""
    if not able(target):
        return
    depth, unit = p.sizes[3], 1 if p.dtype in NARROW else 2
    for m, n, k in itertools.product(BLOCKS, BLOCKS, (32, 64, 128)):
        for warps, ways in _ways(m, n):
            base = Tiling("split", m, n, k * p.denser() // unit, warps, warps_k=ways)
            tiles = p.tiles(base)
            if tiles > target.units or base.k // ways < 16:
                continue
            for waves in MORE_WAVES if p.computed else WAVES:
                splits = whole_splits(depth, base.k, round(waves * target.units) // tiles)
                c = replace(base, splits=splits)
                if splits > 1 and p.steps(c) > 1 and (c := deepest(p, c, target)).num_stages > 2:
                    yield replace(c, reducers=reducers(p, c, target.units))


def _ways(m: int, n: int) -> tuple[tuple[int, int], ...]:
    """(warps, how many of them share a block's depth): in 16 rows there is nothing else for a second warp to share."""
    if m == 16 and n <= 64:
        return (2, 2), (4, 1)
    return ((4, 1), (8, 1)) if m * n >= 128 * 128 else ((4, 1),)


# -- their parts ------------------------------------------------------------------------------------
def deepest(p: Problem, t: Tiling, target: Target) -> Tiling:
    """``t`` with one stage more than it has steps, or as many as fit with its share of neighbours."""
    stages = min(p.steps(t) + 1, STAGES)
    room = target.shared // -(-p.tiles(t) * t.splits // target.units)
    while stages > 2 and shared_bytes(p, replace(t, num_stages=stages), target) > room:
        stages -= 1
    return replace(t, num_stages=stages)


def reducers(p: Problem, t: Tiling, units: int) -> int:
    """How many programs add a tile up: WORDS words a thread, or twice that if then all programs fit into one wave; two
    waves of them at most."""
    parts, threads, tiles = 1 << (t.splits - 1).bit_length(), 32 * t.num_warps, p.tiles(t)
    count = min(t.m * t.n // LEAST, max(1, parts * t.m * t.n // (threads * WORDS)))
    while count > 1 and tiles * count > 2 * units:
        count //= 2
    if tiles * (t.splits + count) > units >= tiles * (t.splits + count // 2) and count > 1:
        count //= 2
    return count


def whole_splits(k: int, block: int, splits: int) -> int:
    """The number nearest below ``splits`` that leaves no program without a block of depth."""
    steps = -(-k // block)
    each = -(-steps // max(1, splits))
    return -(-steps // each)
