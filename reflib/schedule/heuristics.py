"""How to launch a kernel when nothing is measured: block sizes, warps, index width, and what the fast code assumes.

**What a memory-bound kernel needs.** By Little's law bytes in flight = bandwidth x latency: on an H200 about
4.3 TB/s x 0.8 us = 3.4 MB, or 26 KB on each of 132 multiprocessors. A multiprocessor holds at most 2048 threads, so at
full occupancy one 16-byte read per thread (32 KB) is just enough, and 32 to 64 bytes per thread leave room for kernels
that wait at barriers or whose registers allow only half of the threads. Hence:

* pointwise: 8 to 16 elements per thread, so that a thread reads at least 32 bytes in 16-byte pieces;
* rows: about 64 bytes of the main input per thread (32 bf16 or 16 float32 elements; as float32 values these take 32 or
  16 registers, two or three such blocks are in use at once, and the thread stays under 128 registers);
* a row that fits one warp is reduced with shuffles alone: short rows get one warp (or several rows of a warp's
  width), with no barrier at all;
* rows longer than the limit are looped over; a loop's loads are not prefetched, so many small programs overlap.

**What fast code assumes** is the first variant's predicate: 16-byte aligned inputs, 32-bit indices, a row that fits.
The last variant assumes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ir.assume import limit_facts
from ..ir.expr import Expr, Sym, expr
from ..ir.loops import Index, Load, LoopNest, Reduce, Store
from ..ir.program import Assume, Buffer, Config, KernelNode, Variant, kernel_with_fallback
from ..ir.traffic import CLOSE, WARP, accesses, cost
from ..ir.transforms import phases
from ..options import Options
from ..seams import Seam
from ..target import Target
from .axes import Space, layout, step

# (traffic, Target, Options, general) -> (Config, what it assumes) of kernels of a shape of their own; None: of none.
SHAPES = Seam("schedule.SHAPES")
READ_BYTES = 16  # the widest access of one thread
ROW_BYTES = 64  # of a row, in flight per thread


def choose_configs(
    parts: tuple[LoopNest, ...], buffers: dict[str, Buffer], target: Target, options: Options, name: str = "kernel"
) -> tuple[Variant, ...]:
    """``parts`` as one kernel, called ``name``: a fast variant with what it assumes, then one that always works."""
    if not target.is_gpu:
        return kernel_with_fallback(KernelNode(name, parts, Config(xblock=1, num_warps=1, index="int64")))
    traffic = [_Traffic(p, buffers, layout(p, buffers)) for p in parts]
    main = max(traffic, key=lambda t: t.space.x.size.hint())
    config, row_facts = _config(main, traffic, target, options)
    facts = _index_facts(traffic, buffers)
    if facts is None:
        config = replace(config, index="int64")
    else:
        row_facts += facts
    row_facts += _aligned(parts, buffers)
    multiples = _multiples(traffic)
    if multiples:
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
class _Traffic:
    """One part on the grid, and its traffic per point: ``width`` of the main elements in bytes and the number of
    ``streams`` (loads that vary with all of the block's dimensions)."""

    part: LoopNest
    buffers: dict[str, Buffer]
    space: Space

    def itemsizes(self) -> list[int]:
        return [self.buffers[s.buffer].dtype.itemsize for s in self.space.body if isinstance(s, (Load, Store))]

    @property
    def width(self) -> int:
        """Bytes of the narrowest element (bool masks do not count: they are a small part of the traffic)."""
        sizes = self.itemsizes()
        if not sizes:
            return 4
        common = [s for s in sizes if s > 1] or sizes
        return min(common)

    @property
    def streams(self) -> int:
        s = self.space
        dims = [v for v in (s.x, s.y, s.r) if v is not None and v.size != 1]
        full = [ld for ld in s.loads if all(step(ld.index, v) != 0 or ld.index.has(v) for v in dims)]
        return max(1, len({(ld.buffer, ld.index) for ld in full}))

    @property
    def passes(self) -> int:
        """Reductions one after another, plus one when elementwise work on the row follows."""
        r, body = self.space.r, self.space.body
        rounds = [
            phase
            for phase, s in zip(phases(body), body)
            if isinstance(s, Reduce) or (isinstance(s, Store) and r is not None and s.index.has(r))
        ]
        return 1 + max(rounds, default=0)

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
    main: _Traffic, traffic: list[_Traffic], target: Target, options: Options, general: bool = False
) -> tuple[Config, tuple[Assume, ...]]:
    for shape in SHAPES.values():
        if (found := shape(traffic, target, options, general)) is not None:
            return found
    modes = {t.space.mode for t in traffic}
    if "reduction" in modes:
        rows = max((t for t in traffic if t.space.mode == "reduction"), key=lambda t: t.space.x.size.hint())
        return _reduction(rows, target, options, general)
    if len(traffic) == 1 and main.space.mode == "tile":
        return _tile(main), ()
    return _pointwise(main, traffic, target), ()


