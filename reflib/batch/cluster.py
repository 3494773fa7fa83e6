"""A Dask cluster, in this process or at a scheduler's address; `execute` runs jobs on it.

    with local(workers=1, gpus=["0"]) as cluster: ...        with remote("tcp://10.0.0.1:8786") as cluster: ...
        for job, outcome in cluster.execute(jobs): ...       in order of completion

A worker has one thread, so it runs one job at a time. Workers with a GPU have the resource GPU=1, which a job on "cuda"
requires; in this process, workers for jobs on the CPU likewise have CPU=1.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import logging
import os
import queue
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reflib.batch import work
from reflib.batch.jobs import NotebookJob
from reflib.batch.work import JobOutcome
from reflib.errors import LabError

CONNECT_SECONDS = 5.0
FETCH_SECONDS = 5.0  # for a completed job's result to arrive
WORKERS_SECONDS = 15.0  # to wait for the first worker of a cluster
ABANDONED_SECONDS = 60.0  # without any worker, after which waiting jobs fail
STOP_SECONDS = 15.0  # for jobs to end once they are cancelled
START_WORKERS = "dask worker {address} --nthreads 1 (with a GPU: CUDA_VISIBLE_DEVICES=0 ... --resources GPU=1)"


@dataclass
class JobCluster:
    """A client of a scheduler, and how jobs use its workers."""

    client: Any  # distributed.Client
    address: str  # "" for the cluster in this process
    bars: bool = False  # whether jobs show progress bars

    def workers(self) -> dict[str, dict[str, Any]]:
        """Dask's information about each worker, by address."""
        return dict(self.client.scheduler_info(n_workers=-1)["workers"])

    def slots(self, device: str) -> int:
        """Number of jobs for a device that run at the same time."""
        wanted = self.resource(device)
        return sum(1 for w in self.workers().values() if all(w["resources"].get(r, 0) >= 1 for r in wanted))

    def resource(self, device: str) -> dict[str, int]:
        if device == "cuda":
            return {"GPU": 1}
        return {} if self.address else {"CPU": 1}

    def resolve(self, device: str) -> str:
        """The concrete device for "auto". LabError if no worker has the given one."""
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
        jobs: Sequence[NotebookJob],
        retries: int = 0,
        limit: float | None = None,
        started: Callable[[NotebookJob, int], None] = lambda job, attempt: None,
    ) -> Iterator[tuple[NotebookJob, JobOutcome]]:
        """Run the jobs, those on GPUs first; repeat a failed one up to `retries` times. `limit`: seconds per job.

        Closing the iterator, or an exception such as KeyboardInterrupt, ends the running jobs.
        """
        for device in ("cuda", "cpu"):
            yield from Flight(self, device, retries, limit, started).run([j for j in jobs if j.device == device])

    def close(self) -> None:
        with contextlib.suppress(Exception):
            cluster = self.client.cluster
            self.client.close(timeout=2)
            if cluster is not None:
                cluster.close(timeout=5)


Sent = tuple[NotebookJob, int, tuple[str, ...]]  # with the number of this attempt, and the errors of earlier ones


class Flight:
    """The submitted jobs for one device: only as many as can run, so that no worker has two and another none."""

    def __init__(
        self,
        cluster: JobCluster,
        device: str,
        retries: int,
        limit: float | None,
        started: Callable[[NotebookJob, int], None],
    ):
        self.cluster, self.device, self.retries, self.limit, self.started = cluster, device, retries, limit, started
        self.running: dict[Any, Sent] = {}
        self.done: queue.SimpleQueue[Any] = queue.SimpleQueue()  # futures, put there by Dask
        self.seen = time.monotonic()  # when the last worker was present

    def run(self, jobs: Sequence[NotebookJob]) -> Iterator[tuple[NotebookJob, JobOutcome]]:
        waiting: collections.deque[Sent] = collections.deque((job, 1, ()) for job in jobs)
        try:
            while waiting or self.running:
                self.fill(waiting)
                finished = []
                for future in self.ended():
                    if (outcome := outcome_of(future)) is None:
                        future.add_done_callback(self.done.put)  # when it has run again
                        continue
                    job, attempt, earlier = self.running.pop(future)
                    outcome = replace(outcome, attempt=attempt, earlier=earlier)
                    if outcome.status == "interrupted":
                        raise KeyboardInterrupt
                    if outcome.status == "failed" and attempt <= self.retries:
                        waiting.append((job, attempt + 1, (*earlier, outcome.error)))
                    else:
                        finished.append((job, outcome))
                if finished:
                    self.fill(waiting)  # before the caller writes them to disk
                    yield from finished
        finally:
            self.stop()

    def fill(self, waiting: collections.deque[Sent]) -> None:
        room = self.room() if waiting or self.running else 0
        while waiting and len(self.running) < room:
            self.send(*waiting.popleft())

    def room(self) -> int:
        """How many jobs may be submitted now. Workers may join and leave; LabError after a long time without any."""
        if self.cluster.client.status not in ("running", "connecting"):
            raise LabError(f"the scheduler at {self.cluster.address} no longer responds")
        try:
            room = self.cluster.slots(self.device)
        except Exception:  # the scheduler does not respond now; the client retries
            room = 0
        if room:
            self.seen = time.monotonic()
        elif time.monotonic() - self.seen > ABANDONED_SECONDS:
            raise LabError(f"no worker is left at {self.cluster.address}")
        return room

    def send(self, job: NotebookJob, attempt: int, earlier: tuple[str, ...]) -> None:
        future = self.cluster.client.submit(
            work.do, job.text, job.notebook, dict(job.parameters), job.device, self.limit, self.cluster.bars,
            key=f"{job.id}-{attempt}-{time.time_ns()}", pure=False, resources=self.cluster.resource(self.device),
        )  # fmt: skip
        self.running[future] = (job, attempt, earlier)
        future.add_done_callback(self.done.put)
        self.started(job, attempt)

    def ended(self) -> list[Any]:
        """Completed futures, after waiting at most half a second for one. (NB: each of Dask's own waits that ends late
        may leave a TimeoutError, which is printed at the end of the process.)"""
        found = []
        with contextlib.suppress(queue.Empty):
            found.append(self.done.get(timeout=0.5 if self.running else 0.1))
            while True:
                found.append(self.done.get_nowait())
        return [future for future in found if future in self.running]

    def stop(self) -> None:
        """Cancel running jobs; in this process, wait until they have ended."""
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


