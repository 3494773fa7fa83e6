"""``index_put(accumulate=True)`` at positions that are known: the backward of interpolation, as a gather.

torch takes ``interpolate`` apart into reads at computed positions (``x[:, :, rows, columns]``) before it
differentiates, so its backward adds each gradient at such a position. ATen sorts the positions for that. But they are
arithmetic on ``arange`` alone, so they can be computed here (``capture/constants`` sees to it that the backward graph
has them): each input is read by a few neighbouring outputs, and its gradient is the sum over these, a window as in
pooling. The windows only have to be wide enough: whether an output did read this input is asked of the positions
themselves, in the kernel.

On a GPU that is done only where each value is read once (nearest, by 2 or 4); otherwise, and where positions are not
known, the values are added atomically (``accumulate``). Without atomics, sizes that are not known, and windows of more
than UNROLLED, are left to ATen.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from reflib.capture.constants import computed, for_real, from_nothing
from reflib.ir.expr import Expr, expr
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .accumulate import accumulate as add
from .accumulate import possible, put
from .body import NestBuilder, Value, check_dtype, nest, where
from .context import LoweringContext
from .pooling import UNROLLED, Side, Window
from .rules import Unsupported, rule
from .scatter import scatter

Sides = list[tuple[int, int, Expr, int]]


@rule("index_put.default", "_unsafe_index_put.default")
def index_put(
    cx: LoweringContext, x: View, indices: Sequence[View | None], values: View, accumulate: bool = False
) -> View:
    if not accumulate:
        return _masked(cx, x, indices, values) or put(cx, x, indices, values, scatter)
    atomic = possible(cx, cx.dtype)
    try:
        along, sides = _sides(cx, x, indices, values)
    except Unsupported:
        if not atomic:
            raise
        along, sides = [], []
    if atomic and not _read_once(sides):
        return put(cx, x, indices, values, add)
    return _gathered(cx, x, indices, values, along, sides)


def _masked(cx: LoweringContext, x: View, indices: Sequence[View | None], values: View) -> View | None:
    """``x[mask] = v``, one value (per element that the mask does not choose) for all that it does: a select."""
    masks = [(d, i) for d, i in enumerate(indices) if i is not None]
    if len(masks) != 1 or masks[0][1].dtype != torch.bool or not masks[0][1].shape:
        return None
    first, mask = masks[0]
    after = first + len(mask.shape)
    rest = [*x.shape[:first], expr(1), *x.shape[after:]]  # of values: the mask's dimensions are one
    wide = [expr(1)] * (len(rest) - len(values.shape)) + list(values.shape)
    if list(mask.shape) != list(x.shape[first:after]) or len(wide) != len(rest) or wide[first] != 1:
        return None

    def value(k: NestBuilder) -> Value:
        at = [*k.coords[:first], expr(0), *k.coords[after:]][len(rest) - len(values.shape) :]
        here = [expr(0) if n == 1 else c for n, c in zip(values.shape, at)]
        old = k.load(x)
        return where(k.load(mask, k.coords[first:after]), k.load(values, here).to(old.dtype), old)

    return nest(cx, value)


def _read_once(sides: Sides) -> bool:
    """Are no more elements in the windows than there are values or results? (Nearest by 2 on an H200, 27 million
    values: 56 us, and 115 us with atomic additions. Bilinear by 4, whose windows overlap: ten times as long.)"""
    if not sides:
        return False
    reads, values, results = (math.prod(sizes) for sizes in zip(*((int(c) * s, n, s) for n, s, c, _ in sides)))
    return reads <= max(values, results)


def _sides(
    cx: LoweringContext, x: View, indices: Sequence[View | None], values: View
) -> tuple[list[int], Sides]:
    """What ``_dimensions`` and ``_windows`` say of the positions; Unsupported if they are not known or of another
    kind."""
    lead = sum(i is None for i in indices)
    tables = [_known(n) for n in cx.node.args[1][lead:]]  # type: ignore
    if not tables or any(t is None for t in tables) or len(indices) != len(x.shape) or None in indices[lead:]:
        raise Unsupported("library call")
    along = _dimensions(tables)
    with for_real():
        sides = _windows([t for t in tables if t is not None], x.shape[lead:])
    if list(values.shape) != [*x.shape[:lead], *(expr(sides[d][0]) for d in along)]:
        raise Unsupported("library call")  # values that are broadcast
    return along, sides


def _gathered(
    cx: LoweringContext, x: View, indices: Sequence[View | None], values: View, along: list[int], sides: Sides
) -> View:
    """One loop nest over ``x``."""
    lead = len(x.shape) - len(sides)
    out, compute = cx.out(), value_dtype(check_dtype(values.dtype))
    w = Window(cx, out, [s[2] for s in sides])
    k = w.k
    places = [Side(c * s[0] // s[1] - s[3], s[2], expr(s[0])) for c, s in zip(w.spatial, sides)]

    def term(at: list[Expr], mask: Value | None) -> Value:
        hit = mask
        for d, (index, o) in enumerate(zip(indices[lead:], at)):
            assert index is not None
            here = [o if size != 1 else expr(0) for size in index.shape]
            found = k.load(index, here, mask, -1).to(torch.int64).eq(k.index(w.spatial[d]))
            hit = found if hit is None else hit & found
        assert hit is not None
        return where(hit, k.load(values, [*w.lead, *(at[d] for d in along)], hit).to(compute), 0)

    return w.finish(out, k.load(x).to(compute) + w.sum(term(at, m) for at, m in w.elements(places)))


def _dimensions(tables: Sequence[torch.Tensor | None]) -> list[int]:
    """For each dimension of the tables' common shape, which table varies along it: each along one of its own."""
    rank = max(t.dim() for t in tables if t is not None)
    found = {}
    for d, t in enumerate(tables):
        assert t is not None
        wide = [j - t.dim() + rank for j, n in enumerate(t.shape) if n != 1]
        if len(wide) != 1 or wide[0] in found:
            raise Unsupported("library call")
        found[wide[0]] = d
    if sorted(found) != list(range(rank)):
        raise Unsupported("library call")
    return [found[j] for j in range(rank)]


def _windows(tables: Sequence[torch.Tensor], sizes: Sequence[Expr]) -> Sides:
    """For each dimension (n, size, count, back): the outputs that read input i are among ``count`` of the n, from
    ``i * n // size - back`` on."""
    out = []
    for table, length in zip(tables, sizes):
        if length.constant is None or not table.numel():
            raise Unsupported("library call")
        size, read = int(length), table.flatten()
        n = len(read)
        if bool((read < 0).any()) or bool((read >= size).any()):
            raise Unsupported("library call")
        distance = torch.arange(n) - read * n // size  # of an output from where its input's window begins
        ratio = max(n, size) // min(n, size)
        exact = n * size == min(n, size) ** 2 * ratio and ratio & (ratio - 1) == 0
        slack = 0 if exact else 1  # rounded once, by a multiply-add, the first or last reader may read the input beside
        low, high = int(distance.min()), int(distance.max())
        out.append((n, size, expr(high - low + 1 + 2 * slack), slack - low))
    total = 1
    for _, _, count, _ in out:
        total *= int(count)
    if total > UNROLLED:
        raise Unsupported("library call")
    return out


def _known(node: Any) -> torch.Tensor | None:
    """The value of a node that depends on no input, computed on the CPU; None if it does or is not easily found."""
    nodes = from_nothing(node)
    if nodes is None or not all(isinstance(s, int) for n in nodes for s in n.meta["val"].shape):
        return None
    found = computed(nodes, device=torch.device("cpu"))
    return found if found.dtype in (torch.int32, torch.int64) else None
