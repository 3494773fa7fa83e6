"""Matmuls: which tilings are worth measuring, what to take unmeasured, and what a kernel assumes.

The ranking is ``roofline.estimate``'s, but for split-K of small results (``split.known``); pruning is here. Three kinds
of tiling (``ir.program.Tiling``): ``tiled`` everywhere, ``split`` where there are fewer tiles than multiprocessors and
depth to share, ``persistent`` for large products that TMA can read.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch

from ..ir.assume import limit_facts
from ..ir.expr import BinOp, Expr, Sym, Var, ceildiv, expr, minimum, product
from ..ir.instructions import PER_BYTE
from ..ir.loops import Index, Load, Store
from ..ir.program import Assume, Buffer, Config, KernelNode, Template, Tiling, Variant, View, kernel_with_fallback
from ..options import Options
from ..target import Target
from .epilogue import Epilogue
from .one_row import row_tilings
from .roofline import (
    FP8,
    HALVES,
    NARROW,
    Problem,
    accumulators,
    efficiency,
    estimate,
    grouped,
    moving,
    multiplying,
    shared_bytes,
    tensor_cores,
)
from .split_k import BLOCKS, all_splits, known

__all__ = [
    "apart", "estimate", "on_end", "problem", "static_tiling", "template_variants", "tilings", "unfit_for_tma",
    "worth_compiling",
]  # fmt: skip

FIRST = 8  # tilings of one row, and split ones that were measured to be good, before all that the model ranks
MOST = 12  # candidates of a product: each takes 0.2 to 1 s to compile
LEAST = 4  # of each kind that is near
NEAR = {"tiled": 2.5, "persistent": 2.5, "split": 1.25}  # times the best estimate: a kind that is near
FAR = {"tiled": 4.0, "persistent": 4.0, "split": 1.25}  # a kind beyond is left out; what is between has one place
LARGE = 128 * 128  # results of a block that 4 warps can multiply, and 8
ACCUMULATORS = 128  # registers a thread spends on sums; 255 is all it has
COMPUTED = 144  # sums and elements of a computed operand per thread: with more, registers spill
TMA_SCRATCH = 256  # bytes a persistent program writes its two descriptors to
DIVISOR = 16  # elements: what a size or stride must be a multiple of for 16-byte accesses of any dtype


def problem(t: Template) -> Problem:
    """``t`` at its traced sizes."""
    b, m, n, k = (max(1, e.hint()) for e in t.sizes)
    computed = "".join(name for name, v in (("a", t.a), ("b", t.b)) if t.prologue(v))
    twice = t.dtype in FP8 and t.precision == "ieee"
    return Problem((b, m, n, k), t.dtype, t.precision == "tf32", _width(t, t.a), _width(t, t.b), 0, computed, twice)


def _width(t: Template, v: View) -> float:
    """Bytes of an element in memory; of one that is computed, what is read for it: a float as one of the product's."""
    nest = t.prologue(v)
    if nest is None:
        return v.dtype.itemsize
    sizes = {a.var: a.size for a in nest.axes[-2:]}  # (one program has one product of a batch)
    return sum(
        min(s.dtype.itemsize, t.dtype.itemsize) / prod(_sharing(s.index, d, size) for d, size in sizes.items())
        for s in nest.loads()
    )


def _sharing(index: Expr, d: Var, size: Expr) -> int:
    """How many neighbours along ``d`` read one element."""
    if not index.has(d):
        return max(1, size.hint())
    quotients = {a: a.b for a in index.atoms() if isinstance(a, BinOp) and a.fn == "//" and a.a == expr(d)}
    return 1 if len(quotients) != 1 or index.subs(dict.fromkeys(quotients, 0)).has(d) else quotients.popitem()[1].hint()


# -- candidates -------------------------------------------------------------------------------------
def tilings(t: Template, target: Target, options: Options) -> list[Tiling]:
    """Candidates to compile and measure, at most ``MOST``: those that were measured to be good, the best guess of each
    kind (the model ranks within a kind better than between them), then the others as the model ranks them. None where
    Triton has no kernel to offer: on CPUs, bfloat16 before sm_80, and 8-bit floats before sm_89."""
    return list(_ranked(t, target)) if can_multiply(t, target) else []


def can_multiply(t: Template, target: Target) -> bool:
    if t.dtype in FP8 or any(s.dtype in FP8 for p in t.prologues for s in p.loads()):
        return target.kind == "cuda" and target.capability >= 89
    return target.is_gpu and (t.dtype != torch.bfloat16 or tensor_cores(target))


