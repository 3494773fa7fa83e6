"""The *zygote*: the process that starts the tuner's workers and hands out jobs. ``autotune/pool.py`` starts it.

It imports what workers need once (seconds) and forks them (milliseconds). That is safe while it has one thread and no
CUDA context, which it checks; otherwise, and where fork cannot be trusted (macOS), each worker is a new interpreter. It
runs no job: it reads what has arrived, kills what has been silent for too long, notices what has ended and gives the
next jobs to free workers, in one loop. When its parent is gone, it kills all workers and exits.

Messages are pickled by ``multiprocessing.connection``. What a job is given and what it says stays pickled here: its
types may be known to the parent and to the worker alone.

    parent -> zygote    Submit, or the number of a job that is cancelled
    zygote -> parent    News

Only the standard library is imported here, so that a process starts fast. Standard output carries no messages: it and
standard error go to a log, whose end is quoted when a worker dies.
"""

import bisect
import contextlib
import gc
import importlib
import json
import math
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

from .worker import LINUX, kill_group, set_name, work

COMPILE = "compile"
START_SECONDS = 300.0  # for imports: a cold network disk is slow
GRACE = 1.0  # from killing a worker to going on without its end
REAP_SECONDS = 0.25  # for killed workers to be gone, when the zygote ends
POLL_SECONDS = 0.02  # the end of a worker is noticed after so long
STUCK = struct.pack("ll", 5, 0)  # seconds in which half a message must be followed by the other half
TAIL = 4000  # bytes of a log that are quoted
_BOOT = """import json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
from reflib.zygote import main
main(settings)"""


# -- messages ---------------------------------------------------------------------------------------
@dataclass(frozen=True, order=True)
class Submit:
    """A job, in the order of (priority, id). where: "compile" (any of ``compilers`` workers) or a device's name (its
    one worker). limit: seconds without a message. call: a pickled ``worker.Task``. idle: seconds after which a process
    without a job leaves."""

    priority: tuple
    id: int
    where: str = field(compare=False)
    limit: float = field(compare=False)
    call: bytes = field(compare=False)
    compilers: int = field(compare=False)
    idle: float = field(compare=False)


@dataclass(frozen=True)
class News:
    """Of job ``id``: "started" (the worker's name, and when: of ``time.perf_counter``, which all processes here share),
    "said" (a pickled message), or how it has ended, as in ``pool.Job.ended`` (pickled facts, and the end of what the
    worker wrote). Of none (0): "ready" (seconds of importing, and whether workers are forked), "workers" (their process
    ids)."""

    id: int
    what: str
    data: Any


# -- the zygote -------------------------------------------------------------------------------------
@dataclass(eq=False)
class Worker:
    """``last``: when to kill it if nothing happens, of ``time.monotonic``. ``ready``: it listens. ``killed``, or
    told to leave: only its end is waited for. ``hung``: it was killed because its job was silent."""

    where: str
    name: str
    conn: Connection
    log: Any
    pid: int
    last: float
    job: Submit | None = None
    ready: bool = False
    killed: bool = False
    hung: bool = False


class ParentGone(Exception):
    """Nothing can be read from it, or said to it, any more."""


