"""The child processes of the tuner's pool: a *zygote*, and the workers that it forks. ``autotune/pool.py`` starts them.

Messages are the dataclasses below, pickled over a socket by ``multiprocessing.connection``:

    parent -> zygote    Start, followed by two descriptors (the worker's socket, its log); Kill
    zygote -> parent    Ready, Ended
    parent -> worker    Call
    worker -> parent    Hello; per call any number of Said, then one Answer

Only the standard library is imported here, so that a process starts fast. Standard output carries no messages: it and
standard error go to the log, whose end is quoted when a worker dies.

**The zygote** imports what workers need once (seconds) and forks them (milliseconds). That is safe while it has one
thread and no CUDA context, which it checks; otherwise, and where fork cannot be trusted (macOS), each worker is a new
interpreter. It runs no job, so it always reads its socket; when that ends, it kills all workers and exits.

**A worker** leads a process group, so that compilers it runs die with it. On Linux the kernel kills it with the zygote.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import gc
import hashlib
import importlib
import importlib.util
import json
import mmap
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NoReturn

REAP_SECONDS = 0.25  # for killed workers to be gone, when the zygote ends
FORKS = 64  # that one job may make
POLL_SECONDS = 0.02  # the end of a worker is noticed after so long
LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_BOOT = """import json, sys
settings = json.loads(sys.argv[1])
sys.path[:] = settings["path"]
from reflib.worker import main
main(settings)"""


# -- messages ---------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Start:
    id: int
    name: str


@dataclass(frozen=True)
class Kill:
    id: int


@dataclass(frozen=True)
class Ready:
    """The zygote's imports are done, after so many seconds. ``forks``: whether workers are forked."""

    forks: bool
    seconds: float


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended; ``status``: as of ``os.waitstatus_to_exitcode``, None: it could not be started."""

    id: int
    status: int | None


@dataclass(frozen=True)
class Call:
    """Call ``what`` ("module:function") with (state, data, say), after importing ``imports``: modules, files, and
    pickled calls that register what exists in the parent alone."""

    what: str
    data: dict
    imports: tuple[str | bytes, ...] = ()
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Hello:
    pid: int


@dataclass(frozen=True)
class Said:
    message: dict


@dataclass(frozen=True)
class Answer:
    """how: "done" (``facts``: what the function returned), "failed" (it raised), "crashed" (the process cannot go on,
    and ends)."""

    how: str
    facts: dict


# -- the zygote -------------------------------------------------------------------------------------
def command(settings: dict) -> list[str]:
    """What starts ``main`` in a new interpreter, without the working directory among its folders of modules."""
    return [sys.executable or "python3", "-P", "-c", _BOOT, json.dumps(settings)]


class Zygote:
    """Starts workers as ``control`` requests, until that ends.

    ``settings``: "path" (folders of modules), "preload" (names of modules), "fork" (may workers be forked), "fd" (of
    ``control``)."""

    def __init__(self, control: Connection, settings: dict):
        self.control = control
        self.settings = settings
        self.children: dict[int, int] = {}  # process id -> worker's id

    def run(self) -> None:
        # the parent may ignore or block them
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        set_name("reflib-zygote")
        start = time.perf_counter()
        preload(self.settings)
        self.forks = self.settings["fork"] and can_fork()
        try:
            self.control.send(Ready(self.forks, time.perf_counter() - start))
            while True:
                if self.control.poll(POLL_SECONDS if self.children else None):
                    self._obey(self.control.recv())
                self._reap()
        except (EOFError, OSError):
            pass  # the parent is gone
        finally:
            self._end_all()

    def _obey(self, message: Start | Kill) -> None:
        if isinstance(message, Start):
            self._start(message)
        else:
            for pid in [p for p, id in self.children.items() if id == message.id]:
                _kill_group(pid)

    def _start(self, start: Start) -> None:
        with socket.socket(fileno=os.dup(self.control.fileno())) as control:
            _, fds, *_ = socket.recv_fds(control, 1, 2)
        if len(fds) < 2:  # too many open files
            for received in fds:
                os.close(received)
            self.control.send(Ended(start.id, None))
            return
        fd, log = fds
        os.set_inheritable(fd, False)
        try:
            pid = self._fork(start.name, fd, log) if self.forks else self._spawn(start.name, fd, log)
            self.children[pid] = start.id
        except OSError as e:  # too many processes
            os.write(log, str(e).encode())
            self.control.send(Ended(start.id, None))
        finally:
            os.close(fd)
            os.close(log)

    def _fork(self, name: str, fd: int, log: int) -> int:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(name, fd, log, parent)
        with contextlib.suppress(OSError):  # the child does it too, whichever is first
            os.setpgid(pid, pid)
        return pid

    def _become_worker(self, name: str, fd: int, log: int, parent: int) -> NoReturn:
        """In the forked child: drop what is the zygote's. Never returns to the zygote's code, whatever happens."""
        try:
            os.setpgid(0, 0)
            self.control.close()
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(log)
            work(Connection(fd), name, parent)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(70)

    def _spawn(self, name: str, fd: int, log: int) -> int:
        p = subprocess.Popen(
            command(self.settings | {"worker": name, "fd": fd, "parent": os.getpid()}),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(fd,), process_group=0,
        )  # fmt: skip
        p.returncode = 0  # _reap waits for it, not Popen
        return p.pid

    def _reap(self) -> None:
        """Report the workers that have ended, and kill what they have left behind."""
        for pid in list(self.children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                _kill_group(pid)
                self.control.send(Ended(self.children.pop(pid), os.waitstatus_to_exitcode(status)))

    def _end_all(self) -> None:
        """Kill every worker, and wait a little, so that no zombies are inherited."""
        for pid in self.children:
            _kill_group(pid)
        last = time.monotonic() + REAP_SECONDS
        for pid in self.children:
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < last:
                time.sleep(0.002)


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


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


# -- a worker ---------------------------------------------------------------------------------------
def work(parent: Connection, name: str, zygote: int) -> NoReturn:
    """Answer the calls that arrive from ``parent``, one after another, until it ends. ``zygote``: its process id."""
    die_with(zygote)
    set_name(f"reflib {name}")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()  # where in Python it was, when C crashes
    # no core dumps, which take seconds: 1 byte is too little for a file, and tells Linux not to pipe one either
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    forks = contain(parent)
    state: dict = {}
    with contextlib.suppress(EOFError, OSError):  # the parent is gone; or this is a copy that a candidate forked
        parent.send(Hello(os.getpid()))
        while answer(parent, parent.recv_bytes(), state) != "crashed":
            forks[:8] = bytes(8)
    os._exit(0)  # no exit handlers: tearing CUDA down may hang


def contain(parent: Connection) -> mmap.mmap:
    """What a candidate forks ends with this process, cannot speak for it, and is not too much: more than FORKS
    processes in one job end it and all of them. Returns their count, which they share (8 bytes)."""
    worker, count = os.getpid(), mmap.mmap(-1, 8)

    def counted() -> None:
        n = int.from_bytes(count[:8], "little") + 1
        count[:8] = n.to_bytes(8, "little")
        if n > FORKS:
            os.write(2, b"it forked too many processes\n")
            _kill_group(worker)
            os.kill(os.getpid(), signal.SIGKILL)

    def in_child() -> None:
        parent.close()
        if LINUX:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)

    os.register_at_fork(before=counted, after_in_child=in_child)
    return count


def answer(parent: Connection, packed: bytes, state: dict) -> str:
    """Make one call and send what it returned or raised; its ``how``. The function may keep what it likes in
    ``state``."""
    sending = threading.Lock()
    over = False

    def say(message: dict) -> None:
        with sending:
            if not over:  # a thread that an earlier call left running is not heard
                parent.send(Said(message))

    try:
        call: Call = pickle.loads(packed)
        adopt(call)
        for name in call.imports:
            if isinstance(name, bytes):
                pickle.loads(name)
            else:
                import_named(name)
        module, _, function = call.what.partition(":")
        result = Answer("done", getattr(importlib.import_module(module), function)(state, call.data, say) or {})
        reply = pickle.dumps(result)
    except BaseException as e:  # SystemExit too: the end of a job is not its worker's
        facts = {"why": reason(e), "trace": "".join(traceback.format_exception(e)[-20:])}
        lost = "" if isinstance(e, ImportFailed) else broken()
        result = Answer("crashed", {**facts, "why": lost}) if lost else Answer("failed", facts)
        reply = pickle.dumps(result)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with sending:
        over = True
    parent.send_bytes(reply)
    return result.how


class ImportFailed(Exception):
    """A module or file that the user's ops are in cannot be imported."""


