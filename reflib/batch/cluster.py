"""Where jobs run: a Dask cluster, in this process or behind a scheduler's address; `execute` sends them there.

    with local(workers=1, gpus=["0"]) as cluster: ...        with remote("tcp://10.0.0.1:8786") as cluster: ...
        for job, outcome in cluster.execute(jobs): ...       in the order in which they end

A worker has one thread, so it runs one job at a time. Those that have a GPU offer the resource GPU=1, which a job on
"cuda" takes; of those in this process the ones that may run jobs on the CPU offer CPU=1 likewise.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reflib.batch import work
from reflib.batch.jobs import Job
from reflib.batch.work import Outcome
from reflib.errors import LabError

CONNECT_SECONDS = 5.0
WORKERS_SECONDS = 15.0  # for the first worker of a cluster to come
ABANDONED_SECONDS = 60.0  # without any worker; then what waits has failed
STOP_SECONDS = 15.0  # for jobs to end once they are cancelled
START_WORKERS = "dask worker {address} --nthreads 1 (with a GPU: CUDA_VISIBLE_DEVICES=0 ... --resources GPU=1)"


@dataclass
class Cluster:
    """A client of a scheduler, and how its workers may be used."""

    client: Any  # distributed.Client
    address: str  # "" in this process
    bars: bool = False  # whether jobs draw progress bars of their cells

    def workers(self) -> dict[str, dict[str, Any]]:
        """Dask's facts about each worker, by address."""
        return dict(self.client.scheduler_info(n_workers=-1)["workers"])

    def slots(self, device: str) -> int:
        """How many jobs for a device run at once."""
        wanted = self.resource(device)
        return sum(1 for w in self.workers().values() if all(w["resources"].get(r, 0) >= 1 for r in wanted))

    def resource(self, device: str) -> dict[str, int]:
        if device == "cuda":
            return {"GPU": 1}
        return {} if self.address else {"CPU": 1}

    def resolve(self, device: str) -> str:
        """Which device "auto" is; the others must be offered by a worker."""
        gpus = self.slots("cuda")
        if device == "auto":
            return "cuda" if gpus else "cpu"
        if device not in ("cpu", "cuda"):
            raise LabError(f"device is {device!r}; on a cluster it must be auto, cpu or cuda")
        if device == "cuda" and not gpus:
            how = START_WORKERS.format(address=self.address)
            raise LabError(f"no worker of {self.address} offers a GPU: start them with {how}")
        return device

    def execute(
        self,
        jobs: Sequence[Job],
        retries: int = 0,
        limit: float | None = None,
        started: Callable[[Job, int], None] = lambda job, attempt: None,
    ) -> Iterator[tuple[Job, Outcome]]:
        """Run the jobs, those on GPUs first; a failed one again up to `retries` times. `limit` of each: seconds.

        Closing the iterator, or an exception such as KeyboardInterrupt, ends those that run.
        """
        for device in ("cuda", "cpu"):
            yield from Flight(self, device, retries, limit, started).run([j for j in jobs if j.device == device])

    def close(self) -> None:
        with contextlib.suppress(Exception):
            cluster = self.client.cluster
            self.client.close(timeout=2)
            if cluster is not None:
                cluster.close(timeout=5)


Sent = tuple[Job, int, tuple[str, ...]]  # with the number of the attempt, and the errors of those before


