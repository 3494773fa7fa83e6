"""Greedy fusion: nodes in program order, each joined to the groups around it, most bytes saved first.

One pass. For each node only the groups that made what it reads are tried, and a few that read the same buffers, so
the work is linear in the size of the program.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..ir.loops import LoopNest
from ..ir.program import Node, Program, Template
from ..options import Options
from ..seams import Seam
from ..target import Target
from .dependencies import Dependencies, dependencies, remove_dead, used_buffers
from .emit import emit, kind_of, order
from .legality import Cluster, FusionContext, can_fuse, merge, saved_bytes, single
from .result import Fused, Group, Reason, Refusal

# Passes, (Fused, Options, Target) -> Fused: before grouping, and on the kernels it made. The core has none.
BEFORE = Seam("fuse.BEFORE")
AFTER = Seam("fuse.AFTER")
# Does the compiler of a call that launches a kernel take what fusion made of it? (Extern, buffers, Target) -> why not.
TAKES = Seam("fuse.TAKES")

_SIBLINGS = 4  # how many groups that read the same buffer are tried for a node
_MAX_REFUSALS = 2000
Edge = tuple[int, bool]  # a neighbour's position, and whether it made what is read
_OPAQUE = {
    "extern": "a call is a kernel of its own",
    "choice": "how it is done is not decided yet",
    "variants": "its variants are fused already, each by itself",
}


def fuse(program: Program, options: Options, target: Target) -> Fused:
    """Group the loop nests and Templates of ``program`` into kernels; all other nodes stay as they are. The program
    returned computes the same outputs and input mutations.

    Assumes a verified program in a legal order; the result is in one too and may be fused again (once a choice in it is
    decided, say). ``options.fuse=False`` changes nothing.
    """
    if not options.fuse:
        return Fused(program, tuple(Group(n.name, (n.name,), kind_of(n)) for n in program.nodes))
    fused = Fused(remove_dead(program))
    for run in BEFORE.values():
        if (fused := run(fused, options, target)).formed:
            break
    else:
        fused = grouped(fused, options, target)
    for run in AFTER.values():
        fused = run(fused, options, target)
    return fused


def grouped(fused: Fused, options: Options, target: Target, *rules: Callable[..., Reason | None]) -> Fused:
    """One node per kernel: the grouping itself, without the passes around it. ``rules``: like those in RULES."""
    program = fused.program
    work = _Grouping(program, options, target, rules)
    for position, node in enumerate(program.nodes):
        if isinstance(node, (LoopNest, Template)):
            work.place(position, node)
    apart = {(p, q): why for (p, q), why in work.refusals.items() if work.clusters.get(p) is not work.clusters[q]}
    refusals = (Refusal(program.nodes[p].name, program.nodes[q].name, why) for (p, q), why in apart.items())
    fused = replace(fused, refusals=(*fused.refusals, *refusals), ungrouped=fused)
    program, groups = _emit_all(work, {g.name: g.members for g in fused.groups})
    return replace(fused, program=program, groups=tuple(groups))


def waiting(program: Program, depends: Dependencies) -> list[bool]:
    """For each node: is it elementwise, with one reader that is a reduction or waits for one itself?"""
    out = [False] * len(program.nodes)
    for i in reversed(range(len(out))):
        node = program.nodes[i]
        if not isinstance(node, LoopNest) or node.reduced or len(node.writes()) != 1:
            continue
        name = node.writes()[0]
        readers = depends.readers.get(name, [])
        if name not in depends.needed and len(readers) == 1 and len(depends.writers[name]) == 1:
            reader = program.nodes[readers[0]]
            out[i] = out[readers[0]] or (isinstance(reader, LoopNest) and bool(reader.reduced))
    return out


class _Grouping:
    """The clusters as they grow."""

    def __init__(self, program: Program, options: Options, target: Target, rules: tuple[Any, ...]):
        depends = dependencies(program)
        self.clusters: dict[int, Cluster] = {}  # by position, of any member
        self.refusals: dict[tuple[int, int], Reason] = {}
        self.sequence = list(range(len(program.nodes)))  # a legal order, for the ranks
        self.context = FusionContext(program, depends, options, target, self.clusters.get, rules)
        self.waits = waiting(program, depends)

    def place(self, position: int, node: LoopNest | Template) -> None:
        """Start a cluster for ``node`` and merge it with all that it may be merged with, the best first.

        A node that only a later reduction reads waits for that reduction, whose neighbours then include its own:
        otherwise it would join an earlier kernel that the reduction cannot join, and its result would be stored.
        """
        self.clusters[position] = single(position, node, self.context.depends)
        refused = [] if self.waits[position] else self._grow(position, node)
        while refused:  # nothing to wait for any more: their own neighbours are tried now
            p = refused.pop()
            self.waits[p] = False
            refused += self._grow(p, self.context.program.nodes[p])

    def _grow(self, position: int, node: Node) -> list[int]:
        """Merge with neighbours; returns those that waited for this node and were refused. One that is refused for what
        lies between is tried again when something has joined: it may have been that."""
        c = self.context
        cluster = self.clusters[position]
        refused, blocked = set[int](), list[Edge]()
        todo = list(self._neighbours(position, node))
        tried: set[int] = set()
        while (best := self._best(todo, position, cluster, tried)) is not None:
            candidate = best[0]
            other = self.clusters[candidate]
            tried.add(id(other))
            big, small = (other, cluster) if _leads(other, cluster) else (cluster, other)
            answer = can_fuse(big, small, c)  # the common space is written in the big one's variables
            if isinstance(answer, Reason):
                self._refuse(candidate, position, answer)
                if self.waits[candidate]:
                    refused.add(candidate)
                blocked += [best] if answer.code == "order" else []
                continue
            for p in other.members if self.waits[candidate] else ():
                todo += self._neighbours(p, c.program.nodes[p])
            both = merge(big, small, answer, c)
            self.clusters |= dict.fromkeys((cluster if both is other else other).members, both)
            cluster = both
            self._reorder(both.members, answer.between)
            tried -= {id(self.clusters[p]) for p, _ in blocked}
            todo += blocked
            blocked.clear()
        return sorted(refused - cluster.members)

    def _reorder(self, members: set[int], between: set[int]) -> None:
        """Bring ``members`` together: after what they need, before all else in their range."""
        rank = self.context.rank
        first, last = min(rank[p] for p in members), max(rank[p] for p in members)
        span = sorted(self.sequence[first : last + 1], key=lambda p: 0 if p in between else 1 + (p not in members))
        self.sequence[first : last + 1] = span
        for place, p in enumerate(span, first):
            rank[p] = place

    def _best(self, todo: list[Edge], position: int, cluster: Cluster, tried: set[int]) -> Edge | None:
        """The neighbour that saves most, then of its own kind, then the nearest; removed from ``todo``, as are those
        already tried. A matmul comes first: all of its consumers may join it, but not what they have joined before."""
        ranked = []
        for p, dependent in todo:
            other = self.clusters.get(p)
            if other is None:
                if dependent:
                    self._refuse(p, position, Reason("call", _OPAQUE[kind_of(self.context.program.nodes[p])]))
            elif other is not cluster and id(other) not in tried:
                score = saved_bytes(other, cluster, self.context)
                product = dependent and (other.template is not None) > (cluster.template is not None)
                alike = other.reduces == cluster.reduces
                ranked.append((product, score * (2 if dependent else 1), alike, p, dependent))
        ranked.sort(reverse=True)
        todo[:] = [(p, dependent) for *_, p, dependent in ranked]
        return todo.pop(0) if todo else None

    def _neighbours(self, position: int, node: Node) -> Iterator[Edge]:
        depends = self.context.depends
        for name in node.reads():
            writer = depends.last_writer(name, position)
            if writer is not None:
                yield writer, True
        for name in (*node.reads(), *node.writes()):  # (overwriting an input: with the nodes that read it, if possible)
            b = self.context.program.buffers[name]
            seed = (b.kind, b.numel, b.dtype) == ("temp", 1, torch.int64)  # drawn numbers share nothing
            for r in () if seed else depends.readers_before(name, position, _SIBLINGS):
                yield r, False

    def _refuse(self, producer: int, consumer: int, reason: Reason) -> None:
        if len(self.refusals) < _MAX_REFUSALS:
            self.refusals[producer, consumer] = reason


def _leads(a: Cluster, b: Cluster) -> bool:
    """Should the two be written in ``a``'s variables?"""
    return (a.template is not None, a.ops) >= (b.template is not None, b.ops)


