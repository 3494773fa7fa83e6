"""Tuned kernels replace the others at the same call on all ranks (``autotune="background"``).

Where the choice is between candidates that communicate, a rank that swapped alone would start other collectives than
the rest, and all would wait for ever; elsewhere ranks would round differently for some steps. So each rank counts its
calls of a graph, and they agree on the call from which all run the tuned variant. No collective is inserted and no call
waits for another rank:

* The process group's store has one value per graph, the **register**: {rank: promise}. A rank whose tuned variant is
  loaded promises not to begin call P before it has looked again, and writes P there, in one atomic operation of the
  store (``compare_set``).
* At its call P it looks. If some rank is missing, it promises a later one, as far ahead as it calls in LOOK seconds: so
  a rank that waits for others makes about one request per second, and one that never becomes ready stops no other.
* With the last rank's promise the register is complete and does not change any more. The largest promise is the agreed
  call. No rank has begun it: each looks before its own promise, which is not larger.

A rank whose tuning failed writes why. If a choice communicates, all ranks then keep the fallback, with that error. Else
the others do without it, and after ``tuning_seconds`` also without a rank that has not come: its graphs may be others
(stages of a pipeline, say). Equal graphs are recognized by their choices, and by their order among equal ones.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from ..autotune.question import groups_of, sizes_of
from ..ir.program import Choice, Program, walk
from ..logs import get as logger
from ..options import Options
from .meeting import RanksError, store_of

LOOK = 1.0  # seconds between two looks at the register, about
ALONE = "alone"  # in the register: without those that are missing

_graphs: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # process group -> how often each graph was there
_last: WeakKeyDictionary[Any, threading.Event] = WeakKeyDictionary()  # process group -> the last tuning's end
_queueing = threading.Lock()


class Turn:
    """When this rank's graph ``name`` goes over to its tuned variant. ``together``: all ranks of ``group``, or none.
    ``why``: they do not."""

    def __init__(self, group: Any, name: str, together: bool, seconds: float):
        self.group, self.name, self.together, self.seconds = group, name, together, seconds
        self.rank, self.store, self.key = str(group.rank()), store_of(group), f"reflib/swap/{name}"
        self.why, self.agreed = "", False
        self.next = 0  # the call before which to look; once it is agreed, the call that swaps
        self._seen = ""  # the register, as last read
        self._looked: tuple[int, float] | None = None  # at which call, when
        self._since = 0.0
        self._before: threading.Event | None = None
        self._ended = threading.Event()

    def comes(self, call: int) -> bool:
        """Does the graph's call number ``call`` run the tuned variant? To be asked before each one. Raises RanksError
        if that cannot be known."""
        if call >= self.next and not self.agreed and not self.why:
            self._look(call)
        return self.agreed and call >= self.next

    def _look(self, call: int) -> None:
        now = time.monotonic()
        then, when = self._looked or (call, now)
        self._since = self._since or now
        self._looked = call, now
        calls = call - then
        self.next = call + max(1, min(2 * calls, round(calls / max(now - when, 1e-6) * LOOK)))
        late = not self.together and now - self._since > self.seconds
        try:
            found = self._write({self.rank: self.next, **({ALONE: None} if late else {})})
        except RuntimeError as e:
            raise RanksError(f"the store of process group {self.group.group_name!r} cannot be used: {e}") from e
        failed = [f"rank {rank}: {entry}" for rank, entry in found.items() if isinstance(entry, str)]
        if self.together and failed:
            self.why = f"tuning failed on {failed[0]}"
        elif self._complete(found):
            self.agreed, self.next = True, max(e for e in found.values() if isinstance(e, int))
            logger("autotune").info("%d ranks swap at call %d", len(found), self.next)

    def say(self, entry: int | str) -> None:
        """In place of a promise: any call will do (0), or why there is no tuned variant here."""
        with contextlib.suppress(RuntimeError):  # (the store is gone)
            self._write({self.rank: entry})

    def _write(self, more: dict[str, Any]) -> dict[str, Any]:
        """The register, with ``more`` in it unless it was complete."""
        while True:
            found = json.loads(self._seen or "{}")
            if self._complete(found):
                return found
            mine = json.dumps(found | more)
            self._seen = self.store.compare_set(self.key, self._seen, mine).decode()
            if self._seen == mine:
                return found | more

    def _complete(self, found: dict[str, Any]) -> bool:
        return len(found) == self.group.size() or ALONE in found

    # -- the order of tuning ---------------------------------------------------------------------------
    def queue(self) -> None:
        """Graphs are tuned in the order of their first calls, one after another, where all ranks take part."""
        if self.together:
            with _queueing:
                self._before, _last[self.group] = _last.get(self.group), self._ended

    @contextlib.contextmanager
    def tuning(self) -> Iterator[None]:
        """Around the tuning of the graph; it begins when those before it have ended."""
        if self._before is not None:
            self._before.wait()
        try:
            yield
        finally:
            self._ended.set()


def turn(program: Program, kind: str, options: Options) -> Turn | None:
    """Of a graph that is tuned in the background; None where this process is no rank. ``kind``: "forward", say. A part
    of what ranks do together (``autotune.points.Alone``)."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() < 2:
        return None
    choices = [n for n in walk(program.nodes) if isinstance(n, Choice)]
    names = sorted(set[str]().union(*map(groups_of, choices)))
    group = c10d._resolve_process_group(names[0]) if len(names) == 1 else dist.group.WORLD
    about = json.dumps([kind, names, [[c.op, sizes_of(program, c)] for c in choices]])
    digest = hashlib.sha256(about.encode()).hexdigest()[:32]
    counts = _graphs.setdefault(group, Counter())
    counts[digest] += 1
    return Turn(group, f"{digest}/{counts[digest]}", bool(names), options.tuning_seconds)