class Flight:
    """Jobs for one device on their way. As many are sent as can run, so that no worker has two and another none."""

    def __init__(
        self,
        cluster: Cluster,
        device: str,
        retries: int,
        limit: float | None,
        started: Callable[[Job, int], None],
    ):
        self.cluster, self.device, self.retries, self.limit, self.started = cluster, device, retries, limit, started
        self.running: dict[Any, Sent] = {}
        self.seen = time.monotonic()  # when there was a worker

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Outcome]]:
        waiting: collections.deque[Sent] = collections.deque((job, 1, ()) for job in jobs)
        try:
            while waiting or self.running:
                self.fill(waiting)
                finished = []
                for future in self.ended():
                    job, attempt, earlier = self.running.pop(future)
                    outcome = replace(outcome_of(future), attempt=attempt, earlier=earlier)
                    if outcome.status == "interrupted":
                        raise KeyboardInterrupt
                    if outcome.status == "failed" and attempt <= self.retries:
                        waiting.append((job, attempt + 1, (*earlier, outcome.error)))
                    else:
                        finished.append((job, outcome))
                if finished:
                    self.fill(waiting)  # before whoever takes them writes them to a disk
                    yield from finished
        finally:
            self.stop()

    def fill(self, waiting: collections.deque[Sent]) -> None:
        room = self.room() if waiting or self.running else 0
        while waiting and len(self.running) < room:
            self.send(*waiting.popleft())

    def room(self) -> int:
        """How many may be on their way. Workers come and go; without any for long, it is an error."""
        if self.cluster.client.status not in ("running", "connecting"):
            raise LabError(f"the scheduler at {self.cluster.address} no longer answers")
        try:
            room = self.cluster.slots(self.device)
        except Exception:  # the scheduler does not answer now; its client tries again
            room = 0
        if room:
            self.seen = time.monotonic()
        elif time.monotonic() - self.seen > ABANDONED_SECONDS:
            raise LabError(f"no worker is left at {self.cluster.address}")
        return room

    def send(self, job: Job, attempt: int, earlier: tuple[str, ...]) -> None:
        future = self.cluster.client.submit(
            work.do, job.text, job.notebook, dict(job.parameters), job.device, self.limit, self.cluster.bars,
            key=f"{job.id}-{attempt}-{time.time_ns()}", pure=False, resources=self.cluster.resource(self.device),
        )  # fmt: skip
        self.running[future] = (job, attempt, earlier)
        self.started(job, attempt)

    def ended(self) -> list[Any]:
        """Futures that are done, after waiting for one, for half a second at most."""
        from distributed import wait

        if not self.running:
            time.sleep(0.1)
        with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError, asyncio.CancelledError):
            wait(list(self.running), timeout=0.5, return_when="FIRST_COMPLETED")
        return [future for future in self.running if future.done()]

    def stop(self) -> None:
        """Cancel what runs; in this process, wait until it has ended."""
        if not self.running:
            return
        with contextlib.suppress(Exception):
            self.cluster.client.cancel(list(self.running), force=True)
        if not self.cluster.address:
            until = time.monotonic() + STOP_SECONDS
            workers = self.cluster.client.cluster.workers.values()
            while any(w.state.executing for w in workers) and time.monotonic() < until:
                time.sleep(0.05)
        self.running.clear()


def outcome_of(future: Any) -> Outcome:
    """What a task returned, or why it did not."""
    from distributed import KilledWorker

    try:
        found = future.result(timeout=CONNECT_SECONDS)
        return found if isinstance(found, Outcome) else Outcome("failed", f"it returned {type(found).__name__}")
    except KilledWorker as error:
        where = getattr(error.last_worker, "address", error.last_worker)
        return Outcome("failed", f"its worker ended ({where}): killed, or out of memory?")
    except (concurrent.futures.CancelledError, asyncio.CancelledError):
        return Outcome("failed", "the scheduler lost it")
    except Exception as error:
        return Outcome("failed", work.because(error))


# ---- a cluster in this process


def local(workers: int = 1, gpus: Sequence[str] = (), cpu_workers: int = 1, bars: bool = False) -> Cluster:
    """Workers that are threads here. The first have a GPU each, named as CUDA_VISIBLE_DEVICES names it; the first
    `cpu_workers` take jobs on the CPU."""
    import dask
    from distributed import Client, Scheduler, SpecCluster, Worker

    class Unlisted:
        """Dask's have an HTTP server, on a port open to all, even without their dashboard."""

        def start_http_server(self, *_: Any, **__: Any) -> None:
            pass

    here, scheduler = (type(base.__name__, (Unlisted, base), {}) for base in (Worker, Scheduler))
    quiet()
    dask.config.set({"distributed.worker.profile.enabled": False, "distributed.admin.system-monitor.interval": "10s"})

    def offered(index: int) -> dict[str, int]:
        return {"GPU": 1} | ({"CPU": 1} if index < cpu_workers else {}) if index < len(gpus) else {"CPU": 1}

    options = {"nthreads": 1, "memory_limit": 0, "dashboard": False}
    spec = {i: {"cls": here, "options": {**options, "name": i, "resources": offered(i)}} for i in range(workers)}
    top = {"cls": scheduler, "options": {"protocol": "inproc://", "dashboard": False}}
    cluster = SpecCluster(workers=spec, scheduler=top, silence_logs=logging.CRITICAL)
    for index, gpu in enumerate(gpus[:workers]):
        cluster.workers[index].reflib_gpu = gpu
    client = Client(cluster)
    client.wait_for_workers(workers)
    return Cluster(client, "", bars)


