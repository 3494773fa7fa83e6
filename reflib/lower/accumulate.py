"""Sums into places that tensors name, by atomic additions: the backward of reads at such places.

``x.index_add(0, index, new)`` is two loop nests: one fills the result with ``x``, the other runs over ``new`` and adds
each element where it belongs. The second may compute ``new`` itself. Half dtypes are summed in float32, in a buffer of
its own, and rounded once. Whole rows of these need less: only those that several positions name have sums
(``_by_slots``); each of a few rows of zeros is a sum over all positions (``_by_comparing``). Where many add to one
place, they do it in copies of the result (``_in_copies``).

On a GPU only; on a CPU, and with ``atomics=False``, these ops are calls of ATen. With ``batch_invariant`` rows of
floats are added in their order (``segment_sums``), or by a call of ``index_put`` (``sorted_rows``), which sorts in each
call, where ATen's own ``index_add`` has atomic additions as well, for halves slow ones in 16 bits.
**The order of the additions varies from run to run**, and with it the last bits of floating-point sums, as in
TorchInductor's kernels and in some of eager's (those of ``scatter_add``; those of ``index_put`` and of embeddings sort
first). Under ``torch.use_deterministic_algorithms(True)`` only integers are summed so.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from .segment_sums import contiguous, segment_sums

SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32} | {
    d: d for d in (torch.float32, torch.float64, torch.int32, torch.int64)
}
FEW, WAITING = 8, 64  # rows of the result, and as many that are added to each
CROWD, COPIES = 512, 4 << 20  # additions to one place, on average; bytes
# What is added at one point of a loop nest: (coordinates in the result, value).
Term = Callable[[NestBuilder], tuple[Sequence[IntLike], Scalar]]
Sum = Callable[[LoweringContext, View | None, Sequence[IntLike], Term], View]  # ``accumulate``


@dataclass(frozen=True)
class Rows:
    """Positions that each name a row of the result, ``index``; ``new``: what is added there, of these dimensions and a
    row's. ``wraps``: negative ones count from the end; those of index ``skipped`` are not added. ``lead``: so many
    dimensions of the result number its rows; index names one of the last of them, and where a position is in its own
    first ones, so is its row."""

    index: View
    new: View
    wraps: bool = False
    skipped: int = -1
    lead: int = 1

    @property
    def shape(self) -> tuple[Expr, ...]:
        return self.index.shape

    def named(self, k: NestBuilder) -> tuple[Value, Value | None]:
        """What a point's first dimensions name, and whether anything is added there (None: always)."""
        index = k.load(self.index, k.coords[: len(self.shape)]).to(torch.int64)
        return index, index.ne(self.skipped) if self.skipped >= 0 else None

    def row(self, k: NestBuilder, shape: Sequence[Expr]) -> tuple[Expr, Value | None]:
        """... as a place among the rows of a result of this ``shape``."""
        index, wanted = self.named(k)
        rows = product(shape[: self.lead])
        if self.lead > 1:  # (out of range it would name a row of another batch)
            size = shape[self.lead - 1]
            wanted = (index > -1) & (index < k.index(size))
            index = index + k.index(k.linear(range(self.lead - 1)) * size)
        if wanted is None:
            return k.indirect(index, rows, self.wraps), None
        return k.b.indirect(where(wanted, index, rows).id, rows, wraps=False, skips=True), wanted


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
    zeros = start is None or cx.low.uniform.get(start.buffer) == 0
    if rows is not None and zeros and (few := cx.shape[0].constant) and _waiting(cx, rows, few):
        return _by_comparing(cx, rows, few)
    if rows is not None and _saved_by_slots(cx, rows, dtype) > 0:
        return _by_slots(cx, None if zeros else start, rows)
    if rows is not None and (copies := _copies(cx, rows, dtype)) > 1:
        return _in_copies(cx, start, shape, term, len(rows.shape), copies)
    if dtype == cx.dtype:
        return add(cx, cx.out(), start, shape, term)
    sums = add(cx, summing(cx, "sums", dtype), start, shape, term)
    return nest(cx, lambda k: k.load(sums))


def _saved_by_slots(cx: LoweringContext, rows: Rows, dtype: torch.dtype) -> int:
    """Bytes that ``_by_slots`` need not move, less three launches: a sum of each element, unless that is the result;
    what is added is read twice. None for one row: a dimension of size 1 has no places that could be skipped."""
    many, positions = product(cx.shape[: rows.lead]), product(rows.shape)
    if 1 in (many.constant, positions.constant) or rows.lead > 1 and cx.low.options.assert_indirect_indexing:
        return 0
    all_, added = (product((n, *cx.shape[rows.lead :])).hint() for n in (many, positions))
    return (2 * all_ * dtype.itemsize if dtype != cx.dtype else 0) - 2 * added * cx.dtype.itemsize - 2 * LAUNCH


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

    if how is accumulate and len(used) == 1 and indices[0] is not None and isinstance(values, View):
        rows = Rows(used[0], values, wraps=True) if list(values.shape) == shape else None
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

    return accumulate(cx, x, new.shape, term, _rows(x, dim, index, new) if alpha == 1 else None)


