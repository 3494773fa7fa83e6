"""Small independent kernels that could share one launch: an optimizer's update of a hundred parameters.

A launch takes about as long as moving ten megabytes, so for small kernels it is most of their time. Two kernels are
independent when they are at the same depth of the graph of kernels: every dependency leads to a greater depth. And so
are those after the last kernel that another one needs: gradients that are brought to the order of the weights. A kernel
that makes more than it frees, as one that computes an activation again, is as deep as what needs it allows: with others
it would be early. Kernels that store to slices of one tensor which lie apart, as the parts of a ``cat``, need not
follow each other (the gradient of 16 steps' inputs: 18 launches, so 4).

What the kernels of one launch leave to the next is in memory all at once, so it is no more than a cache holds, and the
launches that this takes have equal shares, but for the last ones, which are beside nearly all results. (The gradients
of 26 embeddings of 20,000 x 64 are summed in float32, which is 133 MB; 7 at a time are in L2 until they are rounded,
the last ones fewer.) A tensor that several of them have parts of is there as a whole, however many share a launch.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..ir.loops import LoopNest
from ..ir.program import Program
from ..ir.traffic import accesses, cheapest_last, tile_sides
from ..ir.transforms import drop_unit_axes, merge_axes
from ..options import Options
from ..target import Target
from .dependencies import dependencies
from .emit import kind_of, order
from .one_order import one_launch
from .places import apart
from .result import Fused
from .split import reduces_columns

MAX_POINTS = 1 << 21  # of 4 bytes: 8 MB
TURNED_POINTS = 1 << 18  # ... of what a kernel of tiles would move along both sides: there a launch more costs as much
MAX_BUFFERS = 100
MAX_PARTS = 32
MAX_BYTES = 40 << 20  # of temporary tensors
LAST_BYTES = 8 << 20  # ... when all results of such kernels are in memory
EARLY_BYTES = 1 << 20  # ... that may be made before they are needed


def combine(fused: Fused, options: Options, target: Target) -> Fused:
    """Kernels that may share one launch, made adjacent. Assumes a legal order. GPU only: a CPU's calls cost little."""
    if not (options.combine_kernels and target.is_gpu):
        return fused
    program = fused.program
    before = _in_any_order(program)
    depth = _depths(program, before)
    left = _left(program, before)
    end = max(set().union(*before), default=-1)
    alike: dict[Any, list[int]] = {}
    for i, node in enumerate(program.nodes):
        if not isinstance(node, LoopNest) or not _small(node, program):
            continue
        if options.batch_invariant and not one_launch(node):
            continue
        # what reads nothing is first at any time: it waits for what needs it, or its storage would
        kind = (_shape(node), program.buffers[node.writes()[0]].device, bool(node.reads()))
        key = (depth[i], *kind) if i <= end or (depth[i], *kind) in alike else (-1, *kind)
        alike.setdefault(key, []).append(i)
    sets = sorted(s for members in alike.values() for s in _launches(program, members, left) if len(s) > 1)
    if not sets:
        return fused
    names = tuple(tuple(program.nodes[i].name for i in s) for s in sets)
    fused = fused.regrouped(replace(program, nodes=_adjacent(program, before, sets)))
    return replace(fused, combined=names)


def _in_any_order(program: Program) -> list[set[int]]:
    """What each node must follow. Kernels that store to slices of one tensor: not each other, but what comes before all
    of them, and what comes after follows all."""
    d = dependencies(program)
    before = [set(b) for b in d.before]
    for name, writers in d.writers.items():
        users = {*writers, *d.readers.get(name, ())}
        for run in _runs(program, name, sorted(users)) if len(writers) > 1 else ():
            for earlier, w in pairwise(run):
                before[w] = before[w] - {earlier} | before[run[0]] & users
            for i in users.difference(run) if run else ():
                before[i] |= set(run) if run[-1] in d.before[i] else set()
    return before


def _runs(program: Program, name: str, users: list[int]) -> Iterator[list[int]]:
    """Kernels that have no more in common than a tensor which they store to, and nothing else uses between them: each
    to elements that lie apart from those of the others."""
    run: list[int] = []
    for i in users:
        node = program.nodes[i]
        stores = isinstance(node, LoopNest) and name not in node.reads()
        if run and not (stores and len(run) < MAX_PARTS and _may_change_places(program, name, run, node)):  # type: ignore[arg-type]
            yield run
            run = []
        run += [i] if stores else []
    yield run


def _may_change_places(program: Program, name: str, run: list[int], node: LoopNest) -> bool:
    last = program.nodes[run[-1]]
    both = {*last.writes()}.intersection((*node.reads(), *node.writes())) | {*last.reads()}.intersection(node.writes())
    old = [s.index for w in run for s in program.nodes[w].stores() if s.buffer == name]  # type: ignore[union-attr]
    new = [s.index for s in node.stores() if s.buffer == name]
    return both == {name} and all(apart(program.buffers[name], a, b) for a in old for b in new)


