"""The pool: child processes that compile and measure, so that what crashes or hangs there does neither here.

    job = Job("reflib.jobs:try_one", {...}, "cuda:0", said=print, ended=lambda how, facts: ...)
    pool().submit(job)               # returns at once

**Processes.** A *zygote* imports torch and the stages once (seconds) and forks the workers (milliseconds); both are in
``worker.py``. In this process each has a thread (``children.py``): the zygote's starts it and hears which workers have
ended; a worker's thread takes one job after another from the queue, sends it, waits for the answer, and calls ``said``
and ``ended``. A stuck worker delays its own thread only. There are at most ``compilers`` compile workers and one worker
per device.

**Messages** are pickled dataclasses over a socket per process. Pickled is what the parent made (plain data and
functions by name), so workers never import the user's ``__main__``.

**How jobs end.** A worker that is silent for ``limit`` seconds is killed ("hung"); so is one whose job is cancelled.
One whose process ends by itself has "crashed": its exit status and the end of its log say why. One whose GPU has become
unusable says so and exits, which counts as crashed. Then the thread ends, and another is started for the next job; on
a device only once the old process is gone, with its memory (or after GRACE). Killing is the zygote's task: it alone can
tell which process ids are still its children's. If the zygote dies its workers die with it, and queued jobs go on with
a new one; if it could not even start, queued jobs end with its last words.

**When processes leave.** A worker that has been idle for ``idle_seconds``, then the zygote. ``close`` kills all: it is
called at the interpreter's exit and on Ctrl-C (which reaches only the parent: the zygote leads a session of its own).
However the parent ends, its sockets end with it, and the zygote kills all. A forked child of the parent closes its
copies of the sockets and starts with an empty pool.

NB: not ``multiprocessing`` or ``ProcessPoolExecutor``: they import ``__main__`` again, are refused in daemonic
processes, fail all jobs when one worker dies, and cannot end a job that runs.
"""

from __future__ import annotations

import atexit
import bisect
import contextlib
import itertools
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from ..worker import Call, Ended
from .children import Ending, WorkerThread, ZygoteThread, call, child_path, cores

COMPILE = "compile"
# what every worker needs; names, because autotune may not import later stages
PRELOAD = (
    "torch",
    "reflib.generate.compile_triton:start_triton",
    "reflib.jobs",
    "reflib.tuning",
    "reflib.lower",
    "reflib.wrap",
)
CANCELLED: Ending = ("cancelled", {})


@dataclass(eq=False)
class Job:
    """One call of ``what`` ("module:function") with (state, data, say) in a worker. ``data`` and what it returns can be
    pickled, by names that a worker can import.

    where: "compile" (any compile worker), or a device's name: that device's worker, one job at a time.
    said: called with each message that the function says. ended: called once, with

        ("done", what the function returned) | ("failed", {"why", "trace"}): it raised
        ("crashed", {"why", "output"}): its process died | ("hung", {"why"}): it was silent for ``limit`` seconds
        ("cancelled", {})

    Both are called on the worker's thread; they may submit and cancel. limit: seconds; any message restarts the clock,
    {"kind": "waiting"} stops it until the next. priority: smaller first, then first come first served.
    ``data["imports"]``: files (*.py) and modules that the worker imports first, pickles that it loads (``by_value``).
    """

    what: str
    data: dict
    where: str
    said: Callable[[dict], None]
    ended: Callable[[str, dict], None]
    limit: float = 60.0
    priority: tuple = ()
    # moments of time.perf_counter(): when it was made, and when it started, in which worker ("compile 3", "cuda:0")
    since: float = field(default_factory=time.perf_counter, init=False)
    started: float = field(default=0.0, init=False)
    track: str = field(default="", init=False)


@dataclass(order=True)
class _Queued:
    priority: tuple
    number: int
    job: Job = field(compare=False)
    packed: bytes = field(compare=False)


