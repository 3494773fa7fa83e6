"""Answers that need no measuring: pinned by the user, decided before, or brought from another machine.

``find`` asks, in this order: ``Options.lookup_table``; the store, by a key of everything that could matter; the tables
imported into it, by device model, op and sizes. Each of them names candidates, and a name counts only if the compiler
has just made a candidate of that name: nothing from outside becomes code. (A name that is not there is logged, with
the nearest that is.)

For a target (a GPU that need not be here) the same three are asked (``Elsewhere``), but the store by what stands beside
its rulings: the device model, whose architecture must be the target's, op, sizes, dtypes and what is fused behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from ..options import Options
from ..tables import ANY, Entry, Table, chosen, lookup, lookup_entries
from ..target import Target, arch_of
from .circumstances import decision_key, device_model, facts
from .decision import Candidate
from .portable import decided


@dataclass(frozen=True)
class About:
    """A question: its ``text`` (all that is compiled and measured), and what people call it."""

    text: str
    device: torch.device
    op: str
    sizes: str
    dtypes: str = ""
    epilogue: str = ""


def key_of(about: About) -> str:
    """Of the store."""
    return decision_key(about.text, str(about.device))


Ruled = tuple[tuple[str, ...], tuple[Candidate, ...], str]  # the winner of each range, rows, reason


def find(about: About, names: Sequence[str], ranges: int, options: Options, store: Any) -> Ruled | None:
    """(the winner of each range, rows, reason), or None: measure."""
    model = device_model(about.device)
    what = (model, about.op, about.sizes, about.dtypes, about.epilogue)
    if options.lookup_table and (name := lookup(options.lookup_table, *what)) is not None:
        winners = chosen(name, names, ranges, "lookup_table")
        if winners is not None:
            return _pinned(winners, "by lookup_table")
    if store is None:
        return None
    ruling = store.get(key_of(about))
    if ruling is not None and (found := _checked(ruling, names, ranges)) is not None:
        return found
    if (name := store.imported(*what)) is not None and (winners := chosen(name, names, ranges, "an imported table")):
        return _pinned(winners, "by an imported table")
    return None


def _pinned(winners: tuple[str, ...], by: str) -> Ruled:
    rows = tuple(Candidate(name, "pinned", why=by) for name in dict.fromkeys(winners))
    return winners, rows, f"pinned {by}"


class Elsewhere:
    """What is known about GPUs of the target's architecture. The tables are read when first asked."""

    def __init__(self, target: Target, options: Options, store: Any):
        self.target, self.options, self.store = target, options, store

    @cached_property
    def tables(self) -> list[tuple[str, Table]]:
        """Where from, and what: in the order in which they count."""
        found = [("lookup_table", lookup_entries(self.options.lookup_table))]
        if self.store is not None:
            found += [("decided", decided(self.store, strict=False)), ("imported", self.store.imports(strict=False))]
        return [(source, table) for source, table in found if table.entries]

    def mentions(self, op: str, sizes: str, dtypes: str) -> bool:
        """Is there anything about it?"""
        return any(table.ranked(self._own, op, sizes, dtypes) for _, table in self.tables)

    def find(self, about: About, names: Sequence[str], ranges: int) -> Ruled | None:
        """As ``find``: the best entry whose names are candidates for this target."""
        for source, table in self.tables:
            fitting = table.ranked(self._own, about.op, about.sizes, about.dtypes, about.epilogue)
            for entry in fitting:
                winners = chosen(entry.winner, names, ranges, f"{_SAID[source]} (for {self})")
                if winners is not None:
                    return self._ruled(winners, source, entry, fitting)
        return None

    def _own(self, e: Entry) -> bool:
        return e.key[0] != ANY and arch_of(e.device) == self.target.arch

    def _ruled(self, winners: tuple[str, ...], source: str, entry: Entry, fitting: Sequence[Entry]) -> Ruled:
        if source == "lookup_table" or entry.key[0] == ANY:
            return _pinned(winners, f"by {_SAID[source]}")
        said = f"known of {entry.device}" + (", from an imported table" if source == "imported" else "")
        others = [e for e in fitting if self._own(e) and e.key[3:] == entry.key[3:] and e.winner != entry.winner]
        if others:
            said += f", the most recent; {', '.join(f'{e.winner} of {e.device}' for e in others)}"
        return winners, tuple(Candidate(name, "known", why=said) for name in dict.fromkeys(winners)), said

    def __str__(self) -> str:
        """What says which candidates there are: some are made only where measuring was asked for."""
        shared = f", {self.target.shared // 1024} KB of shared memory" if self.target.is_gpu else ""
        return f"{self.target.arch}{shared}, autotune={self.options.autotune!r}"


_SAID = {"lookup_table": "lookup_table", "decided": "the store of decisions", "imported": "an imported table"}


def keep(
    about: About, winners: Sequence[str], rows: Sequence[Candidate], reason: str, seconds: float, store: Any
) -> None:
    """For later, and for ``reflib tune export``. ``seconds``: that measuring took."""
    key = key_of(about)
    beside = facts(about.device, about.op, about.sizes, rows[0].name, seconds, about.dtypes, about.epilogue)
    store.put(key, {"winners": list(winners), "rows": [asdict(r) for r in rows], "reason": reason}, beside)


def _checked(ruling: dict[str, Any], names: Sequence[str], ranges: int) -> Ruled | None:
    """A stored ruling, if it is about these candidates."""
    try:
        winners = tuple(ruling["winners"])
        rows = tuple(Candidate(**row) for row in ruling["rows"])
        reason = str(ruling["reason"])
    except (KeyError, TypeError):
        return None
    if len(winners) != ranges or not set(winners) <= set(names):
        return None
    return winners, rows, f"{reason}; decided in an earlier run"
