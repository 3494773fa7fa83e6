"""What a kernel stores twice, to a temporary and at the same index to another tensor, is stored once.

An elementwise update of an input joins the copy onto the input; where a call reads the new value, that was stored too::

    add[i] = state[i] = 0.9 * state[i] + k[i] * v[i]           state[i] = 0.9 * state[i] + k[i] * v[i]
    bmm(q, add)                                                bmm(q, state)

Nothing may write to the other tensor before the temporary is read for the last time, and no result be in its memory.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from ..ir.expr import Expr, nonneg
from ..ir.loops import LoopNest, Store
from ..ir.program import Extern, Node, Program, Template
from ..ir.rename import renamed
from ..ir.transforms import select
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, used_buffers
from .in_place import may_alias
from .result import Fused


def store_once(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. Assumes a legal order."""
    program, depends = fused.program, dependencies(fused.program)
    names: dict[str, str] = {}
    for position, node in enumerate(program.nodes):
        for old, new in sorted(_twice(node), key=lambda pair: program.buffers[pair[1]].kind == "temp"):
            moved = {old, new} & names.keys() or old in names.values()
            if not moved and _may_move(program, depends, position, old, new):
                names[old] = new
    if not names:
        return fused
    nodes = [_without(n, names) for n in program.nodes]
    nodes = [n if names.keys().isdisjoint(n.reads()) else renamed([n], (), names)[0][0] for n in nodes]
    return fused.regrouped(replace(program, nodes=tuple(nodes), buffers=used_buffers(program, nodes)))


def _twice(node: Node) -> Iterator[tuple[str, str]]:
    """Pairs of buffers: all that it stores to the first, it stores to the second at the same index, too."""
    loops = node.epilogue if isinstance(node, Template) else node
    if isinstance(loops, LoopNest):
        stores = loops.stores()
        reduced = {s.buffer for s in stores if s.reduce}
        stored: dict[str, set[tuple[int, Expr]]] = {s.buffer: set() for s in stores if s.buffer not in reduced}
        for s in stores:
            if s.buffer in stored:
                stored[s.buffer].add((s.value, s.index))
        yield from (pair for pair in itertools.permutations(stored, 2) if stored[pair[0]] <= stored[pair[1]])


def _may_move(program: Program, d: Dependencies, position: int, old: str, new: str) -> bool:
    a, b = program.buffers[old], program.buffers[new]
    readers = d.readers.get(old, [])
    if a.kind != "temp" or old in d.needed or d.writers[old] != [position] or not readers:
        return False
    if (a.dtype, a.device) != (b.dtype, b.device) or not nonneg(b.extent - a.extent):
        return False
    if any(position < w <= readers[-1] for w in d.writers[new]) or d.writers[new].count(position) > 1:
        return False
    nodes = (program.nodes[r] for r in readers)
    return all(isinstance(n, LoopNest | Template) or isinstance(n, Extern) and not may_alias(n.target) for n in nodes)


def _without(node: Node, names: dict[str, str]) -> Node:
    """``node`` without its stores to buffers in ``names``."""
    if isinstance(node, Template):
        epilogue = _without(node.epilogue, names)
        assert isinstance(epilogue, LoopNest)
        return replace(node, epilogue=epilogue)
    if not isinstance(node, LoopNest) or names.keys().isdisjoint(node.writes()):
        return node
    kept = (i for i, s in enumerate(node.body) if not (isinstance(s, Store) and s.buffer in names))
    return replace(node, body=select(node.body, kept))
