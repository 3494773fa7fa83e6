"""The pool: child processes that compile and measure, so that what crashes or hangs there does neither here.

    job = Job("reflib.jobs:try_some", {...}, "cuda:0", said=print, ended=lambda how, facts: ...)
    pool().submit(job)               # returns at once

**Processes.** A *zygote* (``zygote.py``) imports torch and the stages once (seconds) and forks the workers
(``worker.py``, milliseconds). It has the queue: it gives each job to a free worker, passes on what the worker says, and
kills the one that is silent for too long. There are at most ``compilers`` compile workers and one worker per device.
Here two threads talk to it: one sends jobs, the other reads what has become of them and calls ``said`` and ``ended``.

**Messages** are pickled over one socket. Pickled is what the parent made (plain data and functions by name), so workers
never import the user's ``__main__``.

**How jobs end.** A worker that is silent for ``limit`` seconds is killed ("hung"); so is one whose job is cancelled.
One whose process ends by itself has "crashed": its exit status and the end of its log say why. One whose GPU has become
unusable says so and exits, which counts as crashed. Another worker takes its place; on a device only once the old
process is gone, with its memory. If the zygote dies its workers die with it, and queued jobs go on with a new one; if
it could not even start, they end with its last words.

**When processes leave.** A worker that has been idle for ``idle_seconds``, then the zygote. ``close`` kills all: it is
called at the interpreter's exit and on Ctrl-C (which reaches only the parent: the zygote leads a session of its own).
However the parent ends, its socket ends with it, and the zygote kills all. A forked child of the parent closes its copy
of the socket and starts with an empty pool.

**Threads.** At the interpreter's exit ``threads``, those that tune, are ended too. One that is inside PyTorch when the
interpreter is gone would abort the process: Python ends it by unwinding, through C++ functions that let nothing pass.

NB: not ``multiprocessing`` or ``ProcessPoolExecutor``: they import ``__main__`` again, are refused in daemonic
processes, fail all jobs when one worker dies, and cannot end a job that runs.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import itertools
import os
import pickle
import queue
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

from ..logs import get as logger
from ..worker import Task, cores, first_line, kill_group
from ..zygote import START_SECONDS, News, Submit, command, ending, tail

CLOSE_SECONDS = 0.35  # for the zygote to kill and reap all
ENDING_SECONDS = 10.0  # for ``threads`` to end with the interpreter
# what every worker needs; names, because autotune may not import later stages
PRELOAD = (
    "torch",
    "reflib.generate.compile_triton:start_triton",
    "reflib.jobs",
    "reflib.tuning",
    "reflib.lower",
    "reflib.wrap",
)


@dataclass(eq=False)
class Job:
    """One call of ``what`` ("module:function") with (state, data, say) in a worker. ``data`` and what it returns can be
    pickled, by names that a worker can import.

    where: "compile" (any compile worker), or a device's name: that device's worker, one job at a time.
    said: called with each message that the function says. ended: called once, with

        ("done", what the function returned) | ("failed", {"why", "trace"}): it raised
        ("crashed", {"why", "output"}): its process died | ("hung", {"why"}): it was silent for ``limit`` seconds
        ("cancelled", {})

    Both may submit and cancel. limit: seconds; any message restarts the clock, {"kind": "waiting"} stops it until the
    next, and "more" in one adds to the limit from then on. priority: smaller first, then first come first served.
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
        self.lock = threading.RLock()
        self._jobs: dict[int, tuple[Job, Submit]] = {}  # that have not ended, in the order of their submission
        self._zygote: ZygoteProcess | None = None

    # -- from any thread
    def submit(self, job: Job) -> None:
        """Queue ``job``. Raises what pickle raises for data that cannot be sent. Where no thread can be started, as
        when the interpreter is ending, the job is cancelled at once."""
        imports = tuple(os.path.abspath(i) if str(i).endswith(".py") else i for i in job.data.get("imports", ()))
        packed = pickle.dumps(Task(job.what, job.data, imports, path=tuple(child_path())))
        compilers = self.compilers or cores()
        end: tuple[str, dict[str, Any]] = "cancelled", {}
        with self.lock:
            message = Submit(job.priority, next(self._numbers), job.where, job.limit, packed, compilers,
                             self.idle_seconds)  # fmt: skip
            try:
                self._alive().send(message)
                self._jobs[message.id] = job, message
                return
            except RuntimeError:
                pass
            except OSError as e:
                end = "crashed", {"why": f"the worker processes cannot be started: {e}", "output": ""}
        if end[0] == "cancelled":
            call(job.ended, *end)
        else:  # in a thread: the callback may submit more
            threading.Thread(target=call, args=(job.ended, *end), daemon=True).start()

    def cancel(self, job: Job) -> None:
        """End ``job``, if it has not ended; the worker that runs it is killed."""
        with self.lock:
            number = next((n for n, (j, _) in list(self._jobs.items()) if j is job), None)
            if number is None:
                return
            del self._jobs[number]
            if self._zygote is not None:
                self._zygote.send(number)
        call(job.ended, "cancelled", {})

    def wake(self) -> None:
        """Start the zygote, whose imports take seconds, before there is anything to do."""
        with self.lock, contextlib.suppress(RuntimeError, OSError):
            self._alive()

    def close(self) -> None:
        """Kill all processes; jobs end as cancelled. Takes less than half a second. Another ``submit`` starts anew."""
        with self.lock:
            zygote, jobs = self._zygote, list(self._jobs.values())
            self._zygote, self._jobs = None, {}
        if zygote is not None:
            zygote.end()
        for job, _ in jobs:
            call(job.ended, "cancelled", {})

    def processes(self) -> list[int]:
        """The process ids of all children that are alive, as far as is known: the zygote's first."""
        with self.lock:
            zygote = self._zygote
            return [] if zygote is None else [zygote.process.pid, *zygote.workers]

    def _alive(self) -> ZygoteProcess:
        """The zygote, which is started if there is none. RuntimeError where no thread can be."""
        if exiting.is_set():
            raise RuntimeError
        if self._zygote is None:
            self._zygote = ZygoteProcess(self)
        return self._zygote

    # -- from the zygote's thread
    def heard(self, news: News) -> None:
        ends = news.what not in ("started", "said")
        with self.lock:
            job, _ = (self._jobs.pop if ends else self._jobs.get)(news.id, (None, None))
        if job is None:  # it was cancelled
            return
        if news.what == "started":
            job.track, job.started = news.data
        elif news.what == "said":
            call(lambda: job.said(pickle.loads(news.data)))
        else:
            call(job.ended, *_ending_of(job, news.what, *news.data))

    def zygote_gone(self, zygote: ZygoteProcess, why: str, output: str) -> None:
        """It has ended, and its workers with it. What has not started goes on with another, if that was ready."""
        with self.lock:
            if self._zygote is not zygote:  # closed
                return
            self._zygote = None
            over = [job for job, _ in self._jobs.values() if job.started or not zygote.ready]
            self._jobs = {n: found for n, found in self._jobs.items() if found[0] not in over}
            try:
                for _, message in list(self._jobs.values()):
                    self._alive().send(message)
            except (RuntimeError, OSError):  # no other can be started
                over += [job for job, _ in self._jobs.values()]
                self._jobs = {}
        words = "the process that started it has ended" if zygote.ready else "the worker processes cannot be started"
        for job in over:
            call(job.ended, "crashed", {"why": f"{words}: {why}", "output": output})

    def _after_fork(self) -> None:
        """In the child of a fork: what is at the other end of the socket is the parent's."""
        if self._zygote is not None:
            self._zygote.forget()
        self._reset()