@functools.lru_cache(maxsize=512)  # a choice is expanded when its question is sent, and again when it is decided
def _ranked(t: Template, target: Target, moved: int = 0) -> tuple[Tiling, ...]:
    p = replace(problem(t), moved=moved)
    first = [*row_tilings(t, p, target), *(c for c in known(p, target) if fits(p, c, target))][:FIRST]
    ranked: list[tuple[Tiling, float]] = []
    for made in (_tiled(p, target), all_splits(p, target), _walking(t, p, target)):
        ranked += _varied(p, (c for c in made if fits(p, c, target) and c not in first), target)
    return (*first, *worth_compiling(sorted(ranked, key=lambda c: c[1]), MOST - len(first)))


def worth_compiling(ranked: Sequence[tuple[Tiling, float]], most: int) -> list[Tiling]:
    """Of tilings with their estimates (seconds, ascending), the ``most`` that are worth compiling; the best of each
    kind comes first.

    Each kind whose best estimate is within ``NEAR`` times the best of all has ``LEAST`` places at least, one that is
    within ``FAR`` has one; a tiling whose estimate is beyond twice its kind's best has none. The model estimates
    split-K within a fifth or too high, and the other two kinds up to 1.8 times too high (5 times for the few results of
    great depth that split-K is for). Of 39 products measured on an H200 with 14 to 34 tilings each, the best of twelve
    chosen so is within 1% of the best of all, of eight within 5%, of six within 20%. (They set the limits; none was
    held out.)"""
    kinds: dict[str, list[tuple[Tiling, float]]] = {}
    for c, seconds in ranked:
        kinds.setdefault(c.kind, []).append((c, seconds))
    heads: list[tuple[Tiling, float]] = []
    sure: list[tuple[Tiling, float]] = []
    rest: list[tuple[Tiling, float]] = []
    for kind, of in kinds.items():
        best = of[0][1]
        if best <= NEAR[kind] * ranked[0][1]:
            like = [(c, seconds) for c, seconds in of if seconds <= 2 * best]
            heads += like[:1]
            sure += like[1:LEAST]
            rest += like[LEAST:]
        elif best <= FAR[kind] * ranked[0][1]:
            sure += of[:1]
    taken = sure + sorted(rest, key=lambda pair: pair[1])[: max(0, most - len(heads) - len(sure))]
    return [c for c, _ in (*heads, *sorted(taken, key=lambda pair: pair[1]))][:most]


def on_end(ranked: Sequence[Tiling], t: Template, target: Target) -> list[Tiling]:
    """The best of each kind that has wide blocks of the largest size, on end: for products with an epilogue. Alone the
    wide block is the faster one, but of a tall one a thread has fewer columns, and less of what belongs to these: for
    bias and GELU (4096 x 3584 x 8192, bfloat16, sm_90) ptxas gives 202 registers per thread to a persistent kernel's
    256x128 and all 255 to 128x256."""
    heads: dict[str, Tiling] = {}
    for c in ranked:
        heads.setdefault(c.kind, c)
    tall = [replace(c, m=c.n, n=c.m) for c in heads.values() if c.m * c.n > LARGE and c.m < c.n and not c.turned]
    return [c for c in tall if c not in ranked and fits(problem(t), c, target)]


def open_template(a: Variant) -> Template | None:
    """Its matmul whose tiling is not chosen yet."""
    return next((n for n in a.nodes if isinstance(n, Template) and n.tiling is None), None)


def with_tiling(a: Variant, tiling: Tiling) -> Variant:
    """``a`` with its Template's tiling chosen."""
    nodes = tuple(replace(n, tiling=tiling) if isinstance(n, Template) and n.tiling is None else n for n in a.nodes)
    return replace(a, nodes=nodes)


def apart(a: Variant) -> Variant:
    """``a`` with its matmuls as kernels of their own: what follows them is computed by other kernels."""
    nodes = tuple(replace(n, closed=True) if isinstance(n, Template) else n for n in a.nodes)
    return replace(a, nodes=nodes)


