"""Ops that move elements: cat, pad, slices written into, flips, and reads at positions held in tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from reflib.ir.expr import Expr, expr, floordiv, maximum, minimum, mod, nonneg
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import Kernel, Value, check_dtype, where
from .context import Context, contiguous_strides
from .rules import Unsupported, rule

# Beyond this many, one compare per input and element costs more than a call of ATen's cat.
MAX_CAT_INPUTS = 16


def mapped(cx: Context, x: View, coords: Any) -> View:
    """One Loops: the output's point p is ``x`` at ``coords(kernel)``."""
    out = cx.out()
    k = Kernel(cx, out.shape)
    k.store(out, k.load(x, coords(k)))
    k.finish()
    return out


def axis(dim: int, n: int) -> int:
    return dim % n if n else 0


# -- moved by arithmetic on coordinates -------------------------------------------------------------------
@rule("flip")
def flip(cx: Context, x: View, dims: Sequence[int]) -> View:
    flipped = {axis(d, len(x.shape)) for d in dims}
    return mapped(cx, x, lambda k: [x.shape[d] - 1 - c if d in flipped else c for d, c in enumerate(k.coords)])


@rule("roll")
def roll(cx: Context, x: View, shifts: Any, dims: Any = ()) -> View:
    shifts = [shifts] if isinstance(shifts, (int, Expr)) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if any(s == 0 for s in x.shape):
        return mapped(cx, x, lambda k: k.coords)
    if not dims:
        return mapped(
            cx,
            x,
            lambda k: unflatten(
                rolled(k.linear(range(len(x.shape))), shifts[0], k.count(range(len(x.shape)))), x.shape
            ),
        )

    def coords(k: Kernel) -> list[Expr]:
        out = list(k.coords)
        for s, d in zip(shifts, dims):
            d = axis(d, len(x.shape))
            out[d] = rolled(out[d], s, x.shape[d])
        return out

    return mapped(cx, x, coords)


def rolled(c: Expr, shift: Any, size: Expr) -> Expr:
    return mod(c + mod(-expr(shift), size), size)


