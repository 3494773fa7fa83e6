"""A meeting: each rank of a process group sends one value, and gets what the first rank concludes from all.

It goes through the group's store and not through a collective, which would hang, or mix up data, where a rank
does something else. Each rank writes its words; the group's first rank reads them all and writes what follows, which
the others read: for N ranks N values, each read once, and one that is read N times. They ask at growing intervals: a
store that waits for a key serves no other thread of its process, and Ctrl-C does nothing then.

A rank that does not come within the limit is named in an error on all others. Meetings of a group are numbered by each
rank, so all must hold the same ones in the same order, as with collectives; two that have come to different ones (one
tunes, say, and one does not) are an error on all. Those with a name are numbered apart.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from ..errors import ReflibError

GRACE = 5.0  # seconds by which the other ranks wait longer for the first
PAUSES = 0.001, 0.2  # seconds between two requests of a rank that waits: the first, the longest
_held: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()  # process group -> meetings so far, by name


class RanksError(ReflibError):
    """Ranks do not do the same, or one does not answer."""


class Meeting:
    """``what`` kind of meeting it is; ``about``: in messages. ``limit``: seconds (default: the store's timeout, which
    is ``init_process_group(timeout=)``). ``name``: meetings with it have an order of their own."""

    def __init__(self, group: Any, what: str, about: str, limit: float | None = None, name: str = ""):
        held = _held.setdefault(group, Counter())
        held[name] += 1
        self.group, self.what, self.about, self.key = group, what, about, f"reflib/meeting/{name}/{held[name]}"
        self.store = store_of(group)
        self.limit = self.store.timeout.total_seconds() if limit is None else limit

    def tell(self, words: Any) -> None:
        """Say ``words`` (JSON data), and go on."""
        try:
            self.store.set(f"{self.key}/{self.group.rank()}", json.dumps([self.what, self.about, words]))
        except RuntimeError as e:
            raise RanksError(f"rank {self.group.rank()} cannot write to the process group's store: {e}") from e

    def hear(self, conclude: Callable[[list[Any]], Any]) -> Any:
        """What ``conclude`` makes, on the first rank, of all ranks' words in order. Its error is raised on all."""
        if self.group.rank() != 0:
            return self._verdict()
        try:
            verdict: Any = [conclude(self._all()), ""]
        except BaseException as e:
            group = f"rank 0 of process group {self.group.group_name!r}"
            text = str(e) if isinstance(e, RanksError) else f"{group} ended with {type(e).__name__}: {e}"
            with contextlib.suppress(RuntimeError):  # (the store is gone)
                self._answer([None, text])
            raise
        self._answer(verdict)
        return json.loads(json.dumps(verdict[0]))  # as the others have it

    def _answer(self, verdict: Any) -> None:
        self.store.set(f"{self.key}/verdict", json.dumps(verdict))

    def _all(self) -> list[Any]:
        last, found = time.monotonic() + self.limit, []
        for rank in range(self.group.size()):
            key = f"{self.key}/{rank}"
            try:
                self._wait(key, last)
                what, about, words = json.loads(self.store.get(key))
            except RuntimeError as e:
                raise RanksError(
                    f"rank {rank} of process group {self.group.group_name!r} did not come within {self.limit:.0f} s to "
                    f"{self.about}: it ended, is late, or runs other code"
                ) from e
            if what != self.what:
                raise RanksError(
                    f"ranks of process group {self.group.group_name!r} are at different points: rank 0 came to "
                    f"{self.about}, rank {rank} to {about}. Run the same code with the same options on all ranks"
                )
            found.append(words)
        for rank in range(self.group.size()):
            self.store.delete_key(f"{self.key}/{rank}")
        return found

    def _wait(self, key: str, last: float) -> None:
        pause, longest = PAUSES
        while not self.store.check([key]):
            if time.monotonic() > last:
                raise RuntimeError(f"{key} is not there")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _verdict(self) -> Any:
        try:
            self._wait(f"{self.key}/verdict", time.monotonic() + self.limit + GRACE)
            verdict, error = json.loads(self.store.get(f"{self.key}/verdict"))
        except RuntimeError as e:
            raise RanksError(
                f"rank 0 of process group {self.group.group_name!r} did not answer within {self.limit + GRACE:.0f} s: "
                f"here, rank {self.group.rank()} came to {self.about}"
            ) from e
        if error:
            raise RanksError(error)
        return verdict


def store_of(group: Any) -> Any:
    """The store that the ranks of ``group`` share."""
    import torch.distributed.distributed_c10d as c10d

    return c10d._world.pg_map[group][1]
