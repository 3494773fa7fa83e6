"""Products of small depth, and deep ones of few elements, without a matmul: as sums of products in a loop nest.

Points times a rotation, populations of a lattice times its directions, features times few coefficients: such a product
moves memory and hardly computes, and a call or a Template of it stands between the elementwise work before and after.
As a loop nest it is fused with both; an operand that had to be copied into rows for the call is read where it is.

What it costs are loads: two per term, from L1 all but the first time, which serves a line of memory per cycle: about 7
elements per ps on an H200 (132 units) where a warp's 32 lie in one line, and as many times fewer as they lie in lines
(rows of ``a`` beside each other in memory lie apart in each column). An element's share of memory is itself and
``depth / least`` of the longer operand, ``least`` the smaller of rows and columns, at 4 bytes per ps. The nest is taken
where its loads need at most as long as that; LIMIT times as long where a library's TILE of rows and columns would be
partly empty. Of few elements a product takes a launch's time either way, and stays one.

The gradients of such few coefficients are the contrary: few elements, each of them a sum over all points. They are a
reduction, which is split over the device; a library's kernel has tiles of 32 or more rows and columns. (On an H200
1,000,003 rows of 9 times 9 x 3: 70 us by the library, 21 so; their gradients 209 and 67.)
"""

from ..ir.expr import expr, product
from ..ir.program import View
from .body import NestBuilder, Value, nest
from .context import LoweringContext

DEPTH = 16  # terms
ELEMENTS = 4096
LOADS, BYTES = 7.2, 4.0  # per ps
WARP, LINE = 32, 128  # lanes; bytes that L1 looks up at once
LIMIT, TILE = 2, 32
DEEP, FEW = 1 << 15, 64  # terms, elements


def is_small(cx: LoweringContext, a: View, b: View) -> bool:
    """Of float matrices (..., rows, depth) and (..., depth, columns) on a GPU."""
    depth = a.shape[-1].constant
    if not _possible(cx, a, b) or depth is None or not 0 < depth <= DEPTH or product(cx.shape).hint() < ELEMENTS:
        return False
    rows, columns = max(1, a.shape[-2].hint()), max(1, b.shape[-1].hint())
    lines = _lines(a, -2, -(-WARP // columns)) + _lines(b, -1, min(WARP, columns))
    least = min(rows, columns)
    return depth * lines / LOADS <= (LIMIT if least < TILE else 1) * (1 + depth / least) * cx.dtype.itemsize / BYTES


def _lines(v: View, dim: int, lanes: int) -> float:
    """That so many neighbours along ``dim`` lie in."""
    return min(lanes, max(1, lanes * v.strides[dim].hint() * v.dtype.itemsize / LINE))


def is_deep(cx: LoweringContext, a: View, b: View) -> bool:
    """Of such matrices: few elements, and many terms."""
    few, (rows, columns) = product(cx.shape).constant, (n.hint() for n in (a.shape[-2], b.shape[-1]))
    if not _possible(cx, a, b) or a.shape[-1].hint() < DEEP or few is None or not 0 < few <= FEW:
        return False
    return 2 * rows * columns / LOADS <= LIMIT * (rows + columns) * cx.dtype.itemsize / BYTES


def _possible(cx: LoweringContext, a: View, b: View) -> bool:
    """``numerics="eager"`` leaves products to eager's calls."""
    fast = cx.on_gpu and cx.low.options.numerics != "eager"
    return fast and cx.dtype.is_floating_point and a.dtype == b.dtype == cx.dtype


def deep_product(cx: LoweringContext, a: View, b: View) -> View:
    """``a @ b``, rounded once."""
    k, out = NestBuilder(cx, (*cx.shape, a.shape[-1]), (len(cx.shape),)), cx.out()
    *batch, i, j, d = k.coords
    k.store(out, k.reduce("sum", k.load(a, (*batch, i, d)) * k.load(b, (*batch, d, j))), k.coords[:-1])
    k.finish()
    return out


def small_product(cx: LoweringContext, a: View, b: View, bias: View | None, alpha: float, beta: float) -> View:
    """``alpha * a @ b + beta * bias`` (broadcast), rounded once."""

    def element(k: NestBuilder) -> Value:
        *batch, i, j = k.coords
        terms = [k.load(a, (*batch, i, expr(d))) * k.load(b, (*batch, expr(d), j)) for d in range(int(a.shape[-1]))]
        total = sum(terms[1:], terms[0])
        total = total if alpha == 1 else total * alpha
        if bias is None or beta == 0:  # with beta == 0 not even a NaN of the bias counts
            return total
        return total + (k.load(bias) if beta == 1 else k.load(bias) * beta)

    return nest(cx, element)
