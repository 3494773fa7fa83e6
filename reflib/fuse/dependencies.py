"""What must come before what: by storage (read after write, write after read, write after write), by effects, by sizes.

All by position in ``program.nodes``, in one pass over the program.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from ..ir.expr import Sym
from ..ir.loops import Loops
from ..ir.program import Extern, Node, Program, View, symbols_in


@dataclass
class Dependencies:
    """``before[i]``: positions that node i must follow. ``writers``/``readers``: positions, ascending, per buffer.
    ``needed``: buffers that outlive the program (outputs, and every buffer that is not a temp)."""

    before: list[set[int]] = field(default_factory=list)
    writers: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)

    def last_writer(self, buffer: str, position: int) -> int | None:
        """The node that wrote what a reader at ``position`` sees; None for an input as it came."""
        earlier = [w for w in self.writers.get(buffer, ()) if w < position]
        return earlier[-1] if earlier else None

    def readers_before(self, buffer: str, position: int, most: int) -> list[int]:
        """The last few nodes that read ``buffer`` before ``position``."""
        readers = self.readers.get(buffer, [])
        end = bisect_left(readers, position)
        return readers[max(0, end - most) : end]

    def written_between(self, buffer: str, first: int, last: int) -> bool:
        """Does a node after ``first`` and before ``last`` write ``buffer``?"""
        return any(first < w < last for w in self.writers.get(buffer, ()))


def dependencies(program: Program) -> Dependencies:
    """Assumes that ``program.nodes`` is a legal order."""
    d = Dependencies(needed=_needed(program))
    last_write: dict[str, int] = {}
    reads_since: dict[str, list[int]] = {}
    symbol_from: dict[Sym, int] = {}
    last_effect: int | None = None
    for i, node in enumerate(program.nodes):
        before: set[int] = set()
        for b in node.reads():
            if b in last_write:
                before.add(last_write[b])
            reads_since.setdefault(b, []).append(i)
            d.readers.setdefault(b, []).append(i)
        for b in node.writes():
            before.update(reads_since.get(b, ()))
            if b in last_write:
                before.add(last_write[b])
            last_write[b] = i
            reads_since[b] = []
            d.writers.setdefault(b, []).append(i)
        if symbol_from:
            before.update(symbol_from[s] for s in _symbols(program, node) if s in symbol_from)
        if isinstance(node, Extern):
            symbol_from.update((s, i) for s, _, _ in node.symbols)
            if node.effect:
                before.update(() if last_effect is None else (last_effect,))
                last_effect = i
        d.before.append(before - {i})
    return d


def _needed(program: Program) -> set[str]:
    out = program.output_buffers() | {b.name for b in program.buffers.values() if b.kind != "temp"}
    for n in program.nodes:  # what an extern returns may be a view of one of its arguments
        if isinstance(n, Extern):
            out |= {v.buffer for v in n.outputs if isinstance(v, View)}
    return out


def _symbols(program: Program, node: Node) -> set[Sym]:
    out: set[Sym] = set()
    if isinstance(node, Loops):
        out |= set(node.symbols())
    elif isinstance(node, Extern):
        out |= symbols_in((node.args, node.kwargs))
    for b in [*node.reads(), *node.writes()]:
        for e in (*program.buffers[b].shape, *program.buffers[b].strides):
            out |= e.symbols()
    return out
