"""The pool's threads, one per child process, and words for how a process ended. ``pool.py`` has the queue."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..logs import get as logger
from ..worker import LINUX, Answer, Kill, Ready, Start, command, reason

if TYPE_CHECKING:
    from .pool import Job, Pool

START_SECONDS = 300.0  # for imports: a cold network disk is slow
GRACE = 1.0  # from a kill to doing without its confirmation
CLOSE_SECONDS = 0.35  # for the zygote to kill and reap all
TAIL = 4000  # bytes of a log that are quoted
Ending = tuple[str, dict[str, Any]]  # of a job: see ``Job.ended``


class ZygoteThread(threading.Thread):
    """Starts the zygote, and hears which workers have ended."""

    def __init__(self, pool: Pool):
        super().__init__(name="reflib-zygote", daemon=True)
        self.pool = pool
        self.conn, self.theirs = Pipe()
        self.process: subprocess.Popen | None = None
        self.workers: dict[int, WorkerThread] = {}
        self.ready = self.ending = False
        self.sending = threading.RLock()
        self.start()

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    def tell(self, message: Start | Kill, *fds: int) -> None:
        """That the zygote is gone is noticed by its thread."""
        with self.sending, contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.conn.fileno())) as sock:
            self.conn.send(message)
            if fds:
                socket.send_fds(sock, [b"."], fds)

    def run(self) -> None:
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
        fd = self.theirs.fileno()
        settings = {"path": child_path(), "preload": self.pool.preload, "fork": LINUX, "fd": fd}
        why = ""
        try:
            self.process = subprocess.Popen(
                command(settings), stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(fd,),
                start_new_session=True,
            )  # fmt: skip
        except OSError as e:
            why = str(e)
        self.theirs.close()
        if self.process is not None:
            if self.ending:
                self.process.kill()
            why = self._listen()
            self._hang_up()
            try:
                self.process.wait(CLOSE_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            why = why or ending(self.process.returncode, tail(log))
        self.pool.zygote_gone(self, why, tail(log))
        with self.sending:
            self.conn.close()
        log.close()

    def _listen(self) -> str:
        """Until it ends, or is to end and why."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                if self.conn.poll(max(0.1, self.pool.idle_seconds) if self.ready else START_SECONDS):
                    message = self.conn.recv()
                    if isinstance(message, Ready):
                        self.ready = True
                        logger("pool").info("workers can start: %s", message)
                    else:
                        self.pool.process_ended(self, message)
                elif not self.ready:
                    return "it took too long to start"
                elif self.pool.unused(self):
                    return "it was idle"
        return ""

    def forget(self) -> None:
        """In a forked child: what is at the other end is the parent's."""
        self.conn.close()
        if self.process is not None:
            self.process.returncode = 0  # not ours to wait for

    def _hang_up(self) -> None:
        with self.sending, contextlib.suppress(OSError):
            _shut(self.conn, socket.SHUT_RDWR)

    def end(self) -> None:
        """Have it kill its workers and end; kill it and them if it does not."""
        self.ending = True
        if self.ready:
            self._hang_up()
        elif self.process is not None:
            self.process.kill()
        if self is not threading.current_thread():
            self.join(CLOSE_SECONDS)
        if self.process is not None and self.process.returncode is None:
            for pid in [w.pid for w in self.workers.values() if w.pid]:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            self.process.kill()