def _pointwise(main: _Traffic, traffic: list[_Traffic], target: Target) -> Config:
    """4 warps; a thread reads at least 32 bytes, 16 from each stream; fewer when the tensor would not fill the chip.

    For relu on bf16 that is 16 elements per thread (XBLOCK 2048), for float32 add 4 (512): 2048 threads x 32 bytes =
    64 KB in flight per multiprocessor, twice what is needed by Little's law."""
    per_thread = max(READ_BYTES // main.width, min(16, 32 // (main.width * main.streams)))
    warps = 4
    block = target.warp * warps * _pow2(per_thread)
    total = sum(t.space.x.size.hint() for t in traffic)
    while block > 256 and total < block * target.units * 4:
        block //= 2
    return Config("none", xblock=block, num_warps=warps)


def _tile(t: _Traffic) -> Config:
    """64 x 64 points and 8 warps: 128-byte pieces of bf16 on either side, transposed through shared memory."""
    s = t.space
    assert s.y is not None
    x, y = (min(64, _pow2(v.size.hint())) for v in (s.x, s.y))
    if t.width >= 4 and x == y == 64:
        y = 32
    warps = max(1, min(8, x * y // 512))
    return Config("none", xblock=x, num_warps=warps, extras=(("yblock", y),))


def _reduction(t: _Traffic, target: Target, options: Options, general: bool) -> tuple[Config, tuple[Assume, ...]]:
    s = t.space
    assert s.r is not None
    rows, length = max(1, s.x.size.hint()), max(1, s.r.size.hint())
    known = s.r.size.constant is not None
    if t.columns():
        return _columns(t, rows, length), ()
    limit = options.persistent_limit if t.passes > 1 else min(options.persistent_limit, 4096)
    if length > limit or (general and not known):
        return _looped(t, rows, length, target), ()
    rblock = _pow2(length)
    facts = () if known else (Assume("at_most", s.r.size, rblock),)
    return _persistent(t, rows, rblock, target), facts


def _persistent(t: _Traffic, rows: int, rblock: int, target: Target) -> Config:
    """Rows in registers: ROW_BYTES of each stream per thread, half with three streams or more."""
    elements = ROW_BYTES // t.width // (2 if t.streams >= 3 else 1)
    elements = max(4, min(32, elements))
    lane = READ_BYTES // t.width
    if rblock <= target.warp * lane:  # a row is at most one warp wide: any number of warps, no barrier
        warps, block = 4, 4 * target.warp * elements
    else:
        warps = max(1, min(16 if rblock <= 16384 else 32, rblock // (target.warp * elements)))
        block = warps * target.warp * elements
    xblock = max(1, block // rblock)
    while xblock > 1 and rows < xblock * target.units * 4:
        xblock //= 2
    if xblock * rblock < warps * target.warp:
        warps = max(1, xblock * rblock // target.warp)
    return Config("persistent", xblock=xblock, rblock=rblock, num_warps=warps)


def _looped(t: _Traffic, rows: int, length: int, target: Target) -> Config:
    """One long row per program: 8 warps (16 if rows are few), 8 or 16 elements per thread."""
    warps = 16 if rows < 2 * target.units else 8
    elements = max(4, min(16, 32 // t.width))
    rblock = min(warps * target.warp * elements, _pow2(length))
    warps = max(1, min(warps, rblock // (target.warp * 4)))
    return Config("looped", xblock=1, rblock=rblock, num_warps=warps)


def _columns(t: _Traffic, rows: int, length: int) -> Config:
    """Results are contiguous in memory and each is reduced over a stride: XBLOCK covers 128 bytes of neighbours, and
    RBLOCK reads of that are in flight at once. 8 elements per thread: each reduction keeps as many partial results in
    registers, and with 16 two reductions over two streams took 214 registers, an occupancy of one program."""
    x = min(128 // t.width, _pow2(rows))
    r = min(max(8, 2048 // x), 64, _pow2(length))
    assert t.space.r is not None
    persistent = length <= 64 and t.space.r.size.constant is not None  # else the next size may be a longer one
    warps = max(1, min(8, x * r // 256))
    return Config(
        "persistent" if persistent else "looped",
        xblock=x,
        rblock=_pow2(length) if persistent else r,
        num_warps=warps,
    )


def _pow2(n: int) -> int:
    """The least power of two >= ``n``."""
    return 1 << max(0, n - 1).bit_length()


# -- assumptions ------------------------------------------------------------------------------------
def _index_facts(traffic: list[_Traffic], buffers: dict[str, Buffer]) -> tuple[Assume, ...] | None:
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


def _multiples(traffic: list[_Traffic]) -> list[Sym]:
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
