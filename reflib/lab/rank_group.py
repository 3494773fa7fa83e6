"""`lab.ranks`: a few processes that run a notebook's functions together, each as one rank of a process group.

ranks = lab.ranks(2)
ranks.run(function, *args)      # on every rank at once, in a process group of its own: one result per rank

Functions are sent by value, as tuning sends them (``autotune.by_value``). The store is in this process, as it is in
``torchrun``'s. What ranks print goes to the file ``ranks.log``.
"""

import atexit
import contextlib
import importlib
import itertools
import linecache
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch

from reflib.autotune import by_value
from reflib.errors import LabError
from reflib.options import Options

STARTING, LEAVING = 60.0, 2.0  # seconds for a process group to begin, and for a process to end by itself
LATE, ENDED = "killed: it was not done in time", "its process has ended"


class Failed(str):
    """What a rank raised, as ``Type: message``; or that it ended, or was killed."""


class Ranks:
    """``size`` processes, which start with the first ``run``. ``device``: "cuda" (a GPU per rank, NCCL) or "cpu"
    (gloo)."""

    def __init__(self, size: int, device: str) -> None:
        self.size, self.device = size, device
        self.links: list[Connection] = []
        self.processes: list[Any] = []
        self.store: Any = None
        self.number = itertools.count()
        handle, self.log = tempfile.mkstemp(prefix="ranks-", suffix=".log")
        os.close(handle)
        atexit.register(self.close)

    def run(
        self, function: Callable[..., Any], *args: Any, timeout: float = 60.0, limit: float = 120.0, backend: str = ""
    ) -> list[Any]:
        """``function(*args)`` on all ranks: one result per rank, or a Failed. ``timeout``: of the process group, in
        seconds. ``limit``: until all ranks are killed; the next ``run`` starts new ones. ``backend``: "gloo", say."""
        if not all(p.is_alive() for p in self.processes) or not self.processes:
            self._start()
        sent, ops = by_value.packed((function, args), function.__name__)
        if ops:
            raise LabError(f"{', '.join(ops)}: register the op in the function, so that each rank has it")
        cells = {f: entry for f, entry in linecache.cache.items() if len(entry) == 4 and not os.path.exists(f)}
        group = (f"run {next(self.number)}", self.store.port, timeout, backend)
        for link in self.links:
            with contextlib.suppress(OSError):
                link.send((sent, cells, group))
        last = time.monotonic() + limit
        results = [_answer(link, last) for link in self.links]
        if any(isinstance(r, Failed) and r in (LATE, ENDED) for r in results):
            self.close()
        return results

    def _start(self) -> None:
        import torch.distributed as dist

        self.close()
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=_serve, args=(theirs, rank, self.size, self.device, self.log)))
            self.links.append(ours)
            self.processes[-1].start()
            theirs.close()

    def close(self) -> None:
        """End the processes, and with them what they have started."""
        for link in self.links:
            link.close()
        for p in self.processes:
            p.join(LEAVING)
            p.kill()
            p.join()
        self.links, self.processes, self.store = [], [], None


def ranks(size: int = 2, device: Any = "cpu") -> Ranks:
    """Processes that run a notebook's functions together, as ranks of a process group. They are on GPUs if ``device``
    is one and there is one for each of them; else on the CPU, with gloo."""
    enough = torch.device(device).type == "cuda" and torch.cuda.device_count() >= size
    return Ranks(size, "cuda" if enough else "cpu")


def _answer(link: Connection, last: float) -> Any:
    try:
        if not link.poll(max(0.0, last - time.monotonic())):
            return Failed(LATE)
        return link.recv()
    except (EOFError, OSError):
        return Failed(ENDED)


def _own(names: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in names.items() if not k.startswith("__")}


def _serve(link: Connection, rank: int, size: int, device: str, log: str) -> None:
    """A rank's process."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d

    out = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    while True:
        try:
            sent, cells, (prefix, port, timeout, backend) = link.recv()
        except EOFError:
            os._exit(0)  # (no threads of a pool are waited for)
        linecache.cache.update(cells)  # what functions do is a part of decisions' keys
        if "torch._dynamo" in sys.modules:
            torch._dynamo.reset()
        limit = timedelta(seconds=timeout)
        tcp = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(prefix, tcp)
        backend = backend or ("nccl" if device == "cuda" else "gloo")
        starting = max(limit, timedelta(seconds=STARTING))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=starting)
        store.set(f"joined {rank}", "")  # one that leaves before the others have joined ends them
        store.wait([f"joined {r}" for r in range(size)], starting)
        store.set_timeout(limit)
        c10d._set_pg_timeout(limit)
        try:
            function, args = pickle.loads(sent)
            vars(sys.modules["__main__"]).update(_own(function.__globals__))  # where Dynamo looks for them
            result = function(*args)
        except Exception as e:
            result = Failed(f"{type(e).__name__}: {e}")
        link.send(result)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
        if "reflib.tuning" not in sys.modules:  # meanwhile: what the next will need takes seconds
            importlib.import_module("torch._dynamo")
            importlib.import_module("reflib.tuning").expect_tuning(Options(autotune="blocking"))
