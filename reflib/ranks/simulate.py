"""Sharing the work of tuning, simulated: a thousand ranks without a GPU.

Every rank runs the rules of ``share`` themselves, on a clock of the simulation's own. What is modelled is the rest: how
long a question takes (recorded), when ranks begin, stragglers, ranks that fail, and the store: one server, which does
one request after the other, each in ``service`` seconds, a network's ``latency`` away.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .share import BEAT, Requests, claimed, published, settled


@dataclass(frozen=True)
class World:
    """``late``: ranks begin uniformly within so many seconds. A share ``stragglers`` of them takes ``slower`` times as
    long; a share ``failures`` ends at a moment drawn from the first ``fail_within`` seconds."""

    ranks: int
    seconds: Sequence[float]  # per question
    late: float = 0.0
    stragglers: float = 0.0
    slower: float = 3.0
    failures: float = 0.0
    fail_within: float = 10.0
    latency: float = 100e-6
    service: float = 30e-6
    limit: float = 600.0
    seed: int = 0


@dataclass
class Found:
    """``seconds``: until the last rank has all outcomes. ``requests``: to the store, which was ``busy`` for so many
    seconds. ``measured``: how often any question was measured. ``ended``: ranks that failed."""

    seconds: float = 0.0
    requests: int = 0
    busy: float = 0.0
    measured: int = 0
    ended: int = 0


def tuned(me: int, size: int, questions: int, limit: float) -> Requests:
    """What one rank does: claim those dealt to it, which then are measured meanwhile; then need each in order."""
    mine = set()
    for i in range(me, questions, size):
        if (yield from claimed(me, str(i))):
            yield "start", i
            mine.add(i)
    for i in range(questions):
        if i not in mine:
            if (yield from settled(me, size, str(i), limit)) is not None:
                continue
            yield "start", i
        yield "finish", i
        yield from published(str(i), f"outcome {i}")


@dataclass
class _Rank:
    todo: Generator[tuple[Any, ...], Any, Any]
    began: float
    factor: float = 1.0
    dies: float = float("inf")
    free: float = 0.0  # when its device is
    finished: dict[int, float] = field(default_factory=dict)


def simulate(world: World) -> Found:
    rng = random.Random(world.seed)
    ranks = []
    for i in range(world.ranks):
        rank = _Rank(tuned(i, world.ranks, len(world.seconds), world.limit), rng.uniform(0, world.late))
        rank.factor = world.slower if rng.random() < world.stragglers else 1.0
        rank.dies = rng.uniform(0, world.fail_within) if rng.random() < world.failures else rank.dies
        ranks.append(rank)
    out, order, data = Found(), itertools.count(), dict[str, str]()
    free = 0.0  # when the store is
    events: list[tuple[float, int, int, Any, Any]] = []  # (when, tie, rank, request at the store or None, answer)
    for i, rank in enumerate(ranks):
        heapq.heappush(events, (rank.began, next(order), i, None, None))
    while events:
        now, _, i, request, answer = heapq.heappop(events)
        rank = ranks[i]
        if now > rank.dies:
            out.ended += 1
            continue
        if request is not None:  # it has arrived at the store
            free = max(now, free) + world.service
            out.requests, out.busy = out.requests + 1, out.busy + world.service
            answer = _stored(data, ranks, free, request)
            heapq.heappush(events, (free + world.latency, next(order), i, None, answer))
            continue
        try:
            what, *args = rank.todo.send(answer)
        except StopIteration:
            out.seconds = max(out.seconds, now)
            continue
        if what in ("now", "sleep", "start", "finish"):
            then, answer = _alone(world, rank, now, what, args)
            out.measured += what == "start"
            heapq.heappush(events, (then, next(order), i, None, answer))
        else:
            heapq.heappush(events, (now + world.latency, next(order), i, (what, *args), None))
    return out


def _alone(world: World, rank: _Rank, now: float, what: str, args: Sequence[Any]) -> tuple[float, Any]:
    """What a rank does without the store: (when it goes on, with what)."""
    if what == "start":
        rank.free = rank.finished[args[0]] = max(now, rank.free) + world.seconds[args[0]] * rank.factor
    if what == "finish":
        return max(now, rank.finished[args[0]]), now
    return now + args[0] if what == "sleep" else now, now


def _stored(data: dict[str, str], ranks: list[_Rank], now: float, request: tuple[Any, ...]) -> Any:
    what, key, *values = request
    if what == "beats":
        rank = ranks[int(key)]
        return int((min(now, rank.dies) - rank.began) / BEAT)
    if what == "compare_set" and data.get(key, "") == values[0]:
        data[key] = values[1]
    elif what == "set":
        data[key] = values[0]
    return data.get(key, "")