def local_gpus() -> list[str]:
    """The GPUs of this machine, as CUDA_VISIBLE_DEVICES names them."""
    import torch

    seen = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [seen[i] if i < len(seen) else str(i) for i in range(count)]


def workers_for(devices: set[str], asked: int | None) -> tuple[int, list[str], int]:
    """(workers, GPUs, workers that take jobs on the CPU) for jobs on these devices on this machine."""
    if asked is not None and asked < 1:
        raise LabError(f"--workers {asked}: at least one is needed")
    gpus = local_gpus() if "cuda" in devices else []
    if asked is not None and gpus and asked > len(gpus):
        raise LabError(
            f"--workers {asked}: there are {len(gpus)} GPUs here, and two jobs never share one (timings would suffer)"
        )
    workers = asked or max(1, len(gpus))
    return workers, gpus[:workers], asked or 1


# ---- a cluster elsewhere


def remote(address: str) -> Cluster:
    """The cluster of a scheduler. LabError, within seconds, where none answers or a worker cannot be used."""
    from distributed import Client

    quiet()
    reachable(address)
    try:
        client = Client(address, timeout=CONNECT_SECONDS)
    except Exception as error:
        raise LabError(
            f"what answers at {address} is no Dask scheduler, or of another version: {work.because(error)}"
        ) from None
    cluster = Cluster(client, address)
    try:
        check(cluster)
    except BaseException:
        cluster.close()
        raise
    return cluster


def reachable(address: str) -> None:
    """Asked before Dask, which takes longer to give up and says less."""
    from distributed.comm import get_address_host_port

    try:
        host, port = get_address_host_port(address if "://" in address else f"tcp://{address}", strict=True)
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except ValueError as error:
        raise LabError(f"--scheduler {address}: {error}; an address is such as tcp://10.0.0.1:8786") from None
    except OSError as error:
        raise LabError(
            f"no Dask scheduler answers at {address} ({error.strerror or error}): start one with `dask scheduler` there"
        ) from None


def check(cluster: Cluster) -> None:
    """Every worker has this reflib, one thread, and a GPU of its own if any; else an error that names it."""
    try:
        cluster.client.wait_for_workers(1, timeout=WORKERS_SECONDS)
    except TimeoutError:
        raise LabError(
            f"{cluster.address} has no workers: start them with {START_WORKERS.format(address=cluster.address)}"
        ) from None
    import importlib.metadata

    own = importlib.metadata.version("reflib")
    wrong = []
    taken: dict[tuple[str, str], str] = {}
    workers = cluster.workers()
    for address, facts in cluster.client.run(facts_of_worker(), on_error="return").items():
        name = f"worker {workers.get(address, {}).get('name', address)} ({address})"
        if not isinstance(facts, dict):
            wrong.append(f"{name} cannot say what it has: {work.because(facts)}")
        elif facts["reflib"] != own or facts["lacks"]:
            has = f"has {facts['reflib'] or 'no'} reflib, not {own}"
            has = f"lacks {facts['lacks']}" if facts["reflib"] == own else has
            wrong.append(f"{name} {has}: pip install 'reflib[batch]=={own}' there")
        elif workers.get(address, {}).get("nthreads", 1) != 1:
            wrong.append(f"{name} would run several jobs at once: start it with --nthreads 1")
        elif workers.get(address, {}).get("resources", {}).get("GPU"):
            other = taken.setdefault((facts["host"], facts["gpu"]), name)
            if other != name:
                gpu = f"GPU {facts['gpu']}" if facts["gpu"] else "all GPUs"
                wrong.append(f"{name} and {other} both see {gpu}: give each its own CUDA_VISIBLE_DEVICES")
    if wrong:
        raise LabError("\n".join(wrong))


def facts_of_worker() -> Callable[[], dict[str, str]]:
    """A function that carries its own code, for workers that have no reflib."""

    def facts() -> dict[str, str]:
        import importlib.metadata
        import importlib.util
        import os
        import socket

        try:
            version = importlib.metadata.version("reflib")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0]
        needed = ["papermill", "ipykernel", "nbformat"] + (["reflib.batch"] if version else [])
        lacks = ", ".join(name for name in needed if importlib.util.find_spec(name) is None)
        return {"reflib": version, "lacks": lacks, "host": socket.gethostname(), "gpu": first}

    return facts


def quiet() -> None:
    """Dask's own lines about workers that come and go; what matters is said here."""
    for name in ("distributed", "distributed.scheduler", "distributed.worker", "distributed.core", "distributed.comm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
