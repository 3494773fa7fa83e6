"""Sums into places that tensors name, by atomic additions: the backward of reads at such places.

``x.index_add(0, index, new)`` is two loop nests: one fills the result with ``x``, the other runs over ``new`` and adds
each element where it belongs. The second may compute ``new`` itself. Half dtypes are summed in float32, in a buffer of
its own, and rounded once. That buffer has a row for each index instead of one for each row of the result where this
moves less (``_by_slots``).

On a GPU only; on a CPU, and with ``atomics=False``, these ops are calls of ATen. With ``batch_invariant`` rows of
floats are added in their order (``segment_sums``), or by a call of ``index_put`` (``sorted_rows``), which sorts in each
call, where ATen's own ``index_add`` has atomic additions as well, for halves slow ones in 16 bits.
**The order of the additions varies from run to run**, and with it the last bits of floating-point sums, as in
TorchInductor's kernels and in some of eager's (those of ``scatter_add``; those of ``index_put`` and of embeddings sort
first). Under ``torch.use_deterministic_algorithms(True)`` only integers are summed so.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from reflib.ir.expr import Expr, IntLike, expr, product
from reflib.ir.instructions import LAUNCH
from reflib.ir.program import View, full_view

from .body import NestBuilder, Scalar, Value, nest, where
from .context import LoweringContext
from .extern import extern
from .indexing import axis, here_and_at, named, one_per_row, stand
from .rules import Unsupported, overloads, rule
from .segment_sums import segment_sums

SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32} | {
    d: d for d in (torch.float32, torch.float64, torch.int32, torch.int64)
}
# What is added at one point of a loop nest: (coordinates in the result, value).
Term = Callable[[NestBuilder], tuple[Sequence[IntLike], Scalar]]
Sum = Callable[[LoweringContext, View | None, Sequence[IntLike], Term], View]  # ``accumulate``
# Points that each name a row of the result, of those of a Term the first dimensions: their shape, and which row.
Rows = tuple[Sequence[Expr], Callable[[NestBuilder], Expr]]


# On a GPU eager's kernels of these are atomic additions: their order is open, with numerics="eager" too.
UNORDERED = frozenset(overloads("index_add", "scatter_add", "scatter_reduce"))


def possible(cx: LoweringContext, dtype: torch.dtype) -> bool:
    """May the op's result, of ``dtype``, be summed atomically?"""
    options = cx.low.options
    like_eager = options.numerics == "eager" and cx.node.target in UNORDERED and options.but(numerics="fast").atomics
    ordered = torch.are_deterministic_algorithms_enabled() and dtype.is_floating_point
    exact = options.batch_invariant and not dtype.is_floating_point  # whatever their order
    atomics = options.atomics or exact or like_eager
    return cx.on_gpu and atomics and dtype in SUMMED_IN and not ordered


def check(cx: LoweringContext) -> torch.dtype:
    """The dtype in which the op's result is summed; Unsupported if it cannot be."""
    if not possible(cx, cx.dtype):
        raise Unsupported("library call")
    return SUMMED_IN[cx.dtype]


def accumulate(
    cx: LoweringContext, start: View | None, shape: Sequence[IntLike], term: Term, rows: Rows | None = None
) -> View:
    """``start`` (None: zeros) and the terms, one for each point of ``shape``. Unsupported where that cannot be."""
    dtype = check(cx)
    if dtype == cx.dtype:
        return add(cx, cx.out(), start, shape, term)
    if rows is not None and (start is None or cx.low.uniform.get(start.buffer) == 0):
        spared = (cx.shape[0].hint() - product(rows[0]).hint()) * product(cx.shape[1:]).hint() * 2 * dtype.itemsize
        if spared >= LAUNCH:
            return _by_slots(cx, shape, term, *rows)
    sums = add(cx, summing(cx, "sums", dtype), start, shape, term)
    return nest(cx, lambda k: k.load(sums))


def summing(cx: LoweringContext, what: str, dtype: torch.dtype) -> View:
    """A new buffer laid out as the result is."""
    name, strides = cx.temp(what, cx.shape, dtype).buffer, cx.low.symbols.exprs(cx.fakes[0].stride())
    cx.low.buffers[name] = replace(cx.low.buffers[name], strides=strides)
    return full_view(cx.low.buffers[name])


def add(cx: LoweringContext, sums: View, start: View | int | None, shape: Sequence[IntLike], term: Term) -> View:
    """Two loop nests: one fills ``sums``, the other adds to it."""
    fill(cx, sums, start)
    k = NestBuilder(cx, shape)
    at, value = term(k)
    k.b.store(sums.buffer, k.at(sums, at), k.value(value, sums.dtype).id, "atomic")
    k.finish()
    return sums


