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

from .share import BEAT, Requests, claimed, divided, most_parts, place, published, settled


@dataclass(frozen=True)
class World:
    """``parts``: in which a question may be measured; each takes the share ``common`` of its seconds, and a part of the
    rest. ``late``: ranks begin uniformly within so many seconds. A share ``stragglers`` takes ``slower`` times as
    long; a share ``failures`` ends at a moment drawn from the first ``fail_within`` seconds."""

    ranks: int
    seconds: Sequence[float]  # per question
    parts: int = 1
    common: float = 0.4
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
    seconds. ``measured``: how often any question, or a part of one, was measured. ``ended``: ranks that failed."""

    seconds: float = 0.0
    requests: int = 0
    busy: float = 0.0
    measured: int = 0
    ended: int = 0


def tuned(me: int, size: int, questions: int, limit: float, parts: int = 1) -> Requests:
    """What one rank does: claim those dealt to it, which then are measured meanwhile; then need each in order. What is
    started has its question, its number among the parts and how many there are."""
    dealt, mine = list[tuple[int, int, int]](), set[tuple[int, int, int]]()
    for i in range(questions):
        n = yield from divided(str(i), min(most_parts(i, questions, size), parts))
        for part in [(i, j, n) for j in range(n)]:
            own = place(i, part[1], n, questions, size) % size == me
            if own and (yield from claimed(me, str(part))):
                yield "start", *part
                mine.add(part)
            dealt.append(part)
    for part in dealt:
        if part not in mine:
            if (yield from settled(me, size, str(part), limit)) is not None:
                continue
            yield "start", *part
        yield "finish", *part
        yield from published(str(part), f"outcome {part}")


@dataclass
class _Rank:
    todo: Generator[tuple[Any, ...], Any, Any]
    began: float
    factor: float = 1.0
    dies: float = float("inf")
    free: float = 0.0  # when its device is
    finished: dict[tuple[int, ...], float] = field(default_factory=dict)


def simulate(world: World) -> Found:
    rng = random.Random(world.seed)
    ranks = []
    for i in range(world.ranks):
        rank = _Rank(tuned(i, world.ranks, len(world.seconds), world.limit, world.parts), rng.uniform(0, world.late))
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
        i, _, n = args
        share = world.common + (1 - world.common) / n
        rank.free = rank.finished[tuple(args)] = max(now, rank.free) + world.seconds[i] * share * rank.factor
    if what == "finish":
        return max(now, rank.finished[tuple(args)]), now
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
