"""The pool's manager: the thread that starts processes, hands out jobs and hears how they end. ``pool.py`` says how."""

from __future__ import annotations

import bisect
import contextlib
import json
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from ..logs import get as logger
from .worker import LINUX, pack, tail, unpack

if TYPE_CHECKING:
    from .pool import Job, Pool

COMPILE = "compile"
START_SECONDS = 300.0  # for imports: a cold network disk is slow
GRACE = 1.0  # from a kill to doing without its confirmation
CLOSE_SECONDS = 0.35  # for the zygote to kill and reap all

managers: set[Manager] = set()  # of this process


@dataclass(eq=False)
class _Queued:
    job: Job
    packed: bytes
    key: tuple


@dataclass(eq=False)
class _Channel:
    """A socket that is read and written without waiting."""

    sock: socket.socket
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)

    def pull(self) -> bool:
        """Read what there is; False: it has ended."""
        try:
            while part := self.sock.recv(1 << 18):
                self.inbox += part
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def push(self) -> None:
        """Write what it takes now. That it has ended is for ``pull`` to see."""
        try:
            while self.outbox:
                del self.outbox[: self.sock.send(self.outbox)]
        except BlockingIOError:
            pass
        except OSError:
            self.outbox.clear()


@dataclass(eq=False, kw_only=True)
class _Worker(_Channel):
    id: int
    where: str
    name: str
    until: float  # when something must have happened in its state
    state: str = "starting"  # idle, busy, ending
    pid: int = 0
    greeted: bool = False
    job: Job | None = None
    verdict: tuple[str, dict] | None = None  # how its job ends, when it was killed
    surroundings: tuple = ()  # environment variables and folders of modules, as it knows them


@dataclass(eq=False, kw_only=True)
class _Zygote(_Channel):
    process: subprocess.Popen
    log: BinaryIO
    until: float  # it must be ready, or have had something to do
    ready: bool = False
    surroundings: tuple = ()  # as a worker's


