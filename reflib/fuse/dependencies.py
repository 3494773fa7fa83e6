"""What must run before what: by storage (read after write, write after read, write after write), by effects, by sizes.

All by position in ``program.nodes``, in one pass over the program. A Choice or a Variants is one node: all that is
inside it (``inside``) counts as its own.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from ..ir.expr import Sym
from ..ir.loops import LoopNest
from ..ir.program import (
    Buffer,
    Choice,
    Extern,
    KernelNode,
    Node,
    Program,
    Template,
    Variants,
    View,
    full_view,
    node_symbols,
    symbols_in,
)


@dataclass
class Dependencies:
    """``before[i]``: positions that node i must follow. ``writers``/``readers``: positions, ascending, per buffer.
    ``needed``: buffers that outlive the program (outputs, and every buffer that is not a temp)."""

    before: list[set[int]] = field(default_factory=list)
    writers: dict[str, list[int]] = field(default_factory=dict)
    readers: dict[str, list[int]] = field(default_factory=dict)
    needed: set[str] = field(default_factory=set)

    def last_writer(self, buffer: str, position: int) -> int | None:
        """The node that wrote what is read at ``position``; None for an input that was not written."""
        return max((w for w in self.writers.get(buffer, ()) if w < position), default=None)

    def readers_before(self, buffer: str, position: int, most: int) -> list[int]:
        """The last few nodes that read ``buffer`` before ``position``."""
        readers = self.readers.get(buffer, [])
        end = bisect_left(readers, position)
        return readers[max(0, end - most) : end]

    def written_between(self, buffer: str, first: int, last: int) -> bool:
        """Does a node after ``first`` and before ``last`` write ``buffer``?"""
        return any(first < w < last for w in self.writers.get(buffer, ()))


def dependencies(program: Program) -> Dependencies:
    """Assumes that ``program.nodes`` is a legal order. Kept with the program: most passes change nothing."""
    if found := vars(program).get("_dependencies"):
        return found
    d = Dependencies(needed=_needed(program))
    last_write: dict[str, int] = {}
    reads_since: dict[str, list[int]] = {}
    symbol_from: dict[Sym, int] = {}
    last_effect: int | None = None
    for i, node in enumerate(program.nodes):
        before = {last_write[b] for b in (*node.reads(), *node.writes()) if b in last_write}
        for b in node.reads():
            reads_since.setdefault(b, []).append(i)
            d.readers.setdefault(b, []).append(i)
        for b in node.writes():
            before.update(reads_since.get(b, ()))
            last_write[b] = i
            reads_since[b] = []
            d.writers.setdefault(b, []).append(i)
        if symbol_from:
            before.update(symbol_from[s] for s in sizes_needed(program, node) if s in symbol_from)
        if isinstance(node, Extern):
            symbol_from.update((s, i) for s, _, _ in node.symbols)
        if has_effect(node):
            before.update(() if last_effect is None else (last_effect,))
            last_effect = i
        d.before.append(before - {i})
    vars(program)["_dependencies"] = d
    return d


def inside(node: Node) -> Iterator[Node]:
    """``node`` and everything in it: the nodes of its variants, a kernel's parts."""
    yield node
    parts: Iterable[Node] = ()
    if isinstance(node, (Choice, Variants)):
        parts = (n for v in node.variants for n in v.nodes)
    elif isinstance(node, KernelNode):
        parts = node.parts
    for p in parts:
        yield from inside(p)


def has_effect(node: Node) -> bool:
    """Does it, or anything in it, have an effect (random state, printing) whose order matters?"""
    return any(isinstance(n, Extern) and n.effect for n in inside(node))


def used_buffers(program: Program, nodes: Iterable[Node]) -> dict[str, Buffer]:
    """The program's table without temporaries that neither ``nodes`` nor the outputs use. Buffers used only inside
    a Variants stay; a variant of a Choice has its own table."""
    used = program.output_buffers()
    for node in nodes:
        for n in inside(node):
            used.update((*n.reads(), *n.writes()))
    return {n: b for n, b in program.buffers.items() if b.kind != "temp" or n in used}


def remove_dead(program: Program) -> Program:
    """Without nodes whose results are not read, and without unused buffers. Nodes that contain a call with an effect
    stay, and calls that do more than to make new tensors of known sizes."""
    needed = _needed(program)
    nodes = []
    for node in reversed(program.nodes):
        made = isinstance(node, Extern) and not node.symbols and set(node.outputs) == set(node.writes()) != set()
        may_go = (made or isinstance(node, (LoopNest, Template, Choice, Variants))) and not has_effect(node)
        if not may_go or needed & set(node.writes()):
            nodes.append(node)
            needed |= set(node.reads())
    return replace(program, nodes=tuple(reversed(nodes)), buffers=used_buffers(program, nodes))


def _needed(program: Program) -> set[str]:
    out = program.output_buffers() | {b.name for b in program.buffers.values() if b.kind != "temp"}
    for node in program.nodes:  # what an extern returns may be a view of one of its arguments
        for n in inside(node):
            if isinstance(n, Extern):
                out |= {v.buffer for v in n.outputs if isinstance(v, View)}
    return out


def sizes_needed(program: Program, node: Node) -> set[Sym]:
    """Every size that must be known before the node runs: those in it, and those of the buffers it touches."""
    out = node_symbols(node)
    own: dict[str, Buffer] = {}
    for n in inside(node):
        if isinstance(n, Choice):
            own |= {b.name: b for v in n.variants for b in v.buffers}
        elif isinstance(n, KernelNode):
            own |= {b.name: b for b in n.workspace}
        for b in (*n.reads(), *n.writes()):
            if b in own or b in program.buffers:
                out |= symbols_in(full_view(own.get(b) or program.buffers[b]))
    return out
