"""Steps: the wrapper program. ``plan`` makes it, ``wrap`` prints it, in Python or C++.

Grammar::

    step ::= Let sym = source          a size is read from an input's size or stride
           | Check facts               sizes that it was not captured for are refused
           | Alloc buffer              new storage, or a dead buffer's (``reuse``)
           | Launch kernel             one kernel
           | Call extern               anything but a generated kernel
           | Branch predicate a b      of several variants: the steps of one, else those of the next
           | Note size least most      a size outside what was tuned is logged, once
           | Free buffer               after its last use
           | Return values

A straight line, in execution order: the only decision at run time is Branch. (Loops: ``plan/regions.py``.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ..ir.expr import Expr, Sym
from ..ir.program import Assume, Extern, KernelNode


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
    """All of ``facts``, which are about the inputs' sizes, must hold, or the call raises an error with ``text``."""

    facts: tuple[Assume, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Alloc:
    """``reuse``: take over this dead buffer's storage; None: allocate."""

    buffer: str
    reuse: str | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel. Its workspace is allocated before and freed after."""

    kernel: KernelNode


@dataclass(frozen=True, slots=True)
class Branch:
    """If all of ``predicate`` hold ``then``, else ``otherwise``, which leave the same buffers allocated."""

    predicate: tuple[Assume, ...]
    then: tuple[Step, ...]
    otherwise: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Note:
    """``size`` outside least..most: the nearest range is used, and one line is logged, with ``what``, the size's name,
    and ``op``, the operation's."""

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


@dataclass(frozen=True)
class Plan:
    steps: tuple[Step, ...]


def launches(steps: Iterable[Step]) -> Iterator[Launch]:
    """Every Launch, those in branches included."""
    for s in steps:
        if isinstance(s, Launch):
            yield s
        elif isinstance(s, Branch):
            yield from launches(s.then)
            yield from launches(s.otherwise)
