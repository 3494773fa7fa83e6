"""Ops that move elements: cat, pad, slices written into, flips; reads, and a write per row, at positions in tensors."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from math import prod
from typing import Any

import torch

from reflib.ir.expr import Expr, ceildiv, expr, floordiv, maximum, minimum, mod, nonneg
from reflib.ir.instructions import LAUNCH
from reflib.ir.loops import LoopNest
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, element, nest, where
from .context import LoweringContext, unflatten
from .rules import Unsupported, rule

# Beyond this many, one compare per input and element costs more than a call of ATen's cat.
MAX_CAT_INPUTS = 16
MANY, LENGTHS = 64, 4  # ... unless a GPU's kernel is cut where they meet (``fuse.pieces``); different lengths of those
SECTOR, PIECE = 32, 16  # ... bytes: the least run of each of those, and of what it is a multiple
LONG_RUN, TOGETHER, AHEAD = 512, 32, 8  # bytes; parts; reads that are on their way at once
RUN = 64  # bytes: of shorter rows, a store of their own touches as much as a copy would


def axis(dim: int, n: int) -> int:
    return dim % n if n else 0


# -- moved by arithmetic on coordinates -------------------------------------------------------------------
@element("flip")
def flip(k: NestBuilder, x: View, dims: Sequence[int]) -> Value:
    flipped = {axis(d, len(x.shape)) for d in dims}
    return k.load(x, [x.shape[d] - 1 - c if d in flipped else c for d, c in enumerate(k.coords)])


@element("roll")
def roll(k: NestBuilder, x: View, shifts: Any, dims: Any = ()) -> Value:
    shifts = [shifts] if isinstance(shifts, (int, Expr)) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if any(s == 0 for s in x.shape):
        return k.load(x)
    if not dims:
        everything = range(len(x.shape))
        return k.load(x, unflatten(rolled(k.linear(everything), shifts[0], k.count(everything)), x.shape))
    coords = list(k.coords)
    for s, d in zip(shifts, dims):
        d = axis(d, len(x.shape))
        coords[d] = rolled(coords[d], s, x.shape[d])
    return k.load(x, coords)


def rolled(c: Expr, shift: Any, size: Expr) -> Expr:
    return mod(c + mod(-expr(shift), size), size)


@element("linalg_cross")
def cross(k: NestBuilder, x: View, y: View, *, dim: int = -1) -> Value:
    d = axis(dim, len(k.shape))

    def after(v: View, n: int) -> Value:
        coords = [mod(c + n, expr(3)) if i == d else c for i, c in enumerate(k.coords)]
        return k.load(v, coords[len(coords) - len(v.shape) :])

    return after(x, 1) * after(y, 2) - after(x, 2) * after(y, 1)


@element("repeat")
def repeat(k: NestBuilder, x: View, repeats: Any) -> Any:
    if any(s == 0 for s in k.shape):
        return 0
    return k.load(x, [mod(c, s) for c, s in zip(k.coords[len(k.coords) - len(x.shape) :], x.shape)])


# -- cat, pad, scatter of a slice: masked reads ---------------------------------------------------------------
@rule("cat")
def cat(cx: LoweringContext, tensors: Sequence[View], dim: int = 0) -> View:
    n = len(cx.shape)
    # an empty 1-d tensor may stand among tensors of any shape
    parts = [t for t in tensors if len(t.shape) == n and t.shape[axis(dim, n)] != 0]
    compute = value_dtype(check_dtype(cx.dtype))
    d = axis(dim, n)
    parts = _neighbours_as_one(parts, d)
    if len(parts) > MAX_CAT_INPUTS:
        if (runs := _runs(cx, parts, d)) is not None:
            return _stored_each(cx, parts, d, runs, compute)
        if not _cut(cx, parts, d):
            if not _given(cx, parts):
                raise Unsupported(f"{len(parts)} tensors")
            made = _in_windows(cx, parts, d, compute)
            return _stored_each(cx, parts, d, _alike(parts), compute) if made is None else made
    return nest(cx, lambda k: _joined(k, parts, d, compute))


def _neighbours_as_one(parts: Sequence[View], d: int) -> list[View]:
    """Parts of one tensor that lie there as they will here are one part: ``torch.cat(x.chunk(3, 1), 1)`` is ``x``."""
    out: list[View] = []
    for t in parts:
        as_one = _side_by_side(out[-1], t, d) if out else None
        out[-1:] = [*out[-1:], t] if as_one is None else [as_one]
    return out


def _side_by_side(a: View, b: View, d: int) -> View | None:
    """The part that begins with ``a``, and in which ``b`` follows along dimension ``d``."""
    if (a.buffer, a.dtype) != (b.buffer, b.dtype):
        return None
    sizes = zip(a.shape, a.strides, b.shape, b.strides)
    if any(i != d and (n != m or n != 1 and s != t) for i, (n, s, m, t) in enumerate(sizes)):
        return None
    steps = {v.strides[d] for v in (a, b) if v.shape[d] != 1} or {b.offset - a.offset}
    step = steps.pop()
    if steps or b.offset != a.offset + a.shape[d] * step or not nonneg(step):
        return None
    at = lambda values, new: (*values[:d], new, *values[d + 1 :])  # noqa: E731
    return replace(a, shape=at(a.shape, a.shape[d] + b.shape[d]), strides=at(a.strides, step))


def _cut(cx: LoweringContext, parts: Sequence[View], d: int) -> bool:
    """Will a kernel that joins many parts be cut where they meet, so that each is read as it is?"""
    row = cx.low.symbols.exprs(cx.fakes[0].stride())[d] * cx.dtype.itemsize
    lengths = {(t.shape[d] * row).constant or 0 for t in parts}
    few = len(parts) <= MANY and len(lengths) <= LENGTHS
    return cx.on_gpu and few and all(n >= SECTOR and n % PIECE == 0 for n in lengths)


def _given(cx: LoweringContext, parts: Sequence[View]) -> bool:
    """Are they inputs, whose copies a GPU can make at one time, by kernels that share launches? Of 48 parts of 16 to 31
    columns ATen's call takes 103 us on an H200, such a launch of TorchInductor's 61."""
    return cx.on_gpu and len(parts) <= MANY and all(cx.low.buffers[t.buffer].kind == "input" for t in parts)


def _alike(parts: Sequence[View], apart: Collection[str] = ()) -> list[list[int]]:
    """Numbers of those that follow each other with one shape, up to ``MAX_CAT_INPUTS``; ``apart`` are alone."""
    alike = groupby(range(len(parts)), lambda i: i if parts[i].buffer in apart else parts[i].shape)
    found = [list(same) for _, same in alike]
    return [same[n : n + MAX_CAT_INPUTS] for same in found for n in range(0, len(same), MAX_CAT_INPUTS)]


def _runs(cx: LoweringContext, parts: Sequence[View], d: int) -> list[list[int]] | None:
    """Parts, by number, that are stored in their places, fused with what computes them (embeddings of many columns,
    side by side): up to ``MAX_CAT_INPUTS`` that follow each other by one loop nest, if they have one shape and none is
    reduced. None where less is computed than copied, which one kernel or call does for all at once, of rows too short
    to be stored apart, or for more launches than the copy takes (those that small kernels may share are counted)."""
    row = prod(cx.shape[d + 1 :], start=expr(1)) * cx.dtype.itemsize
    loops = [node for node in cx.low.nodes if isinstance(node, LoopNest)]
    computed, reduced = ({b for n in found for b in n.writes()} for found in (loops, [n for n in loops if n.reduced]))
    sizes = [(t.shape[d].hint(), t.buffer in computed) for t in parts]
    if sum(n if own else -n for n, own in sizes) < 0 or min(sizes)[0] * row.hint() < RUN:
        return None
    runs = _alike(parts, reduced)
    small = 2 * (prod(cx.shape[:d], start=row) * cx.shape[d]).hint() < LAUNCH * (len(runs) - 2)
    return None if cx.on_gpu and small else runs


def _stored_each(
    cx: LoweringContext, parts: Sequence[View], d: int, runs: list[list[int]], compute: torch.dtype
) -> View:  # fmt: skip
    whole = cx.out()
    starts = [*accumulate((t.shape[d] for t in parts), initial=expr(0))]
    step, at = whole.strides[d], whole.offset
    places = [replace(whole, shape=t.shape, offset=at + start * step) for t, start in zip(parts, starts)]
    for numbers in runs:
        k = NestBuilder(cx, places[numbers[0]].shape)
        for i in numbers:
            k.store(places[i], k.load(parts[i]).to(compute))
        k.finish()
    return whole


def _in_windows(cx: LoweringContext, parts: Sequence[View], d: int, compute: torch.dtype) -> View | None:
    """Many short runs side by side. A program copies the same few rows of up to ``TOGETHER`` parts, so that the lines
    of the result, of which each run is a piece, are whole before they leave the cache. Parts of 16 to 31 columns are
    two windows of 16 each, which overlap: there are no conditions. None where runs are long. (Of 17 parts of 60,000
    rows ATen's copy, an element at a time, took 137 us on an H200, TorchInductor's, each part by itself, 82; their
    bytes take 22.)"""
    row = (prod(cx.shape[d + 1 :], start=expr(1)) * cx.dtype.itemsize).hint()
    lengths = [t.shape[d].constant or 0 for t in parts]
    if not all(0 < n * row <= LONG_RUN for n in lengths):
        return None
    whole = cx.out()
    starts, windows = [*accumulate(lengths, initial=0)], dict[int, list[int]]()
    for i, n in enumerate(lengths):
        windows.setdefault(1 << n.bit_length() - 1, []).append(i)
    for size, same in windows.items():
        pieces = [(i, at) for i in same for at in dict.fromkeys((0, lengths[i] - size))]
        for n in range(0, len(pieces), 2 * TOGETHER):
            k = NestBuilder(cx, (*cx.shape[:d], expr(size), *cx.shape[d + 1 :]))
            coords = [[*k.coords[:d], k.coords[d] + at, *k.coords[d + 1 :]] for _, at in pieces]
            for m in range(n, min(len(pieces), n + 2 * TOGETHER), AHEAD):
                some = range(m, min(len(pieces), n + 2 * TOGETHER, m + AHEAD))
                values = [k.load(parts[pieces[j][0]], coords[j]).to(compute) for j in some]  # read before any is stored
                for j, value in zip(some, values):
                    i = pieces[j][0]
                    place = replace(whole, shape=parts[i].shape, offset=whole.offset + whole.strides[d] * starts[i])
                    k.store(place, value, coords[j])
            k.finish()
    return whole


def _joined(k: NestBuilder, parts: Sequence[View], d: int, compute: torch.dtype) -> Any:
    """The element of the part that dimension ``d`` is in."""
    if len(parts) < 2:
        return k.load(parts[0]).to(compute) if parts else 0
    at = k.index(k.coords[d])
    start, chosen = expr(0), []
    for n, t in enumerate(parts, 1):  # (one tensor may stand in several places)
        end = start + t.shape[d]
        inside = None if start == 0 else at >= start
        if n < len(parts):
            inside = both(inside, at < end)
        coords = [c - start if i == d else c for i, c in enumerate(k.coords)]
        chosen.append((at < end, k.load(t, coords, inside).to(compute)))
        start = end
    value = chosen[-1][1]
    for before_end, v in reversed(chosen[:-1]):
        value = where(before_end, v, value)
    return value


@element("constant_pad_nd")
def constant_pad_nd(k: NestBuilder, x: View, pad: Sequence[Any], value: Any = 0) -> Value:
    coords, mask = list(k.coords), None
    for i in range(len(pad) // 2):
        d = len(x.shape) - 1 - i
        before, after = expr(pad[2 * i]), expr(pad[2 * i + 1])
        coords[d] = coords[d] - before
        if not _never_positive(before):
            mask = both(mask, k.index(coords[d]) >= 0)
        if not _never_positive(after):
            mask = both(mask, k.index(coords[d]) < x.shape[d])
    if mask is None or not isinstance(value, Expr):
        return k.load(x, coords, mask, value)
    return where(mask, k.load(x, coords, mask), value)


def both(a: Value | None, b: Value | None) -> Value | None:
    return b if a is None else a if b is None else a & b


def _never_positive(e: Expr) -> bool:
    return e.constant is not None and e.constant <= 0


@element("slice_scatter")
def slice_scatter(
    k: NestBuilder, x: View, src: View, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> Value:
    d = axis(dim, len(x.shape))
    size = x.shape[d]
    lo = _clip(expr(0) if start is None else expr(start), size)
    hi = _clip(size if end is None else expr(end), size)
    inside: Value | None = None
    if lo != 0:
        inside = both(inside, k.index(k.coords[d]) >= lo)
    if hi != size:
        inside = both(inside, k.index(k.coords[d]) < hi)
    away = k.coords[d] - lo
    if expr(step) != 1:
        inside = both(inside, k.index(mod(away, expr(step))).eq(0))
    coords = [floordiv(away, expr(step)) if i == d else c for i, c in enumerate(k.coords)]
    _check_sizes(src, [ceildiv(hi - lo, step) if i == d else n for i, n in enumerate(x.shape)])
    return _written(k, x, src, inside, coords)


def _check_sizes(src: View, sizes: Sequence[Expr]) -> None:
    """Eager refuses other sizes, which torch's meta functions accept: a branch that is not taken may have them."""
    if len(src.shape) != len(sizes) or any((n - m).constant not in (None, 0) for n, m in zip(src.shape, sizes)):
        raise Unsupported("sizes that eager refuses")


