"""Steps: the wrapper program. ``plan`` writes it, ``wrap`` prints it (in Python, later in C++).

Grammar::

    step ::= Let sym = source          a size becomes known: from an input's size or stride, or from a call's result
           | Check facts               sizes that it was not captured for are refused
           | Alloc buffer              new storage, or a dead buffer's (``reuse``)
           | Launch region             one kernel
           | Call extern               anything that is not a kernel of ours
           | Branch predicate a b      two ways to do one thing: steps and steps
           | Note size least most      a size outside what was tuned is logged, once
           | Free buffer               the last use is behind us
           | Return values

A straight line, in execution order: nothing is decided at run time but Branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..ir.expr import Expr, Sym
from ..ir.program import Arm, Assume, Extern, Region


@dataclass(frozen=True, slots=True)
class Let:
    """Input ``buffer``'s size (``what="size"``) or stride (``"stride"``) in ``dim`` is ``times * sym + plus``."""

    sym: Sym
    buffer: str
    what: str
    dim: int
    times: int = 1
    plus: int = 0


@dataclass(frozen=True, slots=True)
class Check:
    """All of ``facts``, which are about the inputs' sizes, must hold, or the call ends here. ``text``: the condition as
    people say it."""

    facts: tuple[Assume, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Alloc:
    """``reuse``: take over this dead buffer's storage; None: allocate."""

    buffer: str
    reuse: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel. Its arm's workspace is allocated before and freed after."""

    region: Region
    arm: Arm


@dataclass(frozen=True, slots=True)
class Branch:
    """If all of ``predicate`` hold then ``then``, else ``otherwise``: steps in order. (What one of them allocates and
    does not free, the other has allocated too.)"""

    predicate: tuple[Assume, ...]
    then: tuple[Step, ...]
    otherwise: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """``size`` outside least..most: the nearest range serves, and one line of log says so. ``what``, of which
    ``op``: for people."""

    size: Expr
    least: int
    most: int
    what: str
    op: str


@dataclass(frozen=True, slots=True)
class Call:
    extern: Extern


@dataclass(frozen=True, slots=True)
class Free:
    buffer: str


@dataclass(frozen=True, slots=True)
class Return:
    outputs: tuple[Any, ...]


Step = Let | Check | Alloc | Launch | Branch | Note | Call | Free | Return


@dataclass(frozen=True, slots=True)
class Moment:
    """Memory in temp buffers while node number ``node`` runs: for the picture of memory over time."""

    node: int
    label: str
    live: tuple[tuple[str, int], ...]  # (buffer, bytes at the hints)

    @property
    def bytes(self) -> int:
        return sum(b for _, b in self.live)


@dataclass(frozen=True)
class Plan:
    """The steps, and what they mean for memory (sizes at the traced hints)."""

    steps: tuple[Step, ...]
    moments: tuple[Moment, ...]

    @property
    def peak_bytes(self) -> int:
        """Most bytes that temp buffers, outputs included, hold at once."""
        return max((m.bytes for m in self.moments), default=0)

    @property
    def allocations(self) -> int:
        return sum(isinstance(s, Alloc) and s.reuse is None for s in self.steps)

    @property
    def reuses(self) -> int:
        return sum(isinstance(s, Alloc) and s.reuse is not None for s in self.steps)


def launches(steps: Iterable[Step]) -> Iterator[Launch]:
    """Every Launch, those in branches included."""
    for s in steps:
        if isinstance(s, Launch):
            yield s
        elif isinstance(s, Branch):
            yield from launches(s.then)
            yield from launches(s.otherwise)