class ZygoteProcess:
    """The zygote, and the threads that talk to it. ``send`` queues a message for it. ``workers``: their process ids.
    Raises OSError if it cannot be started, RuntimeError where no thread can."""

    def __init__(self, pool: Pool):
        self.pool = pool
        self.workers: list[int] = []
        self.ready = False
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _listen
        self.conn, theirs = Pipe()
        settings = {"path": child_path(), "preload": pool.preload, "idle": pool.idle_seconds, "fd": theirs.fileno()}
        with theirs:
            self.process = subprocess.Popen(
                command(settings), stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.send = self._outbox.put
        self.sender = threading.Thread(target=self._send, name="reflib-sender", daemon=True)
        self.listener = threading.Thread(target=self._listen, name="reflib-listener", daemon=True)
        self.sender.start()
        self.listener.start()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the other thread notices that the zygote is gone
            while (message := self._outbox.get()) is not None:
                self.conn.send(message)

    def _listen(self) -> None:
        why = ""
        try:
            while self.conn.poll(None if self.ready else START_SECONDS):
                news: News = self.conn.recv()
                if news.what == "ready":
                    self.ready = True
                    logger("pool").info("workers can start: %s", news.data)
                elif news.what == "workers":
                    self.workers = news.data
                else:
                    self.pool.heard(news)
            why = "it took too long to start"
        except (EOFError, OSError):
            pass  # it has ended
        except Exception as e:
            why = f"what it says cannot be read: {type(e).__name__}: {e}"
        self._hang_up()
        self.send(None)
        self.sender.join()
        try:
            self.process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        output = tail(self.log)
        self.conn.close()
        self.log.close()
        self.pool.zygote_gone(self, why or ending(self.process.returncode, output), output)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.conn.fileno())) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Have it kill its workers and end; kill it and them if it does not."""
        if self.ready:
            self._hang_up()
        else:  # it listens only after its imports
            self.process.kill()
        if threading.current_thread() is not self.listener:
            self.listener.join(CLOSE_SECONDS)
        if self.process.returncode is None:
            for pid in self.workers:
                kill_group(pid)
            self.process.kill()

    def forget(self) -> None:
        """In a forked child."""
        self.conn.close()
        self.process.returncode = 0  # not ours to wait for


def call(function: Callable, *arguments: Any) -> None:
    """A callback of the tuner's: an exception in it is logged, and costs nothing else."""
    try:
        function(*arguments)
    except Exception:
        logger("pool").error("%r raised", function, exc_info=True)


