"""Answers that need no measuring: pinned by the user, decided before, or brought from another machine.

``find`` looks, in this order, in ``Options.lookup_table``, in the store, by a key of everything that could matter, and
in the tables imported into the store, by device model, op and sizes. All of them hold names or keys, which count only
where the compiler has just made a candidate with that name or key: nothing from outside becomes code. (A name that no
candidate has is logged, with the nearest.)

For a target (a GPU that need not be here) the same three are used (``Elsewhere``), but the store by the facts beside
its decisions: the device model, whose architecture must be the target's, op, sizes, dtypes and what is fused behind it.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from ..ir.decision import Candidate
from ..logs import get as logger
from ..models import arch_of
from ..options import Options
from ..tables import ANY, Entry, Table, TableError, Winner, chosen, entry_of, lookup, lookup_entries
from ..target import Target
from .circumstances import device_model, facts
from .question import Question
from .store import Outcome, Store


def find(q: Question, options: Options, store: Store | None) -> Outcome | None:
    """None: measure."""
    about = (device_model(q.device), q.choice.op, q.sizes, q.dtypes, q.epilogue)
    if options.lookup_table and (found := _pinned(q, lookup(options.lookup_table, *about), "lookup_table")):
        return found
    if store is None:
        return None
    stored = store.get(q.store_key)
    if stored is not None and len(stored.winners) == len(q.ranges) and set(stored.winners) <= set(q.candidates):
        return Outcome(stored.winners, stored.rows, f"{stored.reason}; decided in an earlier run")
    return _pinned(q, store.imported(*about), "an imported table")


def keep(q: Question, outcome: Outcome, store: Store) -> None:
    """For later runs, and for ``reflib tune export``."""
    beside = facts(q.device, q.choice.op, q.sizes, outcome.rows[0].name, q.dtypes, q.epilogue)
    store.put(q.store_key, outcome, beside)


def _pinned(q: Question, winner: Winner | None, source: str) -> Outcome | None:
    names = None if winner is None else chosen(winner, list(q.named), len(q.ranges), source)
    return None if names is None else _unmeasured(q, names, "pinned", f"by {source}", f"pinned by {source}")


def _unmeasured(q: Question, names: Sequence[str], status: str, why: str, reason: str) -> Outcome:
    winners = tuple(q.named[name] for name in names)
    return Outcome(winners, tuple(Candidate(key, status, why=why) for key in dict.fromkeys(winners)), reason)


class Elsewhere:
    """What is known about GPUs of the target's architecture. The tables are read when first needed."""

    def __init__(self, target: Target, options: Options, store: Store | None):
        self.target, self.options, self.store = target, options, store

    @cached_property
    def tables(self) -> list[tuple[str, Table]]:
        """(source, table), in the order in which they count."""
        found = [("lookup_table", lookup_entries(self.options.lookup_table))]
        if self.store is not None:
            found.append(("the store of decisions", decided(self.store, strict=False)))
            found.append(("an imported table", self.store.imports(strict=False)))
        return [(source, table) for source, table in found if table.entries]

    def mentions(self, op: str, sizes: str, dtypes: str) -> bool:
        """Is there any entry about it?"""
        return any(table.ranked(self._own, op, sizes, dtypes) for _, table in self.tables)

    def find(self, q: Question) -> Outcome | None:
        """As ``find``: the best entry whose names are candidates for this target."""
        for source, table in self.tables:
            fitting = table.ranked(self._own, q.choice.op, q.sizes, q.dtypes, q.epilogue)
            for entry in fitting:
                names = chosen(entry.winner, list(q.named), len(q.ranges), f"{source} (for {self})")
                if names is None:
                    continue
                if source == "lookup_table" or entry.key[0] == ANY:
                    return _unmeasured(q, names, "pinned", f"by {source}", f"pinned by {source}")
                said = self._said(source, entry, fitting)
                return _unmeasured(q, names, "known", said, said)
        return None

    def _own(self, e: Entry) -> bool:
        return e.key[0] != ANY and arch_of(e.device) == self.target.arch

    def _said(self, source: str, entry: Entry, fitting: Sequence[Entry]) -> str:
        said = f"known of {entry.device}" + (", from an imported table" if source == "an imported table" else "")
        others = [e for e in fitting if self._own(e) and e.key[3:] == entry.key[3:] and e.winner != entry.winner]
        if others:
            said += f", the most recent; {', '.join(f'{e.winner_text} of {e.device}' for e in others)}"
        return said

    def __str__(self) -> str:
        """What determines the candidates: some are made only with autotune."""
        shared = f", {self.target.shared // 1024} KB of shared memory" if self.target.is_gpu else ""
        return f"{self.target.arch}{shared}, autotune={self.options.autotune!r}"


# -- as a portable table -------------------------------------------------------------------------------
def decided(store: Store, strict: bool = True) -> Table:
    """Every decision in the store as an entry. One whose names a table may not have is left out, with a line in the
    log. Raises CacheError where the store cannot be used, if ``strict``."""
    entries = []
    for outcome, beside in store.decisions(strict):
        try:
            entries.append(_entry(outcome, beside))
        except TableError as e:
            logger("tuning").warning("left out: %s", e)
    return Table(tuple(entries))


def _entry(outcome: Outcome, beside: dict[str, Any]) -> Entry:
    names, default = [str(w) for w in outcome.winners], beside.get("default", "")
    data: dict[str, Any] = {k: beside[k] for k in ("device", "op", "sizes", "dtypes", "epilogue", "versions", "date")
                            if k in beside}  # fmt: skip
    data |= {"winner": names[0] if len(names) == 1 else names, "default": default}
    if len(names) == 1:  # with several ranges there is no one time
        data |= {"time_us": _time(outcome, names[0]), "default_us": _time(outcome, default)}
    return entry_of(data, f"the decision for {beside.get('op')!r:.80}")


def _time(outcome: Outcome, name: str) -> float | None:
    """Microseconds; the geometric mean where it was measured at several sizes; None if it was not."""
    times = [row.time_us for row in outcome.rows if row.name == name and row.status == "ok"]
    if not times or not all(times):
        return None
    return float(f"{math.exp(sum(math.log(t) for t in times if t) / len(times)):.6g}")
