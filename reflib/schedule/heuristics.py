"""How to launch a kernel when nothing is measured: block sizes, warps, index width, and what the fast code assumes.

**What a memory-bound kernel needs.** By Little's law bytes in flight = bandwidth x latency: on an H200 about
4.3 TB/s x 0.8 us = 3.4 MB, or 26 KB on each of 132 multiprocessors. A multiprocessor holds at most 2048 threads, so at
full occupancy one 16-byte read per thread (32 KB) is just enough, and 32 to 64 bytes per thread leave room for kernels
that wait at barriers or whose registers allow only half of the threads. Hence:

* pointwise: 8 to 16 elements per thread, read in 16-byte pieces;
* rows: about 64 bytes of the main input per thread (32 bf16 or 16 float32 elements; as float32 values these take 32 or
  16 registers, two or three such blocks are in use at once, and the thread stays under 128 registers);
* rows of up to half a warp's elements are reduced by one warp, with shuffles alone, as many as fill it;
* longer ones are looped over; a loop's loads are not prefetched, so many elements are read per step.

The numbers here come from 2,905 launches of 160 kernels measured on an H200: rows, columns, pooling, transposes.

**Fast code assumes** the first variant's predicate: aligned inputs, 32-bit indices, a row that fits; the last, nothing.
"""

from dataclasses import dataclass, replace
from math import log2

from ..ir.assume import limit_facts
from ..ir.expr import Expr, Sym, expr
from ..ir.loops import Index, Load, LoopNest, Reduce, Scan, Store
from ..ir.program import Assume, Buffer, Config, KernelNode, Variant, kernel_with_fallback
from ..ir.traffic import CLOSE, SECTOR, WARP, accesses, cost
from ..ir.transforms import phases, varying
from ..options import Options
from ..seams import Seam
from ..target import Target
from .axes import Space, layout

# (traffic per part, Target, Options, general) -> (Config, what it assumes), or None: kernels of a shape of their own.
SHAPES = Seam("schedule.SHAPES")
# (Config, traffic, Target) -> Config, where memory is not read in order: rows that are not aligned, strides.
ADJUST = Seam("schedule.ADJUST")
READ_BYTES = 16  # the widest access of one thread
SPARE, SIDES = 0.25, (32, 64, 128, 256)  # of a tile's side, masked off; sides that may be masked off less
ROW_BYTES = 64  # of a row, in flight per thread


def choose_configs(
    parts: tuple[LoopNest, ...], buffers: dict[str, Buffer], target: Target, options: Options, name: str = "kernel"
) -> tuple[Variant, ...]:
    """``parts`` as one kernel, called ``name``: a fast variant with what it assumes, then one that always works."""
    if not target.is_gpu:
        return kernel_with_fallback(KernelNode(name, parts, Config(xblock=1, num_warps=1, index="int64")))
    traffic = [Traffic(p, buffers, layout(p, buffers)) for p in parts]
    main = max(traffic, key=lambda t: t.space.x.size.hint())
    config, row_facts = _config(main, traffic, target, options)
    if (facts := _index_facts(traffic, buffers)) is None:
        config = replace(config, index="int64")
    row_facts += (facts or ()) + _aligned(parts, buffers)
    if multiples := _multiples(traffic):
        row_facts += tuple(Assume("divisible", expr(s), 16) for s in multiples)
        divisible = ("divisible", tuple(s.name for s in multiples))
        config = replace(config, extras=tuple(sorted((*config.extras, divisible))))
    fast = KernelNode(name, parts, config)
    if not row_facts:
        return kernel_with_fallback(fast)
    general, _ = _config(main, traffic, target, options, general=True)
    return kernel_with_fallback(fast, row_facts, replace(fast, config=replace(general, index="int64")))


