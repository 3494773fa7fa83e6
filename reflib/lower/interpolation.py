"""The gradient of interpolation: each input gathers from the outputs that read it.

Along each dimension an output is a weighted sum of a few inputs, whose positions are arithmetic on its own; so the
gradient of an input is one over a window of outputs, as in pooling::

    dx[p] = sum over i from p * n // size - back, for count outputs, of weight(i, p) * dy[i]

n outputs and ``size`` inputs. ``back`` and ``count`` are found by computing the positions here: a window only has to be
wide enough, for the kernel asks of each output whether it did read the input, and loads only then. Where the windows
of all dimensions have more than AT_ONCE elements in all, dimensions are summed one after another, the outermost first:
2 * 34 terms in place of 34 * 34 for an upsampling by 16.

Sums are in float32 (float64 for doubles), in one order: results are the same on every run. (Eager's CUDA kernels add
atomically; those of half types in the half type.) Sizes that are not known are left to ATen.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from reflib.capture.constants import for_real
from reflib.capture.interpolation import LINEAR, NEAREST
from reflib.ir.expr import Expr, expr
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, where
from .context import LoweringContext
from .indexing import both
from .pooling import Side, Window
from .rules import Unsupported, rule

AT_ONCE = 16  # elements of a window
KINDS = ("cubic", "linear", "exact", "nearest")  # parts of the ops' names
CUBIC = -0.75


@rule(*(f"{name}_backward" for name in (*LINEAR, *NEAREST)))
def gradient(
    cx: LoweringContext, grad: View, output_size: Sequence[Any], input_size: Sequence[Any], *how: Any, **named: Any
) -> View:
    """how: ``align_corners``, but of nearest, and the factor along each dimension, as far as they are given."""
    kind = next(k for k in KINDS if k in str(cx.node.target))
    names = [a.name for a in cx.node.target._schema.arguments[3:]]  # type: ignore[union-attr]
    given = dict(zip(names, how)) | named
    corners, factors = bool(given.get("align_corners")), [given.get(n) for n in names if n.startswith("scales")]
    sizes = [(expr(n).constant, expr(size).constant) for n, size in zip(output_size, input_size[-len(factors) :])]
    if not all(n and size for n, size in sizes):
        raise Unsupported("library call")
    dtype = value_dtype(cx.dtype) if kind in ("cubic", "linear") else torch.float32
    along = [
        Resampling.of(kind, int(n), int(size), factor, corners, dtype)  # type: ignore[arg-type]
        for (n, size), factor in zip(sizes, factors)
    ]
    return _gradient(cx, grad, along)


@dataclass(frozen=True)
class Resampling:
    """One dimension. ``n`` outputs read ``size`` inputs; at ``scale * i`` if ``corners``. ``dtype``: of positions."""

    kind: str
    n: int
    size: int
    scale: float
    corners: bool
    dtype: torch.dtype
    back: int = 0
    count: int = 0

    @staticmethod
    def of(kind: str, n: int, size: int, factor: float | None, corners: bool, dtype: torch.dtype) -> "Resampling":
        scale = 1.0 / factor if factor is not None and factor > 0 else size / n
        if corners:
            scale = (size - 1.0) / (n - 1.0) if n > 1 else 0.0
        r = Resampling(kind, n, size, scale, corners, dtype)
        with for_real():
            i = torch.arange(n)
            # of an output from where its input's window begins (the first's second input counts for nothing)
            counted = [(at, torch.as_tensor(weight != 0).expand(n)) for at, weight in r.taps(i.to(dtype))]
            distance = torch.cat([(i - at * n // size)[used] for at, used in counted])
            low, high = int(distance.min()), int(distance.max())
        # a multiply-add rounds once, so the first or last reader may read the input beside (nearest has none)
        slack = int(kind in ("cubic", "linear") and not (_dyadic(scale) and _dyadic(n / size)))
        return replace(r, back=slack - low, count=high - low + 1 + 2 * slack)

    def taps(self, i: Any) -> list[tuple[Any, Any]]:
        """(position, weight) of the inputs that output ``i`` reads; i: a Tensor or a Value of ``dtype``."""
        if self.kind in ("nearest", "exact"):
            at = (i + (0.5 if self.kind == "exact" else 0.0)) * self.scale
            return [(_at_most(at.to(torch.int64), self.size - 1), 1.0)]
        source = i * self.scale if self.corners else (i + 0.5) * self.scale - 0.5
        if self.kind == "linear":
            source = _at_least(source, 0.0)
            at = source.to(torch.int64)
            t = _at_most(_at_least(source - at.to(self.dtype), 0.0), 1.0)
            return [(_at_most(at, self.size - 1), 1.0 - t), (_at_most(at + 1, self.size - 1), t)]
        below = _floor(source)
        t = _at_most(_at_least(source - below, 0.0), 1.0)
        at = below.to(torch.int64)
        weights = (_outer(t + 1.0), _inner(t), _inner(1.0 - t), _outer(2.0 - t))
        return [(_at_least(_at_most(at + (j - 1), self.size - 1), 0), w) for j, w in enumerate(weights)]

    def side(self, p: Expr) -> Side:
        return Side(p * self.n // self.size - self.back, expr(self.count), expr(self.n))

    def weight(self, k: NestBuilder, i: Expr, p: Expr) -> tuple[Value | None, Value | None]:
        """(does output ``i`` of input ``p``'s window read it?, by how much it counts); None: yes, and 1."""
        taps = self.taps(k.index(i).to(self.dtype))
        if len(taps) == 1:
            return (None if self.count * self.size == self.n else taps[0][0].eq(k.index(p))), None
        hit = total = None
        for at, weight in taps:
            here = at.eq(k.index(p))
            part = where(here, weight, 0.0)
            hit, total = (here, part) if hit is None or total is None else (hit | here, total + part)
        return hit, total


def _gradient(cx: LoweringContext, grad: View, dimensions: list[Resampling]) -> View:
    first, out = len(grad.shape) - len(dimensions), cx.out()
    todo = {first + d: r for d, r in enumerate(dimensions)}
    at_once = prod(r.count for r in dimensions) <= AT_ONCE
    x, shape = grad, list(grad.shape)
    while todo:
        some = dict(todo) if at_once else dict([next(iter(todo.items()))])
        for d in some:
            shape[d] = expr(todo.pop(d).size)
        x = _summed(cx, x, _laid_out_like(cx, out, shape) if todo else out, some)
    return out


def _laid_out_like(cx: LoweringContext, out: View, shape: Sequence[Expr]) -> View:
    """A buffer for sums, whose dimensions are in the order that those of ``out`` have in memory."""
    order = sorted(range(len(shape)), key=lambda d: (-out.strides[d].hint(), d))
    inner = cx.temp("along", [shape[d] for d in order], value_dtype(check_dtype(cx.dtype)))
    at = [order.index(d) for d in range(len(shape))]
    return View(inner.buffer, tuple(shape), tuple(inner.strides[j] for j in at), inner.offset, inner.dtype)


def _summed(cx: LoweringContext, x: View, out: View, along: dict[int, Resampling]) -> View:
    """``x`` summed along these dimensions: one loop nest over ``out``."""
    w = Window(cx, out, [expr(r.count) for r in along.values()], AT_ONCE)
    compute = value_dtype(check_dtype(cx.dtype))

    def term(at: Sequence[Expr], mask: Value | None) -> Value:
        total = None
        for (d, r), i in zip(along.items(), at):
            hit, weight = r.weight(w.k, i, w.coords[d])
            mask, total = both(mask, hit), weight if total is None or weight is None else total * weight
        here = [*w.coords]
        for d, i in zip(along, at):
            here[d] = i
        value = w.k.load(x, here, mask).to(compute)
        return value if total is None else value * total.to(compute)

    return w.finish(out, w.sum(term(at, m) for at, m in w.elements([r.side(w.coords[d]) for d, r in along.items()])))


def _dyadic(x: float) -> bool:
    """Are products of small integers by this exact?"""
    return (x * 2**12).is_integer() and x > 2**-12


# -- of a Tensor or a Value ---------------------------------------------------------------------------
def _at_least(x: Any, low: float) -> Any:
    return x.maximum(low) if isinstance(x, Value) else x.clamp(min=low)


def _at_most(x: Any, high: float) -> Any:
    return x.minimum(high) if isinstance(x, Value) else x.clamp(max=high)


def _floor(x: Any) -> Any:
    return x.op("floor") if isinstance(x, Value) else x.floor()


def _inner(t: Any) -> Any:
    """Keys' cubic convolution within 1 of the source; of ``_outer``: from 1 to 2."""
    return (t * (CUBIC + 2) - (CUBIC + 3)) * t * t + 1.0


def _outer(t: Any) -> Any:
    return ((t * CUBIC - 5 * CUBIC) * t + 8 * CUBIC) * t - 4 * CUBIC
