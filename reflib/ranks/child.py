"""One rank's worker while candidates that communicate are measured (``tune`` sends them). Functions of (state, data,
say), as in ``jobs``. The workers of all ranks have a process group of their own, and run the same in step.

No lock of the device is taken, as for other candidates: ranks that share one would wait for each other.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..autotune import switches
from ..autotune.bench import Entry
from ..autotune.by_value import makers
from ..autotune.measure import Session
from ..timing import Samples
from . import candidates, collectives  # noqa: F401  (they define reflib's ops)

ROUNDS, ROUND_SECONDS, MOST_CALLS = 9, 0.004, 64
LOST_EXIT = 86
STARTING = 240.0  # seconds for all ranks' workers to be there


State = dict[str, Any]
Data = Mapping[str, Any]
Say = Callable[[dict[str, Any]], None]


def begin(state: State, data: Data, say: Say) -> dict[str, Any]:
    """Meet the other ranks' workers. data: ``request``, ``group``, ``switches``, ``limit``."""
    switches.write(dict(data["switches"]))
    join(data["group"], data["limit"])
    state["session"] = Together(data["request"], data["group"]["rank"])
    return {}


def try_one(state: State, data: Data, say: Say) -> dict[str, Any]:
    """data: ``name``. {row}. A failure ends this process, and so its connections: the other ranks, which may wait for
    it in a collective, fail soon too."""
    try:
        if "session" not in state:
            raise Failed("its ranks' workers did not find each other")
        session, row = state["session"], None
        if session.bench is None:
            row = session.open()
            say({"kind": "alive"})
        if row is None or data["name"] != row.name:
            row = session.try_one(data["name"])
        if row.status in ("error", "skipped"):
            raise Failed(row.why)
        return {"row": row}
    except BaseException as e:
        say({"kind": "lost", "status": "error", "why": str(e) if isinstance(e, Failed) else f"{type(e).__name__}: {e}"})
        os._exit(LOST_EXIT)


def leave(state: State, data: Data, say: Say) -> dict[str, Any]:
    """End this process: what the workers had together is over."""
    os._exit(0)


class Failed(Exception):
    """A candidate's own error."""


def join(group: Mapping[str, Any], limit: float) -> None:
    """The workers' process group: the default one, and under the name that programs have for it."""
    kind, *where = group["store"]
    timeout = timedelta(seconds=limit)
    if kind == "tcp":
        store: Any = dist.TCPStore(where[0], where[1], is_master=False, timeout=timeout, wait_for_workers=False)
        store = dist.PrefixStore(group["prefix"], store)
    else:
        store = dist.FileStore(f"{where[0]}.{group['prefix'].replace('/', '.')}", group["size"])
    store.set_timeout(timeout)
    rank, size = group["rank"], group["size"]
    store.set(f"here {rank}", "")
    store.wait([f"here {r}" for r in range(size)], timedelta(seconds=STARTING))
    dist.init_process_group(group["backend"], store=store, rank=rank, world_size=size, timeout=timeout)
    if group["name"] != dist.group.WORLD.group_name:  # type: ignore[union-attr]
        torch._C._distributed_c10d._register_process_group(group["name"], dist.group.WORLD)


class Together(Session):
    """Measures as ``Session`` does, in step with other ranks: a candidate counts as right only if it is on all of them,
    and its time is the slowest rank's, from one barrier to the next. Inputs differ from rank to rank."""

    def __init__(self, request: Any, rank: int):
        from ..tuning import build

        super().__init__(replace(request, seed=request.seed + rank), build, makers(request.makers))

    def _time(self, e: Entry) -> None:
        assert self.bench is not None
        if e.status == "error":
            return  # (this process ends)
        right = self._over_ranks(float(e.status == "ok"), dist.ReduceOp.MIN)
        if right < 1:
            if e.status == "ok":
                e.fail("wrong", "its results are wrong on another rank")
            return
        calls = self._calls(e)
        seconds = [self._round(e, calls) for _ in range(ROUNDS)]
        mine = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        slowest, total = mine.clone(), mine.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        e.warm, e.cold = Samples(tuple(slowest.tolist())), None
        n = dist.get_world_size()
        e.say(f"the slowest of {n} ranks; mean {statistics.median(total.tolist()) / n * 1e6:.1f} us")

    def _calls(self, e: Entry) -> int:
        """How many calls a round has: the same on all ranks."""
        once = self._over_ranks(self._round(e, 1), dist.ReduceOp.MAX)
        return max(1, min(MOST_CALLS, int(ROUND_SECONDS / max(once, 1e-7))))

    def _round(self, e: Entry, calls: int) -> float:
        assert self.bench is not None and e.call is not None
        self.bench.restore()
        dist.barrier()
        self.bench.wait()
        start = time.perf_counter()
        for _ in range(calls):
            e.call(list(self.bench.args))
        self.bench.wait()
        return (time.perf_counter() - start) / calls

    def _over_ranks(self, value: float, op: Any) -> float:
        t = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(t, op)
        return float(t.item())
