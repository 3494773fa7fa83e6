"""Rows whose elements one tensor has side by side, and another across: their axes in the order of the first.

Patches of an image become rows that are normalized (channels last, 2 x 2 pixels each)::

    load x[n, c, 2h + i, 2w + j]        of a row (i, j, c), two elements are neighbours: j
    store y[n, h, w, i, j, c]           all are

A warp whose lanes go along a row reads 32 lines of ``x`` for 64 elements or fewer, in whatever order it takes them;
lanes that go along rows (w) read two. Triton lays out each access by itself, through shared memory, so the order of a
row's axes is that of the accesses for which lanes go along the row; j innermost, as fits ``x`` best, would leave each
store in pieces. ``schedule`` takes the cheapest order of the axes that there are, so here they become one.
(``schedule.uneven`` then has a warp's lanes go along rows where an access has no neighbours in either direction.)

**Of longer rows** a program holds one at a time, so what is stored across them (a transposed copy of what is quantized,
and its largest magnitude) touches a sector per element: a kernel of its own reads it again, and goes through tiles
(``transposed_rule``).
"""

from dataclasses import replace

from ..ir.expr import Var, product
from ..ir.loops import Axis, LoopNest, Scan
from ..ir.program import Program
from ..ir.traffic import CLOSE, LANES, Access, accesses, cheapest_last, neighbours
from ..ir.transforms import substitute, unflattened
from ..options import Options
from ..target import Target
from .legality import Cluster, FusionContext
from .result import Fused, Reason

LONGEST = 4096  # elements of a row, which stays in registers
FEWER = 0.5  # of the sectors: lanes that go along rows
ACROSS = 4  # times the sectors


def row_order(fused: Fused, options: Options, target: Target) -> Fused:
    """The same kernels, on a GPU, such rows with one axis each."""
    if not target.is_gpu:
        return fused
    return fused.mapped(lambda n: one_axis(n, fused.program))


def one_axis(loops: LoopNest, program: Program) -> LoopNest:
    """``loops`` with one reduced axis for several, where accesses differ in which side they have neighbours on, and one
    order suits all that have them along the row."""
    n = loops.rnumel.constant
    if len(loops.reduced) < 2 or n is None or n > LONGEST or any(isinstance(s, Scan) for s in loops.body):
        return loops
    both = [
        a for a in accesses(loops.body, program.buffers) if _varies(a, loops.reduced) and _varies(a, loops.parallel)
    ]
    lanes = neighbours(cheapest_last(loops.parallel, both), LANES)
    along = [a for a in both if not a.sectors(lanes) < FEWER * _least(a, loops.reduced)]
    order = cheapest_last(loops.reduced, along)
    suits = all(a.sectors(neighbours(order, LANES)) <= CLOSE * _least(a, loops.reduced) for a in along)
    if not along or not suits or order == cheapest_last(loops.reduced, accesses(loops.body, program.buffers)):
        return loops
    row = Var("row", loops.rnumel)
    body = substitute(loops.body, unflattened(order, row))
    return replace(loops, axes=(*loops.parallel, Axis(row, "r")), body=body)


def _varies(a: Access, axes: tuple[Axis, ...]) -> bool:
    return any(a.varies(x.var) for x in axes)


def _least(a: Access, rows: tuple[Axis, ...]) -> float:
    """Sectors that a warp along the row touches, in the order that suits ``a`` best."""
    return a.sectors(neighbours(cheapest_last(rows, [a]), LANES))


def transposed_rule(a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
    """No reduction of long rows goes with work after it, or beside it, that transposes."""
    if a.reduces == b.reduces or not c.target.is_gpu or a.template is not None:
        return None
    rows, other = (a, b) if a.reduces else (b, a)
    length = product(x.size for x in rows.axes if x.kind == "r").hint()
    if length <= LONGEST or other.writes.keys() & rows.reads.keys():
        return None
    if not any(_transposes(loops, c.program) for _, loops, _ in other.parts):
        return None
    return Reason("rows", f"rows of {length}: what has neighbours across them goes through tiles on its own")


def _transposes(loops: LoopNest, program: Program) -> bool:
    """Is there no order of the axes in which a warp touches few sectors of each tensor?"""
    both = [a for a in accesses(loops.body, program.buffers) if sum(a.varies(x.var) for x in loops.axes) > 1]
    lanes = neighbours(cheapest_last(loops.axes, both), LANES)
    return any(a.sectors(lanes) > ACROSS * _least(a, loops.axes) for a in both if not a.loaded)
