"""Views, and updates of them, that count elements from the begin of a storage: ``as_strided`` with an offset.

A kernel knows buffers, not storages. So it must be known where in its storage the operand begins. An input's offset is
known, and a view's by what it is a view of. What an op makes begins at 0, but for the ops in ALIKE: eager's copy the
operand's storage with what lies before its first element (``at::clone_preserve_strides``), since functionalization
needs that to take views of updated inputs anew. Their meta functions say 0 all the same.
"""

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import Expr, expr
from reflib.ir.program import View

from .accumulate import fill
from .body import check_dtype, nest
from .context import LoweringContext
from .rules import Unsupported, overloads, rule
from .views import is_view_op

aten = torch.ops.aten
ALIKE = frozenset(overloads("copy", "as_strided_scatter", "slice_scatter", "select_scatter", "diagonal_scatter"))


@rule("as_strided")
def as_strided(cx: LoweringContext, x: View, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> View:
    place = View(x.buffer, tuple(map(expr, size)), tuple(map(expr, stride)), x.offset + _moved(cx, offset), x.dtype)
    if not cx.low.symbols.all_bound(*place.shape, *place.strides, place.offset):
        raise Unsupported("a view at a place known only to torch")
    return place


def _moved(cx: LoweringContext, offset: Any) -> Expr:
    """How far ``offset`` is from where the operand begins."""
    return expr(0) if offset is None else expr(offset) - cx.low.symbols.expr(_begin(cx.node.args[0]))


def _begin(node: Any) -> Any:
    """Where in its storage the tensor ``node`` begins, in elements: an int or a SymInt."""
    moved: Any = 0
    while True:
        op = node.args[0] if node.target is operator.getitem else node  # (one of several, as of a split)
        if op.target not in ALIKE and (op.target is aten.as_strided.default or not is_view_op(op.target)):
            return node.meta["val"].storage_offset() + moved
        of = op.args[0]
        if op.target not in ALIKE:  # a view, whose place is counted from its operand's
            moved += node.meta["val"].storage_offset() - of.meta["val"].storage_offset()
        node = of


@rule("as_strided_scatter")
def as_strided_scatter(
    cx: LoweringContext, x: View, src: View, size: Sequence[Any], stride: Sequence[Any], offset: Any = None
) -> View:
    """How updates of inputs that are views of one another are captured: ``x`` is the memory that they share."""
    place = View("", tuple(map(expr, size)), tuple(map(expr, stride)), _moved(cx, offset), cx.dtype)
    strides = cx.low.symbols.exprs(cx.fake.stride())
    room, last = (sum(((n - 1) * m for n, m in zip(v, w)), expr(0)) for v, w in ((cx.shape, strides), (size, stride)))
    # (torch has guarded, when it traced the op, that sizes which may change stay inside)
    inside = all(e.constant is None or e.constant >= 0 for e in (place.offset, room - place.offset - last))
    if not (inside and _apart(place) and list(src.shape) == list(place.shape)):
        raise Unsupported("library call")
    check_dtype(cx.dtype)
    out = cx.out()
    if out.strides != strides:
        raise Unsupported("in another order than eager's")
    fill(cx, out, x)
    nest(cx, lambda k: k.load(src), replace(place, buffer=out.buffer))
    return out


def _apart(v: View) -> bool:
    """Is each element at a place of its own?"""
    dims = [(m, n) for n, m in zip(v.shape, v.strides) if n != 1]
    if len(dims) < 2:
        return all(m.constant != 0 for m, _ in dims)
    if any(e.constant is None for d in dims for e in d):
        return False
    past = 0
    for m, n in sorted((int(m), int(n)) for m, n in dims):
        if m <= past:
            return False
        past += m * (n - 1)
    return True