def _written(k: NestBuilder, x: View, src: View, inside: Value | None, coords: Sequence[Expr]) -> Value:
    """``src`` at ``coords`` where ``inside``, else ``x``."""
    new = k.load(src, coords, inside).to(value_dtype(check_dtype(k.cx.dtype)))
    return new if inside is None else where(inside, new, k.load(x))


def _clip(bound: Expr, size: Expr) -> Expr:
    """A slice bound as Python reads it: negative counts from the end, then clipped to the size."""
    c = bound.constant
    if c is not None and c >= 2**62:  # how an open end is written
        return size
    if c is not None and c < 0:
        bound = maximum(bound + size, 0)
    elif c is None and not nonneg(bound):
        raise Unsupported(f"a slice at {bound}, of unknown sign")
    return minimum(bound, size)


@element("select_scatter")
def select_scatter(k: NestBuilder, x: View, src: View, dim: int, index: Any) -> Value:
    d = axis(dim, len(x.shape))
    index = expr(index)
    if index.constant is None and not nonneg(index):
        raise Unsupported(f"a position {index}, of unknown sign")
    if index.constant is not None and index.constant < 0:
        index = index + x.shape[d]
    here = k.index(k.coords[d]).eq(index)
    _check_sizes(src, [n for i, n in enumerate(x.shape) if i != d])
    return _written(k, x, src, here, [c for i, c in enumerate(k.coords) if i != d])


