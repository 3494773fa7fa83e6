"""A question in parts, so that several processes with equal devices measure it: each some of the candidates, all beside
the default.

What is compared are ratios to the default's time, which every part has measured in its own race: so it does not matter
that no two devices are equally fast. An outcome of parts is computed from their rows alone, which all processes share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ..ir.decision import Candidate, Key
from .question import Question
from .store import Outcome
from .winner import pick_winner

LEAST = 4  # candidates of a part, beside those that all parts have


def parts_of(q: Question, most: int, kept: Collection[Key]) -> list[Question]:
    """``q`` in ``most`` parts or fewer; whole, where it is measured at several sizes. ``kept``: candidates that each
    part has. A candidate stays with the one that differs in its epilogue alone: one compiler's report is about both."""
    alike: dict[Key, list[Key]] = {}
    for key in q.candidates:
        if key not in kept:
            alike.setdefault(replace(key, apart=False), []).append(key)
    n = min(most, sum(map(len, alike.values())) // LEAST)
    if n < 2 or not q.text or sum(len(r.points) for r in q.ranges) > 1:
        return [q]
    parts = []
    for i in range(n):
        own = {key for some in list(alike.values())[i::n] for key in some}
        candidates = {key: a for key, a in q.candidates.items() if key in kept or key in own}
        parts.append(replace(q, candidates=candidates, text=f"{q.text} part {i + 1} of {n}"))
    return parts


def joined(q: Question, outcomes: Sequence[Outcome], default: Key) -> Outcome:
    """What its parts' outcomes say together. ``default``: which they were measured beside."""
    base, rows = 0.0, dict[Key, Candidate]()
    for outcome in outcomes:
        own = next((r for r in outcome.rows if r.key == default), None)
        time = own.time_us or 0.0 if own is not None else 0.0
        base = base or time
        for row in outcome.rows:
            rows.setdefault(row.key, _beside(row, own, base / time) if own is not None and time else row)
    ordered = [rows[key] for key in q.candidates if key in rows]
    if any(r.time_us for r in ordered):
        name, reason = pick_winner(ordered, str(default), q.choice.min_speedup)
        return Outcome((q.named[name],), tuple(ordered), f"{reason}; measured in {len(outcomes)} parts for all")
    found = next((o for o in outcomes if o.winners != (default,)), outcomes[0])  # (what is not measured stays)
    return Outcome(found.winners, tuple(ordered), found.reason)


def _beside(row: Candidate, own: Candidate, scale: float) -> Candidate:
    """The row as it would be where the first part was measured; what its default's spread leaves open is its own."""
    if row.time_us is None or row.key == own.key:
        return row
    times = [None if t is None else t * scale for t in (row.time_us, row.warm_us, row.cold_us)]
    spread = max(row.spread or 0.0, own.spread or 0.0)
    return replace(row, time_us=times[0], warm_us=times[1], cold_us=times[2], spread=spread)
