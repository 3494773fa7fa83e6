"""Kernels that hold much memory at the peak, and save little traffic for it, are formed again as two.

Fusing moves work in time. A kernel runs before the first of its results is needed, so what is needed late is computed
early too, and kept; and it runs after the last of its inputs is there, so what is read by an early part is kept for it.
Grouping weighs bytes moved only. Where the backward computes activations again (a budget below 1, or checkpointing),
this can be most of its memory. In two blocks ``x1 = x + f(norm(x))``, ``x2 = x1 + f(norm(x1))``, of which the backward
has ``x`` and the results of ``f``::

    x1, x2 = ..., ...           needed at once: the gradient begins at x2        one kernel: all that reads x1 is near,
    g2 = backward of f          (needs nothing of these)                         and joins it
    n1 = norm(x1)               for f's weight                        ->         x1, x2, norm(x), norm(x1): each norm is
    g1 = backward of f          with the largest tensors: the peak               in memory through all backwards of f
    n0 = norm(x)                                                                 before its own

The program's order is the measure of what is early: autograd's, with what is computed again placed before its first
use. So after grouping:

1. Where is the peak? The step with the most bytes alive; its place in the program is the earliest last member of the
   kernels from there on (what runs there cannot be later than that).
2. Which kernels have members on both sides of that place, and what would be alive at the step if each side ran where it
   belongs? Results of the later side that are not needed before count for a cut; against it, what the later side would
   then read that no longer could be freed, or need not have been stored at all.
3. If that lowers the peak, the program is grouped again with one rule more: of these kernels, no member from one side
   with one from the other. What results is kept if its peak, in the best order that is found, is lower by more than its
   kernels move more: a byte at the peak is worth a byte of traffic, and a kernel more counts as ``LAUNCH`` bytes; or by
   a share of the peak that is worth their share of the traffic (``SHARE``). Then again, for the peak that is left, at
   most ``ROUNDS`` times.

Where a kernel forms the peak itself, as a long sum does whose terms all wait for the last, its members are kept apart
wherever another kernel runs meanwhile; if that moves too much, in ``PARTS`` parts.

Kernels that share a launch run when the first of them is needed. Those before the peak that are needed only after it
get a launch of their own, if that is a smaller share of the traffic than they are of the peak: copies of all layers'
weights in another order, of which a backward needs those of the last layer first.

Each round is linear in the size of the program.

NB: TorchInductor refuses a pair when what both read for the last time is more than 32 times the bytes that are saved
(``can_fusion_increase_peak_memory``), wherever the peak is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ..fuse.combine import EARLY_BYTES
from ..fuse.dependencies import dependencies
from ..fuse.driver import AFTER, grouped
from ..fuse.legality import Cluster, FusionContext
from ..fuse.mix_order import column_sums
from ..fuse.places import LAUNCH
from ..fuse.result import Fused, Reason
from ..ir.loops import LoopNest
from ..ir.program import Config, KernelNode, Node, Program, Template, Variants, kernel_with_fallback
from ..target import Target
from .order import WORTH, Lifetimes, Owned, owned, search

ROUNDS = 4
SHARE = 0.5  # of the traffic, for as much of the peak
PARTS = 4, 2  # of one kernel


def lower_peak(s: Any, target: Target) -> Fused:
    """Of Stages: what ``s.fused`` should be. The same results."""
    fused, mine, cuts = s.fused, owned(s), list[_Cut]()
    while len(cuts) < ROUNDS and fused.ungrouped is not None:
        for cut in _Formed(fused, mine, target).cuts():
            trial = grouped(fused.ungrouped, s.options, target, *cuts, cut)
            for run in AFTER.values():
                trial = run(trial, s.options, target)
            if _pays(fused, trial, mine, target):
                break
        else:
            break
        fused = trial
        cuts.append(cut)
    for _ in range(ROUNDS):
        if (later := _launched_later(fused, mine, target)) is fused:
            break
        fused = later
    return fused


@dataclass(frozen=True)
class _Cut:
    """A rule for ``can_fuse``: positions of which none from one part may be with one from another."""

    part: dict[int, int]

    def __call__(self, a: Cluster, b: Cluster, c: FusionContext) -> Reason | None:
        if len({self.part[p] for x in (a, b) for p in x.members if p in self.part}) > 1:
            return Reason("peak", "more would be in memory at the peak, and little less be moved")
        return None


class _Formed:
    """Kernels, and where their members were."""

    def __init__(self, fused: Fused, mine: Owned, target: Target):
        assert fused.ungrouped is not None
        self.mine, self.program, self.apart = mine, fused.program, fused.ungrouped.program
        self.launch = LAUNCH[target.is_gpu]
        self.size = {b.name: b.nbytes.hint() for b in self.apart.buffers.values()}
        place = {n.name: i for i, n in enumerate(self.apart.nodes)}
        self.members = [sorted(place[m] for m in g.members if m in place) for g in fused.groups]
        last = [m[-1] if m else len(place) for m in self.members]
        self.now = list(accumulate(reversed(last), min))[::-1]  # the place that each kernel runs at

    def cuts(self) -> Iterator[_Cut]:
        """What would lower the peak, the lowest first."""
        done = [-1, *accumulate((m[0] if m else -1 for m in self.members), max)]  # the first of those that ran before
        stretched = [
            k for k, m in enumerate(self.members)
            if len(m) > 1 and (m[-1] > self.now[k] or m[0] < done[k]) and isinstance(self.program.nodes[k], LoopNest)
        ]  # fmt: skip
        if not stretched:
            return
        alive = Lifetimes(as_kernels(self.program), self.mine)
        peak, at = alive.highest(range(len(self.members)))
        place = self.now[at]
        found = [k for k in stretched if self.members[k][0] <= place < self.members[k][-1]]
        used = _Used(self.program, self.mine)
        gains = {k: self._gain(k, at, place, used) for k in found}
        better = [k for k, gain in gains.items() if gain > self.launch]
        if sum(gains[k] for k in better) > WORTH * peak:
            yield _Cut({p: p > place for k in better for p in self.members[k]})
        elif at in stretched and self._gain(at, at, self.now[at - 1], used) > max(self.launch, WORTH * peak):
            meanwhile = [bisect_left(self.now, p, 0, at) for p in self.members[at]]
            places = sorted(set(meanwhile))
            for n in (len(places), *(n for n in PARTS if n < len(places))):
                yield _Cut({p: places.index(k) * n // len(places) for p, k in zip(self.members[at], meanwhile)})

    def _gain(self, k: int, at: int, place: int, used: _Used) -> int:
        """How many bytes fewer are in memory at kernel ``at`` if kernel ``k``'s members after ``place`` run after it
        and the others before."""
        nodes, size = self.apart.nodes, self.size
        sides = [p for p in self.members[k] if p <= place], [p for p in self.members[k] if p > place]
        made, made_late = ({b for p in side for b in nodes[p].writes()} for side in sides)
        read, read_late = ({b for p in side for b in nodes[p].reads()} for side in sides)
        stored = set(self.program.nodes[k].writes())
        if k > at or place < self.now[at]:  # the early side waits
            held = (b for b in read - made - read_late if used.only_after(b, at, k))
            return sum(map(size.__getitem__, held)) - sum(size[b] for b in made & (stored | read_late))
        early = (b for b in made_late & stored if used.last.get(b, -1) >= at)
        more = (b for b in read_late - made_late if used.free_at(b, at) and (b not in made or b not in stored))
        return sum(map(size.__getitem__, early)) - sum(map(size.__getitem__, more))


class _Used:
    """When the kernels of a program use its buffers."""

    def __init__(self, program: Program, mine: Owned):
        self.freed = {b.name for b in program.buffers.values() if b.kind == "temp" or b.name in mine}
        self.last: dict[str, int] = {}
        self.before: dict[str, int] = {}  # ... the kernel that uses it last
        for i, n in enumerate(program.nodes):
            for b in dict.fromkeys((*n.reads(), *n.writes())):
                self.before[b] = self.last.get(b, -1)
                self.last[b] = i
        self.last |= dict.fromkeys(program.output_buffers(), len(program.nodes))

    def free_at(self, b: str, at: int) -> bool:
        """Is it in memory at kernel ``at`` only if it is kept longer, or stored at all?"""
        return self.last.get(b, -1) < at and (b in self.freed or b not in self.last)

    def only_after(self, b: str, at: int, k: int) -> bool:
        """Is it in memory at kernel ``at`` for kernel ``k`` alone?"""
        return b in self.freed and self.last.get(b) == k and self.before[b] < at


def _pays(old: Fused, new: Fused, mine: Owned, target: Target) -> bool:
    """Is the peak lower, by more than its kernels move more? Column sums must be in the kernels that reduce rows."""
    if not _summed(old.program) <= _summed(new.program):
        return False
    peaks = [search(as_kernels(p), mine).peak for p in (old.program, new.program)]
    moved = [_moved(p) + LAUNCH[target.is_gpu] * len(p.nodes) for p in (old.program, new.program)]
    less, more = peaks[0] - peaks[1], moved[1] - moved[0]
    return less > WORTH * peaks[0] and (more <= less or more / moved[0] <= SHARE * less / peaks[0])


def _launched_later(fused: Fused, mine: Owned, target: Target) -> Fused:
    """One shared launch as two, around the peak; ``fused`` itself if none of them is worth that."""
    nodes, place = fused.program.nodes, {n.name: i for i, n in enumerate(fused.program.nodes)}
    sets = [[place[name] for name in names] for names in fused.combined]
    size = {b.name: b.nbytes.hint() for b in fused.program.buffers.values()}
    if all(sum(size[b] for i in s for b in nodes[i].writes()) < EARLY_BYTES for s in sets):
        return fused
    peak, at = Lifetimes(as_kernels(fused.program), mine).highest(range(len(nodes)))
    at = max([at, *(s[-1] for s in sets if at in s)])
    before, used = dependencies(fused.program).before, _Used(fused.program, mine)
    needed = set().union(*before[: at + 1])
    moved = sum(size[b] for n in nodes for b in {*n.reads(), *n.writes()})
    for k, s in enumerate(sets):
        gains = {i: sum(size[b] for b in nodes[i].writes()) for i in s if s[-1] < at and i not in needed}
        for i in gains:
            gains[i] -= sum(size[b] for b in nodes[i].reads() if b in used.freed and used.last[b] == i)
        late = [i for i in s if gains.get(i, 0) > 0]
        less = sum(gains[i] for i in late)
        if less >= EARLY_BYTES and LAUNCH[target.is_gpu] / moved <= less / peak:
            sets[k : k + 1] = [[i for i in s if i not in late], late]
            order = [*(i for i in range(at + 1) if i not in late), *late, *range(at + 1, len(nodes))]
            names = (tuple(nodes[i].name for i in s) for s in sets if len(s) > 1)
            later = fused.regrouped(replace(fused.program, nodes=tuple(nodes[i] for i in order)))
            return replace(later, combined=tuple(names))
    return fused


def _summed(program: Program) -> set[str]:
    return {s.buffer for n in program.nodes if isinstance(n, LoopNest) and n.reduced for s in column_sums(n)}


def _moved(program: Program) -> int:
    """Bytes that its kernels read and write."""
    own = (n for n in program.nodes if isinstance(n, (LoopNest, Template)))
    return sum(program.buffers[b].nbytes.hint() for n in own for b in {*n.reads(), *n.writes()})


def as_kernels(program: Program) -> Program:
    """As ``schedule`` returns it, but with no launch decided: storage that is written over counts once."""
    return replace(program, nodes=tuple(map(_as_kernel, program.nodes)))


def _as_kernel(n: Node) -> Node:
    if not isinstance(n, (LoopNest, Template)):
        return n
    return Variants(n.name, tuple(n.writes()), kernel_with_fallback(KernelNode(n.name, (n,), Config())), n.origins)
