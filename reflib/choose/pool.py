"""The pool: child processes that compile and measure, so that what crashes or hangs there does neither here.

    job = Job("reflib.jobs:try_one", {...}, "cuda:0", said=print, ended=lambda how, facts: ...)
    pool().submit(job)               # returns at once

**Who is who.** ``worker.py`` has the children: a *zygote*, which imports torch and the stages once (seconds), and the
workers that it forks (milliseconds). Not ``multiprocessing``: that imports ``__main__`` again, which a user's script or
notebook need not survive, and does not work in daemonic processes. Here one thread, the *manager* (``reflib-pool``),
starts the zygote, holds a socket to every worker, and calls ``said`` and ``ended``; all that others do is to put down a
wish under its lock and ring. Nothing that it does waits for a child, so a stuck one delays nobody.

**A worker's life.** starting -> idle <-> busy -> ending -> gone. Compile workers are started as jobs queue up, at most
``compilers``; a device has one. A worker that has been idle for ``idle_seconds`` is asked to leave; a zygote with no
worker for as long goes too. Killing is the zygote's task: it alone knows which process ids are still its children's.

**How jobs end.** A busy worker that is silent for ``limit`` seconds is killed ("hung"); so is one whose job is
cancelled. One whose process ends by itself has "crashed": the zygote tells its exit status and the last it wrote. One
that finds its GPU unusable says so; that counts as crashed, and it is killed. The next job in the queue starts another.
If the zygote dies its workers die with it and their jobs have crashed, while queued ones go on with a new zygote; but
if it could not even start, queued jobs end with what it said, instead of trying for ever.

**Nobody is left.** The terminal's Ctrl-C reaches only the parent (the zygote leads a session of its own); whoever waits
there calls ``close``. However the parent ends, its control socket ends, and the zygote kills all. Should a forked child
of the parent still hold that socket, there is Linux's parent-death signal: it comes when the *thread* that started the
zygote ends, which is the manager, and that ends with the pool or the process.

**Fork of the parent.** The child has no manager. It closes its copies of the sockets, which the workers do not notice,
and forgets jobs and processes; its own first ``submit`` starts others. Locks are made anew there.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from .manager import Manager, managers
from .worker import pack

# what every worker needs; names, because choose may not import later stages
PRELOAD = (
    "torch",
    "reflib.generate.compile_triton:start_triton",
    "reflib.jobs",
    "reflib.pipeline",
    "reflib.lower",
    "reflib.wrap",
)


@dataclass(eq=False)
class Job:
    """One call of ``what`` ("module:function") with (state, data, say) in a worker; plain JSON in and out.

    where: "compile" (any compile worker), or a device's name: that device's worker, one job at a time.
    said: called with each message that the function says. ended: called once, with

        ("done", what the function returned) | ("failed", {"why", "trace"}): it raised
        ("crashed", {"why", "output"}): its process died | ("hung", {"why"}): it was silent for ``limit`` seconds
        ("cancelled", {})

    Both are called on the manager's thread and must be quick; they may submit and cancel. limit: seconds; any message
    restarts the clock, {"kind": "waiting"} stops it until the next. priority: smaller first, then first come first
    served. ``data["imports"]``: files (*.py) and modules that the worker imports first, each once.
    """

    what: str
    data: dict
    where: str
    said: Callable[[dict], None]
    ended: Callable[[str, dict], None]
    limit: float = 60.0
    priority: tuple = ()
    track: str = field(default="", init=False)  # where it runs: "compile 3", "cuda:0"; set when it starts ...
    started: float = field(default=0.0, init=False)  # ... at this time.perf_counter()


class Pool:
    """compilers: how many compile workers at most; 0: one per core. imports: as a job's, for all jobs.
    preload: modules that the zygote imports, and functions ("module:function") that it calls meanwhile; they must not
        leave threads behind or use CUDA."""

    def __init__(
        self,
        compilers: int = 0,
        idle_seconds: float = 120.0,
        imports: tuple[str, ...] = (),
        preload: tuple[str, ...] = PRELOAD,
    ):
        self.compilers = compilers
        self.idle_seconds = idle_seconds
        self.imports = imports
        self.preload = preload
        self._running: Manager | None = None

    def submit(self, job: Job) -> None:
        """Queue ``job``; from any thread. Raises TypeError or ValueError for data that is not plain JSON. Where no
        thread can be started, as when the interpreter is ending, the job is cancelled here and now."""
        wanted = dict.fromkeys((*self.imports, *job.data.get("imports", ())))
        imports = [os.path.abspath(i) if i.endswith(".py") else i for i in wanted]
        packed = pack({"what": job.what, "data": job.data, "imports": imports})
        with _making:
            manager = self._manager()
            if manager is not None:
                manager.submit(job, packed)
        if manager is None:
            job.ended("cancelled", {})

    def cancel(self, job: Job) -> None:
        """End ``job`` soon, if it has not ended: dropped if queued, else its worker is killed."""
        with _making:
            if self._running is not None and self._running.alive():
                self._running.wish(("cancel", job))

    def wake(self) -> None:
        """Start the zygote, whose imports take seconds, before there is anything to do."""
        with _making:
            manager = self._manager()
            if manager is not None:
                manager.wish(("wake", None))

    def close(self) -> None:
        """Kill all processes; jobs end as cancelled. Takes less than half a second. Another ``submit`` starts anew."""
        with _making:
            manager, self._running = self._running, None
        if manager is not None and manager.alive():
            manager.close()

    def processes(self) -> list[int]:
        """The process ids of all children that are alive, as far as is known."""
        manager = self._running
        return manager.processes() if manager is not None and manager.alive() else []

    def _manager(self) -> Manager | None:
        if _exiting:
            return None
        if self._running is None or not self._running.alive():
            try:
                self._running = Manager(self)
            except RuntimeError:
                return None
        return self._running


def pool(compilers: int = 0, imports: tuple[str, ...] = ()) -> Pool:
    """The process's own pool, made when first asked for. A number of compilers, and imports, change what it has."""
    global _pool
    with _making:
        _pool = _pool or Pool()
        _pool.compilers = compilers or _pool.compilers
        _pool.imports = tuple(dict.fromkeys((*_pool.imports, *imports)))
        return _pool


# -- the process's pool, its end and its forks --------------------------------------------------------
_making = threading.RLock()
_pool: Pool | None = None
_exiting = False


def _at_exit() -> None:
    global _exiting
    with _making:
        _exiting = True
    for manager in list(managers):
        manager.close()


def _after_fork_in_child() -> None:
    global _making, _pool
    _making, _pool = threading.RLock(), None
    for manager in list(managers):
        manager.forget()
    managers.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
