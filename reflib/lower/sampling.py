"""``grid_sample``: the input read at positions held in a tensor, between the elements around them.

Interpolation as upsampling does it (``interpolate``) has no rule: torch takes it apart into reads at computed
positions, which fuse to one kernel. (Its gradient has: ``interpolation``.)
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from reflib.ir.expr import Expr
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, nest, where
from .context import LoweringContext
from .indexing import both
from .rules import Unsupported, rule

LINEAR, NEAREST = 0, 1
BORDER, REFLECTION = 1, 2  # else zeros


@rule("grid_sampler_2d", "grid_sampler_3d")
def grid_sampler(
    cx: LoweringContext, x: View, grid: View, interpolation_mode: int, padding_mode: int, align_corners: bool
) -> View:
    """``x``: [batch, channel, *sizes]; ``grid``: [batch, *points, dimension], the last dimension first, -1 to 1."""
    if interpolation_mode not in (LINEAR, NEAREST):
        raise Unsupported("bicubic interpolation")
    if any(s == 0 for s in x.shape):
        raise Unsupported("an empty tensor")
    return nest(cx, lambda k: _sample(k, x, grid, interpolation_mode, padding_mode, align_corners))


rule("cudnn_grid_sampler")(lambda cx, x, grid: nest(cx, lambda k: _sample(k, x, grid, LINEAR, 0, True)))


def _sample(k: NestBuilder, x: View, grid: View, mode: int, padding: int, align: bool) -> Value:
    sizes, point = x.shape[2:], (k.coords[0], *k.coords[2:])
    compute = value_dtype(check_dtype(x.dtype))
    at = []
    for d, size in enumerate(sizes):
        value = k.load(grid, [*point, len(sizes) - 1 - d]).to(compute)
        at.append(_padded(_position(value, size, align), size, padding, align))
    if mode == NEAREST:
        return _element(k, x, [p.op("round") for p in at], compute)
    low = [p.op("floor") for p in at]
    total: Value | None = None
    for corner in itertools.product((0, 1), repeat=len(sizes)):
        weight: Value | None = None
        for c, p, start in zip(corner, at, low):
            part = p - start if c else start + 1 - p
            weight = part if weight is None else weight * part
        term = _element(k, x, [start + 1 if c else start for c, start in zip(corner, low)], compute, weight)
        total = term if total is None else total + term
    assert total is not None
    return total


def _position(value: Value, size: Expr, align: bool) -> Value:
    """From -1 ... 1 to positions in ``size`` elements."""
    return (value + 1) / 2 * (size - 1) if align else ((value + 1) * size - 1) / 2


def _padded(p: Value, size: Expr, padding: int, align: bool) -> Value:
    if padding == REFLECTION and size == 1 and align:
        p = p.like(0)
    elif padding == REFLECTION:  # at the first and last element's centre, or at their outer edges
        low, span = (p.like(0), p.like(size - 1)) if align else (p.like(-0.5), p.like(size))
        away = (p - low).abs()
        rest, turns = away.op("fmod", span), (away / span).op("floor")
        p = where(turns.op("fmod", 2).eq(0), rest + low, span - rest + low)
    return where(p.isnan(), 0, p).maximum(0).minimum(size - 1) if padding in (BORDER, REFLECTION) else p


def _element(k: NestBuilder, x: View, at: Sequence[Value], compute: Any, weight: Value | None = None) -> Value:
    """``x`` at whole positions, times ``weight``; 0 outside, and where a position is NaN. But eager's kernel for images
    on a CPU multiplies 0 by the weight there, which is NaN then."""
    inside: Value | None = None
    for p, size in zip(at, x.shape[2:]):
        inside = both(inside, (p >= 0) & (p < size))
    assert inside is not None
    whole = [where(inside, p, 0).to(torch.int64) for p in at]
    coords = [k.indirect(w, size) for w, size in zip(whole, x.shape[2:])]
    value = k.load(x, [*k.coords[:2], *coords], inside).to(compute)
    if weight is None:
        return value
    if len(at) == 2 and not k.cx.on_gpu:
        return value * weight
    return where(inside, value * weight, 0)