class WorkerThread(threading.Thread):
    """A worker's life: it is started, takes jobs until it is idle for too long or one ends badly, and leaves."""

    def __init__(self, pool: Pool, zygote: ZygoteThread, id: int, where: str, name: str):
        super().__init__(name=name, daemon=True)
        self.pool, self.zygote, self.id, self.where = pool, zygote, id, where
        self.conn: Connection | None = None
        self.log: Any = None
        self.pid = 0
        self.job: Job | None = None
        self.verdict: Ending | None = None  # how its job ends, whatever it answers
        self.gone = threading.Event()  # its process has ended, with this status, or for this reason
        self.status: int | None = None
        self.why = ""

    def run(self) -> None:
        try:
            if self._begin():
                while (taken := self.pool.take(self)) is not None:
                    how, _ = self.pool.over(self, taken[0], self._do(*taken))
                    if how in ("crashed", "hung", "cancelled"):
                        break
        finally:
            if self.conn is not None:
                with self.pool.changed:
                    self.conn.close()  # it exits then, if it is idle
            if not self.gone.wait(GRACE):
                self.zygote.tell(Kill(self.id))
            if self.log is not None:
                self.log.close()
            self.pool.left(self)

    def _begin(self) -> bool:
        """Start its process; whether it is there."""
        try:
            self.log = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - "a": it may be emptied
            self.conn, theirs = Pipe()
            self.zygote.tell(Start(self.id, self.name), theirs.fileno(), self.log.fileno())
            theirs.close()
            if self.conn.poll(START_SECONDS):
                self.pid = self.conn.recv().pid
                return True
            self.kill(None)
            why = "it took too long"
        except EOFError:
            self.gone.wait(GRACE)
            why = self.why or ending(self.status, tail(self.log))
        except OSError as e:  # too many files
            why = str(e)
            self.gone.set()
        self.pool.cannot_start(self, why, tail(self.log) if self.log is not None else "")
        return False

    def _do(self, job: Job, packed: bytes) -> Ending:
        """Have it do a job; how that ended."""
        conn = self.conn
        assert conn is not None
        job.track, job.started = self.name, time.perf_counter()
        patience: float | None = job.limit
        try:
            os.ftruncate(self.log.fileno(), 0)
            conn.send_bytes(packed)
            while conn.poll(patience):
                message = conn.recv()
                if isinstance(message, Answer):
                    if output := tail(self.log):
                        logger("pool").info("%s wrote: %s", self.name, output)
                    more = {"output": output} if message.how == "crashed" else {}
                    return message.how, {**message.facts, **more}
                patience = None if message.message.get("kind") == "waiting" else job.limit
                call(job.said, message.message)
            self.kill(None)
            self.gone.wait(GRACE)
            return "hung", {"why": f"no answer for {job.limit:g} s"}
        except (EOFError, OSError):
            self.gone.wait(GRACE)
            output = tail(self.log)
            return "crashed", {"why": self.why or ending(self.status, output), "output": output}
        except Exception as e:  # an answer that cannot be unpickled here
            self.kill(None)
            return "crashed", {"why": f"its answer cannot be read: {reason(e)}", "output": tail(self.log)}

    def forget(self) -> None:
        """In a forked child: what is at the other end is the parent's."""
        for end in (self.conn, self.log):
            if end is not None:
                end.close()

    def kill(self, verdict: Ending | None) -> None:
        self.verdict = self.verdict or verdict
        self.zygote.tell(Kill(self.id))

    def end(self, status: int | None, why: str = "") -> None:
        """Its process has ended; with the pool's lock held. What it has sent can still be read."""
        self.status, self.why = status, why
        self.gone.set()
        if self.conn is not None:
            with contextlib.suppress(OSError):
                _shut(self.conn, socket.SHUT_RD)


def call(function: Callable, *arguments: Any) -> None:
    """A callback of the tuner's: an exception in it is logged, and costs nothing else."""
    try:
        function(*arguments)
    except Exception:
        logger("pool").error("%r raised", function, exc_info=True)


def _shut(conn: Connection, how: int) -> None:
    with socket.socket(fileno=os.dup(conn.fileno())) as sock:
        sock.shutdown(how)


# -- words ------------------------------------------------------------------------------------------
def tail(log: Any) -> str:
    """The end of a log."""
    size = os.fstat(log.fileno()).st_size
    return os.pread(log.fileno(), TAIL, max(0, size - TAIL)).decode(errors="replace")


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
    """Where children look for modules: as here, with the working directory last, so that a file in it that is named
    like a module is not taken for that one."""
    own = str(Path(__file__).parents[2])
    relative = []
    with contextlib.suppress(FileNotFoundError):
        relative = [os.path.abspath(p) for p in sys.path if not os.path.isabs(p)]
    return list(dict.fromkeys([*(p for p in sys.path if os.path.isabs(p)), own, *relative]))