def adopt(call: Call) -> None:
    """The parent's environment variables and folders of modules."""
    for name in set(os.environ) - set(call.environ):
        del os.environ[name]
    os.environ.update(call.environ)
    sys.path += [p for p in call.path if p not in sys.path]


@functools.cache
def import_named(name: str) -> None:
    """Import a module, or a file (*.py) under a name that is derived from its path, unless it is there already."""
    try:
        if not name.endswith(".py"):
            importlib.import_module(name)
            return
        real = os.path.realpath(name)
        files = [getattr(m, "__file__", None) for m in list(sys.modules.values())]
        if real not in [os.path.realpath(f) for f in files if isinstance(f, str)]:
            _import_file(real)
    except BaseException as e:
        raise ImportFailed(f"a worker cannot import {name}: {reason(e)}") from e


def _import_file(path: str) -> None:
    stem = os.path.splitext(os.path.basename(path))[0]
    name = f"reflib_imported_{stem}_{hashlib.sha256(path.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def reason(e: BaseException) -> str:
    """An exception in one line."""
    lines = str(e).strip().splitlines()
    if isinstance(e, ImportFailed):
        return lines[0]
    return f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__


def broken() -> str:
    """Why this process cannot use its GPU any more; "" if it can. After an illegal memory access every later call
    fails, and only a new process helps."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as e:
        return reason(e)
    return ""


# -- both -------------------------------------------------------------------------------------------
def die_with(parent: int) -> None:
    """Have Linux kill this process when its parent ends; exit if that has happened."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)


def set_name(name: str) -> None:
    """What ``ps`` and ``top`` show (15 characters)."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main(settings: dict) -> None:
    os.set_inheritable(settings["fd"], False)
    end = Connection(settings["fd"])
    if "worker" in settings:
        preload(settings)
        work(end, settings["worker"], settings["parent"])
    Zygote(end, settings).run()
    os._exit(0)  # taking torch down takes long
