"""One element of a row that a scan or a sort has in registers: a reduction over the row, in the same kernel.

``c.gather(-1, k)`` of a cumulative sum ``c``, or ``c[:, -1:]``, reads one element of each row where the scan's program
had all of it. It reads at another element than was written, so it was a second kernel, and all of ``c`` went through
memory for it. What a scan makes cannot be computed again at one place, as an elementwise producer is
(``inline_loads``); but a row that is at hand can be searched for its element::

    y[i] = c[i, k[i]]     becomes     y[i] = max_r (c[i, r] if r == k[i] else -inf)

A maximum, since it keeps any bits there are, where a sum would lose -0.0. The row may also be an elementwise
function of a scan's. That pays where the reduction fuses, so it is asked; and where rows are short: else one sector is
read by itself for less than the search takes.

NB: TorchInductor stores the row and gathers in another kernel.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..ir.expr import Expr, Ref, Var, expr
from ..ir.loops import Axis, BodyBuilder, Index, Load, LoopNest, Scan, map_stmt
from ..ir.ops import identity
from ..ir.program import Node
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies
from .inline_loads import makes_all
from .legality import common_space, single
from .mapping import fresh
from .result import Fused, Reason

LONGEST = 512  # elements of a row

Rows = dict[str, tuple[int, int]]  # of buffers whose rows a scan made: the stride along a row, and its length


def picks(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, such loads as reductions. GPU only. Assumes a legal order."""
    nodes = list(fused.program.nodes)
    if not target.is_gpu or not any(isinstance(n, LoopNest) and _scans(n) for n in nodes):
        return fused
    depends, rows = dependencies(fused.program), Rows()
    for i, node in enumerate(nodes):
        if not isinstance(node, LoopNest):
            continue
        if not node.reduced:
            nodes[i] = node = _picked(nodes, i, node, rows, depends)
        v = _along(node, rows)
        for s in node.stores():
            stride = None if v is None else s.index.coefficient(v)
            if v is not None and stride is not None and stride.constant and makes_all(fused.program, node, s):
                rows[s.buffer] = int(stride), int(v.size)
    return replace(fused, program=replace(fused.program, nodes=tuple(nodes)))


def _scans(loops: LoopNest) -> bool:
    return any(isinstance(s, Scan) for s in loops.body)


def _along(loops: LoopNest, rows: Rows) -> Var | None:
    """The axis along which ``loops`` scans short rows, or reads those of a scan."""
    if _scans(loops):
        v = loops.reduced[0].var
        return v if v.size.constant is not None and v.size.constant <= LONGEST else None
    if loops.reduced:
        return None
    read = [(s.index, rows[s.buffer]) for s in loops.loads() if s.buffer in rows]
    return next((a.var for index, row in read for a in loops.axes if _is_along(a, index, row)), None)


def _is_along(a: Axis, index: Expr, row: tuple[int, int]) -> bool:
    return a.size == row[1] and index.coefficient(a.var) == row[0]


def _pick(loops: LoopNest, s: Load, row: tuple[int, int]) -> Expr | None:
    """The position in its row of the one element that ``s`` reads at a point; None if it reads otherwise."""
    stride, n = row
    if s.mask is not None or any(_is_along(a, s.index, row) for a in loops.axes):
        return None
    refs = [a for a in s.index.atoms() if isinstance(a, Ref)]
    if refs:
        return expr(refs[0]) if s.index.coefficient(refs[0]) == stride and refs[0].size == n else None
    for a in loops.axes:
        step = s.index.coefficient(a.var)
        if step is None or step.constant is None or a.size.constant is None and step.constant < stride:
            return None
        if step.constant % (stride * n) and step.constant * (a.size.constant or 1) > stride:
            return None  # along a part of a row
    start = s.index.subs({a.var: 0 for a in loops.axes}).constant
    return None if start is None else expr(start // stride % n)


def _picked(nodes: list[Node], i: int, loops: LoopNest, rows: Rows, depends: Dependencies) -> LoopNest:
    """``loops`` with the loads that pick an element as reductions, if it then fuses with what made these."""
    found = {j: s for j, s in enumerate(loops.body) if isinstance(s, Load) and s.buffer in rows}
    places = {j: p for j, s in found.items() if (p := _pick(loops, s, rows[s.buffer])) is not None}
    if not places or len({rows[found[j].buffer][1] for j in places}) > 1:
        return loops
    some = found[next(iter(places))].buffer
    r = fresh(expr(rows[some][1]))
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for j, s in enumerate(loops.body):
        if j in places:
            stride, dtype = rows[found[j].buffer][0], found[j].dtype
            row = replace(found[j], index=found[j].index + (expr(r) - places[j]) * stride)
            here = b.op("eq", b.index(expr(r)), b.add(map_stmt(Index(places[j], torch.int64), ids)))
            value = b.op("where", here, b.add(map_stmt(row, ids)), b.const(identity("max", dtype), dtype))
            ids[j] = b.reduce("max", value, dtype=dtype)
        else:
            ids[j] = b.add(map_stmt(s, ids))
    new = replace(loops, axes=(*loops.axes, Axis(r, "r")), body=tuple(b.body))
    maker = depends.last_writer(some, i)
    fits = maker is not None and isinstance(m := nodes[maker], LoopNest) and common_space(
        single(maker, m, depends), single(i, new, depends)
    )
    return new if fits and not isinstance(fits, Reason) else loops
