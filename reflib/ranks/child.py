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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..autotune import switches
from ..autotune.bench import Entry
from ..autotune.by_value import makers
from ..autotune.measure import Session
from ..timing import (
    GRAPH_SECONDS,
    CaptureFailed,
    Fn,
    Graphs,
    Sampler,
    Samples,
    calls_for,
    elapsed,
    loop,
    replay_seconds,
    turning,
)
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
    and its time is the slowest rank's: of a CUDA graph of calls that all replay at once; without a GPU, of a loop.
    Inputs differ from rank to rank."""

    def __init__(self, request: Any, rank: int):
        from ..tuning import build

        super().__init__(replace(request, seed=request.seed + rank), build, makers(request.makers))
        self.graphs: Graphs | None = None

    def _time(self, e: Entry) -> None:
        assert self.bench is not None
        if e.status == "error":
            return  # (this process ends)
        right = self._over_ranks(float(e.status == "ok"), dist.ReduceOp.MIN)
        if right < 1:
            if e.status == "ok":
                e.fail("wrong", "its results are wrong on another rank")
            return
        sample = self._graph(e) or self._loop(e)
        seconds = [self._sampled(sample) for _ in range(ROUNDS)]
        mine = torch.tensor(seconds, dtype=torch.float64, device=self.device)
        slowest, total = mine.clone(), mine.clone()
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        dist.all_reduce(total)
        e.warm, e.cold = Samples(tuple(slowest.tolist())), None
        n = dist.get_world_size()
        e.say(f"the slowest of {n} ranks; mean {statistics.median(total.tolist()) / n * 1e6:.1f} us")

    def _graph(self, e: Entry) -> Sampler | None:
        """Replays a CUDA graph of calls, as many on all ranks; None: not on a GPU, or not captured on all."""
        if self.device.type != "cuda" or not self.request.graph_timing:
            return None
        self.graphs, fn = self.graphs or Graphs(), self._call(e)
        once, graph = self._slowest(lambda: elapsed(partial(loop, fn, 3)) / 3), None
        for _ in range(2):  # (the first estimate has launches in it)
            calls, why = calls_for(once, GRAPH_SECONDS), ""
            try:
                graph = self.graphs.capture(partial(loop, fn, calls))
            except CaptureFailed as error:
                why = str(error)
            if self._over_ranks(float(not why), dist.ReduceOp.MIN) < 1:
                e.say(f"no CUDA graph ({why or 'on another rank'}): timed with launches in")
                return None
            assert graph is not None
            graph.replay()
            once = self._slowest(partial(replay_seconds, graph)) / calls
        return lambda: replay_seconds(graph) / calls

    def _loop(self, e: Entry) -> Sampler:
        """Calls as many on all ranks, launches and all."""
        fn, bench = self._call(e), self.bench
        assert bench is not None

        def sample(calls: int) -> float:
            start = time.perf_counter()
            loop(fn, calls)
            bench.wait()
            return (time.perf_counter() - start) / calls

        calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS / max(self._slowest(partial(sample, 1)), 1e-7))))
        return partial(sample, calls)

    def _call(self, e: Entry) -> Fn:
        assert self.bench is not None and e.call is not None
        return turning(e.call, [self.bench.args])

    def _slowest(self, sample: Sampler) -> float:
        """Of two; at first, connections are made."""
        return [self._over_ranks(self._sampled(sample), dist.ReduceOp.MAX) for _ in range(2)][-1]

    def _sampled(self, sample: Sampler) -> float:
        """On all ranks at the same time."""
        assert self.bench is not None
        self.bench.restore()
        dist.barrier()
        self.bench.wait()
        return sample()

    def _over_ranks(self, value: float, op: Any) -> float:
        t = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(t, op)
        return float(t.item())