def _rows(x: View, dim: int, index: View, new: View) -> Rows | None:
    """Where ``index`` names whole rows of ``x`` along ``dim``: it has one dimension, or is the same for a row's all
    elements."""
    d, strides = axis(dim, len(x.shape)), index.strides
    if len(new.shape) != len(x.shape) or any(m != n for i, (m, n) in enumerate(zip(new.shape, x.shape)) if i != d):
        return None
    if len(index.shape) == 1 and (len(x.shape) > 1 or index.shape == new.shape):  # (scatter_add's may be shorter)
        strides = (*[expr(0)] * d, *strides)
    elif index.shape != new.shape or d == len(x.shape) - 1 or any(m != 0 for m in strides[d + 1 :]):
        return None
    return Rows(replace(index, shape=new.shape[: d + 1], strides=strides[: d + 1]), new, lead=d + 1)


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
    cx: LoweringContext, grad: View, indices: View, rows: Any, padding_idx: Any, scale_grad_by_freq: bool
) -> View:
    padding = expr(padding_idx).constant
    if scale_grad_by_freq or padding is None:
        raise Unsupported("library call")

    def term(k: NestBuilder) -> tuple[Sequence[IntLike], Scalar]:
        index, value = k.load(indices, k.coords[: len(indices.shape)]).to(torch.int64), k.load(grad)
        at = [k.indirect(index, rows), k.coords[-1]]
        return at, value if padding < 0 else where(index.ne(padding), value, 0)

    if (out := segment_sums(cx, None, indices, grad, padding)) is not None:
        return out
    return accumulate(cx, None, grad.shape, term, Rows(indices, grad, skipped=padding))


def _by_slots(cx: LoweringContext, start: View | None, rows: Rows) -> View:
    """``accumulate`` of rows. Of the positions that name a row, any one wins its slot, and any other one is
    its second; only third and further ones are added atomically, and only rows with a second have sums::

        slot[:] = n;  slot[row[i]] = i                          second[:] = n;  second[slot[row[i]]] = i, if not that
        sums[w] = new[second[w]], where there is one            sums[slot[row[i]]] += new[i], for all others
        out[v] = start[v] + new[slot[v]] + sums[slot[v]], where there are

    (8,192 rows of 1,024 bfloat16 for a vocabulary of 32,000: 131 MB of float32 would be filled and read.)"""
    few, others = product(rows.shape), cx.shape[rows.lead :]
    slot = cx.temp("slot", (product(cx.shape[: rows.lead]),), torch.int32)
    second, sums = cx.temp("second", (few,), torch.int32), cx.temp("sums", (few, *others), SUMMED_IN[cx.dtype])
    new = flat(cx, rows.new, len(rows.shape))
    fill(cx, slot, few)
    fill(cx, second, few)

    def here(k: NestBuilder) -> tuple[Value, Value, Value]:
        """This position; which one has its row's slot; is that another one?"""
        row, wanted = rows.row(k, cx.shape)
        mine, first = k.index(k.linear(range(len(rows.shape)))).to(torch.int32), k.load(slot, [row], wanted, 2**31 - 1)
        return mine, first, first.ne(mine) if wanted is None else first.ne(mine) & wanted

    def at(position: Value, if_: Value) -> Expr:
        """Nothing is stored where that is false."""
        return position.kernel.b.indirect(where(if_, position, few).id, few, wraps=False, skips=True)

    def load(v: View, position: Value, if_: Value) -> Value:
        """Its row there, or zero."""
        k = position.kernel
        return k.load(v, [at(position, if_), *k.coords[-len(others) :][: len(v.shape) - 1]], if_)

    k = NestBuilder(cx, rows.shape)
    k.store(slot, k.index(k.linear(range(len(rows.shape)))), [rows.row(k, cx.shape)[0]])
    k.finish()
    k = NestBuilder(cx, rows.shape)
    mine, first, other = here(k)
    k.store(second, mine, [at(first, other)])
    k.finish()
    k = NestBuilder(cx, sums.shape)
    found = k.load(second, k.coords[:1])
    k.store(sums, load(new, found, found < few), [at(k.index(k.coords[0]).to(torch.int32), found < few), *k.coords[1:]])
    k.finish()
    k = NestBuilder(cx, [*rows.shape, *others])
    mine, first, other = here(k)
    third = other & load(second, first, other).ne(mine)
    columns = k.coords[len(rows.shape) :]
    value = k.load(new, [k.linear(range(len(rows.shape))), *columns], third)
    k.b.store(sums.buffer, k.at(sums, [at(first, third), *columns]), k.value(value, sums.dtype).id, "atomic")
    k.finish()

    def total(k: NestBuilder) -> Value:
        first = k.load(slot, [k.linear(range(rows.lead))])
        any_ = first < few
        more = load(sums, first, any_ & (load(second, first, any_) < few))
        value = load(new, first, any_).to(sums.dtype) + more
        old = 0.0 if start is None else k.load(start).to(sums.dtype)
        return value if start is None else where(any_, value + old, old)  # (-0.0 stays what it is)

    return nest(cx, total)