class Manager:
    """The processes, jobs and thread of a pool, from its first wish to ``close``."""

    def __init__(self, settings: Pool):
        self.settings = settings
        self.owner = os.getpid()
        # reentrant: the garbage collector may run a __del__ that cancels a job just when its own thread is in here
        self.lock = threading.RLock()
        self.closed = False
        self.wishes: list[tuple[str, Any]] = []
        self.calls: list[tuple[Callable, tuple]] = []  # of said and ended, to be made without the lock
        self.queues: dict[str, list[_Queued]] = {}
        self.workers: list[_Worker] = []
        self.zygote: _Zygote | None = None
        self.count = 0
        self.selector = selectors.DefaultSelector()
        self.ears, self.bell = socket.socketpair()
        self.ears.setblocking(False)
        self.bell.setblocking(False)
        self.selector.register(self.ears, selectors.EVENT_READ)
        self.thread = threading.Thread(target=self._run, name="reflib-pool", daemon=True)
        self.thread.start()
        managers.add(self)

    def alive(self) -> bool:
        return not self.closed and self.owner == os.getpid()

    # -- from any thread
    def submit(self, job: Job, packed: bytes) -> None:
        with self.lock:
            self.count += 1
            queue = self.queues.setdefault(job.where, [])
            bisect.insort(queue, _Queued(job, packed, (job.priority, self.count)), key=lambda q: q.key)
        self._ring()

    def wish(self, what: tuple[str, Any]) -> None:
        with self.lock:
            self.wishes.append(what)
        self._ring()

    def processes(self) -> list[int]:
        with self.lock:
            zygote = [self.zygote.process.pid] if self.zygote else []
            return zygote + [w.pid for w in self.workers if w.pid]

    def close(self) -> None:
        """Kills on the caller's thread: the manager may be busy with a call."""
        with self.lock:
            self.closed = True
            zygote, pids = self.zygote, [w.pid for w in self.workers if w.pid]
        if zygote is not None:
            _end_zygote(zygote, pids)
        self._ring()
        if threading.current_thread() is not self.thread:
            self.thread.join(0.1)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: it will wake up anyway; closed: too late
            self.bell.send(b"!")

    def forget(self) -> None:
        """Close sockets and files, and only that: what is at their other ends does not matter, or is a parent's."""
        self.closed = True
        self.selector.close()
        for s in (self.ears, self.bell, *(w.sock for w in self.workers)):
            s.close()
        if self.zygote is not None:
            self.zygote.sock.close()
            self.zygote.log.close()
            if self.owner != os.getpid():
                self.zygote.process.returncode = 0  # not ours to wait for

    # -- on the manager's thread
    def _run(self) -> None:
        timeout: float | None = 0.0
        while not self.closed:
            try:
                events = self.selector.select(timeout)
                with self.lock:
                    if not self.closed:
                        for key, mask in events:
                            self._hear(key.data, mask)
                        self._advance(time.monotonic())
                        timeout = self._timeout(time.monotonic())
            except Exception:
                logger("pool").error("the pool's manager failed", exc_info=True)
                timeout = 0.1
            self._make_calls()
        with self.lock:
            self._finish()
        self._make_calls()

    def _make_calls(self) -> None:
        with self.lock:
            calls, self.calls = self.calls, []
        for function, arguments in calls:
            try:
                function(*arguments)
            except Exception:
                logger("pool").error("%r raised", function, exc_info=True)

    def _finish(self) -> None:
        """All processes have been killed: end the jobs, close the sockets."""
        jobs = [w.job for w in self.workers if w.job] + [q.job for queue in self.queues.values() for q in queue]
        self.calls += [(job.ended, ("cancelled", {})) for job in jobs]
        self.queues.clear()
        self.forget()
        self.workers.clear()
        managers.discard(self)

    def _hear(self, channel: _Channel | None, mask: int) -> None:
        """Something arrived, or there is room to write."""
        if channel is None:
            with contextlib.suppress(BlockingIOError):
                while self.ears.recv(4096):
                    pass
        elif isinstance(channel, _Zygote):
            if channel is self.zygote:
                self._hear_zygote(channel)
        elif channel in self.workers:
            if mask & selectors.EVENT_WRITE:
                self._push(channel)
            if mask & selectors.EVENT_READ:
                self._hear_worker(channel)

    # -- what is to be done
    def _advance(self, now: float) -> None:
        wishes, self.wishes = self.wishes, []
        for what, job in wishes:
            if what == "cancel":
                self._cancel(job)
        for where in list(self.queues):
            self._assign(where, now)
        for worker in list(self.workers):
            if now >= worker.until:
                self._expire(worker)
        busy = any(self.queues.values()) or self.workers
        if self.zygote is None and (any(self.queues.values()) or any(what == "wake" for what, _ in wishes)):
            self._start_zygote(now)
        elif self.zygote is not None and self.zygote.ready:
            for where in list(self.queues):
                self._start_workers(where, now)
            if busy or any(what == "wake" for what, _ in wishes):
                self.zygote.until = now + self.settings.idle_seconds
        if self.zygote is not None and now >= self.zygote.until:
            self._zygote_gone(self.zygote, "it took too long to start")

    def _timeout(self, now: float) -> float | None:
        if self.calls:
            return 0.0
        first = min([w.until for w in self.workers] + ([self.zygote.until] if self.zygote else []), default=math.inf)
        return None if first == math.inf else max(0.0, first - now)

    def _assign(self, where: str, now: float) -> None:
        """Give queued jobs to idle workers."""
        queue = self.queues[where]
        for worker in self.workers:
            if queue and worker.where == where and worker.state == "idle":
                self._give(worker, queue.pop(0), now)
        if not queue:
            del self.queues[where]

    def _give(self, worker: _Worker, queued: _Queued, now: float) -> None:
        assert self.zygote is not None
        surroundings = (dict(os.environ), child_path())
        if surroundings != worker.surroundings:
            worker.surroundings = surroundings
            worker.outbox += pack({"environ": surroundings[0], "path": surroundings[1]})
        job = worker.job = queued.job
        job.track, job.started = worker.name, time.perf_counter()
        worker.state, worker.until = "busy", now + job.limit
        worker.outbox += queued.packed
        self._push(worker)

    def _push(self, worker: _Worker) -> None:
        worker.push()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outbox else 0)
        self.selector.modify(worker.sock, events, worker)

    def _expire(self, worker: _Worker) -> None:
        """It has been too long in its state."""
        if worker.state == "idle":
            worker.outbox += pack({"leave": True})
            self._push(worker)
            self._let_end(worker)
        elif worker.state == "busy":
            assert worker.job is not None
            self._kill(worker, ("hung", {"why": f"no answer for {worker.job.limit:g} s"}))
        elif worker.state == "starting":
            self._kill(worker, None)
        else:
            self._tell_zygote({"kill": worker.id})
            self._gone(worker, "it did not end when it was killed")

    def _kill(self, worker: _Worker, verdict: tuple[str, dict] | None) -> None:
        worker.verdict = worker.verdict or verdict
        self._tell_zygote({"kill": worker.id})
        self._let_end(worker)

    def _let_end(self, worker: _Worker) -> None:
        """Its end, or GRACE, is waited for before another takes its place: its memory on the device is free then."""
        if worker.state != "ending":
            worker.state, worker.until = "ending", time.monotonic() + GRACE

    def _cancel(self, job: Job) -> None:
        for queue in self.queues.values():
            for queued in [q for q in queue if q.job is job]:
                queue.remove(queued)
                self.calls.append((job.ended, ("cancelled", {})))
        for worker in self.workers:
            if worker.job is job:
                self._kill(worker, ("cancelled", {}))

    # -- workers
    def _start_workers(self, where: str, now: float) -> None:
        here = [w for w in self.workers if w.where == where]
        if where == COMPILE:
            here = [w for w in here if w.state != "ending"]
            room = (self.settings.compilers or cores()) - len(here)
        else:
            room = 1 - len(here)  # one that is ending still has memory on the device
        starting = sum(w.state == "starting" for w in here)
        for _ in range(min(room, len(self.queues[where]) - starting)):
            self._start_worker(where, now)

    def _start_worker(self, where: str, now: float) -> None:
        assert self.zygote is not None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.count += 1
        names = {w.name for w in self.workers}
        free = next(i for i in range(1, len(names) + 2) if f"{where} {i}" not in names)
        name = f"{where} {free}" if where == COMPILE else where
        worker = _Worker(ours, id=self.count, where=where, name=name, until=now + START_SECONDS)
        worker.surroundings = self.zygote.surroundings
        self.workers.append(worker)
        self.selector.register(ours, selectors.EVENT_READ, worker)
        self._tell_zygote({"start": worker.id, "name": name}, theirs.fileno())
        theirs.close()

    def _hear_worker(self, worker: _Worker) -> None:
        going_on = worker.pull()
        for message in unpack(worker.inbox):
            self._heed(worker, message)
        if not going_on:
            self._deaf(worker)
            self._let_end(worker)

    def _deaf(self, worker: _Worker) -> None:
        with contextlib.suppress(KeyError):
            self.selector.unregister(worker.sock)

    def _heed(self, worker: _Worker, message: dict) -> None:
        now = time.monotonic()
        if "hello" in message:
            worker.greeted, worker.pid = True, message["hello"]
            if worker.state == "starting":
                worker.state, worker.until = "idle", now + self.settings.idle_seconds
        elif worker.state != "busy" or worker.job is None:
            return  # the last words of one that was killed
        elif "say" in message:
            said = message["say"]
            worker.until = math.inf if said.get("kind") == "waiting" else now + worker.job.limit
            self.calls.append((worker.job.said, (said,)))
        else:
            self._answered(worker, message, now)

    def _answered(self, worker: _Worker, message: dict, now: float) -> None:
        assert worker.job is not None
        output = message.pop("output", "")
        if output:
            logger("pool").info("%s wrote: %s", worker.name, output)
        ((how, facts),) = message.items()
        how, facts = ("crashed", facts | {"output": output}) if how == "broken" else (how, facts)
        self.calls.append((worker.job.ended, (how, facts)))
        worker.job = None
        worker.state, worker.until = "idle", now + self.settings.idle_seconds
        if how == "crashed":
            self._kill(worker, None)

    def _gone(self, worker: _Worker, why: str, output: str = "") -> None:
        """It has ended, or must be done without."""
        worker.pull()
        for message in unpack(worker.inbox):
            self._heed(worker, message)
        self.workers.remove(worker)
        self._deaf(worker)
        worker.sock.close()
        crashed = ("crashed", {"why": why, "output": output})
        if worker.job is not None:
            self.calls.append((worker.job.ended, worker.verdict or crashed))
        elif not worker.greeted and (queue := self.queues.get(worker.where)):
            facts = {"why": f"a worker could not be started: {why}", "output": output}
            self.calls.append((queue.pop(0).job.ended, ("crashed", facts)))

    # -- the zygote
    def _start_zygote(self, now: float) -> None:
        ours, theirs = socket.socketpair()
        path = child_path()
        wanted = {"path": path, "preload": self.settings.preload, "fork": LINUX, "fd": theirs.fileno()}
        script = str(Path(__file__).with_name("worker.py"))
        command = [sys.executable or "python3", "-P", script, json.dumps(wanted)]
        try:
            log = tempfile.TemporaryFile()  # noqa: SIM115 - kept
            fds: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(command, **fds, pass_fds=(theirs.fileno(),), start_new_session=True)
        except OSError as e:
            ours.close()
            self._cannot_start(str(e), "")
            return
        finally:
            theirs.close()
        ours.setblocking(False)
        self.zygote = _Zygote(ours, process=process, log=log, until=now + START_SECONDS)
        self.zygote.surroundings = (dict(os.environ), path)
        self.selector.register(ours, selectors.EVENT_READ, self.zygote)

    def _tell_zygote(self, message: dict, *fds: int) -> None:
        """A short message; that the zygote is gone is seen when it is read from."""
        if self.zygote is not None:
            sock = self.zygote.sock
            with contextlib.suppress(OSError):
                sock.settimeout(1.0)  # it always listens
                data = pack(message)
                sock.sendall(data[socket.send_fds(sock, [data], fds) :])
            with contextlib.suppress(OSError):
                sock.setblocking(False)

    def _hear_zygote(self, zygote: _Zygote) -> None:
        going_on = zygote.pull()
        for message in unpack(zygote.inbox):
            if "ready" in message:
                zygote.ready = True
                zygote.until = time.monotonic() + self.settings.idle_seconds
                logger("pool").info("workers can start: %s", message["ready"])
                continue
            id = message["started"] if "started" in message else message["ended"]
            for worker in [w for w in self.workers if w.id == id]:
                if "started" in message:
                    worker.pid = message["pid"]
                else:
                    self._gone(worker, ending(message["status"], message["output"]), message["output"])
        if not going_on:
            self._zygote_gone(zygote, "")

    def _zygote_gone(self, zygote: _Zygote, why: str) -> None:
        """It has ended, or is to end, and its workers with it."""
        self.zygote = None
        with contextlib.suppress(KeyError):
            self.selector.unregister(zygote.sock)
        _end_zygote(zygote, [w.pid for w in self.workers if w.pid])
        output = tail(zygote.log.fileno())
        why = why or ending(zygote.process.returncode, output)
        for worker in list(self.workers):
            self._gone(worker, f"the process that started it has ended: {why}")
        if not zygote.ready:
            self._cannot_start(why, output)
        zygote.sock.close()
        zygote.log.close()

    def _cannot_start(self, why: str, output: str) -> None:
        facts = {"why": f"the worker processes cannot be started: {why}", "output": output}
        self.calls += [(q.job.ended, ("crashed", facts)) for queue in self.queues.values() for q in queue]
        self.queues.clear()


