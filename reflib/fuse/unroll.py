"""A reduction over a few elements whose results another reduction needs, or of columns: written out.

The squared distance of two points is a sum over three coordinates; the distance to the nearest point is a minimum of
these. One kernel has one set of rows, so as two reductions they are two kernels, and all the distances go through
memory. Written out, the first is elementwise, and both are one kernel::

    d[i, j] = sum_c (x[i, c] - y[j, c])^2     becomes     d[i, j] = (x[i, 0] - y[j, 0])^2 + (x[i, 1] - y[j, 1])^2 + ...

It is joined to its readers, or computed again in each of them, like other elementwise work. The elementwise nodes that
make its operand alone go into it first; they are computed as often as before. A short reduction whose readers reduce
the same rows (a norm of 4 features), or put its result back beside each element, stays one.

A bag of embeddings sums columns: neighbouring results come from neighbouring elements. As a reduction it has blocks of
256 x 4, in which Triton exchanges what it loads, and adds up, through shared memory: 240 instructions per warp for 256
results. Elementwise, it takes 130 for 1024. So columns are written out, unless others use what they reduce.

NB: TorchInductor writes out each reduction of fewer than 8 elements while lowering.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ..ir.expr import Atom, IntLike
from ..ir.loops import Axis, BodyBuilder, Indirect, Load, LoopNest, Op, Reduce, Scan, map_stmt
from ..ir.program import Program
from ..ir.transforms import two_passes, varying
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, remove_dead
from .inline_loads import MAX_BODY, Producer, make_producer, makes_all, replace_loads
from .legality import common_space, single
from .result import Fused, Reason
from .split import reduces_columns

LONGEST = 8  # elements: from a second row of them on, a thread has their registers twice
MAX_WORK = 96  # loads and operations of one result
FAR = 64  # readers that are looked at
_OPS = {"sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "or", "all": "and", "m2": ""}


def unroll(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, such reductions written out. GPU only: a CPU's kernels vectorize what is left of a row. Not
    with ``batch_invariant``: what reads a sum may depend on the batch, and with it the order of additions."""
    if not target.is_gpu or options.batch_invariant:
        return fused
    program = fused.program
    short = [i for i, n in enumerate(program.nodes) if isinstance(n, LoopNest) and _short(n)]
    if not short:
        return fused
    depends = dependencies(program)
    columns = {i for i in short if _columns(program, depends, i)}
    again = {i for i in short if _reduced_again(program, depends, i)}
    taken = _makers(program, depends, columns | again)
    ours = columns | {p.position for p in taken.values()}
    nodes = list(program.nodes)
    for i in sorted(columns | again):
        loops = _with_makers(nodes[i], taken, depends, i)  # type: ignore[arg-type]
        written_out = unrolled(loops)
        work = sum(isinstance(s, (Load, Op, Indirect)) for s in written_out.body)
        pays = i in again and _moves_less(program, depends, written_out)
        if work <= MAX_WORK and (pays or i in columns and not _shares(program, depends, loops, ours)):
            nodes[i] = written_out
    if all(a is b for a, b in zip(nodes, program.nodes)):
        return fused
    return replace(fused, program=remove_dead(replace(program, nodes=tuple(nodes))))


def _shares(program: Program, depends: Dependencies, loops: LoopNest, ours: set[int]) -> bool:
    """Does another loop nest make or read the elements that it reduces? A reduction may be one kernel with that."""
    every = {a.var for a in loops.axes}
    wide = {s.buffer for s in loops.loads() if s.index.variables() >= every}
    near = {i for b in wide for of in (depends.writers, depends.readers) for i in of.get(b, ())}
    return any(isinstance(program.nodes[i], LoopNest) for i in near - ours)


def _moves_less(program: Program, depends: Dependencies, loops: LoopNest) -> bool:
    """Are fewer bytes that other kernels store read again than the result's store and load take?"""
    made = [program.buffers[b] for b in loops.reads() if b in depends.writers]
    return sum(b.nbytes.hint() for b in made) < 2 * sum(program.buffers[b].nbytes.hint() for b in loops.writes())


def _short(loops: LoopNest) -> bool:
    """Does it reduce a few elements, each result stored once per row?"""
    kinds = {s.kind for s in loops.body if isinstance(s, Reduce)}
    if not kinds or not kinds <= set(_OPS) or any(isinstance(s, Scan) for s in loops.body):
        return False
    if any(s.reduce or s.index.has(v) for s in loops.stores() for v in loops.reduced_vars):
        return False
    n = loops.rnumel.constant
    return n is not None and 1 < n <= LONGEST