def _waiting(cx: LoweringContext, rows: Rows, few: int) -> bool:
    """Would additions to one of few places wait for each other?"""
    many = product(rows.shape).hint() >= WAITING * few
    return few <= FEW and many and rows.lead == 1 and not cx.low.options.assert_indirect_indexing


def _by_comparing(cx: LoweringContext, rows: Rows, few: int) -> View:
    """``accumulate`` of many rows into a few zeros: each is the sum of those that name it.

    (Gradients of two token types: 8,192 atomic additions to each number would wait for each other.)"""
    out, dims = cx.out(), len(rows.shape)
    for which in range(few):
        k = NestBuilder(cx, rows.new.shape, range(dims))
        index, wanted = rows.named(k)
        here = index.eq(which) | index.eq(which - few) if rows.wraps else index.eq(which)
        new = where(here if wanted is None else here & wanted, k.load(rows.new).to(SUMMED_IN[cx.dtype]), 0)
        k.store(out, k.reduce("sum", new), [which, *k.coords[dims:]])
        k.finish()
    return out


def _copies(cx: LoweringContext, rows: Rows, dtype: torch.dtype) -> int:
    """Sums beside each other, of which each gets a part of the positions: so many that few wait; 1 where it is few."""
    each = product(rows.shape).hint() // max(1, product(cx.shape[: rows.lead]).hint())
    size = product(cx.shape).constant
    if each < CROWD or not size:  # (of a size that varies, copies might be many times too large)
        return 1
    return max(1, min(each // WAITING, COPIES // (size * dtype.itemsize)))


def _in_copies(
    cx: LoweringContext, start: View | None, shape: Sequence[IntLike], term: Term, dims: int, copies: int
) -> View:
    """``accumulate`` where many points add to one place: into ``copies`` of the result, by a position's number (of its
    first ``dims`` coordinates), which are added up then.

    (270,400 pairs of positions have 32 relative ones: their gradients took 3 ms, 15 ns for each that waits.)"""
    sums = cx.temp("copies", (copies, *cx.shape), SUMMED_IN[cx.dtype])

    def beside(k: NestBuilder) -> tuple[Sequence[IntLike], Scalar]:
        at, value = term(k)
        return [k.linear(range(dims)) % copies, *at], value

    add(cx, sums, None, shape, beside)
    k, out = NestBuilder(cx, sums.shape, (0,)), cx.out()
    total = k.reduce("sum", k.load(sums))
    k.store(out, total if start is None else total + k.load(start, k.coords[1:]).to(sums.dtype), k.coords[1:])
    k.finish()
    return out


def flat(cx: LoweringContext, v: View, dims: int) -> View:
    """``v`` with its first ``dims`` dimensions, of more than one element, as one of a stride; or a copy."""
    lead = [(n, m) for n, m in zip(v.shape[:dims], v.strides) if n != 1]
    apart = lead[-1][1] == 0 or any(a[1] != b[0] * b[1] for a, b in itertools.pairwise(lead))
    if apart and product(v.shape) != 0:
        return flat(cx, contiguous(cx, v), dims)
    return replace(v, shape=(product(v.shape[:dims]), *v.shape[dims:]), strides=(lead[-1][1], *v.strides[dims:]))


def scatter_add(cx: LoweringContext, x: View, dim: int, index: View, new: View) -> View:
    """One position per row needs no atomics: each element of the row is compared with it. (The rule: ``scatter``.)"""
    if not one_per_row(x, dim, index):
        if (out := sorted_rows(cx, x, dim, index, new)) is not None:
            return out
        return accumulate(cx, x, index.shape, scattered(x, index.shape, dim, index, new), _rows(x, dim, index, new))

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
        return accumulate(cx, x, index.shape, terms, _rows(x, dim, index, new)) if out is None else out
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