def _end_zygote(zygote: _Zygote, workers: list[int]) -> None:
    """Have it kill its workers and end; kill it and them, if it does not."""
    process = zygote.process
    if zygote.ready:
        with contextlib.suppress(OSError):
            zygote.sock.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(subprocess.TimeoutExpired):
            if process.wait(CLOSE_SECONDS) == 0:
                return
        for pid in workers:
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(0.1)


# -- words ------------------------------------------------------------------------------------------
def ending(status: int | None, output: str) -> str:
    """How a process ended, in a line: its status, where in Python it was if that is known, its last words."""
    if status is None:
        how = "its process could not be started"
    elif status >= 0:
        how = f"exit code {status}"
    else:
        name = signal.strsignal(-status) or "killed"
        how = f"{name[0].lower()}{name[1:]} (signal {-status})"
    own, _, dump = output.partition("Fatal Python error: ")  # faulthandler's
    words = [line.strip() for line in own.splitlines() if line.strip()]
    dump = dump.partition("Current thread")[2] or dump  # other threads come before it, or after
    frames = [line.strip() for line in dump.splitlines() if line.startswith('  File "')]
    return "; ".join([how, *(f"in {f}" for f in frames[:1]), *words[-1:]])


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def child_path() -> list[str]:
    """Where children look for modules: as here, with the working directory last, lest a file in it that is called
    like a module be taken for that one, as it was not here."""
    absolute = [p for p in sys.path if os.path.isabs(p)]
    own = str(Path(__file__).parents[2])
    relative = []
    with contextlib.suppress(FileNotFoundError):
        relative = [os.path.abspath(p) for p in sys.path if not os.path.isabs(p)]
    return list(dict.fromkeys([*absolute, own, *relative]))
