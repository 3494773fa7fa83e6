"""Runs peers, which may crash, in a child process on the same device, with a time limit.

A crash, an error or a timeout becomes a labelled row, and the notebook continues.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from reflib.lab.children import Failure, Job, run
from reflib.lab.timing import Samples

if TYPE_CHECKING:
    import torch

ATTEMPTS = 4


@dataclass(frozen=True)
class Peer:
    """Source text that defines `make(device, dtype, **arguments) -> function of no arguments`."""

    source: str
    timeout_s: float = 120.0
    arguments: Mapping[str, Any] = field(default_factory=dict)


def peer(source: str, *, timeout_s: float = 120.0, **arguments: Any) -> Peer:
    """A case for `lab.measure` that runs in a separate process.

    `source` is Python text that defines `make(device, dtype, **arguments)`, returning the function to time. Arguments
    are passed as JSON. The time limit covers everything, including imports and compiling.
    """
    json.dumps(arguments)
    return Peer(source, timeout_s, arguments)


def run_peer(
    peer: Peer,
    clock: str | Callable[..., Any],
    cache: str,
    rounds: int,
    budget_s: float,
    device: torch.device,
) -> Samples | Failure:
    """Run the peer in a child process; its samples, or why there are none."""
    from reflib.lab.session import current

    if not isinstance(clock, str):
        return Failure("not here", "a clock of your own does not reach another process")
    how = {"clock": clock, "cache": cache, "rounds": rounds, "budget_s": budget_s}
    job = {"timing": how, "here": {**current().arguments(), "device": str(device)}}
    return run_at_places(peer.source, [peer.arguments], job, peer.timeout_s)[0]


def run_at_places(
    source: str, places: Sequence[Mapping[str, Any]], job: Job, timeout_s: float
) -> list[Samples | Failure]:
    """The peer's result for each of several arguments of its `make`, in one child process. After a place at which it
    crashes, another continues with the rest."""
    deadline = time.monotonic() + timeout_s
    found: list[Samples | Failure] = []
    for _ in range(ATTEMPTS):
        left = [dict(place) for place in places[len(found) :]]
        if not left or time.monotonic() >= deadline:
            break
        job = {**job, "places": left}
        limit = max(0.0, deadline - time.monotonic())
        results, why = run("reflib.lab.peer_child", job, {"peer_source.py": source}, limit)
        found += [r if isinstance(r, Failure) else Samples(tuple(r["seconds"]), r["clock"], r["note"]) for r in results]
        if len(results) < len(left) and why.status == "crashed":
            found.append(why)
    late = Failure("timed out", f"after {timeout_s:g} s")
    return found + [late] * (len(places) - len(found))
