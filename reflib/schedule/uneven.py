"""Launches of kernels whose neighbouring points are not neighbours in memory, or not in aligned pieces.

``heuristics`` counts on reads of 16 bytes per thread. Without them, on an H200:

* **Rows of an odd number of elements** are read one element per lane, so Triton spreads a row over all warps before a
  thread gets a second element, and adds it up through shared memory. One warp per program where a row is short (layer
  norm, 103 columns: 64 us with 4 warps, 36 with one), two rows per program where it is long (RMS norm, 1365: 31, 25).
* **Pointwise** kernels give a thread neighbouring elements; of a stride, each lane of a request is then in a line of
  its own, and L1 looks one line up per cycle: 8 bf16 per thread, every second one of memory, are 8 lines per request,
  and all requests take 1.0 cycles per element where memory takes 0.3 (a gate of interleaved columns: 58 us with 8, 64
  with 2 where TorchInductor takes 50). Fewer elements per thread, down to 2, until L1 keeps up with memory (max pooling
  of 31 x 31: 21 us with 8, 8 with 2). Of unaligned streams 8 are right, of eight streams or more 4, for the registers.
* **Pointwise stencils of half precision** (neighbours, shifted rows, rows of odd length that are stored) read and store
  most elements one by one, and some in pieces, for which Triton gives a thread neighbouring elements. A request for one
  of each thread's is then several lines, of which it uses a part. Where these take clearly longer than memory, or
  store, since each request writes to L2, lanes go along neighbours, with ``LANE`` bytes each: a request is one line
  (interpolation to 1,601 points: 39 us, so 29). Not float32, of which a lane would have one element, and no reads of
  several at once (the windows of a fold: 40 us, so 56; a wave equation in 3-d: 35 and 40).
* **Rows that memory runs across** (features of a convolution normalized over channels): as many rows per program as
  sectors hold, if that leaves much fewer of them.
* **Rows of some tensors that are columns of others** (``(x + y.mT).sum(1)``): a loop over squares, which Triton reads
  each along its own contiguous side, where that leaves much fewer sectors, all being read once per pass.
* **Rows whose neighbours are some elements apart**, in either direction (every second pixel of an image, normalized
  over channels), or of whose neighbours it is not sure (windows of 7 x 7 pixels of 117 channels, where it does not see
  that ``x % 117`` has neighbours): Triton has lanes go along a block's inner dimension then, before 3.7 along the outer
  one. That is to be rows, if these share sectors (patches of 2 x 2 pixels as rows of 384: 32 lines per request before,
  4 now, and 624 instructions for 880; the mean of such windows: 162 us along the pixels, where memory takes 11).
* **Variances of columns** take two exchanges between threads, some 40 instructions per warp for each 4 columns that a
  thread has: 4 elements per thread in a loop of up to 32 steps, which ptxas writes out, with 1/n as constants (1,138
  instructions per warp for 256 bf16 columns of 64; with 16 elements 1,455), 8 in a longer one. All at once: 32.
* **Columns of many streams**: a step's loads are HELD bytes per thread at most. (The gradient of max pooling, summed
  for a batch norm, reads 4 windows and as many int64 places: with 16 elements per thread 168 registers, 72 with 4.)
* **Columns that are read again**, of a tensor that no cache holds, which the programs that run at once go through
  before any of them is back: in registers, KEPT elements, 32 per thread, or half of each of two tensors. From memory a
  second time, 512 channels of a convolution normalized by their square mean move 201 MB for 134.
* **Columns of pairs** (all quantiles with all targets, of each row of a batch) are computed of what L1 has, and take
  the time of their instructions. A row in registers is added up by exchanges between lanes, and each lane divides the
  block's index for 4 elements: 47 instructions per pair for rows of 101. In a loop over few elements, 19.
* **Columns with a vector** (a bias per channel) before they are reduced: where it has as many elements as there are
  threads, Triton gives each thread one, and lays the whole block out along it, across memory (512 channels: 164
  exchanges between lanes, 13 with twice as many threads). So threads are more than that.
* **Few programs of columns**, less than two per multiprocessor, go through a loop with four times as many warps and
  twice as many rows per step.
* **Few programs** that keep all that they reduce in registers get more warps each, down to one read per thread, until
  half of the multiprocessors' threads are there: nothing else hides what a thread waits for.
"""

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from math import prod
from typing import Any