def fill(cx: LoweringContext, out: View, start: View | IntLike | None) -> None:
    nest(cx, lambda k: k.load(start) if isinstance(start, View) else 0 if start is None else start, out)


# -- the ops ------------------------------------------------------------------------------------------------
def put(cx: LoweringContext, x: View, indices: Sequence[View | None], values: Any, how: Sum) -> View:
    """``x.index_put(indices, values)``, added or (``scatter``) stored; values: a View, or a number."""
    used = [i for i in indices if i is not None]
    if not used or any(i.dtype not in (torch.int32, torch.int64) for i in used):
        raise Unsupported("library call")  # an index that is a mask
    others = [s for d, s in enumerate(x.shape) if d >= len(indices) or indices[d] is None]
    first, rank = stand(indices)
    shape = [*others[:first], *broadcast([i.shape for i in used]), *others[first:]]

    def term(k: NestBuilder) -> tuple[Sequence[IntLike], Scalar]:
        return named(k, x, indices, first, rank), k.load(values) if isinstance(values, View) else values

    if how is accumulate and len(used) == 1 and indices[0] is not None:
        rows = used[0].shape, lambda k: k.indirect(k.load(used[0]), x.shape[0], True)
        return accumulate(cx, x, shape, term, rows)
    return how(cx, x, shape, term)


def broadcast(shapes: Sequence[Sequence[Expr]]) -> list[Expr]:
    """The common shape."""
    rank = max(len(s) for s in shapes)
    out = [expr(1)] * rank
    for shape in shapes:
        for d, size in enumerate(shape, rank - len(shape)):
            out[d] = size if out[d] == 1 else out[d]
    return out


def sorted_rows(cx: LoweringContext, x: View, dim: int, index: View, new: View) -> View | None:
    """``new`` added to the rows of ``x``, along ``dim``, that ``index`` names, in their order, for
    ``batch_invariant``; None: not so. ``index``: of one dimension, or the same for all elements of a row."""
    d, others = axis(dim, len(x.shape)), range(len(x.shape))
    if not cx.low.options.batch_invariant or not cx.on_gpu or not cx.dtype.is_floating_point:
        return None
    if len(new.shape) != len(x.shape):
        return None
    if any(a != b for i, (a, b) in enumerate(zip(x.shape, new.shape)) if i != d):
        return None
    if len(index.shape) == len(x.shape):
        if index.shape != new.shape or any(i != d and index.strides[i] != 0 and index.shape[i] != 1 for i in others):
            return None
        index = replace(index, shape=(index.shape[d],), strides=(index.strides[d],))
    if len(index.shape) != 1 or index.dtype != torch.int64:
        return None
    if d == 0 and (out := segment_sums(cx, x, index, new)) is not None:
        return out
    return extern(cx, torch.ops.aten.index_put.default, (x, [*[None] * d, index], new, True), {}, "added in order")


@rule("index_add")
def index_add(cx: LoweringContext, x: View, dim: int, index: View, new: View, *, alpha: Any = 1) -> View:
    if alpha == 1 and (out := sorted_rows(cx, x, dim, index, new)) is not None:
        return out
    place = scattered(x, new.shape, dim, index, new)

    def term(k: NestBuilder) -> tuple[Sequence[IntLike], Scalar]:
        at, value = place(k)
        return at, value if alpha == 1 else value * k.value(alpha, SUMMED_IN[cx.dtype])

    rows = index.shape, lambda k: k.indirect(k.load(index), x.shape[0])
    return accumulate(cx, x, new.shape, term, rows if len(index.shape) == 1 and axis(dim, len(x.shape)) == 0 else None)


def scattered(x: View, shape: Sequence[Expr], dim: int, index: View, new: View | float) -> Term:
    """``new`` at the position in ``x``, along ``dim``, that ``index`` names: of each point, or each row of them."""
    if not x.shape or len(shape) != len(x.shape):
        raise Unsupported("library call")
    d = axis(dim, len(x.shape))

    def term(k: NestBuilder) -> tuple[Sequence[IntLike], Scalar]:
        at = k.coords if len(index.shape) == len(x.shape) else [k.coords[d]] if index.shape else []
        row = k.indirect(k.load(index, at), x.shape[d])
        return [row if i == d else c for i, c in enumerate(k.coords)], k.load(new) if isinstance(new, View) else new

    return term


