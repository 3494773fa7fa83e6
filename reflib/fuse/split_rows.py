"""A reduction over all of a tensor whose elements need a statistic of their row: first the rows, then over the rows.

The mean over a batch of a divergence of two distributions sums ``f(i, r)`` over rows and columns, where ``f`` needs row
``i``'s maximum and sum of exponentials. Cut into pieces of equal size (``split``), its first step has other axes than
the kernel that makes these, and the row is read again. Instead::

    y = sum_{i, r} f(i, r)     becomes     of_rows[i] = sum_r f(i, r);  y = sum_i of_rows[i]

whose first step is one more reduction of the row, in the statistics' kernel. What it stores, a number per row, is read
by the second step, which ``split`` may cut.
"""

from __future__ import annotations

from dataclasses import replace

from ..ir.expr import product
from ..ir.loops import Axis, BodyBuilder, LoopNest, Reduce, map_stmt
from ..ir.program import Buffer, Node, Program
from ..ir.transforms import eliminate_dead, needed, varying
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies
from .mapping import fresh
from .result import Fused
from .split import can_split, row_major

_KINDS = ("sum", "prod", "max", "min", "any", "all")


def split_rows(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, such reductions in two steps. GPU only: a thread of a CPU takes many rows."""
    if not options.split_reductions or not target.is_gpu:
        return fused
    program, buffers = fused.program, dict(fused.program.buffers)
    depends = dependencies(program)
    nodes: list[Node] = []
    for position, node in enumerate(program.nodes):
        rows = _rows(program, depends, position, node) if isinstance(node, LoopNest) else 0
        if isinstance(node, LoopNest) and rows and product(a.size for a in node.axes[:rows]).hint() >= 2 * target.units:
            nodes += _two_steps(node, rows, buffers)
        else:
            nodes.append(node)
    return replace(fused, program=replace(program, nodes=tuple(nodes), buffers=buffers))


def _rows(program: Program, depends: Dependencies, position: int, loops: LoopNest) -> int:
    """How many of the first axes are rows of which a statistic is needed: all are reduced. 0: none."""
    kinds = [s.kind for s in loops.body if isinstance(s, Reduce)]
    if len(loops.reduced) < 2 or loops.parallel or not set(kinds) <= set(_KINDS) or not can_split(loops):
        return 0
    sizes = [a.size for a in loops.axes]
    todo, seen = [position], set[int]()
    while todo:
        at = todo.pop()
        for name in program.nodes[at].reads():
            writer = depends.last_writer(name, at)
            maker = None if writer is None else program.nodes[writer]
            if writer is None or writer in seen or not isinstance(maker, LoopNest):
                continue
            seen.add(writer)
            own = [a.size for a in maker.axes]
            if maker.reduced and own == sizes and maker.parallel and maker.axes[-1].kind == "r":
                return len(maker.parallel)
            if not maker.reduced and own in (sizes, sizes[: len(own)]):
                todo.append(writer)
    return 0


def _two_steps(loops: LoopNest, rows: int, buffers: dict[str, Buffer]) -> list[Node]:
    axes = tuple(replace(a, kind="p") if i < rows else a for i, a in enumerate(loops.axes))
    shape = tuple(a.size for a in axes[:rows])
    strides = tuple(product(shape[d + 1 :]) for d in range(rows))
    first, second = BodyBuilder(), BodyBuilder()
    over = [Axis(fresh(size), "r") for size in shape]
    ids, later = dict[int, int](), dict[int, int]()
    level = varying(loops.body, loops.reduced_vars)
    reduces = [i for i, s in enumerate(loops.body) if isinstance(s, Reduce)]
    for i in needed(loops.body, reduces):
        s = loops.body[i]
        ids[i] = first.add(map_stmt(s, ids))
        if isinstance(s, Reduce):
            name = f"{loops.name}_of_rows{len(later)}"
            device = buffers[loops.writes()[0]].device
            buffers[name] = Buffer(name, s.dtype, device, shape, strides)
            first.store(name, row_major(axes[:rows]), ids[i])
            later[i] = second.reduce(s.kind, second.load(name, row_major(over), s.dtype), dtype=s.dtype)
    for i, s in enumerate(loops.body):
        if i not in later and not level[i]:
            later[i] = second.add(map_stmt(s, later))
    made = LoopNest(f"{loops.name}_rows", axes, eliminate_dead(tuple(first.body)), loops.origins)
    return [made, LoopNest(loops.name, tuple(over), eliminate_dead(tuple(second.body)), loops.origins)]
