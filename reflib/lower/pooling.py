"""Pooling: each result is a sum or a maximum over a window of the input.

A window of at most UNROLLED elements is that many loads in one pointwise loop nest, so that its neighbours fuse with
it; a larger one (global pooling) is a reduction over r axes. Both are written once: ``Window`` gives a rule the points
of its window, as numbers or as loop variables.

Backward passes gather: an input's gradient is a sum over the windows that contain it, found by the same arithmetic.
So there are no atomics, and results are the same on every run (eager's CUDA kernels add atomically where windows
overlap).

NB: TorchInductor takes large windows and overlapping backward windows to ATen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from reflib.ir.expr import ONE, ZERO, Expr, IntLike, ceildiv, divide_exact, expr, maximum, minimum, mod, nonneg, product
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, where
from .context import LoweringContext
from .indexing import both
from .rules import Unsupported, rule

UNROLLED = 49  # 7 x 7


@dataclass(frozen=True)
class Side:
    """A window along one dimension: ``start + step * j`` for j < ``count``, of which those below 0 and those that are
    not below ``end`` are left out. ``within``: it is known that those with j < ``within`` are below ``end``, though the
    sizes alone may not prove it."""

    start: Expr
    count: Expr
    end: Expr
    step: Expr = ONE
    within: int = 0

    def at(self, j: IntLike) -> Expr:
        return self.start + self.step * expr(j)

    def mask(self, k: NestBuilder, j: IntLike) -> Value | None:
        """Is element ``j`` inside? None: always."""
        at, mask = self.at(j), None
        if not nonneg(at):
            mask = k.index(at) >= 0
        surely = isinstance(j, int) and j < self.within
        if not surely and not nonneg(self.end - 1 - at):
            mask = both(mask, k.index(at) < self.end)
        return mask

    def first(self) -> Expr:
        """The first element that is inside."""
        if nonneg(self.start):
            return self.start
        return self.start + self.step * maximum(ceildiv(ZERO - self.start, self.step), 0)


class Window:
    """A loop nest over the points of ``out`` whose value is computed from a window: ``sides`` makes it from the
    coordinates of the last dimensions. Of more than ``most`` elements it is a reduction."""

    def __init__(self, cx: LoweringContext, out: View, counts: Sequence[Expr], most: int = UNROLLED):
        total = product(counts).constant
        self.out, self.rank, self.counts = out, len(out.shape), counts
        self.unrolled = total is not None and total <= most
        shape = out.shape if self.unrolled else (*out.shape, *counts)
        self.k = NestBuilder(cx, shape, range(self.rank, len(shape)))
        self.coords = self.k.coords[: self.rank]
        self.lead = self.coords[: self.rank - len(counts)]
        self.spatial = self.coords[self.rank - len(counts) :]

    def points(self) -> Iterator[Sequence[IntLike]]:
        if not self.unrolled:
            return iter([self.k.coords[self.rank :]])
        return itertools.product(*(range(int(c)) for c in self.counts))

    def elements(self, sides: Sequence[Side]) -> Iterator[tuple[list[Expr], Value | None]]:
        """The positions of the window's elements and their masks: all, or the one of the r axes."""
        for point in self.points():
            mask: Value | None = None
            for side, j in zip(sides, point):
                inside = side.mask(self.k, j)
                mask = both(mask, inside)
            yield [side.at(j) for side, j in zip(sides, point)], mask

    def sum(self, terms: Iterator[Value]) -> Value:
        if not self.unrolled:
            return self.k.reduce("sum", next(terms))
        total = next(terms)
        for t in terms:
            total = total + t
        return total

    def finish(self, out: View, value: Any) -> View:
        """``out``, to which ``value`` is stored last."""
        self.k.store(out, value, self.coords)
        self.k.finish()
        return out


