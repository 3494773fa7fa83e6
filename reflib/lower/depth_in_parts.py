"""A product of great depth in parts, under ``Options.batch_invariant``: a sum of products side by side.

    a[M, K] @ b[K, N]  =  sum over s of  a[M, s, K/S] @ b[s, K/S, N]

The gradient of a weight is a product whose depth is the batch: of 262,144 rows and 256 x 256 results, eight programs
walk over all of it while the other multiprocessors are idle. S follows from K alone, so the order of a result's
additions does: within a part as the product's instruction has it, then the float32 sums of the parts, by a reduction
(``lower.one_order``). Rounded once, after alpha and the bias. A depth that is known only at run time is not cut, nor
one that no such S divides. (``decompose_k`` is the same, with an S that is measured.)
"""

from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import expr
from reflib.ir.program import View

from .body import NestBuilder
from .context import LoweringContext

DEEP = 1 << 14  # shorter ones keep enough programs busy, or are small
EACH = 1 << 12  # of depth, about: beside it storing and reading 4 bytes per result takes little
MOST = 128  # parts
BLOCK = 64  # a multiple of the depth of a block, so that no part has a tail


def parts(depth: int | None) -> int:
    """S; 1: in one.

    >>> parts(262144), parts(100352), parts(8192), parts(None)
    (64, 28, 1, 1)
    """
    if depth is None or depth < DEEP:
        return 1
    wanted = min(MOST, depth // EACH)
    fit = [s for s in range(max(2, -(-wanted // 2)), 2 * wanted + 1) if depth % (s * BLOCK) == 0]
    return min(fit, key=lambda s: (max(s, wanted) / min(s, wanted), s), default=1)


def operands(a: View, b: View, count: int) -> tuple[View, View]:
    """[S, M, K/S] and [S, K/S, N], where a and b are."""
    each = expr((a.shape[1].constant or 0) // count)
    left = replace(a, shape=(expr(count), a.shape[0], each), strides=(each * a.strides[1], *a.strides))
    right = replace(b, shape=(expr(count), each, b.shape[1]), strides=(each * b.strides[0], *b.strides))
    return left, right


def added(cx: LoweringContext, sums: View, bias: View | None, alpha: Any, beta: Any) -> View:
    """alpha * (the sum of ``sums`` [S, M, N], over S) + beta * bias, as the op's result."""
    k, out = NestBuilder(cx, sums.shape, (0,)), cx.out()
    value = k.reduce("sum", k.load(sums))
    value = value if alpha == 1 else value * k.value(alpha, torch.float32)
    if bias is not None and beta != 0:  # else not even a NaN of the bias counts
        term = k.load(bias).to(torch.float32)
        value = value + (term if beta == 1 else term * k.value(beta, torch.float32))
    k.store(out, value.to(out.dtype), k.coords[1:])
    k.finish()
    return out