@element("diagonal_scatter")
def diagonal_scatter(k: NestBuilder, x: View, src: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    a, b = axis(dim1, len(x.shape)), axis(dim2, len(x.shape))
    row, col = k.coords[a], k.coords[b]
    here = (k.index(col) - k.index(row)).eq(offset)
    rest = [c for i, c in enumerate(k.coords) if i not in (a, b)]
    length = minimum(x.shape[a] + min(offset, 0), x.shape[b] - max(offset, 0))
    _check_sizes(src, [*(n for i, n in enumerate(x.shape) if i not in (a, b)), maximum(length, 0)])
    return _written(k, x, src, here, [*rest, row if offset >= 0 else col])


# -- reads at positions held in tensors -----------------------------------------------------------------------
@element("index_select")
def index_select(k: NestBuilder, x: View, dim: int, index: View) -> Value:
    return _at_position(k, x, dim, index, [k.coords[axis(dim, len(x.shape))]] if x.shape and index.shape else [])


def _at_position(k: NestBuilder, x: View, dim: int, index: View, at: Sequence[Expr]) -> Value:
    """``x`` at this point, but at the position ``index[at]`` of dimension ``dim``."""
    if not x.shape:
        return k.load(x, [])
    coords = list(k.coords) or [expr(0)] * len(x.shape)  # a 0-d index gives a 0-d result
    d = axis(dim, len(x.shape))
    coords[d] = k.indirect(k.load(index, at), x.shape[d])
    return k.load(x, coords)


element("gather")(lambda k, x, dim, index, sparse_grad=False: _at_position(k, x, dim, index, k.coords))


@element("embedding")
def embedding(k: NestBuilder, weight: View, indices: View, *_: Any, **__: Any) -> Value:
    row = k.indirect(k.load(indices, k.coords[:-1]), weight.shape[0])
    return k.load(weight, [row, k.coords[-1]])


@rule("index.Tensor", "_unsafe_index.Tensor")
def index(cx: LoweringContext, x: View, indices: Sequence[View | None]) -> View:
    if any(i is not None and i.dtype not in (torch.int32, torch.int64) for i in indices):
        raise Unsupported("an index that is a mask")
    return nest(cx, lambda k: _indexed(k, x, indices))


def _indexed(k: NestBuilder, x: View, indices: Sequence[View | None]) -> Value:
    return k.load(x, named(k, x, indices, *stand(indices)))


def stand(indices: Sequence[View | None]) -> tuple[int, int]:
    """Where the indices' own dimensions stand in a result: the first one, and how many."""
    used = [d for d, i in enumerate(indices) if i is not None]
    adjacent = used == list(range(used[0], used[-1] + 1))
    return used[0] if adjacent else 0, max(len(i.shape) for i in indices if i is not None)


def named(k: NestBuilder, x: View, indices: Sequence[View | None], first: int, rank: int) -> list[Expr]:
    """The position in ``x`` that the indices name at this point."""
    own = k.coords[first : first + rank]
    others = iter(k.coords[:first] + k.coords[first + rank :])
    at = [*indices, *[None] * (len(x.shape) - len(indices))]
    return [next(others) if i is None else k.indirect(k.load(i, own), n, True) for i, n in zip(at, x.shape)]


# -- few positions per row written: a comparison with each, not a scatter -------------------------------------------
def per_row(x: View, dim: int, index: View) -> int:
    """How many elements of each row along ``dim`` ``index`` names; 0: not as many in each."""
    d = axis(dim, len(x.shape))
    if not x.shape or [*index.shape[:d], *index.shape[d + 1 :]] != [*x.shape[:d], *x.shape[d + 1 :]]:
        return 0
    return index.shape[d].constant or 0


def one_per_row(x: View, dim: int, index: View) -> bool:
    return per_row(x, dim, index) == 1


def here_and_at(k: NestBuilder, x: View, dim: int, index: View, which: int = 0) -> tuple[Value, list[Expr]]:
    """Is this the element of its row, along ``dim``, that ``index`` names? And where its new value stands. (Of some
    per row, ``which``.)"""
    d = axis(dim, len(x.shape))
    at = [expr(which) if i == d else c for i, c in enumerate(k.coords)]
    return k.index(k.indirect(k.load(index, at), x.shape[d])).eq(k.index(k.coords[d])), at