def _emit_all(work: _Grouping, made_of: Mapping[str, tuple[str, ...]]) -> tuple[Program, list[Group]]:
    """The fused program, and its groups in the same order. ``made_of``: members of nodes that are several already."""
    program, depends = work.context.program, work.context.depends
    units: list[Cluster | int] = []
    for i in range(len(program.nodes)):
        cluster = work.clusters.get(i)
        if cluster is None or cluster.last == i:
            units.append(i if cluster is None else cluster)
    unit_of = {p: u for u, x in enumerate(units) for p in ((x,) if isinstance(x, int) else x.members)}
    needs = [depends.before[x] if isinstance(x, int) else x.before for x in units]
    before = [{unit_of[p] for p in positions} - {u} for u, positions in enumerate(needs)]
    sequence = order(before)
    nodes: list[Node] = []
    groups: list[Group] = []
    taken = {n.name for n in program.nodes}
    for u in sequence:
        x = units[u]
        if isinstance(x, int):
            node: Node = program.nodes[x]
            members: tuple[str, ...] = (node.name,)
        else:
            node = emit(x, _name(x, len(nodes), taken), _droppable(x, depends), program.buffers)
            members = tuple(program.nodes[p].name for p in sorted(x.members))
            members = (*(part for m in members for part in made_of.get(m, ()) if part != m), *members)
        groups.append(Group(node.name, members, kind_of(node)))
        nodes.append(node)
    return replace(program, nodes=tuple(nodes), buffers=used_buffers(program, nodes)), groups


def _droppable(cluster: Cluster, depends: Dependencies) -> set[str]:
    """Buffers whose readers and writers are all in the cluster, and which are not needed afterwards."""
    users = {name: depends.readers.get(name, []) + depends.writers[name] for name in cluster.writes}
    return {name for name, at in users.items() if name not in depends.needed and cluster.members.issuperset(at)}


def _name(cluster: Cluster, number: int, taken: set[str]) -> str:
    """``fused_sub_exp_sum_3``: the ops it came from, in order, and its place; a lone node keeps its name. In a program
    that is fused again a node may have the name already (in ``taken``)."""
    if len(cluster.parts) == 1:
        return cluster.parts[0][1].name
    ops = [_short(o.op) for _, loops, _ in sorted(cluster.parts, key=lambda p: p[0]) for o in loops.origins]
    stem = "_".join(["fused", *list(dict.fromkeys(ops))[:4]])
    while f"{stem}_{number}" in taken:
        number += 1
    taken.add(f"{stem}_{number}")
    return f"{stem}_{number}"


def _short(op: str) -> str:
    """``add`` for ``aten.add.Tensor``."""
    parts = op.split(".")
    return re.sub(r"\W", "_", parts[1] if len(parts) > 1 else parts[0]).strip("_")
