"""Stores at places that tensors name: rows of a cache, tokens sorted by expert.

Two loop nests, as for sums (``accumulate``): one copies, the other stores. Where nothing else needs what is copied, the
copy goes (``fuse.in_place``): a cache is written where it is. On a CPU only where that may be possible: else ATen's op,
a copy and a kernel as well, stays. As in eager's CUDA kernels, of several values for one place any may win; not under
``torch.use_deterministic_algorithms(True)``, which asks for the last one.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import IntLike, Ref, expr
from reflib.ir.program import View

from . import accumulate as sums
from .accumulate import Term, fill, scattered
from .body import NestBuilder, Scalar, Value, check_dtype, fit, nest, where
from .context import LoweringContext
from .indexing import axis, here_and_at, one_per_row, per_row
from .rules import Unsupported, overloads, rule
from .segment_sums import segment_sums

FEW, SHORT = 8, 512  # positions per row, of so many elements, that each element is compared with
UPDATES = frozenset(overloads("index_copy", "index_fill", "index_put", "_unsafe_index_put", "scatter", "scatter_add"))
PARTS = frozenset(overloads("select_scatter", "slice_scatter"))
VIEWS = frozenset(overloads("permute", "view", "transpose", "t", "squeeze", "unsqueeze"))


def scatter(cx: LoweringContext, start: View | None, shape: Sequence[IntLike], term: Term) -> View:
    """``start`` with the terms stored, one for each point of ``shape``. Unsupported where that cannot be."""
    if torch.are_deterministic_algorithms_enabled() or not (cx.on_gpu or _may_be_in_place(cx.node)):
        raise Unsupported("library call")
    check_dtype(cx.dtype)
    out = cx.out()
    fill(cx, out, start)
    k = NestBuilder(cx, shape)
    at, value = term(k)
    k.store(_with_indices(out, at), value, at)
    k.finish()
    return out


def _with_indices(out: View, at: Sequence[IntLike]) -> View:
    """``out``, whose index names what is read from memory in dimensions of size 1 also: that is why two points of the
    loops may store at one place."""
    read = [n == 1 and any(isinstance(a, Ref) for a in expr(c).atoms()) for n, c in zip(out.shape, at)]
    shape = tuple(expr(2) if one else n for n, one in zip(out.shape, read))
    return replace(out, shape=shape, strides=tuple(expr(1) if one else n for n, one in zip(out.strides, read)))


def _may_be_in_place(node: torch.fx.Node) -> bool:
    first = node.args[0]
    assert isinstance(first, torch.fx.Node)
    return reaches_input(node) or (first.op == "call_function" and len(first.users) == 1)


def reaches_input(node: torch.fx.Node) -> bool:
    """Is the result, perhaps updated again, or put back into what it is a part of, copied onto an input in the end?"""
    todo, seen = [node], {node}
    while todo:
        n = todo.pop()
        for user in n.users:
            if user.target is torch.ops.aten.copy_.default and user.args[1] is n:
                return True
            updated = user.target in UPDATES | PARTS | VIEWS and user.args[0] is n
            put_back = user.target in PARTS and user.args[1] is n
            if (updated or put_back) and user not in seen:
                seen.add(user)
                todo.append(user)
    return False


@rule("scatter.src", "scatter.value")
def scatter_(cx: LoweringContext, x: View, dim: int, index: View, new: Any) -> View:
    """A few positions per row need no copy: each element of the row is compared with them. The gradient of picking one
    logit per row (cross entropy, ``gather``), or the greatest few (``topk``), is this, of zeros."""
    few = per_row(x, dim, index)
    short = few and cx.on_gpu and (x.shape[axis(dim, len(x.shape))].constant or SHORT + 1) <= SHORT
    if not 1 <= few <= (FEW if short else 1) or reaches_input(cx.node):
        return scatter(cx, x, index.shape, scattered(x, index.shape, dim, index, new))

    def value(k: NestBuilder) -> Value:
        out = k.load(x)
        for which in range(few):
            here, at = here_and_at(k, x, dim, index, which)
            out = where(here, k.load(new, at).to(out.dtype) if isinstance(new, View) else fit(new, out.dtype), out)
        return out

    return nest(cx, value)


@rule("index_put.default", "_unsafe_index_put.default")
def index_put(
    cx: LoweringContext, x: View, indices: Sequence[View | None], values: View, accumulate: bool = False
) -> View:
    if accumulate:
        alone = indices[0] if len([i for i in indices if i is not None]) == 1 else None
        shaped = alone is not None and list(values.shape) == [*alone.shape, *x.shape[1:]]
        if shaped and alone is not None and (out := segment_sums(cx, x, alone, values, wraps=True)) is not None:
            return out
        return sums.put(cx, x, indices, values, sums.accumulate)
    return _masked(cx, x, indices, values) or sums.put(cx, x, indices, values, scatter)


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


@rule("index_copy")
def index_copy(cx: LoweringContext, x: View, dim: int, index: View, new: View) -> View:
    return scatter(cx, x, new.shape, scattered(x, new.shape, dim, index, new))


@rule("index_fill")
def index_fill(cx: LoweringContext, x: View, dim: int, index: View, new: Any) -> View:
    """Places may be counted from the end, as in eager; torch's own decomposition, an ``index_copy``, refuses these."""
    if not x.shape:
        raise Unsupported("library call")
    return sums.put(cx, x, [None] * axis(dim, len(x.shape)) + [index], new, scatter)


@rule("scatter_add")
def scatter_add(cx: LoweringContext, x: View, dim: int, index: View, new: View) -> View:
    """As ``accumulate``; but at one position per row, which no other one adds to, of an input: where it is."""
    if not one_per_row(x, dim, index) or not reaches_input(cx.node):
        return sums.scatter_add(cx, x, dim, index, new)
    terms = scattered(x, index.shape, dim, index, new)

    def term(k: NestBuilder) -> tuple[Sequence[IntLike], Scalar]:
        at, value = terms(k)
        old = k.load(x, at)
        return at, (old + value.to(old.dtype)).to(cx.dtype)  # type: ignore[union-attr]

    return scatter(cx, x, index.shape, term)