def spread(value: Any, dims: int) -> list[Expr]:
    """A parameter of a pooling op (a number, or one for all or each of the dimensions), for each dimension."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return [expr(v) for v in (values * dims if len(values) == 1 else values)]


@dataclass(frozen=True)
class Geometry:
    """Kernel, stride, padding, dilation per dimension; ``ceil``: the last window may begin inside and end outside."""

    kernel: list[Expr]
    stride: list[Expr]
    padding: list[Expr]
    dilation: list[Expr]
    ceil: bool

    @staticmethod
    def of(dims: int, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Geometry:
        stride = kernel if stride is None or (isinstance(stride, (list, tuple)) and not stride) else stride
        each = [spread(v, dims) for v in (kernel, stride, padding, dilation)]
        return Geometry(each[0], each[1], each[2], each[3], bool(ceil))

    def side(self, d: int, o: Expr, size: Expr) -> Side:
        """The window of output ``o``."""
        k, p, step = self.kernel[d], self.padding[d], self.dilation[d]
        start = o * self.stride[d] - p
        within = 0
        known = None not in (k.constant, p.constant, step.constant)
        if not self.ceil and known:  # the last window ends with the padding
            within = sum((int(k) - 1 - j) * int(step) >= int(p) for j in range(int(k)))
        return Side(start, k, size, step, within)

    def windows(self, d: int, i: Expr, size: Expr) -> Side:
        """The windows (positions in a result of ``size``) that contain input ``i``, the last first."""
        s, at = self.stride[d], i + self.padding[d]
        extent = (self.kernel[d] - 1) * self.dilation[d] + 1
        return Side(at // s, ceildiv(extent, s), size, -ONE)


def _sizes(x: View, dims: int) -> tuple[Expr, ...]:
    return x.shape[len(x.shape) - dims :]


# -- average ----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Divisor:
    """What a window's sum is divided by."""

    geometry: Geometry
    sizes: Sequence[Expr]
    with_padding: bool
    override: Any

    def at(self, point: Sequence[Expr]) -> Expr:
        """For the window at ``point`` of the result; at least 1."""
        if self.override is not None:
            return expr(self.override)
        g, out = self.geometry, ONE
        for d, (o, size) in enumerate(zip(point, self.sizes)):
            start, end = o * g.stride[d] - g.padding[d], size + g.padding[d]
            whole = start + g.kernel[d]
            end = minimum(whole, end) if g.ceil else whole
            length = end - start if self.with_padding else minimum(end, size) - maximum(start, 0)
            out = out * (length if nonneg(length - 1) else maximum(length, 1))
        return out


def divided(total: Value, divisor: Expr) -> Value:
    return total / divisor if total.dtype.is_floating_point else total.op("truncdiv", divisor)


@rule("avg_pool2d", "avg_pool3d")
def avg_pool(
    cx: LoweringContext, x: View, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: Any = None,
) -> View:  # fmt: skip
    dims, out = _dims(cx), cx.out()
    g = Geometry.of(dims, kernel_size, stride, padding, 1, ceil_mode)
    compute, sizes = value_dtype(check_dtype(x.dtype)), _sizes(x, dims)
    w = Window(cx, out, g.kernel)
    sides = [g.side(d, w.spatial[d], sizes[d]) for d in range(dims)]
    total = w.sum(w.k.load(x, [*w.lead, *at], m).to(compute) for at, m in w.elements(sides))
    return w.finish(out, divided(total, Divisor(g, sizes, count_include_pad, divisor_override).at(w.spatial)))


def _dims(cx: LoweringContext) -> int:
    """How many dimensions the op pools: by its name."""
    return int(str(cx.node.target).partition("pool")[2][0])


@rule("avg_pool2d_backward", "avg_pool3d_backward")
def avg_pool_backward(
    cx: LoweringContext, grad: View, x: View, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: Any,
) -> View:  # fmt: skip
    dims, out = _dims(cx), cx.out()
    g = Geometry.of(dims, kernel_size, stride, padding, 1, ceil_mode)
    divisor = Divisor(g, _sizes(x, dims), count_include_pad, divisor_override)
    w = Window(cx, out, [ceildiv(k, s) for k, s in zip(g.kernel, g.stride)])
    sides = [g.windows(d, w.spatial[d], size) for d, size in enumerate(_sizes(grad, dims))]
    constant = divisor.at(w.spatial).constant

    def term(point: Sequence[IntLike], at: list[Expr], mask: Value | None) -> Value:
        for i, j, size, s, p in zip(w.spatial, point, g.kernel, g.stride, g.padding):
            distance = mod(i + p, s) + s * expr(j)  # from the window's start to i: it may end before i
            if not nonneg(size - 1 - distance):
                mask = both(mask, w.k.index(distance) < size)
        value = w.k.load(grad, [*w.lead, *at], mask)
        return value if constant is not None else divided(value, divisor.at(at))

    total = w.sum(term(point, *e) for point, e in zip(w.points(), w.elements(sides)))
    return w.finish(out, total if constant is None else divided(total, expr(constant)))


# -- maximum ----------------------------------------------------------------------------------------------
def lowest(dtype: torch.dtype) -> float | int:
    return float("-inf") if dtype.is_floating_point else torch.iinfo(dtype).min


