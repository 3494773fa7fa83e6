"""Small independent kernels that could share one launch: an optimizer's update of a hundred parameters.

A launch takes about as long as moving ten megabytes, so for small kernels it is most of their time. Two kernels are
independent when they are at the same depth of the graph of kernels: every dependency leads to a greater depth.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..ir.loops import LoopNest
from ..ir.program import Program
from ..options import Options
from ..target import Target
from .dependencies import dependencies
from .emit import kind_of, order
from .result import Fused
from .split import reduces_columns

MAX_POINTS = 1 << 21  # of 4 bytes: 8 MB
MAX_BUFFERS = 100
MAX_PARTS = 32


def combine(fused: Fused, options: Options, target: Target) -> Fused:
    """Kernels that may share one launch, made adjacent. Assumes a legal order. GPU only: a CPU's calls cost little."""
    if not (options.combine_kernels and target.is_gpu):
        return fused
    program = fused.program
    before = dependencies(program).before
    depth: list[int] = []
    for b in before:
        depth.append(1 + max((depth[j] for j in b), default=0))
    open_sets: dict[Any, tuple[list[int], set[str]]] = {}
    sets: list[list[int]] = []
    for i, node in enumerate(program.nodes):
        if not isinstance(node, LoopNest) or not _small(node) or (node.reduced and options.batch_invariant):
            continue
        # what reads nothing is first at any time: it waits for what needs it, or its storage would
        key = (depth[i], _shape(node), program.buffers[node.writes()[0]].device, bool(node.reads()))
        buffers = {*node.reads(), *node.writes()}
        members, used = open_sets.get(key, ([], set()))
        if not members or len(used) + len(buffers) > MAX_BUFFERS or len(members) == MAX_PARTS:
            members, used = [], set()
            open_sets[key] = (members, used)
            sets.append(members)
        members.append(i)
        used |= buffers
    sets = [s for s in sets if len(s) > 1]
    if not sets:
        return fused
    names = tuple(tuple(program.nodes[i].name for i in s) for s in sets)
    fused = fused.regrouped(replace(program, nodes=_adjacent(program, before, sets)))
    return replace(fused, combined=names)


def _shape(loops: LoopNest) -> tuple[Any, ...]:
    """Parts of one launch share its block sizes: reductions must have one length and the same layout."""
    if not loops.reduced:
        return (kind_of(loops),)
    return kind_of(loops), loops.rnumel, reduces_columns(loops)


def _small(loops: LoopNest) -> bool:
    """Small enough to gain, and not empty (that needs no launch at all). Column sums need a launch of their own."""
    if loops.numel == 0 or any(s.reduce == "sum" for s in loops.stores()):
        return False
    return loops.numel.hint() * loops.rnumel.hint() <= MAX_POINTS


def _adjacent(program: Program, before: list[set[int]], sets: list[list[int]]) -> tuple[Any, ...]:
    """The nodes reordered so that each set's members are adjacent, where its last member was."""
    set_of = {i: s for s in sets for i in s}
    units: list[list[int]] = []
    for i in range(len(before)):
        s = set_of.get(i, [i])
        if s[-1] == i:
            units.append(s)
    unit_of = {i: u for u, s in enumerate(units) for i in s}
    needs = [{unit_of[j] for i in s for j in before[i]} - {u} for u, s in enumerate(units)]
    return tuple(program.nodes[i] for u in order(needs) for i in units[u])
