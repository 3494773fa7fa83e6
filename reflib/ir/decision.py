"""What was decided, and why: plain data, shown by ``explain``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .program import Config, Tiling


@dataclass(frozen=True)
class Key:
    """Which implementation of a Choice, exactly.

    variant: the Variant's name, unique in its Choice.   tiling: of its Template, if it has one.
    apart: the epilogue is computed by kernels of its own.
    """

    variant: str
    tiling: Tiling | None = None
    apart: bool = False

    def __str__(self) -> str:
        """The name that is displayed, and compared with names in portable tables: other keys, other names."""
        tiling = "" if self.tiling is None else str(self.tiling)
        return " ".join(filter(None, (self.variant, tiling))) + (", epilogue apart" if self.apart else "")

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Key:
        tiling = data["tiling"]
        return Key(str(data["variant"]), None if tiling is None else Tiling(**tiling), bool(data["apart"]))


@dataclass(frozen=True)
class Candidate:
    """One implementation that was considered.

    status: ``ok``, ``wrong`` (its result is not right), ``error`` (it could not be compiled or raised), ``skipped``,
        ``pruned``, ``crashed``, ``hung``, ``guard`` (its assumptions do not hold at these sizes), ``heuristic``,
        ``pinned`` and ``known`` (not measured here), or why it could not be traced (``raised``, ``wrong shape`` ...).
    time_us: the time that decides: ``cold_us`` if the subprogram reads weights, else ``warm_us``; None if not measured.
    warm_us, cold_us: microseconds per call with everything in L2, and with the weights out of it.
    spread: relative; differences inside it mean nothing.   error: relative to a float32 or float64 reference.
    where: sizes it was measured at, where there are several.
    dropped: out after a short round; its time is of another moment than the others', and cannot win.
    """

    key: Key
    status: str
    time_us: float | None = None
    warm_us: float | None = None
    cold_us: float | None = None
    spread: float | None = None
    error: float | None = None
    why: str = ""
    where: str = ""
    dropped: bool = False

    @property
    def name(self) -> str:
        return str(self.key)

    def to_data(self) -> dict[str, Any]:
        """As JSON data, for other processes and for the store."""
        return asdict(self)

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Candidate:
        """Raises KeyError or TypeError for data of another form."""
        return Candidate(**{**data, "key": Key.from_data(data["key"])})


@dataclass(frozen=True)
class Decision:
    """What was chosen for one choice, or how one kernel is launched.

    region: the choice's or the kernel's name.   op: what it computes.   config: how a kernel is launched.
    winners: one for each size range, in order (of a choice).
    candidates: all that were considered, failed ones included.   reason: one sentence.
    members: neighbours that were measured with it.   sizes: its inputs, for people.
    """

    region: str
    winners: tuple[Key, ...]
    candidates: tuple[Candidate, ...]
    reason: str
    op: str = ""
    members: tuple[str, ...] = ()
    sizes: str = ""
    config: Config | None = None

    @property
    def winner(self) -> Any:
        """The winners' names, for people; of a kernel that a heuristic launches, its Config."""
        return " | ".join(dict.fromkeys(map(str, self.winners))) if self.winners else self.config