def largest(cx: LoweringContext, x: View, counts: Sequence[Expr], side: Callable[[int, Expr], Side]) -> list[Any]:
    """[values, indices]: the largest element of each window, and where it is in the window's dimensions, counted row by
    row. As in eager: NaN is larger than all, the first of equals counts, and the last of several NaN."""
    dims, values, indices = len(counts), cx.out(0), cx.out(1)
    dtype = value_dtype(check_dtype(x.dtype))
    if dtype == torch.bool:
        raise Unsupported("a maximum of bool")
    w = Window(cx, values, counts)
    sides = [side(d, w.spatial[d]) for d in range(dims)]

    def place(at: Sequence[Expr]) -> Value:
        out = ZERO
        for size, c in zip(_sizes(x, dims), at):
            out = out * size + c
        return w.k.index(out)

    found = [(w.k.load(x, [*w.lead, *at], m, lowest(dtype)), place(at), m) for at, m in w.elements(sides)]
    pick = _pick if w.unrolled else _pick_reduced
    best, where_ = pick(w.k, found, place([s.first() for s in sides]))
    w.k.store(values, best, w.coords)
    return [values, w.finish(indices, where_)]


Found = list[tuple[Value, Value, Value | None]]  # value, position, mask


def _pick(k: NestBuilder, found: Found, first: Value) -> tuple[Value, Value]:
    best, at, mask = found[0]
    at = at if mask is None else first
    for v, position, _ in found[1:]:
        better = v > best
        at = where(better | v.isnan() if v.dtype.is_floating_point else better, position, at)
        best = best.maximum(v)
    return best, at


def _pick_reduced(k: NestBuilder, found: Found, first: Value) -> tuple[Value, Value]:
    """``argmax`` gives the first of equals, and the first NaN; a masked element must not be one of the equals."""
    v, position, mask = found[0]
    best = k.reduce("max", v)
    far = torch.iinfo(torch.int64).max
    at = k.reduce("argmax", v, position if mask is None else where(mask, position, far))
    if v.dtype.is_floating_point:
        last = k.reduce("max", where(v.isnan(), position, -1))
        at = where(best.isnan(), last, at)
    return best, at


@rule("max_pool2d_with_indices", "max_pool3d_with_indices")
def max_pool(
    cx: LoweringContext, x: View, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False,
) -> list[Any]:  # fmt: skip
    dims = _dims(cx)
    if not cx.on_gpu and len(x.shape) == dims + 2 and x.shape[1] != 1 and x.strides[1] == 1:
        raise Unsupported("channels last on a CPU: a C++ compiler does not vectorise a chain of maxima as ATen does")
    g, sizes = Geometry.of(dims, kernel_size, stride, padding, dilation, ceil_mode), _sizes(x, dims)
    return largest(cx, x, g.kernel, lambda d, o: g.side(d, o, sizes[d]))


@rule("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward")
def max_pool_backward(
    cx: LoweringContext, grad: View, x: View, kernel_size: Any, stride: Any, padding: Any, dilation: Any,
    ceil_mode: bool, indices: View,
) -> View:  # fmt: skip
    dims = _dims(cx)
    g, sizes = Geometry.of(dims, kernel_size, stride, padding, dilation, ceil_mode), _sizes(grad, dims)
    counts = [ceildiv((k - 1) * step + 1, s) for k, step, s in zip(g.kernel, g.dilation, g.stride)]
    if not cx.on_gpu and product(counts) != 1:
        raise Unsupported("overlapping windows on a CPU: to scatter needs no atomics there, and reads less")
    return chosen(cx, grad, x, indices, counts, lambda d, i: g.windows(d, i, sizes[d]))


def chosen(
    cx: LoweringContext, grad: View, x: View, indices: View, counts: Sequence[Expr], side: Callable[[int, Expr], Side]
) -> View:
    """The gradient of ``largest``: each element's sum over the windows that chose it."""
    dims, out = len(counts), cx.out()
    w = Window(cx, out, counts)
    here = ZERO
    for size, c in zip(_sizes(x, dims), w.spatial):
        here = here * size + c
    at_here = w.k.index(here)
    sides = [side(d, w.spatial[d]) for d in range(dims)]

    def term(at: list[Expr], mask: Value | None) -> Value:
        hit = w.k.load(indices, [*w.lead, *at], mask, -1).eq(at_here)
        return where(hit, w.k.load(grad, [*w.lead, *at], mask), 0)

    return w.finish(out, w.sum(term(at, m) for at, m in w.elements(sides)))


