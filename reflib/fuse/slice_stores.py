"""Chains of writes to slices, stored in place: the pass behind ``slices``, which says what a chain is.

A link whose ``x_old`` nothing reads later can be stored into ``x_old``'s buffer: n slices are stored instead of n
copies of the whole. Not for short chains: one kernel with a few selects per element, fused with what makes and what
reads ``x``, moves fewer bytes than several kernels. A chain that starts at an input of the program and ends by being
copied onto it is stored into the input itself, whatever its length: a cache with one new row.

Links over the same loops become one loop nest with several stores (``_Stores``), which fuses with what makes the
values, so a recurrence is one kernel as far as a kernel's limits allow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..ir.expr import Atom, Expr, ceildiv, expr, nonneg
from ..ir.loops import Axis, BodyBuilder, Const, Load, LoopNest
from ..ir.program import Node, Program
from ..ir.rename import renamed
from ..options import Options
from ..target import Target
from .dependencies import Dependencies, dependencies, remove_dead
from .mapping import fresh
from .result import Fused
from .slices import Write, continues, find_write, same_layout, whole_copy

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
    out = _Stores(most)
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
        out.add_slice(write, chain.root, {v: names[v] for v in write.node.reads() if v in names})
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
        free = free and write.new.buffer != base  # else another element may be overwritten before it is read
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
        if _copied_at_end(program, d, name, chain) or len(chain.links) > MAX_SELECTS:
            out.append(_covered(program, d, chain))
    return out


def _copied_at_end(program: Program, d: Dependencies, name: str, chain: Chain) -> bool:
    """If the result is only copied, the copy is dropped. Is it copied to the input that the chain started with, which
    nothing else writes, nor reads after the first link? Then it is stored there."""
    last = d.readers.get(name, [-1])[-1]
    found = whole_copy(program, program.nodes[last])
    if name in d.needed or found is None or found[1].buffer != name or found[1].index != found[2].index:
        return False
    target, first = found[2].buffer, chain.links[0]
    if d.writers[target] != [last] or not same_layout(program, first, target):
        return False
    if program.buffers[target].kind == "temp":
        chain.last, chain.copied = last, target
        return False
    ours = isinstance(chain.start, Load) and chain.start.buffer == target and continues(program, first, target)
    if ours and d.readers[target][-1] == first.position and first.new.buffer != target:
        chain.root, chain.start, chain.last, chain.copied = target, None, last, target
        return True
    return False


def _covered(program: Program, d: Dependencies, chain: Chain) -> Chain:
    """Without the copy before a chain that writes every element anyway, and is read by nothing before it has."""
    if any(d.readers[w.buffer] != [n.position] for w, n in zip(chain.links, chain.links[1:])):
        return chain
    ranges = sorted(w.own for w in chain.links if w.own is not None and w.step == 1 and w.dim == chain.links[0].dim)
    end = 0
    for low, high in ranges:
        end = max(end, high) if low <= end else end
    if chain.root == chain.copied:
        return chain  # an input
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
    stores: dict[tuple[Expr, Expr, int], tuple[Load, Expr]] = field(default_factory=dict)
    origins: dict[Any, None] = field(default_factory=dict)


class _Stores:
    """The new nodes, in order. Stores to slices wait until something needs them, and become one node then."""

    def __init__(self, most: int):
        self.nodes: list[Node] = []
        self.most = most
        self.pending: dict[str, _Pending] = {}  # by root
        self.reading: dict[str, set[str]] = {}  # the roots whose pending stores read a buffer

    def add(self, node: Node) -> None:
        self._flush(node.reads(), node.writes())
        self.nodes.append(node)

    def add_slice(self, w: Write, root: str, names: dict[str, str]) -> None:
        """``w``'s slice, stored into ``root``."""
        new = replace(w.new, mask=None, other=0, buffer=names.get(w.new.buffer, w.new.buffer))
        self._flush([new.buffer], [root], but=root if new.buffer != root else "")
        axes, env = _narrow(w)
        region = (w.low, w.high, w.step)
        p = self.pending.get(root)
        if p is not None and not (p.dim == w.dim and _sizes(p.axes) == _sizes(axes) and self._fits(p, region)):
            self._emit(root)
            p = None
        if p is None:
            p = self.pending[root] = _Pending(w.node.name, axes, w.dim)
        env = {v: expr(e).subs({a.var: expr(b.var) for a, b in zip(axes, p.axes)}) for v, e in env.items()}
        p.stores.pop(region, None)
        p.stores[region] = replace(new, index=new.index.subs(env)), w.store.index.subs(env)
        p.name = w.node.name
        p.origins |= dict.fromkeys(w.node.origins)
        self.reading.setdefault(new.buffer, set()).add(root)

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
        for load, index in p.stores.values():
            b.store(root, index, b.add(load))
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