class Zygote:
    """``settings``: "path" (folders of modules), "preload" (modules), "idle" (as of Submit), "fd" (of ``parent``)."""

    def __init__(self, parent: Connection, settings: dict):
        self.parent = parent
        self.settings = settings
        self.idle = settings["idle"]
        self.queue: list[Submit] = []
        self.workers: list[Worker] = []
        self.ending: list[int] = []  # killed workers that were waited for no longer: a GPU's context takes long to go
        self.unused = 0.0  # since when there is nothing to do

    def run(self) -> None:
        # the parent may ignore or block them
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        set_name("reflib-zygote")
        start = time.perf_counter()
        preload(self.settings)
        self.forks = LINUX and can_fork()
        try:
            self._tell(0, "ready", (time.perf_counter() - start, self.forks))
            self.unused = time.monotonic()
            while time.monotonic() - self.unused < self.idle:
                self._listen()
                for w in list(self.workers):
                    self._look_after(w)
                self.ending = [pid for pid in self.ending if not os.waitpid(pid, os.WNOHANG)[0]]
                self._assign()
                if self.workers or self.queue:
                    self.unused = time.monotonic()
        except ParentGone:
            pass
        finally:
            self._end_all()

    def _listen(self) -> None:
        """Read what has arrived, or wait for it a little."""
        workers = {w.conn: w for w in self.workers if not w.conn.closed}
        for conn in wait([self.parent, *workers], POLL_SECONDS if self.workers else min(self.idle, 3600.0)):
            if conn is self.parent:
                try:
                    message = self.parent.recv()
                except (EOFError, OSError) as e:
                    raise ParentGone from e
                self._obey(message)
            else:
                self._hear(workers[conn])  # type: ignore[index]

    def _obey(self, message: Submit | int) -> None:
        if isinstance(message, Submit):
            bisect.insort(self.queue, message)
            self.idle = message.idle
            return
        self.queue = [q for q in self.queue if q.id != message]
        for w in self.workers:
            if w.job is not None and w.job.id == message:
                w.job = None
                self._kill(w)

    def _hear(self, w: Worker) -> None:
        """One message of a worker."""
        try:
            what, data, *more = w.conn.recv()
        except Exception:  # it has ended, or is about to; or wrote to whatever was open
            w.conn.close()
            return self._kill(w)
        if what == "ready":
            w.ready, w.last = True, time.monotonic() + self.idle
        elif w.job is not None and not w.hung:
            if what in ("said", "waits"):
                w.last = time.monotonic() + w.job.limit + sum(more) if what == "said" else math.inf
                self._tell(w.job.id, "said", data)
            else:
                self._over(w, what, data)
                w.last = time.monotonic() + self.idle
                if what == "crashed":
                    self._kill(w)

    def _look_after(self, w: Worker) -> None:
        """Note its end, and kill what it has left behind; kill it if it is time."""
        late = time.monotonic() >= w.last
        pid, status = os.waitpid(w.pid, os.WNOHANG)
        if pid:
            while not w.conn.closed and w.conn.poll():  # what it sent before its end
                self._hear(w)
            kill_group(pid)
            self._gone(w, ending(os.waitstatus_to_exitcode(status), tail(w.log)))
        elif late and w.killed:  # waited for no longer
            kill_group(w.pid)
            self.ending.append(w.pid)
            self._gone(w, "it cannot be killed")
        elif late and w.ready and w.job is None:  # idle: it exits when its socket ends
            w.conn.close()
            w.killed, w.last = True, time.monotonic() + GRACE
        elif late:
            w.hung = w.job is not None
            self._kill(w)

    def _kill(self, w: Worker) -> None:
        kill_group(w.pid)
        if not w.killed:
            w.killed, w.last = True, time.monotonic() + GRACE

    def _gone(self, w: Worker, why: str) -> None:
        self.workers.remove(w)
        self._tell(0, "workers", [w.pid for w in self.workers])
        if w.job is not None:
            how, why = ("hung", f"no answer for {w.job.limit:g} s") if w.hung else ("crashed", why)
            self._over(w, how, pickle.dumps({"why": why}))
        elif not w.ready:
            self._cannot_start(w.where, why, tail(w.log))
        w.conn.close()
        w.log.close()

    def _over(self, w: Worker, how: str, facts: bytes) -> None:
        assert w.job is not None
        self._tell(w.job.id, how, (facts, tail(w.log)))
        w.job = None

    def _cannot_start(self, where: str, why: str, output: str = "") -> None:
        """One job fails, so that starting is not retried for ever."""
        for q in [q for q in self.queue if q.where == where][:1]:
            self.queue.remove(q)
            self._tell(q.id, "crashed", (pickle.dumps({"why": f"a worker could not be started: {why}"}), output))

    def _tell(self, id: int, what: str, data: Any) -> None:
        try:
            self.parent.send(News(id, what, data))
        except OSError as e:
            raise ParentGone from e

    # -- jobs to workers
    def _assign(self) -> None:
        """Give jobs to free workers; start workers, as many as there are jobs and room for."""
        unserved: dict[str, int] = {}
        for q in list(self.queue):
            here = [w for w in self.workers if w.where == q.where]
            free = [w for w in here if w.job is None and not w.killed]
            if idle := [w for w in free if w.ready]:
                self.queue.remove(q)
                self._give(idle[0], q)
                continue
            unserved[q.where] = unserved.get(q.where, 0) + 1
            if len(free) < unserved[q.where] and len(here) < (q.compilers if q.where == COMPILE else 1):
                try:
                    self._start(q.where)
                except OSError as e:  # too many processes, or open files
                    self._cannot_start(q.where, str(e))

    def _give(self, w: Worker, q: Submit) -> None:
        w.job, w.last = q, time.monotonic() + q.limit
        os.ftruncate(w.log.fileno(), 0)
        self._tell(q.id, "started", (w.name, time.perf_counter()))
        try:
            w.conn.send_bytes(q.call)
        except OSError:  # it has just ended
            self._kill(w)

    def _start(self, where: str) -> None:
        taken = {w.name for w in self.workers}
        names = [f"{where} {i}" for i in range(1, len(taken) + 2)] if where == COMPILE else [where]
        name = next(n for n in names if n not in taken)
        log = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - "a": it may be emptied
        ours, theirs = Pipe()
        with socket.socket(fileno=os.dup(ours.fileno())) as sock:
            for way in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, way, STUCK)
        w = Worker(where, name, ours, log, 0, time.monotonic() + START_SECONDS)
        with theirs:
            w.pid = self._fork(w, theirs) if self.forks else self._spawn(w, theirs.fileno())
        self.workers.append(w)
        self._tell(0, "workers", [w.pid for w in self.workers])

    def _fork(self, w: Worker, theirs: Connection) -> int:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(w, theirs, zygote)
        with contextlib.suppress(OSError):  # the child does it too, whichever is first
            os.setpgid(pid, pid)
        return pid

    def _become_worker(self, own: Worker, theirs: Connection, zygote: int) -> NoReturn:
        """In the forked child: drop what is the zygote's. Never returns to the zygote's code, whatever happens."""
        try:
            os.setpgid(0, 0)
            os.dup2(own.log.fileno(), 1)
            os.dup2(own.log.fileno(), 2)
            self.parent.close()
            for w in (own, *self.workers):
                w.conn.close()
                w.log.close()
            work(theirs, own.name, zygote)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(70)

    def _spawn(self, w: Worker, fd: int) -> int:
        p = subprocess.Popen(
            command(self.settings | {"worker": w.name, "fd": fd, "parent": os.getpid()}),
            stdin=subprocess.DEVNULL, stdout=w.log, stderr=w.log, pass_fds=(fd,), process_group=0,
        )  # fmt: skip
        p.returncode = 0  # _look_after waits for it, not Popen
        return p.pid

    def _end_all(self) -> None:
        """Kill every worker, and wait a little, so that no zombies are inherited."""
        for w in self.workers:
            kill_group(w.pid)
        last = time.monotonic() + REAP_SECONDS
        for w in self.workers:
            while not os.waitpid(w.pid, os.WNOHANG)[0] and time.monotonic() < last:
                time.sleep(0.002)