from ..fuse.decided import integer
from ..ir.expr import Atom, BinOp, Sym, Var, expr
from ..ir.loops import Load, Op, Reduce, Scan, Stmt, Store
from ..ir.program import Config
from ..ir.traffic import LANES, SECTOR, WARP, Access, accesses, cost
from ..ir.transforms import needed, phases
from ..target import Target
from .axes import step
from .heuristics import READ_BYTES, filling, nearest_pow2

SQUARE, MUCH_FEWER = 32, 0.6
WORTH = 0.75  # of the sectors: what is left where twice as many rows per program pay
PIECE = READ_BYTES // 2  # elements of half precision
CACHE, KEPT = 32 << 20, 16384  # bytes; elements of a program
HALF = 1024  # threads of a multiprocessor
STEP, GROUPS = 8, 4  # elements of a thread, of pairs; sectors that WARP results read of a list, or a vector per group
HELD = 256  # bytes: 64 registers
LINE = 128  # bytes that L1 looks up at once
LANE = 4  # bytes per lane with which a request is one line
NEARBY = 1.5  # lookups per time of memory, of neighbours one by one: for more, lanes go along them
OFTEN = 2.4  # lookups per time of memory, of one element each, that other work hides
BYTES = 20  # from memory, per cycle of a multiprocessor


def adjust(config: Config, t: Any, target: Target) -> Config:
    """``config``, or a better one; ``t``: a ``heuristics.Traffic``."""
    s = t.space
    moved = [a for a in accesses(s.body, t.buffers, range(len(s.body))) if a.varies(s.x)]
    if config.reduction == "none":
        return _pointwise(config, t, moved, target)
    if (squares := _squares(config, t, target)) is not None:
        return squares
    if s.r is not None and t.columns():
        return turned(_spread(_columns(_longer(config, t, target), t, target), t, target), t, target)
    if config.reduction != "persistent":
        return config
    return turned(_more_warps(_strided(_unaligned(config, t, moved, target), t, moved, target), t, target), t, target)


