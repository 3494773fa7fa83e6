"""A few processes with a gloo group, for a whole file of tests: each task is a function that all of them call.

with Ranks(2) as ranks:
    results = ranks.run(task, 1, 2)      # task(1, 2) on both, in a new process group; one result per rank
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class Failed(str):
    """What a task raised: ``Type: message``."""


class Ranks:
    def __init__(self, size: int):
        self.size, self.number = size, itertools.count()
        self.folder = tempfile.TemporaryDirectory()
        self.links: list[Connection] = []
        context = multiprocessing.get_context("spawn")
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=_serve, args=(theirs, rank, size), daemon=True))
            self.links.append(ours)
            self.processes[-1].start()
            theirs.close()

    def run(self, task: Callable[..., Any], *args: Any, timeout: float = 60.0, limit: float = 120.0) -> list[Any]:
        """One result per rank: what the task returned, a Failed, or None where the process has ended. ``timeout``: of
        the process group. A rank that takes longer than ``limit`` is an error here."""
        file = str(Path(self.folder.name) / str(next(self.number)))
        for link in self.links:
            with contextlib.suppress(OSError):
                link.send((task, args, file, timeout))
        last = time.monotonic() + limit
        return [self._answer(link, last) for link in self.links]

    def _answer(self, link: Connection, last: float) -> Any:
        try:
            if not link.poll(max(0.0, last - time.monotonic())):
                raise AssertionError("a rank did not answer in time")
            return link.recv()
        except (EOFError, OSError):
            return None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *error: Any) -> None:
        for p in self.processes:
            p.kill()
        for p in self.processes:
            p.join()
        self.folder.cleanup()


def _serve(link: Connection, rank: int, size: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    while True:
        try:
            task, args, file, timeout = link.recv()
        except EOFError:
            os._exit(0)
        torch._dynamo.reset()
        torch.manual_seed(0)
        store = dist.FileStore(file, size)
        store.set_timeout(timedelta(seconds=timeout))  # as init_process_group does with stores that it makes
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
        try:
            result = task(*args)
        except BaseException as e:
            result = Failed(f"{type(e).__name__}: {e}")
        link.send(result)
        with contextlib.suppress(Exception):
            dist.destroy_process_group()
