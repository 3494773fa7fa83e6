"""Answers that need no measuring: pinned by the user, decided before, or brought from another machine.

``find`` asks, in this order: ``Options.lookup_table``; the store, by a key of everything that could matter; the tables
imported into it, by device model, op and sizes. Each of them names candidates, and a name counts only if the compiler
has just made a candidate of that name: nothing from outside becomes code. (A name that is not there is logged, with
the nearest that is.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..options import Options
from ..tables import chosen, lookup
from .circumstances import decision_key, device_model, facts
from .decision import Candidate


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


def find(
    about: About, names: Sequence[str], ranges: int, options: Options, store: Any
) -> tuple[tuple[str, ...], tuple[Candidate, ...], str] | None:
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


def _pinned(winners: tuple[str, ...], by: str) -> tuple[tuple[str, ...], tuple[Candidate, ...], str]:
    rows = tuple(Candidate(name, "pinned", why=by) for name in dict.fromkeys(winners))
    return winners, rows, f"pinned {by}"


def keep(
    about: About, winners: Sequence[str], rows: Sequence[Candidate], reason: str, seconds: float, store: Any
) -> None:
    """For later, and for ``reflib tune export``. ``seconds``: that measuring took."""
    key = key_of(about)
    beside = facts(about.device, about.op, about.sizes, rows[0].name, seconds, about.dtypes, about.epilogue)
    store.put(key, {"winners": list(winners), "rows": [asdict(r) for r in rows], "reason": reason}, beside)


def _checked(
    ruling: dict[str, Any], names: Sequence[str], ranges: int
) -> tuple[tuple[str, ...], tuple[Candidate, ...], str] | None:
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