def _varied(p: Problem, made: Iterable[Tiling], target: Target) -> list[tuple[Tiling, float]]:
    """With their estimates, the cheapest that differ in more than stages, with different blocks m x n as far as there
    are any.

    Of those that differ in warps alone one, where wgmma multiplies: on an H200 4 and 8 warps were within 2% of each
    other for blocks of 128 x 128, where k of 64 and 128 differed by up to 20%. (split-K: 8, from 4% faster than 4 to 2%
    slower.) Of two that are each other's mirror images the wide one, unless the model prefers the tall one: the wide
    one was faster in 82 of 92 pairs, by 5% in the median."""
    cost = {c: estimate(p, c, target) for c in made}

    def eight(c: Tiling) -> bool:
        return c.kind == "split" and c.m * c.n >= LARGE

    found: dict[Tiling, Tiling] = {}
    for c in sorted(cost, key=lambda c: (cost[c], abs(c.num_stages - 4), c.n < c.m, eight(c) and c.num_warps < 8)):
        key = replace(c, num_stages=0, num_warps=0 if eight(c) or grouped(p, c, target) else c.num_warps)
        if min(c.m, c.n) < 64 or c.m <= c.n or replace(key, m=c.n, n=c.m) not in found:
            found.setdefault(key, c)
    shapes = {(c.m, c.n) for c in found.values()}
    each = max(2, -(-MOST // max(1, len(shapes)))) + any(c.kind == "split" for c in found)
    taken: dict[tuple[int, int], int] = {}
    out = []
    for c in found.values():
        taken[c.m, c.n] = taken.get((c.m, c.n), 0) + 1
        if taken[c.m, c.n] <= each:
            out.append((c, cost[c]))
    return out


def fits(p: Problem, t: Tiling, target: Target) -> bool:
    """Within the target's shared memory and registers, and no block of more than twice the size it covers."""
    _, m, n, k = p.sizes
    if shared_bytes(p, t, target) > target.shared or accumulators(t) * (1 + p.twice) > ACCUMULATORS:
        return False
    if p.computed and accumulators(t) + p.made(t) // (32 * t.num_warps) > COMPUTED:
        return False
    if t.warps_k > 1 and p.computed or p.dtype in FP8 and (t.warps_k > 1 or t.k < 32):
        return False
    if t.num_warps * 32 > max(t.m * t.n // 4, 32) * t.warps_k:
        return False
    return t.m < 2 * max(m, 16) and t.n < 2 * max(n, 16) and t.k < 2 * max(k, 32)


def _depths(p: Problem) -> tuple[int, ...]:
    """Sizes of k: 64 to 256 bytes of a row."""
    sizes = (64, 128, 256) if p.dtype in FP8 else (32, 64, 128) if p.dtype in HALVES else (16, 32, 64)
    return tuple(k * p.denser() for k in sizes)


def _tiled(p: Problem, target: Target) -> Iterator[Tiling]:
    """A program a tile. Without tensor cores the sums are formed in registers, from smaller blocks."""
    plain = not tensor_cores(target) or p.dtype not in NARROW and not p.tf32
    if plain:
        for m, n in itertools.product(BLOCKS[:-1], BLOCKS[:-1]):
            for k in (16, 32) if p.sizes[3] > 32 else (16,):  # 32 in one step: no loop, and ptxas spills (up to 4 KB)
                warps = max(1, min(8, m * n // 1024))
                ahead = 1 if p.computed else 3 if tensor_cores(target) else 2  # (beside what is computed, 2 KB spill)
                yield Tiling("tiled", m, n, k, warps, ahead)
        return
    stages = (2,) if target.kind == "hip" else (3, 4) if target.capability < 90 else (3, 4, 5, 6, 7)
    for m, n in itertools.product(BLOCKS, BLOCKS):
        turned = _turned(p, m, n, target)
        for k, s, warps in itertools.product(_depths(p), stages, (4,) if turned else _warps(m, n)):
            yield Tiling("tiled", m, n, k, warps, s, turned=turned)


def _turned(p: Problem, m: int, n: int, target: Target) -> bool:
    """Few rows and 64 columns or more: the columns are the rows of Hopper's wgmma. Faster for all of M in 16..64 and
    blocks of 16 or 32 rows on an H200 (N = 11008, K = 4096, bfloat16: by 3% and 8%, by 27% for two tiles of 32)."""
    return target.kind == "cuda" and target.capability == 90 and p.dtype in NARROW and m < 64 <= n


def _warps(m: int, n: int) -> tuple[int, ...]:
    """Warps that such a block keeps busy: 1024 to 4096 sums each, and a group of 4 for wgmma."""
    if m * n >= 128 * 256:
        return (8,)
    if m * n >= 128 * 128:
        return (4, 8)
    return (4,) if m * n >= 32 * 64 else (2, 4)


def _walking(t: Template, p: Problem, target: Target) -> Iterator[Tiling]:
    """Persistent: for products of at least a third of a wave of large tiles."""
    if target.kind != "cuda" or target.capability < 90 or t.sizes[0] != 1 or t.sizes[3] == 0 or t.prologues:
        return
    if (p.dtype not in NARROW and not p.tf32) or any(unfit_for_tma(v, _names(multiples(t))) for v in (t.a, t.b)):
        return
    for m, n in ((64, 128), (64, 256), (128, 64), (128, 128), (128, 256), (256, 128)):
        for k, s, warps in itertools.product(_depths(p)[1:], (3, 4, 5), _warps(m, n)):
            c = Tiling("persistent", m, n, k, warps, s)
            if p.tiles(c) * 3 >= target.units:
                yield c


# -- without measuring ------------------------------------------------------------------------------
# A launch, its gap and a kernel that reads back what was just stored cost 2 to 4 us; where the library's product
# itself takes no more than about that, one fused launch wins.
SMALL = 2 * 256 * 256 * 1024  # operations
SKINNY = 64 * 64  # results that split-K is meant for ...
BEHIND = 0.7  # of the bytes' time of what is behind a product, in the model's seconds
DEEP = 64  # ... with at least so much depth for each row or column


def static_tiling(t: Template, behind: Callable[[], Epilogue | None], target: Target) -> Tiling | None:
    """What to use when nothing is measured; None: leave it to ATen. ``behind``: ``epilogue_of`` it.

    Small products with an epilogue become one launch; so do few results of great depth, where the library's own
    split-K takes two launches for the product alone; and products that wait for memory (``_waiting``). All else is the
    library's: without measuring, 0.9 of cuBLAS on a large product costs more than the epilogue's launch saves."""
    if not can_multiply(t, target) or not tensor_cores(target) and t.dtype != torch.float32:
        return None
    p = problem(t)
    b, m, n, k = p.sizes
    small = 2 * b * m * n * k <= SMALL
    skinny = b * m * n <= SKINNY and k >= DEEP * max(m, n)
    waits = moving(p, p.dtype.itemsize, target) > multiplying(p, target)
    if not (small or skinny or waits) or (after := behind()) is None:
        return None
    return best_tiling(t, after.moved, target) if small or skinny else _waiting(t, p, after, target)


def arithmetic_takes_longer(t: Template, tiling: Tiling, target: Target) -> bool:
    """Of a product that is not small, in float32 and without tensor cores: does its arithmetic take longer than memory?
    The library's is faster then, by more than a kernel for its operands takes."""
    p = problem(t)
    if 2 * prod(p.sizes) <= SMALL or p.dtype in NARROW or p.tf32:
        return False
    return multiplying(p, target) > efficiency(p, tiling, target) * moving(p, p.dtype.itemsize, target)


def _waiting(t: Template, p: Problem, behind: Epilogue, target: Target) -> Tiling | None:
    """A product of little depth or width takes the library the time of its bytes, and what is behind it reads the
    result again and stores another: 262,144 x 256 of depth 256 and a ReLU move 537 MB in two kernels, 269 in one. So
    ours is taken where by the model it ends before memory could have moved what two kernels do. (On an H200 our two
    products of 262,144 x 256 took 1.6 and 1.5 times the model's seconds, the library's as many times their bytes', and
    the ReLU 1.1 times. Arithmetic of an epilogue is added, as it waits for the product; a kernel of its own does it
    while it reads.)"""
    stored = p.dtype.itemsize
    p = replace(p, moved=behind.moved if behind.kept else max(0, behind.moved - stored))
    tiling = best_tiling(t, p.moved, target)
    if tiling is None:
        return None
    work = behind.work / PER_BYTE  # as bytes
    ours = estimate(p, tiling, target) + moving(p, work, target) - moving(p, 0, target)
    after = moving(p, max(stored + behind.moved, work), target) - moving(p, 0, target)
    return tiling if ours <= moving(p, stored, target) + BEHIND * after else None


def best_tiling(t: Template, moved: int, target: Target) -> Tiling | None:
    """As the model ranks those that assume nothing of strides. ``moved``: see ``Problem``."""
    ranked = _ranked(t, target, moved) if can_multiply(t, target) else ()
    return next((c for c in ranked if c.kind != "persistent"), None)


# -- variants ---------------------------------------------------------------------------------------
def template_variants(name: str, t: Template, buffers: dict[str, Buffer], target: Target) -> tuple[Variant, ...]:
    """The kernel of ``t`` with what it assumes, then one that assumes nothing. Where it has no tiling it is to have the
    one that all products have (``Options.batch_invariant``), or is a CPU's."""
    if not target.is_gpu:
        return kernel_with_fallback(KernelNode(name, (t,), Config("matmul", xblock=1, num_warps=1, index="int64")))
    same = t.tiling is None
    if same:
        t = replace(t, tiling=same_tiling(t, _moved(t, buffers), target))
    used = [buffers[b] for b in dict.fromkeys([*t.reads(), *t.writes()])]
    computed = (product(v.shape) for v in (t.a, t.b) if t.prologue(v))  # indices on the way to what is read reach these
    facts = limit_facts([*t.sizes, *(b.extent for b in used), *computed])
    body = [s for nest in (*t.prologues, t.epilogue) for s in nest.body]
    if any(a.lo < -(2**31) for s in body if isinstance(s, Index) for a in s.expr.symbols()):
        facts = None  # any integer at all, as a value
    assert t.tiling is not None
    general = _kernel(name, replace(t, tiling=general_tiling(t)), target, "int64", ())
    if facts is None and t.tiling.kind == "persistent":  # TMA counts in 32 bits
        return kernel_with_fallback(general)
    aligned = tuple(Assume("aligned", b.name, 16) for b in used if b.kind != "temp")
    divisors = multiples(t)
    predicate = (*aligned, *(facts or ()), *(Assume("divisible", expr(s), DIVISOR) for s in divisors))
    fast = _kernel(name, t, target, "int64" if facts is None else "int32", divisors)
    if same and (t.dtype in HALVES or t.precision == "tf32"):  # (else the product itself is of contracted additions)
        fast, general = exact(fast), exact(general)
    return kernel_with_fallback(fast, predicate, general if predicate else None)


def exact(kernel: KernelNode) -> KernelNode:
    """Its epilogue rounded as it is written."""
    extras = tuple(sorted((*kernel.config.extras, ("exact", True))))
    return replace(kernel, config=replace(kernel.config, extras=extras))


def _moved(t: Template, buffers: dict[str, Buffer]) -> int:
    """Bytes per element of the result that its epilogue loads and stores, beside the result."""
    m, n = (a.var for a in t.epilogue.axes[-2:])
    places = {s.buffer for s in t.epilogue.body if isinstance(s, (Load, Store)) and s.index.has(m) and s.index.has(n)}
    return max(0, sum(buffers[b].dtype.itemsize for b in places) - t.dtype.itemsize)


def same_tiling(t: Template, moved: int, target: Target) -> Tiling:
    """One that gives all products of a depth and a dtype the same order of additions. That depends on the instruction
    that multiplies blocks. Hopper's wgmma adds a result's products 16 of K at a time to what is there, whatever the
    block's sides and depth, stages and warps, and whichever operand has the 64 rows. A float32 result is one thread's
    chain of fused multiplications and additions along K, in any block. Of such tilings the model's first
    (tests/gpu/test_batch_invariant_cuda.py compares their bits). Elsewhere one tiling for all sizes."""
    wgmma = t.dtype in HALVES and target.capability == 90
    if target.kind == "cuda" and (wgmma or t.dtype == torch.float32 and t.precision != "tf32"):
        return _same_order(replace(problem(t), moved=moved), target)
    if t.dtype in HALVES and target.kind == "hip":
        return Tiling("tiled", 64, 128, 64, 4, 2)
    if t.dtype in HALVES and tensor_cores(target):
        return Tiling("tiled", 64, 128, 64, 4, 3)
    return Tiling("tiled", 64, 64, 32 if t.precision == "tf32" else 16, 4, 3 if tensor_cores(target) else 2)


@functools.lru_cache(maxsize=512)
def _same_order(p: Problem, target: Target) -> Tiling:
    b, m, n, k = p.sizes
    least = replace(p, sizes=(b, max(33, m), max(33, n), max(64, k)))  # one block of wgmma is never too large
    made = [c for c in same_order(p, target) if fits(least, c, target)]
    return min(made, key=lambda c: (estimate(p, c, target), c.m * c.n))


def same_order(p: Problem, target: Target) -> list[Tiling]:
    """Tilings for Hopper's wgmma, or for float32, whose results have the same bits."""
    return [c for c in _tiled(p, target) if p.dtype == torch.float32 or grouped(p, c, target)]


def general_tiling(t: Template) -> Tiling:
    """``tiled``, in the chosen blocks if they are that, within what every target has."""
    own = t.tiling
    if own is not None and own.kind == "tiled":
        return own
    p = problem(t)
    m, n = (min(64, max(16, _pow2(s))) for s in p.sizes[1:3])
    return Tiling("tiled", m, n, 32 if p.dtype in NARROW else 16, 4 if m * n >= 32 * 32 else 2, 2)


def _kernel(name: str, t: Template, target: Target, index: str, divisors: tuple[Sym, ...]) -> KernelNode:
    tiling = t.tiling
    assert tiling is not None
    extras = (("divisible", _names(divisors)),) if divisors else ()
    config = Config(
        "matmul", xblock=tiling.n, num_warps=tiling.num_warps, num_stages=tiling.num_stages, index=index, extras=extras
    )
    return KernelNode(name, (t,), config, workspace(name, t, target))


def workspace(name: str, t: Template, target: Target) -> tuple[Buffer, ...]:
    """What the kernel needs beside its tensors: split-K's parts of each tile (words that are zero between calls), or a
    persistent kernel's descriptors."""
    tiling, device = t.tiling, torch.device("cuda", 0)
    assert tiling is not None
    b, m, n, _ = t.sizes
    tiles = b * ceildiv(m, tiling.m) * ceildiv(n, tiling.n)

    if tiling.kind == "persistent":
        size = minimum(tiles, target.units) * TMA_SCRATCH
        return (Buffer(f"{name}_scratch", torch.uint8, device, (size,), (expr(1),), "scratch"),)
    if tiling.kind == "split":
        parts = tiles * (tiling.splits * tiling.m * tiling.n)
        return (Buffer(f"{name}_parts", torch.int32, device, (parts,), (expr(1),), "zeros"),)
    return ()


def multiples(t: Template) -> tuple[Sym, ...]:
    """Size symbols that must be multiples of 16 for 16-byte accesses, and were when traced: those that a row's stride
    or an offset has as its only factor, and the lengths of contiguous rows."""
    steps = [e for v in (t.a, t.b) if not t.prologue(v) for e in (v.offset, *_strides(v), *_lengths(v))]
    for nest in (*t.prologues, t.epilogue):
        axes = {a.var: a.size for a in nest.axes}
        for s in nest.body:
            if isinstance(s, (Load, Store)):
                steps += [by for v in axes if (by := s.index.coefficient(v)) is not None]
                steps += [size for v, size in axes.items() if s.index.coefficient(v) == 1]
    terms = [([a for a in atoms if isinstance(a, Sym)], c) for e in steps for atoms, c in e.terms]
    out: set[Sym] = set()
    for symbols, c in sorted(terms, key=lambda term: len(term[0])):  # of a product one is enough
        if c % DIVISOR and not out.intersection(symbols):
            out.update([s for s in symbols if s.hint and s.hint % DIVISOR == 0][:1])
    return tuple(sorted(out))


def _strides(v: View) -> list[Expr]:
    return [stride for size, stride in zip(v.shape, v.strides) if size != 1]


def _lengths(v: View) -> list[Expr]:
    return [size for size, stride in zip(v.shape, v.strides) if stride == 1]


def _names(symbols: Iterable[Sym]) -> tuple[str, ...]:
    return tuple(s.name for s in symbols)


def unfit_for_tma(v: View, known: Collection[str]) -> str:
    """Why TMA cannot read the matrix ``v`` of shape [1, rows, columns] from an aligned buffer; "" if it can.
    ``known``: size symbols that are multiples of 16."""
    if all(s != 1 for s in v.strides[1:]):
        return "neither its rows nor its columns are contiguous"
    outer = v.strides[1] if v.strides[2] == 1 else v.strides[2]
    if outer == 0 or not all(_multiple(e * v.dtype.itemsize, known) for e in (outer, v.offset)):
        return "its stride or its offset is not a multiple of 16 bytes"
    return ""


def _multiple(e: Expr, known: Collection[str]) -> bool:
    """Is ``e`` (bytes) surely a multiple of 16?"""
    return all(c % 16 == 0 or any(isinstance(a, Sym) and a.name in known for a in atoms) for atoms, c in e.terms)


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