def _depths(program: Program, before: list[set[int]]) -> list[int]:
    """One more than those before a node; of a node that holds memory, one less than those after it."""
    depth: list[int] = []
    after = [len(before) + 1] * len(before)  # the least depth of what needs it
    for i, b in enumerate(before):
        depth.append(1 + max((depth[j] for j in b), default=0))
        for j in b:
            after[j] = min(after[j], depth[i])
    readers = dependencies(program).readers
    for i, node in enumerate(program.nodes):
        if after[i] <= len(before) and isinstance(node, LoopNest):
            freed = [r for r in node.reads() if len(readers[r]) == 1]
            held = [w for w in node.writes() if program.buffers[w].kind == "temp"]
            more = sum(program.buffers[w].nbytes.hint() for w in held)
            if more - sum(program.buffers[r].nbytes.hint() for r in freed) > EARLY_BYTES:
                depth[i] = after[i] - 1
    return depth


def _left(program: Program, before: list[set[int]]) -> list[int]:
    """Per node, bytes of results that it, and what follows from it, leave in memory; at most ``MAX_BYTES``."""
    returned = program.output_buffers()
    left = [sum(program.buffers[w].nbytes.hint() for w in returned.intersection(n.writes())) for n in program.nodes]
    for i in reversed(range(len(left))):
        for j in before[i]:
            left[j] = min(MAX_BYTES, left[j] + left[i])
    return left


def _launches(program: Program, members: list[int], left: list[int]) -> list[list[int]]:
    """Kernels that may share a launch, in as few launches as the limits allow."""
    nodes = [program.nodes[i] for i in members]
    having = Counter(b for n in nodes for b in {*n.reads(), *n.writes()})
    own = {b for b, n in having.items() if n == 1}
    passed = [_passed(program, n, own) for n in nodes]  # type: ignore[arg-type]
    share = sum(passed) / max(1, -(-sum(passed) // MAX_BYTES))
    sets, used, held = list[list[int]](), set[str](), 0
    results = sum(program.buffers[b].nbytes.hint() for b in program.output_buffers())
    ends = [left[i] for i in members]
    later = max(0, sum(ends) - results) // max(1, len(ends) - 1)  # what follows from all of them is made after all
    for i, more in zip(reversed(members), reversed(passed), strict=True):
        buffers = {*program.nodes[i].reads(), *program.nodes[i].writes()}
        full = len(used) + len(buffers) > MAX_BUFFERS or sets and len(sets[-1]) == MAX_PARTS
        if not sets or full or held + more > min(MAX_BYTES, LAST_BYTES + later) or more and held >= share:
            later += sum(left[j] for j in sets[-1]) if sets else 0
            sets.append([])
            used, held = set(), 0
        sets[-1].append(i)
        used, held = used | buffers, held + more
    return [s[::-1] for s in reversed(sets)]


def _shape(loops: LoopNest) -> tuple[Any, ...]:
    """Parts of one launch share its block sizes: reductions must have one length and the same layout."""
    if not loops.reduced:
        return (kind_of(loops),)
    return kind_of(loops), loops.rnumel, reduces_columns(loops)


def _small(loops: LoopNest, program: Program) -> bool:
    """Small enough to gain, and not empty (that needs no launch at all). Column sums need a launch of their own, and so
    do tiles: a launch of several parts goes over each in one order (two images brought to channels-last, of 800,000
    elements each: 10.9 us in one, 3.6 in two)."""
    if loops.numel == 0 or any(s.reduce == "sum" for s in loops.stores()):
        return False
    points = loops.numel.hint() * loops.rnumel.hint()
    return points <= TURNED_POINTS or points <= MAX_POINTS and not _turned(loops, program)


def _turned(loops: LoopNest, program: Program) -> bool:
    if loops.reduced:
        return False
    loops = merge_axes(drop_unit_axes(loops), apart=True)
    moved = accesses(loops.body, program.buffers)
    return tile_sides(loops, cheapest_last(loops.parallel, moved), moved) is not None


def _passed(program: Program, loops: LoopNest, own: set[str]) -> int:
    """Bytes of temporary tensors, of its ``own``, that it hands over to other kernels, or takes from them: the more."""
    points = (loops.numel * loops.rnumel).hint()
    scattered = {s.buffer for s in loops.stores() if s.reduce}

    def size(name: str) -> int:
        b = program.buffers[name]
        n = b.numel.hint() if name in scattered else min(points, b.numel.hint())
        return n * b.dtype.itemsize if b.kind == "temp" else 0

    return max(sum(map(size, own.intersection(used))) for used in (loops.reads(), loops.writes()))


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