def outcome_of(future: Any) -> JobOutcome | None:
    """The outcome of a completed task, a failed one if it raised. None if it cannot be had now: the worker that held it
    has ended, and the scheduler runs the task again."""
    from distributed import KilledWorker

    try:
        found = future.result(timeout=FETCH_SECONDS)
        return found if isinstance(found, JobOutcome) else JobOutcome("failed", f"it returned {type(found).__name__}")
    except KilledWorker as error:
        where = getattr(error.last_worker, "address", error.last_worker)
        return JobOutcome("failed", f"its worker ended ({where}): killed, or out of memory?")
    except (concurrent.futures.CancelledError, asyncio.CancelledError):
        return JobOutcome("failed", "the scheduler lost it")
    except Exception as error:
        if isinstance(error, TimeoutError) and future.status != "error":  # not the task's own
            return None
        return JobOutcome("failed", work.because(error))


# ---- a cluster in this process


def local(workers: int = 1, gpus: Sequence[str] = (), cpu_workers: int = 1, bars: bool = False) -> JobCluster:
    """A cluster whose workers are threads of this process. The first ones have a GPU each, named as in
    CUDA_VISIBLE_DEVICES; the first `cpu_workers` run jobs on the CPU."""
    import dask
    from distributed import Client, Scheduler, SpecCluster, Worker

    class Unlisted:
        """A mixin without the HTTP server that Dask's workers open on a public port, even without a dashboard."""

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
    return JobCluster(client, "", bars)


def local_gpus() -> list[str]:
    """The GPUs of this machine, named as in CUDA_VISIBLE_DEVICES."""
    import torch

    seen = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [seen[i] if i < len(seen) else str(i) for i in range(count)]


def workers_for(devices: set[str], requested: int | None) -> tuple[int, list[str], int]:
    """(workers, GPUs, workers for CPU jobs) for jobs on these devices on this machine. LabError if impossible."""
    if requested is not None and requested < 1:
        raise LabError(f"--workers {requested}: at least one is needed")
    gpus = local_gpus() if "cuda" in devices else []
    if requested is not None and gpus and requested > len(gpus):
        raise LabError(
            f"--workers {requested}: there are {len(gpus)} GPUs here, and jobs never share one, for undisturbed timings"
        )
    workers = requested or max(1, len(gpus))
    return workers, gpus[:workers], requested or 1


# ---- a cluster elsewhere


def remote(address: str) -> JobCluster:
    """The cluster of a scheduler. LabError, within seconds, if none responds or a worker cannot be used."""
    from distributed import Client

    quiet()
    reachable(address)
    try:
        client = Client(address, timeout=CONNECT_SECONDS)
    except Exception as error:
        raise LabError(
            f"{address} is not a Dask scheduler, or has another version: {work.because(error)}"
        ) from None
    cluster = JobCluster(client, address)
    try:
        check(cluster)
    except BaseException:
        cluster.close()
        raise
    return cluster


def reachable(address: str) -> None:
    """LabError if nothing listens at the address; faster and clearer than the error of Dask."""
    from distributed.comm import get_address_host_port

    try:
        host, port = get_address_host_port(address if "://" in address else f"tcp://{address}", strict=True)
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except ValueError as error:
        raise LabError(f"--scheduler {address}: {error}; an address is such as tcp://10.0.0.1:8786") from None
    except OSError as error:
        raise LabError(
            f"no Dask scheduler responds at {address} ({error.strerror or error}): start one with `dask scheduler`"
        ) from None


def check(cluster: JobCluster) -> None:
    """LabError unless all workers have this version of reflib, one thread, and separate GPUs."""
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
            wrong.append(f"{name} cannot be inspected: {work.because(facts)}")
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
    """A function that is pickled by value, for workers without reflib."""

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
    """Silence Dask's log messages about workers that join and leave."""
    for name in ("distributed", "distributed.scheduler", "distributed.worker", "distributed.core", "distributed.comm"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