def unflatten(position: Expr, shape: Sequence[Expr]) -> list[Expr]:
    """Coordinates of a row-major position."""
    out = []
    for size, stride in zip(shape, contiguous_strides(shape)):
        out.append(mod(position // stride, size))
    return out


@rule("repeat")
def repeat(cx: Context, x: View, repeats: Any) -> View:
    n = len(x.shape)
    if any(s == 0 for s in cx.shape):
        return mapped_empty(cx)
    return mapped(cx, x, lambda k: [mod(c, s) for c, s in zip(k.coords[len(k.coords) - n :], x.shape)])


def mapped_empty(cx: Context) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    k.store(out, 0)
    k.finish()
    return out


# -- cat, pad, scatter of a slice: masked reads ---------------------------------------------------------------
@rule("cat")
def cat(cx: Context, tensors: Sequence[View], dim: int = 0) -> View:
    out = cx.out()
    n = len(out.shape)
    # an empty 1-d tensor may stand among tensors of any shape
    parts = [t for t in tensors if len(t.shape) == n and t.shape[axis(dim, n)] != 0]
    if len(parts) > MAX_CAT_INPUTS:
        raise Unsupported(f"{len(parts)} tensors")
    if not parts:
        del cx.low.buffers[out.buffer]
        return mapped_empty(cx)
    d = axis(dim, n)
    compute = value_dtype(check_dtype(out.dtype))
    k = Kernel(cx, out.shape)
    at = k.index(k.coords[d])
    start, chosen = expr(0), []
    for t in parts:
        end = start + t.shape[d]
        inside = (
            None
            if len(parts) == 1
            else at < end
            if start == 0
            else at >= start
            if t is parts[-1]
            else (at >= start) & (at < end)
        )
        coords = [c - start if i == d else c for i, c in enumerate(k.coords)]
        chosen.append((at < end, k.load(t, coords, inside).to(compute)))
        start = end
    value = chosen[-1][1]
    for before_end, v in reversed(chosen[:-1]):
        value = where(before_end, v, value)
    k.store(out, value)
    k.finish()
    return out


@rule("constant_pad_nd")
def constant_pad_nd(cx: Context, x: View, pad: Sequence[Any], value: Any = 0) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    n = len(x.shape)
    coords, mask = list(k.coords), None
    for i in range(len(pad) // 2):
        d = n - 1 - i
        before, after = expr(pad[2 * i]), expr(pad[2 * i + 1])
        coords[d] = coords[d] - before
        if not _never_positive(before):
            mask = both(mask, k.index(coords[d]) >= 0)
        if not _never_positive(after):
            mask = both(mask, k.index(coords[d]) < x.shape[d])
    k.store(out, masked(k, x, coords, mask, value))
    k.finish()
    return out


def masked(k: Kernel, x: View, coords: Any, mask: Value | None, other: Any) -> Value:
    """``x`` where ``mask``, else the number ``other``."""
    if mask is None:
        return k.load(x, coords)
    if not isinstance(other, Expr):
        return k.load(x, coords, mask, other)
    return where(mask, k.load(x, coords, mask), other)


def both(a: Value | None, b: Value) -> Value:
    return b if a is None else a & b


def _never_positive(e: Expr) -> bool:
    return e.constant is not None and e.constant <= 0


@rule("slice_scatter")
def slice_scatter(
    cx: Context, x: View, src: View, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    d = axis(dim, len(x.shape))
    size = x.shape[d]
    lo = _clip(expr(0) if start is None else expr(start), size)
    hi = _clip(size if end is None else expr(end), size)
    at = k.index(k.coords[d])
    inside: Value | None = None
    if lo != 0:
        inside = both(inside, at >= lo)
    if hi != size:
        inside = both(inside, at < hi)
    away = k.coords[d] - lo
    if expr(step) != 1:
        inside = both(inside, k.index(mod(away, expr(step))).eq(0))
    coords = [floordiv(away, expr(step)) if i == d else c for i, c in enumerate(k.coords)]
    new = k.load(src, coords, inside).to(value_dtype(check_dtype(out.dtype)))
    k.store(out, new if inside is None else where(inside, new, k.load(x)))
    k.finish()
    return out


def _clip(bound: Expr, size: Expr) -> Expr:
    """A slice bound as Python reads it: negative counts from the end, then clipped to the size."""
    c = bound.constant
    if c is not None and c < 0:
        bound = maximum(bound + size, 0)
    elif c is None and not _known_nonneg(bound):
        raise Unsupported(f"a slice at {bound}, of unknown sign")
    return minimum(bound, size)


def _known_nonneg(e: Expr) -> bool:
    return nonneg(e)


@rule("select_scatter")
def select_scatter(cx: Context, x: View, src: View, dim: int, index: Any) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    d = axis(dim, len(x.shape))
    index = expr(index)
    if index.constant is None and not _known_nonneg(index):
        raise Unsupported(f"a position {index}, of unknown sign")
    if index.constant is not None and index.constant < 0:
        index = index + x.shape[d]
    here = k.index(k.coords[d]).eq(index)
    coords = [c for i, c in enumerate(k.coords) if i != d]
    k.store(out, where(here, k.load(src, coords, here).to(value_dtype(check_dtype(out.dtype))), k.load(x)))
    k.finish()
    return out


@rule("diagonal_scatter")
def diagonal_scatter(cx: Context, x: View, src: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    a, b = axis(dim1, len(x.shape)), axis(dim2, len(x.shape))
    row, col = k.coords[a], k.coords[b]
    here = (k.index(col) - k.index(row)).eq(offset)
    rest = [c for i, c in enumerate(k.coords) if i not in (a, b)]
    coords = [*rest, row if offset >= 0 else col]
    k.store(out, where(here, k.load(src, coords, here).to(value_dtype(check_dtype(out.dtype))), k.load(x)))
    k.finish()
    return out


# -- reads at positions held in tensors -----------------------------------------------------------------------
@rule("gather")
def gather(cx: Context, x: View, dim: int, index: View, sparse_grad: bool = False) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    if not x.shape:
        k.store(out, k.load(x, []))
    else:
        d = axis(dim, len(x.shape))
        coords = list(k.coords)
        coords = coords or [expr(0)] * len(x.shape)
        coords[d] = k.indirect(k.load(index), x.shape[d])
        k.store(out, k.load(x, coords))
    k.finish()
    return out


@rule("index_select")
def index_select(cx: Context, x: View, dim: int, index: View) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    if not x.shape:
        k.store(out, k.load(x, []))
    else:
        d = axis(dim, len(x.shape))
        coords = list(k.coords)
        at = [coords[d]] if index.shape else []
        coords[d] = k.indirect(k.load(index, at), x.shape[d])
        k.store(out, k.load(x, coords))
    k.finish()
    return out


@rule("embedding")
def embedding(cx: Context, weight: View, indices: View, *_: Any, **__: Any) -> View:
    out = cx.out()
    k = Kernel(cx, out.shape)
    row = k.indirect(k.load(indices, k.coords[:-1]), weight.shape[0])
    k.store(out, k.load(weight, [row, k.coords[-1]]))
    k.finish()
    return out


@rule("index.Tensor", "_unsafe_index.Tensor")
def index(cx: Context, x: View, indices: Sequence[View | None]) -> View:
    out = cx.out()
    used = [d for d, i in enumerate(indices) if i is not None]
    if any(indices[d].dtype not in (torch.int32, torch.int64) for d in used):  # type: ignore[union-attr]
        raise Unsupported("an index that is a mask")
    k = Kernel(cx, out.shape)
    rank = max(len(indices[d].shape) for d in used)  # type: ignore[union-attr]
    adjacent = used == list(range(used[0], used[-1] + 1))
    first = used[0] if adjacent else 0  # where the indices' own dimensions stand in the result
    own = k.coords[first : first + rank]
    others = iter(k.coords[:first] + k.coords[first + rank :])
    coords = []
    for d in range(len(x.shape)):
        i = indices[d] if d < len(indices) else None
        if i is None:
            coords.append(next(others))
        else:
            coords.append(k.indirect(k.load(i, own), x.shape[d]))
    k.store(out, k.load(x, coords))
    k.finish()
    return out