# -- adaptive ---------------------------------------------------------------------------------------------
def share(c: Expr, size: Expr, parts: Expr) -> Side:
    """Part ``c`` of ``size`` elements in ``parts`` parts that may overlap: from floor(c * size / parts) to
    ceil((c + 1) * size / parts). The parts that contain element i of ``size`` are ``share(i, parts, size)``."""
    exact = divide_exact(size, parts)
    if exact is not None:
        return Side(c * exact, exact, c * exact + exact)
    return Side(c * size // parts, longest_share(size, parts), ceildiv((c + 1) * size, parts))


def longest_share(size: Expr, parts: Expr) -> Expr:
    """The greatest length of ``share(c, size, parts)``, exactly if the sizes are known."""
    exact = divide_exact(size, parts)
    if exact is not None:
        return exact
    n, m = size.constant, parts.constant
    if n is not None and m is not None:
        return expr(max(-((c + 1) * n // -m) - c * n // m for c in range(m)))
    return ceildiv(size, parts) + 1


def _shares(sizes: Sequence[Expr], parts: Sequence[Expr]) -> list[Expr]:
    if any(s == 0 for s in (*sizes, *parts)):
        raise Unsupported("an empty tensor")
    return [longest_share(s, p) for s, p in zip(sizes, parts)]


@rule("_adaptive_avg_pool2d", "_adaptive_avg_pool3d")
def adaptive_avg_pool(cx: LoweringContext, x: View, output_size: Any) -> View:
    dims, out = _dims(cx), cx.out()
    sizes, parts, compute = _sizes(x, dims), _sizes(out, dims), value_dtype(check_dtype(x.dtype))
    w = Window(cx, out, _shares(sizes, parts))
    sides = [share(w.spatial[d], sizes[d], parts[d]) for d in range(dims)]
    total = w.sum(w.k.load(x, [*w.lead, *at], m).to(compute) for at, m in w.elements(sides))
    return w.finish(out, divided(total, _length(sides)))


def _length(sides: Sequence[Side]) -> Expr:
    return product(s.end - s.start for s in sides)


@rule("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(cx: LoweringContext, grad: View, x: View) -> View:
    dims, out = _dims(cx), cx.out()
    sizes, parts = _sizes(x, dims), _sizes(grad, dims)
    w = Window(cx, out, _shares(parts, sizes))
    sides = [share(w.spatial[d], parts[d], sizes[d]) for d in range(dims)]

    def term(at: list[Expr], mask: Value | None) -> Value:
        length = _length([share(o, sizes[d], parts[d]) for d, o in enumerate(at)])
        return divided(w.k.load(grad, [*w.lead, *at], mask), length)

    return w.finish(out, w.sum(term(at, m) for at, m in w.elements(sides)))


@rule("adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool(cx: LoweringContext, x: View, output_size: Any) -> list[Any]:
    dims = _dims(cx)
    sizes, parts = _sizes(x, dims), cx.low.symbols.exprs(cx.fakes[0].shape)[-dims:]
    return largest(cx, x, _shares(sizes, parts), lambda d, o: share(o, sizes[d], parts[d]))


@rule("adaptive_max_pool2d_backward", "adaptive_max_pool3d_backward")
def adaptive_max_pool_backward(cx: LoweringContext, grad: View, x: View, indices: View) -> View:
    dims = _dims(cx)
    sizes, parts = _sizes(x, dims), _sizes(grad, dims)
    return chosen(cx, grad, x, indices, _shares(parts, sizes), lambda d, i: share(i, parts[d], sizes[d]))


# -- windows as a dimension -------------------------------------------------------------------------------
@rule("unfold_backward")
def unfold_backward(cx: LoweringContext, grad: View, sizes: Any, dim: int, size: int, step: int) -> View:
    """``grad`` has a position per window in dimension ``dim``, and the windows' elements in a last one."""
    out = cx.out()
    if not out.shape or size == 0:
        raise Unsupported("windows of a number, or of nothing")
    d = dim % len(out.shape)
    after = len(out.shape) - 1 - d
    g = Geometry.of(1, size, step, 0, 1, False)
    w = Window(cx, out, [ceildiv(g.kernel[0], g.stride[0]), *[ONE] * after])
    side = g.windows(0, w.spatial[0], grad.shape[d])
    whole = [Side(c, ONE, n) for c, n in zip(w.spatial[1:], out.shape[d + 1 :])]

    def term(point: Sequence[IntLike], at: list[Expr], mask: Value | None) -> Value:
        distance = mod(w.spatial[0], g.stride[0]) + g.stride[0] * expr(point[0])  # as above
        if not nonneg(g.kernel[0] - 1 - distance):
            mask = both(mask, w.k.index(distance) < g.kernel[0])
        return w.k.load(grad, [*w.lead, *at, distance], mask)

    return w.finish(out, w.sum(term(point, *e) for point, e in zip(w.points(), w.elements([side, *whole]))))
