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

import itertools
from dataclasses import replace

import torch

from ..ir.expr import Expr, Ref, Var, expr
from ..ir.loops import Axis, BodyBuilder, Index, Load, LoopNest, Scan, map_stmt, stmt_exprs
from ..ir.ops import identity
from ..ir.program import Buffer, Node
from ..ir.transforms import eliminate_dead, needed
from ..lower.context import contiguous_strides
from ..options import Options
from ..target import Target
from .dependencies import dependencies
from .legality import common_space, single
from .mapping import fresh
from .producers import makes_all
from .result import Fused, Reason
from .split import row_major

LONGEST = 1024  # elements of a row

Rows = dict[str, tuple[int, int]]  # of buffers whose rows a scan made: the stride along a row, and its length


def picks(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, each such load as a reduction before its loop nest. GPU only. Assumes a legal order."""
    program = fused.program
    if not target.is_gpu or not any(isinstance(n, LoopNest) and _scans(n) for n in program.nodes):
        return fused
    depends, rows = dependencies(program), Rows()
    buffers, out = dict(program.buffers), list[Node]()
    for i, node in enumerate(program.nodes):
        if isinstance(node, LoopNest):
            body = list(node.body)
            for name in node.reads() if not node.reduced else ():
                maker = depends.last_writer(name, i) if name in rows else None
                scanned = None if maker is None else program.nodes[maker]
                if maker is None or not isinstance(scanned, LoopNest):
                    continue
                found = _picked(node, name, rows[name], buffers)
                own = single(maker, scanned, depends)
                if any(isinstance(common_space(own, single(i, p, depends)), Reason) for p, _ in found.values()):
                    continue
                for j, (pick, made) in found.items():
                    buffers[made.name] = made
                    body[j] = Load(made.name, pick.stores()[0].index, body[j].dtype)  # type: ignore[union-attr]
                    out.append(pick)
            node = replace(node, body=eliminate_dead(tuple(body)))
            v = _along(node, rows)
            for w in node.stores():
                stride = None if v is None else w.index.coefficient(v)
                if v is not None and stride is not None and stride.constant and makes_all(program, node, w):
                    rows[w.buffer] = int(stride), int(v.size)
        out.append(node)
    return replace(fused, program=replace(program, nodes=tuple(out), buffers=buffers))


def _picked(
    loops: LoopNest, name: str, row: tuple[int, int], buffers: dict[str, Buffer]
) -> dict[int, tuple[LoopNest, Buffer]]:
    """By statement: a loop nest for each load of a buffer's elements, and what that stores. None, if one of them can be
    no such reduction: the row goes through memory then (and a binary search in it reads all of its places there)."""
    out, taken = dict[int, tuple[LoopNest, Buffer]](), set(buffers)
    for j, s in enumerate(loops.body):
        if isinstance(s, Load) and s.buffer == name and not any(_is_along(a, s.index, row) for a in loops.axes):
            place = _pick(loops, s, row)
            if place is None:
                return {}
            own = next(n for k in itertools.count() if (n := f"{loops.name}_element{k}") not in taken)
            taken.add(own)
            out[j] = _searched(own, loops, j, place, row, buffers[name])
    return out


def _scans(loops: LoopNest) -> bool:
    return any(isinstance(s, Scan) for s in loops.body)


def _along(loops: LoopNest, rows: Rows) -> Var | None:
    """The axis along which ``loops`` scans short rows, or reads those of a scan."""
    if _scans(loops):
        v = loops.reduced[0].var
        return v if 0 < (v.size.constant or 0) <= LONGEST else None
    if loops.reduced:
        return None
    read = [(s.index, rows[s.buffer]) for s in loops.loads() if s.buffer in rows]
    return next((a.var for index, row in read for a in loops.axes if _is_along(a, index, row)), None)


def _is_along(a: Axis, index: Expr, row: tuple[int, int]) -> bool:
    return a.size == row[1] and index.coefficient(a.var) == row[0]


def _pick(loops: LoopNest, s: Load, row: tuple[int, int]) -> Expr | None:
    """The position in its row of the one element that ``s`` reads at a point; None if it reads otherwise."""
    stride, n = row
    if s.mask is not None:
        return None
    refs = [a for a in s.index.atoms() if isinstance(a, Ref)]
    if refs:
        return expr(refs[0]) if s.index.coefficient(refs[0]) == stride and refs[0].size == n else None
    for a in loops.axes:
        step = s.index.coefficient(a.var)
        if step is None or step.constant is None or a.size.constant is None and abs(step.constant) < stride:
            return None
        if step.constant % (stride * n) and abs(step.constant) * (a.size.constant or 1) > stride:
            return None  # along a row, or a part of it
    start = s.index.subs({a.var: 0 for a in loops.axes}).constant
    return None if start is None else expr(start // stride % n)


def _searched(
    name: str, loops: LoopNest, j: int, place: Expr, row: tuple[int, int], buffer: Buffer
) -> tuple[LoopNest, Buffer]:
    """A loop nest that stores what the load at ``j`` does, found by a reduction over the row, and what it stores in."""
    r, s = fresh(expr(row[1])), loops.body[j]
    assert isinstance(s, Load)
    b = BodyBuilder()
    ids: dict[int, int] = {}
    for i in needed(loops.body, [j])[:-1]:
        ids[i] = b.add(map_stmt(loops.body[i], ids))
    element = map_stmt(replace(s, index=s.index + (expr(r) - place) * row[0]), ids)
    here = b.op("eq", b.index(expr(r)), b.add(map_stmt(Index(place, torch.int64), ids)))
    value = b.op("where", here, b.add(element), b.const(identity("max", s.dtype), s.dtype))
    value = b.reduce("max", value, dtype=s.dtype)
    axes = [a for a in loops.axes if any(e.has(a.var) for stmt in b.body for e in stmt_exprs(stmt))]
    sizes = tuple(a.size for a in axes)
    made = Buffer(name, buffer.dtype, buffer.device, sizes, contiguous_strides(sizes))
    b.store(name, row_major(axes), value)
    return LoopNest(name, (*axes, Axis(r, "r")), tuple(b.body), loops.origins), made
