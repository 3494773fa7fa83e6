"""What was decided, and why: plain data, shown by ``explain``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ir.program import Config


@dataclass(frozen=True)
class Candidate:
    """One way that was considered.

    status: ``ok``, ``wrong`` (its result is not right), ``error`` (it could not be compiled or raised), ``skipped``,
        ``guard`` (its assumptions do not hold at these sizes), ``heuristic`` (not measured), or why an implementation
        could not be traced (``raised``, ``wrong shape`` ...).
    time_us: the time that decides: ``cold_us`` if the region reads weights, else ``warm_us``; None if not measured.
    warm_us, cold_us: microseconds a call with everything in L2, and with the weights out of it.
    spread: relative; differences inside it mean nothing.   error: relative to a float32 or float64 reference.
    where: sizes it was measured at, where there are several.
    dropped: out after a short round; its time is of another moment than the others', and cannot win.
    """

    name: str
    status: str
    time_us: float | None = None
    warm_us: float | None = None
    cold_us: float | None = None
    spread: float | None = None
    error: float | None = None
    why: str = ""
    where: str = ""
    dropped: bool = False


@dataclass(frozen=True)
class Decision:
    """What was chosen for one choice, or for one kernel.

    region: the choice's or the kernel's name.   op: what it computes.
    winner: the candidate's name; of a kernel that a heuristic launches, its Config.
    candidates: all that were considered, failed ones included.   reason: one sentence.
    members: neighbours that were measured with it.   sizes: its inputs, for people.
    config: how a kernel is launched (kernels only).
    """

    region: str
    winner: Any
    candidates: tuple[Candidate, ...]
    reason: str
    op: str = ""
    members: tuple[str, ...] = ()
    sizes: str = ""
    config: Config | None = None
