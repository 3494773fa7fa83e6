"""What fusing returns."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir.program import Program


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a pair was not fused. ``code``: one of ``order``, ``index``, ``space``, ``axes``, ``broadcast``,
    ``in-place``, ``device``, ``limit``, ``rows``, ``call``, ``template``. ``text``: a sentence for people."""

    code: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Group:
    """``name``: the fused node's name. ``members``: names of the nodes of the program before that it is made of (a cast
    that became a template's prologue is among them).
    ``kind``: ``pointwise``, ``reduction``, ``template``, ``extern``, ``choice``, ``dispatch`` or ``region``."""

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
    """``combined``: sets of kernels (their names, adjacent in ``program.nodes``) that may share one launch."""

    program: Program
    groups: tuple[Group, ...]
    refusals: tuple[Refusal, ...] = ()
    combined: tuple[tuple[str, ...], ...] = ()
