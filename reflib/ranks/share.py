"""Choices that many ranks have to decide are measured once: by one rank each, for all that have equal devices.

Questions are dealt in rounds of as many as there are ranks, one to each. Those of the last round, if they are fewer,
are measured in **parts** (``autotune.parts``), so that no rank is idle: each by several ranks, which have some of its
candidates each, and its default. In how many, the first rank that comes to a question says: others may know more, and
have fewer questions left.

The default process group's store holds, per question or part (``Question.store_key``: the subprogram, its candidates,
the model of the device, versions), a **claim** and, once it is decided, the outcome. A rank claims what is dealt to it
at once and has it measured. When a rank needs an answer

* it is there: it is taken, and kept in this rank's own table of decisions;
* no rank has claimed it (another program, other devices, a rank that is late): this rank claims it and measures;
* another rank measures it: this one polls, at intervals that grow with the number of ranks. A rank that measures counts
  its **beats** in the store; one whose beats have stopped for STALE seconds has failed, and its claim is taken over.
  After ``tuning_seconds`` this rank measures it too.

No rank waits for one that does not come, and ranks need not run the same program. Claims are made by one atomic
operation of the store (``compare_set``). The rules are generators of store requests, so that the simulation
(``simulate``) runs the same with a thousand ranks and a clock of its own.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import asdict
from typing import Any
from weakref import WeakKeyDictionary

from ..autotune.parts import parts_of
from ..autotune.pool import exiting, threads
from ..autotune.store import Outcome
from ..ir.decision import Key
from ..logs import get as logger
from .meeting import store_of

FIRST_PAUSE = 0.02  # seconds between two requests of a rank that waits; they grow
MOST_REQUESTS = 1000  # per second, of all ranks together
STALE, BEAT = 10.0, 1.0
FEW = 16  # ranks for which questions are measured in parts: of more, that may take as long (``simulate``)
Requests = Generator[tuple[Any, ...], Any, Any]  # (what, ...): see ``Sharing.do``
DONE = "done"


# -- the rules --------------------------------------------------------------------------------------------
def most_parts(i: int, count: int, size: int) -> int:
    """How many of ``size`` ranks can measure the i-th of ``count`` questions, and leave none of its round for later.
    (Of many ranks one: each asks the store for every part, which takes longer than it saves.)"""
    if size > FEW:
        return 1
    left = count - i // size * size  # in this round and those that follow
    return max(1, size // min(size, left)) if left > 0 else 1


def place(i: int, j: int, parts: int, count: int, size: int) -> int:
    """The rank, modulo ``size``, that part ``j`` of question ``i`` is dealt to. Parts of the last round are dealt
    backwards: where questions grow along a program, the first ranks have the smaller ones."""
    whole = count - count % size
    return i + j if i < whole or parts == 1 else whole + size - 1 - ((i - whole) * parts + j)


def divided(key: str, most: int) -> Requests:
    """In how many parts is it measured? As the first rank says."""
    return int((yield "compare_set", f"{key}/parts", "", str(most)))


def claimed(me: int, key: str) -> Requests:
    """Did this rank claim it now?"""
    return (yield "compare_set", f"{key}/claim", "", str(me)) == str(me)


def published(key: str, outcome: str) -> Requests:
    yield "set", f"{key}/outcome", outcome
    yield "set", f"{key}/claim", DONE


def released(me: int, key: str) -> Requests:
    """As if this rank had not claimed it."""
    yield "compare_set", f"{key}/claim", str(me), ""


def settled(me: int, size: int, key: str, limit: float) -> Requests:
    """The outcome; None: this one of ``size`` ranks is to measure."""
    pause, heard, beats = FIRST_PAUSE, (yield ("now",)), -1
    last = heard + limit
    while True:
        owner = yield "compare_set", f"{key}/claim", "", str(me)
        if owner == DONE:
            return (yield "get", f"{key}/outcome")
        now = yield ("now",)
        if owner == str(me) or now > last:
            return None
        if now - heard > STALE / 2 or beats < 0:
            found = yield "beats", owner
            if found != beats:
                beats, heard = found, now
            elif now - heard > STALE and (yield "compare_set", f"{key}/claim", owner, str(me)) == str(me):
                return None
        yield "sleep", pause
        pause = min(2 * pause, max(FIRST_PAUSE, size / MOST_REQUESTS))


# -- in this process --------------------------------------------------------------------------------------
class Sharing:
    """This rank's part, over the store of ``group``."""

    def __init__(self, group: Any):
        self.rank, self.size, self.store = group.rank(), group.size(), store_of(group)
        self.dealt = 0  # questions so far: those of the next program begin with the next rank
        self.mine: set[str] = set()
        self.beating: threading.Thread | None = None

    def run(self, requests: Requests) -> Any:
        """What ``requests`` return, done on the real store."""
        answer: Any = None
        try:
            while True:
                answer = self.do(*requests.send(answer))
        except StopIteration as e:
            return e.value

    def do(self, what: str, *args: Any) -> Any:
        if what == "now":
            return time.monotonic()
        if what == "sleep":
            return time.sleep(args[0])
        if what == "beats":
            return self.store.add(f"reflib/beats/{args[0]}", 0)
        answer = getattr(self.store, what)(*(f"reflib/shared/{args[0]}", *args[1:]))
        return answer.decode() if isinstance(answer, bytes) else answer

    def measuring(self, key: str) -> None:
        """This rank measures it: others hear its beats."""
        self.mine.add(key)
        if self.beating is None or not self.beating.is_alive():
            self.beating = threading.Thread(target=self._beat, name="reflib-beats", daemon=True)
            threads.add(self.beating)
            self.beating.start()

    def _beat(self) -> None:
        while self.mine:
            try:
                self.store.add(f"reflib/beats/{self.rank}", 1)
            except RuntimeError:  # the store is gone, with the rank that held it
                return
            if exiting.wait(BEAT):
                return