def turned(config: Config, t: Any, target: Target) -> Config:
    """``config`` with the dimension of a block that lanes are to go along where Triton has them, if an access has
    neighbours along neither that it sees: rows, if such accesses touch much fewer sectors so; of rows in registers, as
    many as share a sector."""
    x, r = t.space.x, t.space.r
    picks = any(isinstance(s, Scan) or isinstance(s, Reduce) and s.kind.startswith("arg") for s in t.space.body)
    lone = [a for a in accesses(t.space.body, t.buffers) if a.varies(x) and a.varies(r)]
    lone = [a for a in lone if not a.loaded and not _seen(a, x) and not _seen(a, r)]
    if config.reduction not in ("persistent", "mixed") or picks or not lone:
        return config
    near, wider = min(abs(step(a.index, x) or SECTOR) * a.itemsize for a in lone), config
    while wider.reduction == "persistent" and wider.xblock * near < SECTOR and wider.num_warps < 16:
        wider = replace(wider, xblock=2 * wider.xblock, num_warps=2 * wider.num_warps)
    wider = wider if wider.xblock * target.units <= x.size.hint() else config
    rows = min(LANES, wider.xblock)
    along = cost(lone, {x: rows, r: LANES // rows}) <= MUCH_FEWER * cost(lone, {r: LANES})
    config = wider if along else config
    if config.xblock == 1 or along == outer_first():
        return config
    return replace(config, extras=tuple(sorted((*config.extras, ("across", config.reduction)))))


@functools.cache
def outer_first() -> bool:
    """Do lanes go along a block's outer dimension where Triton sees no neighbours? Since 3.7 along the inner one."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return tuple(map(int, metadata.version("triton").split(".")[:2])) < (3, 7)
    return False


def _seen(a: Access, v: Var) -> bool:
    """Does Triton see that neighbours along ``v`` are neighbours in memory, two at least?"""
    terms = [(m, c) for m, c in a.index.terms if any(expr(f).has(v) for f in m)]
    return step(a.index, v) == 1 and all(_whole(m, c, v, 2) for m, c in terms)


def _squares(config: Config, t: Any, target: Target) -> Config | None:
    x, r = t.space.x, t.space.r
    rows, length = x.size.hint(), r.size.hint()
    if config.reduction == "mixed" or any(isinstance(i, Scan) for i in t.space.body):
        return None
    if length < SQUARE or 4 * rows < 3 * SQUARE * target.units or t.shared:
        return None
    moved = [a for a in accesses(t.space.body, t.buffers) if a.varies(r)]
    now = cost(moved, {x: min(config.xblock, rows), r: min(config.rblock, length)})
    square = {x: SQUARE, r: min(2 * SQUARE, length)}
    if sum(cost(each, square) for each in _by_pass(t)) > MUCH_FEWER * now:
        return None
    few = 2 if rows < 2 * SQUARE * target.units and length >= 4 * SQUARE else 1  # one program per multiprocessor
    return replace(config, reduction="looped", xblock=SQUARE, rblock=2 * few * SQUARE, num_warps=8 * few)


def _by_pass(t: Any) -> list[list[Access]]:
    """What each pass of a loop over the rows reads and writes along them: what its sums and its stores need."""
    body, r, out = t.space.body, t.space.r, []
    level = phases(body)
    for n in range(max(level) + 1):
        wanted = [i for i, s in enumerate(body) if level[i] == n and isinstance(s, (Reduce, Store))]
        ids = needed(body, wanted, lambda i: not isinstance(body[i], Reduce))
        out.append([a for a in accesses(body, t.buffers, set(ids)) if a.varies(r)])
    return out


def _longer(config: Config, t: Any, target: Target) -> Config:
    """Fewer results per program, and more of what each is made of at a time, where there are few programs, if no more
    sectors are touched so: of 8 columns for each image, those of one image."""
    x, r = t.space.x, t.space.r
    moved = [a for a in accesses(t.space.body, t.buffers) if a.varies(r)]
    while config.reduction == "looped" and config.xblock > 1 and x.size.hint() < 4 * config.xblock * target.units:
        half = replace(config, xblock=config.xblock // 2, rblock=2 * config.rblock)
        now, then = (cost(moved, {x: c.xblock, r: c.rblock}) for c in (config, half))
        if then > now or half.rblock > r.size.hint():
            break
        config = half
    return config


def _columns(config: Config, t: Any, target: Target) -> Config:
    x, threads, length = config.xblock, target.warp * config.num_warps, t.space.r.size.hint()
    variance = any(isinstance(s, Reduce) and s.kind == "m2" for s in t.part.body)
    along = [a for a in accesses(t.space.body, t.buffers) if a.varies(t.space.r)]
    if t.passes == 1 and not variance and all(a.sectors({t.space.x: WARP}) <= GROUPS for a in along):
        return _pairs(config, t, target)
    if config.reduction == "looped" and (whole := _kept(config, t)) is not None:
        return whole
    if config.reduction == "looped":
        rows = config.rblock
        if variance:
            rows = max(1, 4 * threads // x)
            rows = min(config.rblock, rows if length <= 32 * rows else 2 * rows)
        inside = {(s.buffer, s.index) for s in t.space.loads if s.index.has(t.space.r)}
        each = sum(t.buffers[b].dtype.itemsize for b, _ in inside)
        while rows * x > 4 * threads and rows * x // threads * each > HELD:
            rows //= 2
        config = replace(config, rblock=rows)
        if config.num_warps <= 4 and rows < length and t.space.x.size.hint() < 2 * x * target.units:
            return replace(config, rblock=2 * rows, num_warps=4 * config.num_warps)
        return config
    if not variance or t.space.x.size.hint() < 2 * x * target.units:
        return config
    return replace(config, num_warps=min(config.num_warps, max(4, x * config.rblock // (32 * target.warp))))


def _pairs(config: Config, t: Any, target: Target) -> Config:
    """All pairs of two lists: arithmetic, of what L1 has. So as many results per program as leave enough programs, and
    STEP elements per thread at a time."""
    x, warps = 4 * target.warp, 4
    while x > target.warp and t.space.x.size.hint() < 8 * x * target.units:
        x //= 2
    rblock = STEP * warps * target.warp // x
    if x <= config.xblock // 2 or t.space.x.size.hint() < 8 * x * target.units or rblock >= t.space.r.size.hint():
        return config
    return Config("looped", x, rblock, warps)


def _kept(config: Config, t: Any) -> Config | None:
    """Columns that are read again, in registers where no cache would keep them until then."""
    s, x, length = t.space, config.xblock, t.space.r.size.constant
    reads = [a for a in accesses(s.body, t.buffers) if not a.store and a.varies(s.r)]
    full = [a for a in reads if a.sectors({s.x: WARP}) > GROUPS]
    read = {b.name: b for b in (t.buffers[ld.buffer] for ld in s.loads if ld.index.has(s.r) and ld.index.has(s.x))}
    if length is None or t.passes == 1 or len(full) > 2 or sum(b.nbytes.hint() for b in read.values()) < CACHE:
        return None
    most, rblock = KEPT // min(2, t.streams), 1 << max(0, length - 1).bit_length()
    while x * rblock > most and x * t.width > 2 * SECTOR:
        x //= 2
    return None if x * rblock > most else Config("persistent", x, rblock, x * rblock * KEPT // most // (32 * LANES))


def _spread(config: Config, t: Any, target: Target) -> Config:
    """With more threads than a vector along the columns has elements, if what is reduced is made with one."""
    body, x, r = t.space.body, t.space.x, t.space.r
    summed = needed(body, (i for i, s in enumerate(body) if isinstance(s, Reduce)))
    vectors = any(isinstance(s, Load) and s.index.has(r) and not s.index.has(x) for s in map(body.__getitem__, summed))
    while vectors and config.reduction == "persistent" and target.warp * config.num_warps <= min(config.rblock, 512):
        config = replace(config, num_warps=2 * config.num_warps)
    return config


def _more_warps(config: Config, t: Any, target: Target) -> Config:
    programs, warps = t.space.x.size.hint() // config.xblock, config.num_warps
    most = min(1024, config.xblock * config.rblock * t.width // READ_BYTES)
    while 2 * warps * target.warp <= most and programs * warps * target.warp < HALF * target.units:
        warps *= 2
    return replace(config, num_warps=warps)


def _pointwise(config: Config, t: Any, moved: list[Access], target: Target) -> Config:
    threads, inner = target.warp * config.num_warps, t.space.x
    most = config.xblock
    apart = [a for a in moved if not (a.loaded or _in_pieces(a, inner)) and _apart(a, inner)]
    if apart:
        while most > 2 * threads and _lookups(apart, inner, most // threads) > _memory(t):
            most //= 2
    elif t.streams >= 8:
        most = 4 * threads
    elif not all(_in_pieces(a, inner) for a in moved if not a.loaded):
        most = PIECE * threads
    most = min(config.xblock, most)
    masked = {s.index for s in t.space.loads if s.mask is not None and not _alike(t.space.body, s.mask, inner)}
    single = [a for a in moved if not a.loaded and (a.index in masked or not _in_pieces(a, inner))]
    near = [a for a in single if not _apart(a, inner) and a.sectors({inner: WARP}) * SECTOR >= WARP * a.itemsize]
    piece = LANE // max((a.itemsize for a in near), default=LANE)
    if piece > 1 and (any(a.store for a in near) or _lookups(near, inner, most // threads) > NEARBY * _memory(t)):
        config = replace(config, extras=tuple(sorted((*config.extras, ("piece", piece)))))
        single = [a for a in single if a not in near]
    while most > 2 * threads and _lookups(single, inner, most // threads) > OFTEN * _memory(t):
        most //= 2
    return replace(config, xblock=most)


def _unaligned(config: Config, t: Any, moved: list[Access], target: Target) -> Config:
    r = t.space.r
    rblock, warp = config.rblock, target.warp * (32 if t.width <= 2 else 16)
    if rblock > 4 * warp or all(_in_pieces(a, r) for a in moved if a.index.has(r)):
        return config
    if rblock <= target.warp:  # a lane or several per row: 8 or 16 elements per thread
        xblock, warps = 4 * target.warp * (16 if rblock <= 8 else 8) // rblock, 4
    elif rblock < warp:
        share = (2 if t.passes == 1 else 1 if t.streams == 1 else 0.5) * (0.5 if rblock == 2 * target.warp else 1)
        xblock, warps = max(1, int(share * warp) // rblock), 1
    else:
        xblock, warps = 2, min(16, nearest_pow2(2 * r.size.hint() / warp))
    xblock, warps = filling(t.space.x.size.hint(), xblock, warps, target)
    return replace(config, xblock=xblock, num_warps=warps)


def _strided(config: Config, t: Any, moved: list[Access], target: Target) -> Config:
    rows = t.space.x.size.hint()
    while rows >= 2 * config.xblock * target.units and config.num_warps < 16:
        wider = replace(config, xblock=2 * config.xblock, num_warps=2 * config.num_warps)
        if not across(wider, t, moved):
            break
        config = wider
    return config


def across(config: Config, t: Any, moved: list[Access] | None = None) -> bool:
    """Would half as many whole rows per program touch many more sectors?"""
    if config.reduction != "persistent":
        return False
    moved = moved or [a for a in accesses(t.space.body, t.buffers) if a.varies(t.space.x)]
    half, whole = (cost(moved, {t.space.r: config.rblock, t.space.x: x}) for x in (config.xblock // 2, config.xblock))
    return whole <= WORTH * half


# -- how memory is touched ----------------------------------------------------------------------------
def _apart(a: Access, x: Var) -> bool:
    """Are neighbouring points not neighbours in memory, or few of them? (Where an index is loaded, its arithmetic takes
    the time.)"""
    return step(a.index, x) not in (-1, 0, 1) or a.sectors({x: WARP}) > 2 * (1 + WARP * a.itemsize / SECTOR)


def _lookups(moved: list[Access], x: Var, elements: int) -> float:
    """Cycles per point that L1 takes for the lines of accesses one by one, of so many neighbours per thread."""
    return sum(min(LANES, a.sectors({x: LANES * elements}) * SECTOR / LINE) for a in moved) / LANES


def _memory(t: Any) -> float:
    """Cycles per point that memory takes."""
    points, used = t.space.x.size.hint(), {s.buffer for s in (*t.space.loads, *t.space.stores)}
    each = (t.buffers[b].extent.hint() * t.buffers[b].dtype.itemsize / max(1, points) for b in used)
    return sum(min(SECTOR, e) for e in each) / BYTES


def _in_pieces(a: Access, v: Var) -> bool:
    """Are points along ``v`` next to each other in aligned pieces of 16 bytes, or one in each piece?"""
    terms = [(m, c) for m, c in a.index.terms if m or step(a.index, v)]
    return all(_whole(m, c, v, READ_BYTES // max(2, a.itemsize)) for m, c in terms)


def _alike(body: Sequence[Stmt], mask: int, v: Var) -> bool:
    """Does this condition hold for all or for none of each ``PIECE`` neighbours along ``v``, of an aligned piece?"""
    s = body[mask]
    if not isinstance(s, Op) or s.op not in ("and", "or", "not", "lt", "ge"):
        return False
    if s.op in ("and", "or", "not"):
        return all(_alike(body, arg, v) for arg in s.args)
    sides = [integer(body[arg]) for arg in s.args]
    return all(e is not None and all(_whole(*term, v, PIECE) for term in e.terms) for e in sides)


def _whole(m: tuple[Atom, ...], c: int, v: Var, lane: int) -> bool:
    """Is this term of an index the same for each ``lane`` neighbours along ``v``, or their number?"""
    for a in m:
        if isinstance(a, BinOp) and a.a.has(v):
            if not all(_whole(*term, v, lane) for term in a.a.terms):
                return False
            if (v,) not in dict(a.a.terms):  # all of it is the same
                return True
            return a.b.hint() % lane == 0 and (a.fn == "//" or (c == 1 and len(m) == 1))
    return (m == (v,) and c == 1) or c * prod(expr(a).hint() for a in m if isinstance(a, Sym)) % lane == 0
