"""Chains of writes to slices, stored in place: the pass behind ``slices``, which says what a chain is.

A link whose ``x_old`` nothing reads later can be stored into ``x_old``'s buffer: n slices are stored instead of n
copies of the whole. Not for short chains: one kernel with a few selects per element, fused with what makes and what
reads ``x``, moves fewer bytes than several kernels. (Slices of an input that is updated: ``in_place``.)

Links over the same loops become one loop nest with several stores (``Stores``), which fuses with what makes the
values, so a recurrence is one kernel as far as a kernel's limits allow.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..ir.expr import Atom, Expr, IntLike, ceildiv, expr, nonneg
from ..ir.loops import Axis, BodyBuilder, Const, Load, LoopNest
from ..ir.program import Node, Program
from ..ir.rename import renamed
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, remove_dead
from .mapping import fresh
from .result import Fused
from .slices import Write, continues, find_write, same_layout, whole_copy

Place = Callable[[str, Expr], tuple[str, Expr]]  # a buffer and an index, to where that element is
MAX_SELECTS = 4  # a longer chain is stored in place


def slice_stores(fused: Fused, options: Options, target: Target) -> Fused:
    """The same results. Assumes a legal order; nodes and buffers that are not needed any more are removed."""
    return replace(fused, program=_in_place(fused.program, options.max_fused_buffers // 2))


@dataclass
class Chain:
    """``links`` are stored into ``root``, after ``start``, if it is not None, has been stored there. ``last``: a node
    that only copies the result, to ``copied``: dropped, and ``root`` is used instead."""

    root: str
    links: list[Write]
    start: Load | Const | None
    last: int | None = None
    copied: str | None = None


def _in_place(program: Program, most: int) -> Program:
    """With long chains stored in place; ``most`` stores in a loop nest."""
    chains = _chains(program)
    if not chains:
        return program
    at = {w.position: (c, w) for c in chains for w in c.links}
    names = {w.buffer: c.root for c in chains for w in c.links}
    names |= {c.copied: c.root for c in chains if c.copied is not None}
    dropped = {c.last for c in chains}
    out = Stores(most)
    for position, node in enumerate(program.nodes):
        if position in dropped:
            continue
        if position not in at:
            if not names.keys().isdisjoint((*node.reads(), *node.writes())):
                (node,), _ = renamed([node], (), names)
            out.add(node)
            continue
        chain, write = at[position]
        if write is chain.links[0] and chain.start is not None:
            out.add(_whole(write, chain))
        out.add_slice(write, chain.root, lambda b, index: (names.get(b, b), index))
    outputs = tuple(
        replace(v, buffer=names.get(v.buffer, v.buffer)) if hasattr(v, "buffer") else v for v in program.outputs
    )
    return remove_dead(replace(program, nodes=tuple(out.finish()), outputs=outputs))


def _chains(program: Program) -> list[Chain]:
    """What to store in place: every write is in one chain at most."""
    d = dependencies(program)
    chains: dict[str, Chain] = {}  # by the last buffer
    for position, node in enumerate(program.nodes):
        write = find_write(program, position, node) if isinstance(node, LoopNest) else None
        if write is None or len(d.writers[write.buffer]) != 1 or program.buffers[write.buffer].kind != "temp":
            continue
        base = write.old.buffer if isinstance(write.old, Load) else ""
        free = bool(base) and continues(program, write, base) and d.readers[base][-1] == position
        if isinstance(write.new, Load) and write.new.buffer == base:  # an element may be overwritten before it is read
            free = False
        if free and base in chains and base not in d.needed:
            chain = chains.pop(base)
            chain.links.append(write)
        elif free and base not in d.needed:
            chain = Chain(base, [write], None)
        else:
            chain = Chain(write.buffer, [write], write.old)
        chains[write.buffer] = chain
    out = []
    for name, chain in chains.items():
        if len(chain.links) > MAX_SELECTS:
            _without_copy(program, d, name, chain)
            out.append(_covered(program, d, chain))
    return out


def _without_copy(program: Program, d: Dependencies, name: str, chain: Chain) -> None:
    """If the result is only copied, to a temporary, the copy is dropped."""
    last = d.readers.get(name, [-1])[-1]
    found = whole_copy(program, program.nodes[last])
    if name in d.needed or found is None or found[1].buffer != name or found[1].index != found[2].index:
        return
    target = found[2].buffer
    plain = d.writers[target] == [last] and same_layout(program.buffers[chain.links[0].buffer], program.buffers[target])
    if plain and program.buffers[target].kind == "temp":
        chain.last, chain.copied = last, target


def _covered(program: Program, d: Dependencies, chain: Chain) -> Chain:
    """Without the copy before a chain that writes every element anyway, and is read by nothing before it has."""
    if any(d.readers[w.buffer] != [n.position] for w, n in zip(chain.links, chain.links[1:])):
        return chain
    ranges = sorted(w.own for w in chain.links if w.own is not None and w.step == 1 and w.dim == chain.links[0].dim)
    end = 0
    for low, high in ranges:
        end = max(end, high) if low <= end else end
    size = program.buffers[chain.links[0].buffer].shape[chain.links[0].dim].constant
    if size is None or end < size:
        return chain
    return replace(chain, root=chain.links[0].buffer, start=None)


def _whole(write: Write, chain: Chain) -> LoopNest:
    """``old`` stored everywhere: what comes before the first slice."""
    b = BodyBuilder()
    b.store(chain.root, write.store.index, b.add(chain.start))  # type: ignore[arg-type]
    return LoopNest(f"{write.node.name}_whole", write.node.axes, tuple(b.body), write.node.origins)


@dataclass
class _Pending:
    """Stores into one root that are yet to become a node: by region, the last of those to the same one."""

    name: str
    axes: tuple[Axis, ...]
    dim: int
    stores: dict[tuple[Expr, Expr, int], tuple[Load | Const, Expr]] = field(default_factory=dict)
    origins: dict[Any, None] = field(default_factory=dict)


class Stores:
    """The new nodes, in order. Stores to slices wait until something needs them, and become one node then."""

    def __init__(self, most: int):
        self.nodes: list[Node] = []
        self.most = most
        self.pending: dict[str, _Pending] = {}  # by root
        self.reading: dict[str, set[str]] = {}  # the roots whose pending stores read a buffer

    def add(self, node: Node) -> None:
        self._flush(node.reads(), node.writes())
        self.nodes.append(node)

    def add_slice(self, w: Write, root: str, place: Place, alone: bool = False) -> None:
        """``w``'s slice, stored into ``root``. ``place``: of an element, where it is now. ``alone``: as a node of its
        own, since what ``w`` makes is a part of ``root``."""
        axes, env = _narrow(w)
        new: Load | Const = w.new
        if isinstance(new, Load):
            buffer, index = place(new.buffer, new.index.subs(env))
            new = replace(new, mask=None, other=0, buffer=buffer, index=index)
        read = new.buffer if isinstance(new, Load) else ""
        overtakes = root in self.reading.get(root, ())  # (pending stores have to read it first)
        self._flush([read], [root], but=root if read != root and not alone and not overtakes else "")
        region, at = (w.low, w.high, w.step), place(w.buffer, w.store.index.subs(env))[1]
        p = self.pending.get(root)
        if p is not None and not (p.dim == w.dim and _sizes(p.axes) == _sizes(axes) and self._fits(p, region)):
            self._emit(root)
            p = None
        if p is None:
            p = self.pending[root] = _Pending(w.node.name, axes, w.dim)
        same: dict[Atom, IntLike] = {a.var: expr(b.var) for a, b in zip(axes, p.axes)}
        p.stores.pop(region, None)
        p.stores[region] = replace(new, index=new.index.subs(same)) if isinstance(new, Load) else new, at.subs(same)
        p.name = w.node.name
        p.origins |= dict.fromkeys(w.node.origins)
        self.reading.setdefault(read, set()).add(root)
        if alone:
            self._emit(root)

    def _fits(self, p: _Pending, region: tuple[Expr, Expr, int]) -> bool:
        """Is it a slice that is stored already, or one apart from all that are?"""
        if region in p.stores:
            return True
        low, high, _ = region
        apart = (nonneg(start - high) or nonneg(low - end) for start, end, _ in p.stores)
        return len(p.stores) < self.most and all(apart)

    def _flush(self, reads: Iterable[str], writes: Iterable[str], but: str = "") -> None:
        writes = list(writes)
        roots = [r for r in (*reads, *writes) if r in self.pending]
        for b in writes:
            roots += self.reading.pop(b, ())
        for r in dict.fromkeys(roots):
            if r != but:
                self._emit(r)

    def _emit(self, root: str) -> None:
        p = self.pending.pop(root, None)
        if p is None:
            return
        b = BodyBuilder()
        for value, index in p.stores.values():
            b.store(root, index, b.add(value))
        self.nodes.append(LoopNest(p.name, p.axes, tuple(b.body), tuple(p.origins)))

    def finish(self) -> list[Node]:
        for root in list(self.pending):
            self._emit(root)
        return self.nodes


def _narrow(w: Write) -> tuple[tuple[Axis, ...], dict[Atom, Expr]]:
    """Loops over the slice alone, and the node's variables in terms of theirs."""
    axes: list[Axis] = []
    env: dict[Atom, Expr] = {}
    for v in w.axes:
        if v is None:
            continue
        size = ceildiv(w.high - w.low, w.step) if v == w.axes[w.dim] else v.size
        inner = fresh(size)
        env[v] = expr(0) if size == 1 else expr(inner)
        if size != 1:
            axes.append(Axis(inner, "p"))
        if v == w.axes[w.dim]:
            env[v] = env[v] * w.step + w.low
    return tuple(axes), env


def _sizes(axes: tuple[Axis, ...]) -> list[Expr]:
    return [a.size for a in axes]