class Pool:
    """compilers: how many compile workers at most; 0: one per core.
    preload: modules that the zygote imports, and functions ("module:function") that it calls meanwhile; they must not
        leave threads behind or use CUDA."""

    def __init__(self, compilers: int = 0, idle_seconds: float = 120.0, preload: tuple[str, ...] = PRELOAD):
        self.compilers = compilers
        self.idle_seconds = idle_seconds
        self.preload = preload
        self._numbers = itertools.count(1)
        self._reset()
        _pools.add(self)

    def _reset(self) -> None:
        # reentrant: the garbage collector may run a __del__ that cancels a job while its own thread is in here
        self.changed = threading.Condition(threading.RLock())
        self._queue: list[_Queued] = []
        self._workers: list[WorkerThread] = []
        self._zygote: ZygoteThread | None = None

    # -- from any thread
    def submit(self, job: Job) -> None:
        """Queue ``job``. Raises what pickle raises for data that cannot be sent. Where no thread can be started, as
        when the interpreter is ending, the job is cancelled at once."""
        imports = tuple(os.path.abspath(i) if str(i).endswith(".py") else i for i in job.data.get("imports", ()))
        packed = pickle.dumps(Call(job.what, job.data, imports, path=tuple(child_path())))
        queued = _Queued(job.priority, next(self._numbers), job, packed)
        with self.changed:
            bisect.insort(self._queue, queued)
            try:
                if not _exiting:
                    self._hire(job.where)
                    self.changed.notify_all()
                    return
            except RuntimeError:
                pass
            self._queue.remove(queued)
        job.ended(*CANCELLED)

    def cancel(self, job: Job) -> None:
        """End ``job`` soon, if it has not ended: dropped if queued, else its worker is killed."""
        with self.changed:
            queued = [q for q in self._queue if q.job is job]
            self._queue = [q for q in self._queue if q.job is not job]
            for worker in self._workers:
                if worker.job is job:
                    worker.kill(CANCELLED)
        for q in queued:
            call(q.job.ended, *CANCELLED)

    def wake(self) -> None:
        """Start the zygote, whose imports take seconds, before there is anything to do."""
        with self.changed, contextlib.suppress(RuntimeError):
            if not _exiting:
                self._zygote = self._zygote or ZygoteThread(self)

    def close(self) -> None:
        """Kill all processes; jobs end as cancelled. Takes less than half a second. Another ``submit`` starts anew."""
        with self.changed:
            zygote, workers, queue = self._zygote, self._workers, self._queue
            self._zygote, self._workers, self._queue = None, [], []
            for worker in workers:
                worker.verdict = worker.verdict or CANCELLED
            self.changed.notify_all()
        if zygote is not None:
            zygote.end()
        for q in queue:
            call(q.job.ended, *CANCELLED)
        last = time.monotonic() + 0.1
        for worker in workers:
            if worker is not threading.current_thread():
                worker.join(max(0.0, last - time.monotonic()))

    def processes(self) -> list[int]:
        """The process ids of all children that are alive, as far as is known: the zygote's first."""
        with self.changed:
            pids = [self._zygote.pid] if self._zygote else []
            return [pid for pid in pids + [w.pid for w in self._workers if not w.gone.is_set()] if pid]

    # -- from the processes' threads
    def _hire(self, where: str) -> None:
        """Start workers, as many as there are jobs and room for. With the lock held."""
        here = [w for w in self._workers if w.where == where]
        room = (1 if where != COMPILE else self.compilers or cores()) - len(here)
        jobs = sum(q.job.where == where for q in self._queue) - sum(w.job is None for w in here)
        for _ in range(min(room, jobs)):
            self._zygote = self._zygote or ZygoteThread(self)
            taken = {w.name for w in self._workers}
            names = (f"{where} {i}" for i in itertools.count(1)) if where == COMPILE else (where,)
            name = next(n for n in names if n not in taken)
            worker = WorkerThread(self, self._zygote, next(self._numbers), where, name)
            worker.start()  # raises where there is no thread to be had; its first job waits for the lock
            self._workers.append(worker)
            self._zygote.workers[worker.id] = worker

    def take(self, worker: WorkerThread) -> tuple[Job, bytes] | None:
        """The next job for ``worker``, and its message; None: it is to leave."""
        last = time.monotonic() + self.idle_seconds
        with self.changed:
            while worker in self._workers and not worker.gone.is_set():
                for q in self._queue:
                    if q.job.where == worker.where:
                        self._queue.remove(q)
                        worker.job = q.job
                        return q.job, q.packed
                if time.monotonic() >= last:
                    break
                self.changed.wait(last - time.monotonic())
        return None

    def over(self, worker: WorkerThread, job: Job, ending: Ending) -> Ending:
        """``job`` has ended; as what, if it was not cancelled meanwhile."""
        with self.changed:
            worker.job = None
            ending = worker.verdict or ending
        call(job.ended, *ending)
        return ending

    def left(self, worker: WorkerThread) -> None:
        """The worker's process is gone."""
        with self.changed:
            worker.zygote.workers.pop(worker.id, None)
            if worker in self._workers:
                self._workers.remove(worker)
                with contextlib.suppress(RuntimeError):
                    self._hire(worker.where)

    def cannot_start(self, worker: WorkerThread, why: str, output: str) -> None:
        """It costs one job, lest it be tried for ever. (If there was no zygote, ``zygote_gone`` ends all.)"""
        with self.changed:
            counts = worker.zygote.ready and worker in self._workers
            cost = [q for q in self._queue if q.job.where == worker.where][: int(counts)]
            self._queue = [q for q in self._queue if q not in cost]
        for q in cost:
            call(q.job.ended, "crashed", {"why": f"a worker could not be started: {why}", "output": output})

    def process_ended(self, zygote: ZygoteThread, message: Ended) -> None:
        with self.changed:
            if message.id in zygote.workers:
                zygote.workers[message.id].end(message.status)
            self.changed.notify_all()

    def unused(self, zygote: ZygoteThread) -> bool:
        """Whether there is nothing to do for it; then the pool has given it up."""
        with self.changed:
            if self._zygote is zygote and not self._workers and not self._queue:
                self._zygote = None
            return self._zygote is not zygote

    def zygote_gone(self, zygote: ZygoteThread, why: str, output: str) -> None:
        """It has ended, and its workers with it."""
        with self.changed:
            failed: list[_Queued] = []
            if self._zygote is zygote:
                self._zygote = None
                if not zygote.ready:
                    failed, self._queue = self._queue, []
            for worker in zygote.workers.values():
                worker.end(None, f"the process that started it has ended: {why}")
            self.changed.notify_all()
        facts = {"why": f"the worker processes cannot be started: {why}", "output": output}
        for q in failed:
            call(q.job.ended, "crashed", facts)

    def _after_fork(self) -> None:
        """In the child of a fork: what is at the other ends of sockets is the parent's."""
        for thread in (*self._workers, self._zygote):
            if thread is not None:
                thread.forget()
        self._reset()


# -- the process's pool, its end and its forks --------------------------------------------------------
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
_exiting = False
_pool = Pool()


def pool(compilers: int = 0) -> Pool:
    """The process's own pool; with another number of compile workers, if one is given."""
    _pool.compilers = compilers or _pool.compilers
    return _pool


def _at_exit() -> None:
    global _exiting
    _exiting = True
    for p in list(_pools):
        p.close()


def _after_fork_in_child() -> None:
    for p in list(_pools):
        p._after_fork()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