@rule("embedding_dense_backward")
def embedding_dense_backward(
    cx: LoweringContext, grad: View, indices: View, rows: Any, padding: int, scale_grad_by_freq: bool
) -> View:
    if scale_grad_by_freq:
        raise Unsupported("library call")

    def row(k: NestBuilder) -> tuple[Value, Expr]:
        index = k.load(indices, k.coords[: len(indices.shape)]).to(torch.int64)
        return index, k.indirect(index, rows)

    def term(k: NestBuilder) -> tuple[Sequence[IntLike], Scalar]:
        (index, at), value = row(k), k.load(grad)
        return [at, k.coords[-1]], value if padding < 0 else where(index.ne(padding), value, 0)

    if (out := segment_sums(cx, None, indices, grad, padding)) is not None:
        return out
    return accumulate(cx, None, grad.shape, term, (indices.shape, lambda k: row(k)[1]))


def _by_slots(
    cx: LoweringContext, shape: Sequence[IntLike], term: Term, named: Sequence[Expr], row: Callable[[NestBuilder], Expr]
) -> View:
    """``accumulate`` of rows into zeros, of which most stay: as many rows are summed as there are indices, not as the
    result has, and one that stays zero. Of the positions of one row any may win, and all add to its sums::

        slot[:] = n;  slot[index[i]] = i;  sums[slot[index[i]]] += new[i];  out[v] = sums[slot[v]]

    (A vocabulary of 51,865 x 384 and 512 tokens: 80 MB of float32 would be filled and read, of which 0.8 are sums.)"""
    slot, few = cx.temp("slot", cx.shape[:1], torch.int32), product(named)
    fill(cx, slot, few)
    k = NestBuilder(cx, named)
    k.store(slot, k.index(k.linear(range(len(k.shape)))), [row(k)])
    k.finish()
    sums = cx.temp("sums", (few + 1, *cx.shape[1:]), SUMMED_IN[cx.dtype])
    fill(cx, sums, None)
    k = NestBuilder(cx, shape)
    (here, *others), value = term(k)
    at = k.indirect(k.load(slot, [here]), few + 1)
    k.b.store(sums.buffer, k.at(sums, [at, *others]), k.value(value, sums.dtype).id, "atomic")
    k.finish()

    return nest(cx, lambda k: k.load(sums, [k.indirect(k.load(slot, k.coords[:1]), few + 1), *k.coords[1:]]))


def scatter_add(cx: LoweringContext, x: View, dim: int, index: View, new: View) -> View:
    """One position per row needs no atomics: each element of the row is compared with it. (The rule: ``scatter``.)"""
    if not one_per_row(x, dim, index):
        if (out := sorted_rows(cx, x, dim, index, new)) is not None:
            return out
        return accumulate(cx, x, index.shape, scattered(x, index.shape, dim, index, new))

    def value(k: NestBuilder) -> Value:
        here, at = here_and_at(k, x, dim, index)
        old = k.load(x)
        return where(here, old + k.load(new, at).to(old.dtype), old)

    return nest(cx, value)


@rule("scatter_reduce")
def scatter_reduce(
    cx: LoweringContext, x: View, dim: int, index: View, new: View, reduce: str, *, include_self: bool = True
) -> View:
    """Sums and means. Without ``x`` itself among the terms, it stays where there are none: so they are counted."""
    if reduce not in ("sum", "mean") or reduce == "mean" and not cx.dtype.is_floating_point:
        raise Unsupported("library call")
    terms = scattered(x, index.shape, dim, index, new)
    if reduce == "sum" and (include_self or cx.low.uniform.get(x.buffer) == 0):
        out = sorted_rows(cx, x, dim, index, new)
        return accumulate(cx, x, index.shape, terms) if out is None else out
    sums, start = None, x
    if cx.low.options.batch_invariant and possible(cx, torch.int32):  # the terms are counted by atomic additions
        if not include_self:
            start = summing(cx, "zeros", cx.dtype)
            fill(cx, start, None)
        sums = sorted_rows(replace(cx, name=cx.low.unique(f"{cx.name}_sums")), start, dim, index, new)
    dtype = SUMMED_IN[cx.dtype] if sums is not None else check(cx)
    if sums is None:
        sums = add(cx, summing(cx, "sums", dtype), x if include_self else 0, index.shape, terms)
    ones = scattered(x, index.shape, dim, index, 1)
    counts = add(cx, summing(cx, "counts", torch.int32), int(include_self), index.shape, ones)

    def value(k: NestBuilder) -> Value:
        total, count = k.load(sums).to(dtype), k.load(counts)
        result = total / count.to(dtype) if reduce == "mean" else total
        return where(count > 0, result, k.load(x).to(dtype))

    return nest(cx, value)
