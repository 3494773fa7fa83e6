"""Places in sorted sequences: searchsorted, bucketize. A binary search, written out.

Of n elements at most ``n.bit_length()`` are looked at, each where the one before says: as many loads, comparisons and
choices, which fuse with what makes the value and what uses the place. The elements are those that eager's kernels look
at, so that the place is eager's in a sequence that is not sorted, too, as one with NaN in it. NaN compares as neither
greater nor equal: it is put after all.

Lengths that are not known, and sequences with a ``sorter``, are left to ATen.

NB: TorchInductor's ``ops.bucketize`` is a function of its Triton library, with a loop in it.
"""

from collections.abc import Sequence
from typing import Any

import torch

from reflib.ir.expr import IntLike
from reflib.ir.program import View

from .body import NestBuilder, Value, check_dtype, where
from .context import LoweringContext
from .pointwise import promote
from .rules import Unsupported, rule


@rule("searchsorted")
def searchsorted(
    cx: LoweringContext, sequence: View, x: Any, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: View | None = None,
) -> View:  # fmt: skip
    n = sequence.shape[-1].constant
    if n is None or n > 2**30 or sorter is not None:
        raise Unsupported("a length that is not known" if n is None else "library call")
    dtype = check_dtype(promote([sequence, x]))
    k = NestBuilder(cx, cx.shape)
    value = (k.load(x) if isinstance(x, View) else k.value(x, dtype)).to(dtype)
    row = k.coords[:-1] if len(sequence.shape) > 1 else []
    out = cx.out()
    k.store(out, place_in(k, sequence, row, value, n, right or side == "right"))
    k.finish()
    return out


def place_in(
    k: NestBuilder, sequence: View, row: Sequence[IntLike], value: Value, n: int, right: bool = False
) -> Value:
    """How many of the n elements of ``sequence`` at ``row`` are below ``value``, or (``right``) not above it."""
    dtype = value.dtype
    start, end = k.value(0, torch.int32), k.value(n, torch.int32)
    least, most = n, n  # elements that are left
    while most:
        middle = (start + end).op("shr", 1)
        place = k.b.indirect((middle if least else middle.minimum(n - 1)).id, n, checked=False, wraps=False)
        element = k.load(sequence, [*row, place]).to(dtype)
        stop = element > value if right else element >= value
        stop = stop if least else stop | (start >= end)
        start, end = where(stop, start, middle + 1), where(stop, middle, end)
        least, most = max(0, least - 1) // 2, most // 2
    return start.minimum(n)  # (which it is; what reads a table there has no need to check that)


rule("bucketize")(
    lambda cx, x, boundaries, *, out_int32=False, right=False: searchsorted(cx, boundaries, x, right=right)
)
