"""What ``in_place`` reported about inputs, once it is known which kernels there are.

It leaves elementwise updates and chains of slices to fusion: they mostly become one kernel that stores over the input
itself (``same_element``). Then no copy was made, whatever it had refused. Where a kernel cannot, since it reads other
elements than it stores, it stores to a temporary that is copied onto the input at last: that is told.
"""

from collections.abc import Iterator
from dataclasses import replace

from ..ir.loops import Load, LoopNest, Store
from ..ir.program import Node, Program
from ..options import Options
from ..target import Target
from .dependencies import dependencies
from .in_place import Updated
from .result import Fused
from .slices import whole_copy


def copies_left(fused: Fused, options: Options, target: Target) -> Fused:
    """The same program. Inside of loops and branches ``in_place`` knows."""
    program, updates = fused.program, [u for u in fused.updates if isinstance(u, Updated)]
    inputs = {n for n, b in program.buffers.items() if b.kind == "input"}
    told = {u.buffer for u in updates if u.why}
    left = {b: u for b, u in _copied(program, inputs) if b not in told}
    kept = [replace(u, copied=0, why="") if u.why and _gone(program, u, inputs) else u for u in updates]
    return replace(fused, updates=(*kept, *left.values()))


def _gone(program: Program, u: Updated, inputs: set[str]) -> bool:
    """Is there nothing that could be the copy?"""
    if u.buffer not in inputs or not all(isinstance(n, LoopNest) for n in program.nodes):
        return False
    made = {b for n in program.nodes if u.buffer in n.reads() for b in n.writes()} - inputs
    return all(program.buffers[b].nbytes.hint() < u.copied for b in made)


def _copied(program: Program, inputs: set[str]) -> Iterator[tuple[str, Updated]]:
    """Inputs onto which a temporary is copied that was computed from their older elements."""
    d = dependencies(program)
    for node in program.nodes:
        for b, temp in _copies(node):
            makers = [program.nodes[i] for i in d.writers.get(temp, ()) if temp not in inputs]
            whole = program.buffers[temp].numel == program.buffers[b].numel  # (else what is written to a part of it)
            if whole and b in inputs and any(b in m.reads() and isinstance(m, LoopNest) for m in makers):
                of = [o for m in makers for o in m.origins if o.op != "aten.copy_.default"]
                slices = whole_copy(program, makers[0]) is not None
                what = "copies it, for slices to be stored over" if slices else "reads other elements than it stores"
                why = f"{makers[0].name} {what}"
                where = next((o.source for o in reversed(of) if o.source), "")
                size = program.buffers[temp].nbytes.hint()
                yield b, Updated(of[-1].op if of else makers[0].name, b, size, why, where)


def _copies(node: Node) -> Iterator[tuple[str, str]]:
    for s in node.body if isinstance(node, LoopNest) else ():
        value = node.body[s.value] if isinstance(node, LoopNest) and isinstance(s, Store) else None
        if isinstance(s, Store) and isinstance(value, Load) and not s.reduce:
            yield s.buffer, value.buffer