# -- starting ---------------------------------------------------------------------------------------
def preload(settings: dict) -> None:
    """Import what workers need, and call each ``module:function`` while the rest is imported. What is missing or fails
    is left to the job that needs it."""
    calls: list[threading.Thread] = []
    for name in settings["preload"]:
        module, _, function = name.partition(":")
        try:
            found = importlib.import_module(module)
            if function:
                calls.append(threading.Thread(target=getattr(found, function)))
                calls[-1].start()
        except Exception:
            traceback.print_exc()
    for thread in calls:  # a process with several threads must not be forked
        thread.join()
    gc.collect()
    gc.freeze()  # workers that collect garbage would copy every page of it


def can_fork() -> bool:
    """Whether this process has one thread, those of C libraries included, and no CUDA context (Linux)."""
    pid = os.fork()  # OpenBLAS, whose threads numpy starts, stops them at a fork
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    tries = 20  # a thread that was joined is listed for a moment
    while (several := len(os.listdir("/proc/self/task")) > 1) and (tries := tries - 1):
        time.sleep(0.005)
    torch = sys.modules.get("torch")
    return not several and not (torch is not None and torch.cuda.is_initialized())


def command(settings: dict) -> list[str]:
    """What starts ``main`` in a new interpreter, without the working directory among its folders of modules."""
    return [sys.executable or "python3", "-P", "-c", _BOOT, json.dumps(settings)]


def main(settings: dict) -> None:
    os.set_inheritable(settings["fd"], False)
    end = Connection(settings["fd"])
    if "worker" in settings:
        preload(settings)
        work(end, settings["worker"], settings["parent"])
    Zygote(end, settings).run()
    os._exit(0)  # taking torch down takes long


# -- words ------------------------------------------------------------------------------------------
def tail(log: Any) -> str:
    """The end of a log."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")


def ending(status: int, output: str) -> str:
    """How a process ended, in a line: its status, where in Python it was if that is known, its last words."""
    if status >= 0:
        how = f"exit code {status}"
    else:
        name = signal.strsignal(-status) or "killed"
        how = f"{name[0].lower()}{name[1:]} (signal {-status})"
    own, _, dump = output.partition("Fatal Python error: ")  # faulthandler's
    words = [line.strip() for line in own.splitlines() if line.strip()]
    dump = dump.partition("Current thread")[2] or dump  # other threads come before it, or after
    frames = [line.strip() for line in dump.splitlines() if line.startswith('  File "')]
    return "; ".join([how, *(f"in {f}" for f in frames[:1]), *words[-1:]])