# -- what a part moves ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Traffic:
    """One part on the grid, and its traffic per point: ``width`` of the main elements in bytes and the number of
    ``streams`` (loads that vary with all of the block's dimensions, by more than one number per row of many)."""

    part: LoopNest
    buffers: dict[str, Buffer]
    space: Space

    @property
    def width(self) -> int:
        """Bytes of the narrowest element (bool masks do not count: they are a small part of the traffic)."""
        sizes = [self.buffers[s.buffer].dtype.itemsize for s in self.space.body if isinstance(s, (Load, Store))]
        return min([s for s in sizes if s > 1] or sizes, default=4)

    @property
    def streams(self) -> int:
        s = self.space
        dims = [v for v in (s.x, s.y, s.r) if v is not None and v.size != 1]
        full = [a for a in accesses(s.body, self.buffers) if not a.store and all(a.index.has(v) for v in dims)]
        return max(1, sum(4 * a.sectors(dict.fromkeys(dims[-1:], WARP)) * SECTOR > WARP * a.itemsize for a in full))

    @property
    def passes(self) -> int:
        """Reductions one after another, plus one when elementwise work on the row follows."""
        body, each = self.space.body, varying(self.space.body, self.space.reduced_vars)
        along = [a and isinstance(s, Store) or isinstance(s, Reduce) for s, a in zip(body, each)]
        rounds = [phase for phase, a in zip(phases(body), along) if a]
        return 1 + max(rounds, default=0)

    @property
    def shared(self) -> bool:
        """Of a reduction: is what it reads along r the same for neighbours x (all pairs of two lists, of a batch)?"""
        x, r = self.space.x, self.space.r
        assert r is not None
        return all(a.sectors({x: WARP}) == 1 for a in accesses(self.space.body, self.buffers) if a.varies(r))

    def columns(self) -> bool:
        """Of a reduction: does a warp touch fewer sectors when its lanes go along x, one result each, than along r?"""
        x, r = self.space.x, self.space.r
        assert r is not None
        moved = [a for a in accesses(self.space.body, self.buffers) if a.varies(r)]
        length = max(1, min(WARP, r.size.hint()))
        row, rows, column = ({r: length}, {r: length, x: WARP // length}, {x: min(WARP, x.size.hint())})
        return x.size.hint() > 1 and cost(moved, column) < min(cost(moved, row), CLOSE * cost(moved, rows))


# -- block shapes -----------------------------------------------------------------------------------
def _config(
    main: Traffic, traffic: list[Traffic], target: Target, options: Options, general: bool = False
) -> tuple[Config, tuple[Assume, ...]]:
    for shape in SHAPES.values():
        if (found := shape(traffic, target, options, general)) is not None:
            return found
    if rows := [t for t in traffic if t.space.mode == "reduction"]:
        main = max(rows, key=lambda t: t.space.x.size.hint())
        config, facts = _reduction(main, target, options, general)
    elif len(traffic) == 1 and main.space.mode == "tile":
        return _tile(main, target), ()
    else:
        config, facts = _pointwise(main, traffic, target), ()
    for adjust in ADJUST.values():
        config = adjust(config, main, target)
    return replace(config, num_warps=min(config.num_warps, 1024 // target.warp)), facts


def _pointwise(main: Traffic, traffic: list[Traffic], target: Target) -> Config:
    """4 warps; a thread reads 32 bytes per stream (16 elements of bf16: XBLOCK 2048), 16 of three streams or more;
    fewer when the tensor would not fill the chip."""
    block = 4 * target.warp * _pow2(READ_BYTES // main.width * (2 if main.streams < 3 else 1))
    while block > 256 and sum(t.space.x.size.hint() for t in traffic) < block * target.units * 4:
        block //= 2
    return Config("none", xblock=block, num_warps=4)


def _tile(t: Traffic, target: Target) -> Config:
    """64 x 32 points and 8 warps, transposed through shared memory: pieces of 256 and 128 bytes of float32. Of narrower
    elements 64 x 64, if these fill the chip. Where a side is shorter, the other one is longer. Where 64 points would be
    masked off too often (of 96 or 200 columns), x is as long as leaves fewest, each piece being a sector more."""
    s = t.space
    assert s.y is not None
    wide, high = _pow2(s.x.size.hint()), _pow2(s.y.size.hint())
    square = t.width < 4 and min(wide, high) >= 64 and t.part.numel.hint() >= 4 * 4096 * target.units
    size, side = s.x.size.hint(), min(64, wide)
    if -size % side > SPARE * size:
        side = min(SIDES, key=lambda n: (-(-size // n) * (n + SECTOR // t.width), -n))
    y = min((4096 if square else 2048) // min(side, wide), high)
    x = min(2048 // y if y < 32 and side <= 64 else side, wide)
    return Config("none", xblock=x, num_warps=max(1, min(8, x * y // 256)), extras=(("yblock", y),))


def _reduction(t: Traffic, target: Target, options: Options, general: bool) -> tuple[Config, tuple[Assume, ...]]:
    s = t.space
    assert s.r is not None
    rows, length = max(1, s.x.size.hint()), max(1, s.r.size.hint())
    if t.columns():
        return _columns(t, rows, length, target), ()
    longest = min(options.persistent_limit, 4096 if any(isinstance(i, Scan) for i in s.body) else length)
    if length > longest or (general and s.r.size.constant is None):
        return _looped(t, rows, length, target), ()
    facts = (Assume("at_most", s.r.size, _pow2(length)),) if s.r.size.constant is None else ()
    return _persistent(t, rows, length, target), facts


def _persistent(t: Traffic, rows: int, length: int, target: Target) -> Config:
    """Rows in registers: ROW_BYTES of each stream per thread, half with three streams or more. A multiprocessor holds
    32 programs: those of one warp must read much, which sums have the registers for."""
    elements = max(4, min(32, ROW_BYTES // t.width // (2 if t.streams >= 3 else 1)))
    warp, rblock = target.warp * elements, _pow2(length)
    if rblock <= target.warp * READ_BYTES // t.width // 2:
        xblock, warps = 4 * warp // rblock, 4
    elif rblock < warp:
        xblock, warps = nearest_pow2((2 if t.passes == 1 else 1) * warp / length), 1
    elif rblock == warp and t.streams == 1:
        xblock, warps = 2, nearest_pow2(2 * length / warp)
    else:
        xblock, warps = 1, min(16 if rblock <= 16384 else 32, rblock // warp)
    xblock, warps = filling(rows, xblock, warps, target)
    return Config("persistent", xblock=xblock, rblock=rblock, num_warps=max(1, min(warps, xblock * rblock // 32)))


def filling(rows: int, xblock: int, warps: int, target: Target) -> tuple[int, int]:
    """Rows per program, and its warps: fewer, until there are enough programs for the chip."""
    while xblock > 1 and rows < xblock * target.units * 4:
        xblock, warps = xblock // 2, max(1, warps // 2)
    return xblock, warps


def _looped(t: Traffic, rows: int, length: int, target: Target) -> Config:
    """One long row per program, 8 elements per thread of 32 warps; fewer with several reductions, each of which keeps
    as many partial results in registers (a variance two). A loop of whole blocks is unrolled by ptxas, and 1024 threads
    have no registers for that (2 rows of 2^27: 386 us on an H100, 175 are possible): 16 elements of fewer warps."""
    kept = sum(2 if s.kind == "m2" else 1 for s in t.space.body if isinstance(s, Reduce))
    few = rows < 4 * target.units
    most = 16 if kept != 1 or (few and length % 8192 == 0) else 32 if few else 8
    rblock = min(8192 // min(_pow2(kept), 4), 512 * most, _pow2(length))
    return Config("looped", xblock=1, rblock=rblock, num_warps=max(1, min(most, rblock // (target.warp * 4))))


def _columns(t: Traffic, rows: int, length: int, target: Target) -> Config:
    """Results are contiguous in memory and each is reduced over a stride. Programs of a line of neighbours, 128 bytes,
    which read 16 elements per thread in a step (8 by twice as many warps take 1.08 times as long, sums on an H100; but
    few programs that go on for long need the threads: 2^23 rows of 16 take 1.61 of a copy's time without, 1.05 with);
    all at once where that is little, or is read again. Where results are few, fewer and all: to hide latency. What all
    results are made of is in no lines of their own: at least 8 programs per multiprocessor."""
    assert t.space.r is not None
    rblock, once = _pow2(length), t.passes == 1
    x = min(max(128 // t.width if once else 32, 1024 // rblock), _pow2(rows))
    while x > 1 and rows < x * target.units * (8 if t.shared else 0.5 if x <= 32 else 1):
        x //= 2
    most = 16384 if t.streams == 1 and rows < 4 * x * target.units else 8192 if t.streams == 1 and not once else 4096
    if t.space.r.size.constant is not None and x * rblock <= most:  # else the next size may be a longer one
        return Config("persistent", xblock=x, rblock=rblock, num_warps=max(1, min(8, x * rblock // 512)))
    rblock = min(max(1, 2048 // x), rblock)
    long = length > 16 * rblock and rows // x < 8 * target.units
    return Config("looped", x, rblock, num_warps=max(1, x * rblock // (256 if long else 512)))


def nearest_pow2(n: float) -> int:  # at least 1
    return 1 << max(0, round(log2(n)))


def _pow2(n: int) -> int:
    """The least power of two >= ``n``."""
    return 1 << max(0, n - 1).bit_length()


# -- assumptions ------------------------------------------------------------------------------------
def _index_facts(traffic: list[Traffic], buffers: dict[str, Buffer]) -> tuple[Assume, ...] | None:
    """What must be at most 2^31 for 32-bit indices and cannot be proved; None when these do not suffice."""
    sizes: list[Expr] = []
    for t in traffic:
        sizes += [v.size for v in t.space.variables]
        sizes += [buffers[b].extent for b in [*t.part.reads(), *t.part.writes()]]
        if any(a.lo < -(2**31) for s in t.part.body if isinstance(s, Index) for a in s.expr.symbols()):
            return None  # any integer at all, as a value
    return limit_facts(sizes)


def _aligned(parts: tuple[LoopNest, ...], buffers: dict[str, Buffer]) -> tuple[Assume, ...]:
    """Inputs may be any view; what reflib allocates is aligned."""
    used = dict.fromkeys(b for p in parts for b in [*p.reads(), *p.writes()])
    return tuple(Assume("aligned", b, 16) for b in used if buffers[b].kind != "temp")


def _multiples(traffic: list[Traffic]) -> list[Sym]:
    """Size symbols that are a row's stride and were multiples of 16 when traced, as 16-byte reads need."""
    out: set[Sym] = set()
    for t in traffic:
        for s in t.space.body:
            if not isinstance(s, (Load, Store)):
                continue
            for m, c in s.index.terms:
                syms = [a for a in m if isinstance(a, Sym)]
                if len(m) > 1 and c % 16 and len(syms) == 1 and syms[0].hint and syms[0].hint % 16 == 0:
                    out.add(syms[0])
    return sorted(out)