def _ending_of(job: Job, how: str, packed: bytes, output: str) -> tuple[str, dict[str, Any]]:
    try:
        facts = pickle.loads(packed)
    except Exception as e:
        how, facts = "crashed", {"why": f"its answer cannot be read: {first_line(e)}"}
    if output and how != "crashed":
        logger("pool").info("%s wrote: %s", job.track, output)
    return how, facts | {"output": output} if how == "crashed" else facts


def child_path() -> list[str]:
    """Where children look for modules: as here, with the working directory last, so that a file in it that is named
    like a module is not taken for that one."""
    own = str(Path(__file__).parents[2])
    relative = []
    with contextlib.suppress(FileNotFoundError):
        relative = [os.path.abspath(p) for p in sys.path if not os.path.isabs(p)]
    return list(dict.fromkeys([*(p for p in sys.path if os.path.isabs(p)), own, *relative]))


# -- the process's pool, its end and its forks --------------------------------------------------------
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()
threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
exiting = threading.Event()
_pool = Pool()


def pool(compilers: int = 0) -> Pool:
    """The process's own pool; with another number of compile workers, if one is given."""
    _pool.compilers = compilers or _pool.compilers
    return _pool


def _at_exit() -> None:
    """``threads`` get a SystemExit; what they wait for, jobs, is over when the pools are closed."""
    exiting.set()
    alive = [t for t in list(threads) if t.is_alive()]
    for t in alive:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(t.ident or 0), ctypes.py_object(SystemExit))
    for p in list(_pools):
        p.close()
    last = time.monotonic() + ENDING_SECONDS
    for t in alive:
        t.join(max(0.0, last - time.monotonic()))


def _after_fork_in_child() -> None:
    for p in list(_pools):
        p._after_fork()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)