_sharing: WeakKeyDictionary[Any, Sharing] = WeakKeyDictionary()


def sharing() -> Sharing | None:
    """This process's, if it is one of several ranks."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    group = dist.group.WORLD
    if group not in _sharing:
        _sharing[group] = Sharing(group)
    return _sharing[group]


def order(count: int) -> list[int]:
    """In which order this rank sends ``count`` questions: what is dealt to it first, to be compiled meanwhile."""
    s = sharing()
    return sorted(range(count), key=lambda i: s is not None and (s.dealt + i) % s.size != s.rank)


def deal(
    questions: Iterable[tuple[int, Any]], count: int, kept: Callable[[Any], Key]
) -> Iterator[tuple[Any, list[Any], list[Any]]]:
    """Each of about ``count`` numbered questions with the parts that it is measured in, and those dealt to this rank.
    ``kept``: a candidate that each part has."""
    s = sharing()
    for i, q in questions:
        if s is None or not q.text:
            yield q, [q], [q]
            continue
        most = _done(s, divided(_key(q), most_parts(i, count, s.size)), 1)
        parts = parts_of(q, most, {q.default, kept(q)}) if most > 1 else [q]
        places = [s.dealt + place(i, j, len(parts), count, s.size) for j in range(len(parts))]
        yield q, parts, [part for part, at in zip(parts, places) if at % s.size == s.rank]
    if s is not None:
        s.dealt += count


def claim(q: Any, work: Any) -> bool:
    """Is this rank to measure the question, or the part of one, now? A store that cannot be used is no obstacle: each
    rank measures then."""
    s = sharing()
    if s is None or not q.text or (key := _key(q)) in s.mine:
        return True
    found = _done(s, claimed(s.rank, key), None)
    if found:
        s.measuring(key)
    return found is not False


def settle(q: Any, work: Any) -> Outcome | None:
    """Another rank's outcome, waited for; None: measure it here."""
    s = sharing()
    if s is None or not q.text:
        return None
    key = _key(q)
    try:
        found = s.run(settled(s.rank, s.size, key, work.options.tuning_seconds))
        if found is not None:
            return Outcome.from_data(json.loads(found))
    except (RuntimeError, ValueError, KeyError, TypeError) as e:
        logger("tuning").warning("decisions are not shared between ranks: %s", e)
        return None
    s.measuring(key)
    return None


def publish(q: Any, outcome: Outcome) -> None:
    """Tell the others, if this rank measured for them."""
    s = sharing()
    if s is None or (key := _key(q)) not in s.mine:
        return
    reason = f"{outcome.reason}; measured by rank {s.rank} for all"
    _done(s, published(key, json.dumps(asdict(Outcome(outcome.winners, outcome.rows, reason)))), None)
    s.mine.discard(key)


def release(q: Any) -> None:
    """This rank does not measure it after all: another one may, at once."""
    s = sharing()
    if s is None or (key := _key(q)) not in s.mine:
        return
    s.mine.discard(key)
    _done(s, released(s.rank, key), None)


def _done(s: Sharing, requests: Requests, otherwise: Any) -> Any:
    """What ``requests`` return; ``otherwise`` where the store cannot be used."""
    try:
        return s.run(requests)
    except (RuntimeError, ValueError) as e:
        logger("tuning").warning("decisions are not shared between ranks: %s", e)
        return otherwise


def _key(q: Any) -> str:
    return hashlib.sha256(q.store_key.encode()).hexdigest()[:32]