def _columns(program: Program, depends: Dependencies, position: int) -> bool:
    """Are neighbouring columns reduced, and does no kernel over as many elements read the results, at once or through
    elementwise nodes?"""
    loops: LoopNest = program.nodes[position]  # type: ignore[assignment]
    points = loops.numel * loops.rnumel
    return reduces_columns(loops) and all(n.numel * n.rnumel != points for n in _readers(program, depends, position))


def _reduced_again(program: Program, depends: Dependencies, position: int) -> bool:
    """Does a reduction over other rows read its results, at once or through elementwise nodes with as many points?"""
    rows = program.nodes[position].numel  # type: ignore[union-attr]
    return any(n.reduced and n.numel != rows for n in _readers(program, depends, position))


def _readers(program: Program, depends: Dependencies, position: int) -> Iterator[LoopNest]:
    """The loop nests that read its results, at once or through elementwise nodes with as many points."""
    rows = program.nodes[position].numel  # type: ignore[union-attr]
    todo, seen = [position], set[int]()
    while todo and len(seen) < FAR:
        for name in program.nodes[todo.pop()].writes():
            for r in depends.readers.get(name, []):
                reader = program.nodes[r]
                if r in seen or r <= position or not isinstance(reader, LoopNest):
                    continue
                seen.add(r)
                yield reader
                if not reader.reduced and reader.numel == rows:
                    todo.append(r)


def _makers(program: Program, depends: Dependencies, chosen: set[int]) -> dict[str, Producer]:
    """By what they write: elementwise nodes that only ``chosen`` and others of these read, where they write it."""
    found: dict[str, Producer] = {}
    inside = set(chosen)
    for i in range(max(chosen, default=-1), -1, -1):
        node = program.nodes[i]
        if not isinstance(node, LoopNest) or node.reduced or len(node.stores()) != 1 or i in inside:
            continue
        store = node.stores()[0]
        readers = depends.readers.get(store.buffer, [])
        if store.buffer in depends.needed or store.reduce or not readers or not inside.issuperset(readers):
            continue
        if len(depends.writers[store.buffer]) != 1 or not makes_all(program, node, store):
            continue
        alike = (common_space(single(i, node, depends), single(r, program.nodes[r], depends)) for r in readers)  # type: ignore[arg-type]
        producer = make_producer(i, node, store)
        if producer is not None and not any(isinstance(m, Reason) for m in alike):
            found[store.buffer] = producer
            inside.add(i)
    return found


def _with_makers(loops: LoopNest, makers: dict[str, Producer], depends: Dependencies, position: int) -> LoopNest:
    while names := [n for n in loops.reads() if n in makers]:
        p = makers[names[0]]
        if any(depends.written_between(b, p.position, position + 1) for b in p.loops.reads()):
            break
        new = replace_loads(loops, p)
        if len(new.body) > MAX_BODY:
            break
        loops = new
    return loops


def unrolled(loops: LoopNest) -> LoopNest:
    """Without its reduced axes, whose sizes are constants: each statement once per element of these."""
    loops = two_passes(loops)
    level = varying(loops.body, loops.reduced_vars)
    ranges = [[(a.var, n) for n in range(a.size.constant or 0)] for a in loops.reduced]
    points: list[dict[Atom, IntLike]] = [dict(p) for p in product(*ranges)]
    b = BodyBuilder()
    ids: list[dict[int, int]] = [{} for _ in points]
    for i, s in enumerate(loops.body):
        if isinstance(s, Reduce):
            total = b.cast(ids[0][s.args[0]], s.dtype)
            for at in ids[1:]:
                total = b.op(_OPS[s.kind], total, b.cast(at[s.args[0]], s.dtype))
            new = [total] * len(points)
        elif level[i]:
            new = [b.add(map_stmt(s, at, point)) for at, point in zip(ids, points)]
        else:
            new = [b.add(map_stmt(s, ids[0]))] * len(points)
        for at, value in zip(ids, new):
            at[i] = value
    return LoopNest(loops.name, tuple(Axis(a.var, "p") for a in loops.parallel), tuple(b.body), loops.origins)
