"""What fusing returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..ir.loops import LoopNest
from ..ir.program import Program


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a pair was not fused. ``code``: ``order``, ``index``, ``space``, ``axes``, ``broadcast``, ``in-place``,
    ``device``, ``limit``, ``rows``, ``columns``, ``call``, ``template`` or ``peak``. ``text``: a sentence to show."""

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Group:
    """``name``: the fused node's name. ``members``: names of the nodes it was made of.
    ``kind``: ``pointwise``, ``reduction``, ``template``, ``extern``, ``choice`` or ``variants``."""

    name: str
    members: tuple[str, ...]
    kind: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """A pair of nodes that touch the same data and are not in one kernel."""

    producer: str
    consumer: str
    reason: Reason


@dataclass(frozen=True)
class Fused:
    """What fusing returns, and what each of its passes takes and returns.

    program: its nodes are the kernels to be.
    groups: one per node, in order. (Before grouping: only of nodes that a pass made of several.)
    combined: sets of kernels (their names, adjacent in ``program.nodes``) that may share one launch.
    updates: of tensors, in place or in a copy (``in_place.Updated``).
    formed: its kernels are formed: a pass that tried what follows from it returns what it found.
    ungrouped: as it was before they were.
    """

    program: Program
    groups: tuple[Group, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    combined: tuple[tuple[str, ...], ...] = ()
    updates: tuple[object, ...] = ()
    formed: bool = False
    ungrouped: Fused | None = None

    def regrouped(self, program: Program) -> Fused:
        """With ``program``, which has the same nodes in another order, or fewer of them."""
        groups = {g.name: g for g in self.groups}
        return replace(self, program=program, groups=tuple(groups[n.name] for n in program.nodes))

    def mapped(self, change: Callable[[LoopNest], LoopNest]) -> Fused:
        """With each loop nest changed."""
        nodes = tuple(change(n) if isinstance(n, LoopNest) else n for n in self.program.nodes)
        return replace(self, program=replace(self.program, nodes=nodes))
