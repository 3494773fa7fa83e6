"""Scans: cumsum, cumprod, logcumsumexp, cummax, cummin, and the gradient of cumprod. A loop nest whose r axis is the
scanned dimension."""

from functools import partial
from typing import Any

import torch

from reflib.ir.expr import product
from reflib.ir.loops import Scan
from reflib.ir.ops import value_dtype
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype
from .context import LoweringContext
from .rules import Unsupported, rule

VERY_LONG, FEW = 65536, 16


def scan(k: NestBuilder, kind: str, *values: Value) -> Value:
    """See ``ir/scans.py``. Along a dimension of size 1 nothing is combined."""
    if not any(a.kind == "r" for a in k.axes):
        return values[-1]
    return Value(k, k.b.add(Scan(kind, tuple(v.id for v in values), values[-1].dtype)))


def _along(cx: LoweringContext, x: View, dim: int) -> NestBuilder:
    return NestBuilder(cx, x.shape, [dim % len(x.shape)] if x.shape else [])


def check_rows(cx: LoweringContext, x: View, dim: int, kind: str) -> None:
    """A few, very long rows are cut into pieces (``fuse/split_scans``). Where that cannot be, a GPU would be idle, and
    ATen has a scan of one pass over all of it."""
    if not cx.on_gpu or not x.shape:
        return
    length = x.shape[dim % len(x.shape)]
    rows = product(x.shape).hint() // max(1, length.hint())
    n = length.constant
    cut = n is not None and kind != "logsumexp" and any(n % pieces == 0 for pieces in range(16, 129))
    if length.hint() >= VERY_LONG and rows <= FEW and not cut:
        raise Unsupported("a few, very long rows that cannot be cut into equal pieces")


def _accumulate(kind: str, cx: LoweringContext, x: View, dim: int, *, dtype: Any = None) -> View:
    check_rows(cx, x, dim, kind)
    out = cx.out()
    compute = value_dtype(check_dtype(cx.dtype))
    k = _along(cx, x, dim)
    k.store(out, scan(k, kind, k.load(x).to(compute)))
    k.finish()
    return out


def _extreme(kind: str, cx: LoweringContext, x: View, dim: int) -> list[View]:
    """[values, indices]. Of equals the last, as eager has it. Two loop nests: if both are needed, they are fused."""
    outs = cx.out(0), cx.out(1)
    for out, prefix in zip(outs, ("", "arg")):
        k = _along(cx, x, dim)
        v = k.load(x)
        v = v.to(torch.int32) if v.dtype == torch.bool else v
        at = [k.index(k.coords[dim % len(x.shape)] if x.shape else 0)] if prefix else []
        k.store(out, scan(k, prefix + kind, v, *at))
        k.finish()
    return list(outs)


@rule("reflib::cumprod_backward")
def cumprod_backward(cx: LoweringContext, grad: View, x: View, y: View, dim: int) -> View:
    """``y``: the products. See ``capture/products``."""
    out, k = cx.out(), _along(cx, x, dim)
    dim = dim % len(x.shape) if x.shape else 0
    if not any(a.kind == "r" for a in k.axes):
        k.store(out, k.load(grad))
    else:
        last, r = x.shape[dim] - 1, k.coords[dim]

        def at(i: Any) -> list[Any]:
            return [*k.coords[:dim], i, *k.coords[dim + 1 :]]

        factor = k.load(x, at(last - r + 1), mask=k.index(r) > 0)
        later = scan(k, "linear", factor, k.load(grad, at(last - r)))
        k.store(out, later * k.load(y, at(last - r - 1), mask=k.index(r) < last, other=1), at(last - r))
    k.finish()
    return out


for _op, _kind in (("cumsum", "sum"), ("cumprod", "prod"), ("logcumsumexp", "logsumexp")):
    rule(f"{_op}.default")(partial(_accumulate, _kind))
for _kind in ("max", "min"):
    rule(f"cum{_kind}.default")(partial(_extreme, _kind))
