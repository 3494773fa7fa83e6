"""Elementwise work that reads a scan's results from their end goes through its own points from their end.

The gradient of a cumulative sum is a cumulative sum from the end: ``g.flip(1).cumsum(1).flip(1)``. The first flip is
an index; the second reads element n - 1 - i where the scan made element i, so that no common iteration space exists
and the scan's results went through memory. The points of an elementwise node may be visited in any order::

    y[i] = scan[n - 1 - i] * w[i]     becomes     y[n - 1 - i] = scan[i] * w[n - 1 - i]

and the readers of ``y`` likewise, which can then all be in the scan's kernel.
"""

from dataclasses import replace

from ..ir.expr import Var, expr
from ..ir.loops import LoopNest, Scan
from ..ir.program import Node, Program
from ..ir.transforms import substitute
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies
from .mapping import match
from .result import Fused, Reason


def reverse(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program, such nodes written from the end. Assumes a legal order."""
    nodes = list(fused.program.nodes)
    if not any(_scans(n) for n in nodes):
        return fused
    depends = dependencies(fused.program)
    turned = set[int]()
    for i, node in enumerate(nodes):
        if not isinstance(node, LoopNest) or node.reduced:
            continue
        writers = {depends.last_writer(b, i) for b in node.reads()} - {None}
        makers = {w: m for w in writers if w is not None and isinstance(m := nodes[w], LoopNest)}
        v = next((v for w, m in makers.items() if (w in turned or _scans(m)) and (v := _backwards(node, m))), None)
        if v is None or _reduced_later(nodes, depends, i):
            continue
        others = (m for m in makers.values() if _along(node, m, v) and _backwards(node, m) != v)
        if all(_inlined(m, i, fused.program, depends) for m in others):
            nodes[i] = replace(node, body=substitute(node.body, {v: v.size - 1 - expr(v)}))
            turned.add(i)
    return replace(fused, program=replace(fused.program, nodes=tuple(nodes))) if turned else fused


def _reduced_later(nodes: list[Node], depends: Dependencies, position: int) -> bool:
    """Does a reduction read what ``position`` makes? Its rows have other operands, which would be read from the end."""
    todo, seen = [position], set[int]()
    while todo:
        for r in (r for b in nodes[todo.pop()].writes() for r in depends.readers.get(b, []) if r not in seen):
            reader = nodes[r]
            if isinstance(reader, LoopNest) and reader.reduced and not _scans(reader):
                return True
            seen.add(r)
            todo += [r] if isinstance(reader, LoopNest) and not reader.reduced else []
    return False


def _inlined(maker: LoopNest, position: int, program: Program, depends: Dependencies) -> bool:
    """Will ``inline_loads`` compute ``maker``, of inputs, where it is read, in whichever direction? In its one reader,
    or in each one, if the inputs are no larger than its result (they are cast)."""
    if maker.reduced or any(b in depends.writers for b in maker.reads()) or depends.needed & set(maker.writes()):
        return False
    read, made = (sum(program.buffers[b].nbytes.hint() for b in set(x)) for x in (maker.reads(), maker.writes()))
    return read <= made or all(depends.readers.get(b) == [position] for b in maker.writes())


def _scans(node: Node) -> bool:
    return isinstance(node, LoopNest) and any(isinstance(s, Scan) for s in node.body)


def _backwards(node: LoopNest, maker: LoopNest) -> Var | None:
    """The one axis that ``node`` must go through from its end to read each element where ``maker`` made it."""
    for store in maker.stores():
        for index in {s.index for s in node.loads() if s.buffer == store.buffer}:
            if isinstance(match(maker.axes, store.index, node.axes, index), Reason):
                for v in (a.var for a in node.axes if index.has(a.var)):
                    turned = index.subs({v: v.size - 1 - expr(v)})
                    if not isinstance(match(maker.axes, store.index, node.axes, turned), Reason):
                        return v
    return None


def _along(node: LoopNest, maker: LoopNest, v: Var) -> bool:
    return any(s.index.has(v) for s in node.loads() if s.buffer in maker.writes())
