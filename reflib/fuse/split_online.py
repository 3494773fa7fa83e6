"""Few, long rows whose maximum and sum of exponentials are wanted: both in one pass over each piece. (Rows of any
stride: columns, too.)

``split`` alone would cut a softmax's maximum, and then its sum, which waits for the maximum of the whole row: the row
is read twice before the first result. But the sum can be taken relative to the piece's own maximum (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018)::

    M[i]   = max_r v(i, r)                    m[i, s] = max_t v           S[i, s] = sum_t f * exp(v - m[i, s])
    y[i]   = sum_r f * exp(v - at(M[i]))      M[i] = max_s m[i, s]        y[i] = sum_s S[i, s] * exp(m[i, s] - at[i])

The first two nodes fuse, as those of a softmax of ``s`` rows more do, and so do the last two. A log-sum-exp then reads
its row once, and a softmax twice: for the statistics and for its result.

**Infinities.** S is relative to 0 where m is infinite. A piece of -inf alone then has S = 0 and, for a finite ``at``,
the weight 0; elsewhere NaN and infinity come out as from the definition. Any ``at`` that is the same along the row is
right; of its being the maximum only the range of the numbers depends.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ir.expr import Atom, Expr, IntLike, expr
from ..ir.loops import BodyBuilder, LoopNest, Op, Reduce, Stmt, map_stmt
from ..ir.program import Buffer, Node
from ..ir.transforms import needed, varying
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies
from .producers import make_producer, makes_all, replace_loads
from .result import Fused
from .split import (
    Cut,
    can_split,
    cut_axis,
    first_step,
    partial_axes,
    pieces_wanted,
    row_major,
    second_step,
    was_split,
    with_axis,
)

MAX_INLINED = 8  # elementwise nodes between v and the sum


@dataclass(frozen=True)
class _Sum:
    """``loops``: with v and the exponential in it. Positions of its sum, its ``v - at``, and ``at``."""

    loops: LoopNest
    total: int
    difference: int
    at: int


def split_online(fused: Fused, options: Options, target: Target) -> Fused:
    """Cut every maximum that ``split`` would cut together with the sums of exponentials that need it; GPU only."""
    if not options.split_reductions or options.batch_invariant or not target.is_gpu:
        return fused
    program = fused.program
    maxima = {i: n for i, n in enumerate(program.nodes) if isinstance(n, LoopNest) and _is_maximum(n)}
    if not maxima:
        return fused
    depends = dependencies(program)
    maxima = {i: _inlined(fused, depends, i, n, copies=True) or n for i, n in maxima.items()}
    wanted = {i: pieces_wanted(n, program.buffers, target) for i, n in maxima.items()}
    if all(pieces == 1 for pieces in wanted.values()):
        return fused
    buffers = dict(program.buffers)
    cut: dict[int, list[Node]] = {}
    for position, node in maxima.items():
        pieces = wanted[position]
        if pieces == 1 or with_axis(node, pieces)[0] is not node:
            continue
        later = range(position + 1, len(program.nodes))
        sums = {j: s for j in later if (s := _sum_at(fused, depends, position, node, j))}
        if sums:
            _, axis, pieces = with_axis(node, pieces)
            made = cut_axis(axis, pieces, alone=len(node.reduced) == 1)
            first, partials = first_step(node, made, buffers)
            cut[position] = [first, second_step(node, made.s.size, partials, buffers)]
            for j, s in sums.items():
                cut[j] = _sum_in_pieces(s, made, first.stores()[0].buffer, buffers)
    nodes = tuple(n for i, node in enumerate(program.nodes) for n in cut.get(i, [node]))
    return replace(fused, program=replace(program, nodes=nodes, buffers=buffers)) if cut else fused


def _is_maximum(loops: LoopNest) -> bool:
    reduces = [s for s in loops.body if isinstance(s, Reduce)]
    alone = len(reduces) == 1 and reduces[0].kind == "max" and reduces[0].dtype.is_floating_point
    return alone and can_split(loops) and not was_split(loops)


def _sum_at(fused: Fused, depends: Dependencies, top: int, maximum: LoopNest, position: int) -> _Sum | None:
    """Node ``position``, if it is a sum of what is to be cut with the maximum at ``top``."""
    node = fused.program.nodes[position]
    if not isinstance(node, LoopNest) or was_split(node) or not can_split(node):
        return None
    kinds = [s.kind for s in node.body if isinstance(s, Reduce)]
    if kinds != ["sum"] or [(a.kind, a.size) for a in node.axes] != [(a.kind, a.size) for a in maximum.axes]:
        return None
    for _ in range(MAX_INLINED):
        found = _matched(maximum, node)
        if found is not None:
            late = any(depends.written_between(b, top, position + 1) for b in maximum.reads())
            return None if late else found
        inlined = _inlined(fused, depends, position, node)
        if inlined is None:
            return None
        node = inlined
    return None


def _inlined(
    fused: Fused, depends: Dependencies, position: int, node: LoopNest, copies: bool = False
) -> LoopNest | None:
    """``node`` with one load along the row replaced by what computed it elementwise. ``copies``: by what was copied (of
    a transposed tensor, whose rows are columns of memory)."""
    for s in node.loads():
        writers = depends.writers.get(s.buffer, [])
        if not s.index.variables() & node.reduced_vars or len(writers) != 1 or writers[0] >= position:
            continue
        writer = fused.program.nodes[writers[0]]
        if not isinstance(writer, LoopNest) or writer.reduced or len(writer.stores()) != 1:
            continue
        if copies and len(writer.body) > 2:
            continue
        if any(not isinstance(x, Op) and not hasattr(x, "buffer") and not hasattr(x, "value") for x in writer.body):
            continue  # loads, constants and ops alone
        if any(depends.written_between(b, writers[0], position + 1) for b in writer.reads()):
            continue
        store = writer.stores()[0]
        producer = make_producer(writers[0], writer, store) if makes_all(fused.program, writer, store) else None
        if producer is not None and not store.reduce:
            return replace_loads(node, producer)
    return None


def _matched(maximum: LoopNest, node: LoopNest) -> _Sum | None:
    """``node`` in the variables of ``maximum``, if it sums exponentials of what that is the maximum of."""
    b = BodyBuilder()
    ids: dict[int, int] = {}
    top = next(s for s in maximum.body if isinstance(s, Reduce))
    for i in needed(maximum.body, top.args):
        ids[i] = b.add(map_stmt(maximum.body[i], ids))
    v = ids[top.args[0]]
    env: dict[Atom, IntLike] = {mine.var: expr(a.var) for mine, a in zip(node.axes, maximum.axes, strict=True)}
    ids = {}
    for i, s in enumerate(node.body):
        ids[i] = b.add(map_stmt(s, ids, env))
    body: tuple[Any, ...] = tuple(b.body)
    level = varying(body, maximum.reduced_vars)
    total = next(i for i, s in enumerate(body) if isinstance(s, Reduce))
    for difference in _differences(body, body[total].args[0]):
        x, at = body[difference].args
        if x == v and not level[at]:
            return _Sum(replace(node, axes=maximum.axes, body=body), total, difference, at)
    return None


def _differences(body: Sequence[Any], i: int) -> Iterator[int]:
    """The ``a - b`` of the exponentials that statement ``i`` is a multiple of."""
    s = body[i]
    if isinstance(s, Op) and s.op == "mul":
        for a in s.args:
            yield from _differences(body, a)
    if isinstance(s, Op) and s.op == "exp" and isinstance(body[s.args[0]], Op) and body[s.args[0]].op == "sub":
        yield s.args[0]


def _sum_in_pieces(s: _Sum, cut: Cut, maxima: str, buffers: dict[str, Buffer]) -> list[Node]:
    dtype = buffers[maxima].dtype

    def from_own(b: BodyBuilder, i: int, st: Stmt) -> Stmt:
        if i != s.difference:
            return st
        assert isinstance(st, Op)
        m = b.load(maxima, row_major(partial_axes(s.loops, cut.s)), dtype)
        return replace(st, args=(st.args[0], b.op("where", b.op("isinf", m), b.const(0, dtype), m)))

    def weight(b: BodyBuilder, index: Expr, ids: dict[int, int]) -> int:
        return b.op("exp", b.op("sub", b.load(maxima, index, dtype), ids[s.at]))

    first, partials = first_step(s.loops, cut, buffers, from_own)
    return [first, second_step(s.loops, cut.s.size, partials, buffers, weight=weight)]
