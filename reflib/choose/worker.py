"""What runs in the pool's child processes: a *zygote*, and the workers that it forks. The other end is ``pool.py``.

Run as a script, by path, with nothing imported but the standard library: so the zygote hears of its parent's end before
it spends seconds on importing torch, and a folder named like one of its modules cannot mislead it.

    parent -> zygote    {"start": id, "name"} with a worker's socket, {"kill": id}
    zygote -> parent    {"ready": ...}, {"started": id, "pid"}, {"ended": id, "status", "output"}
    parent -> worker    {"what", "data", "imports"}: a job, {"environ", "path"}, {"leave"}
    worker -> parent    {"hello": pid}; for a job {"say": ...} ..., then {"done" | "failed" | "broken": ..., "output"}

A message is its length in four bytes and as much JSON. Standard output is no part of this: it and standard error go to
a file without a name, whose end is quoted when a worker dies.

**The zygote** imports what workers need once (seconds) and forks them (milliseconds). That is safe while it has one
thread and no CUDA context, which it checks; otherwise, and where fork is not to be trusted (macOS), it starts each
worker as a new interpreter. It runs no job, so it always listens: it reaps workers, says how each ended, and at the
control socket's end kills them all. A worker stuck in C with the interpreter's lock held dies so too.

**A worker** leads a process group: compilers that it runs die with it. On Linux it asks the kernel to be killed with
the zygote, and the zygote to be told, by SIGTERM, when the thread that started it ends; it then ends as above.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import hashlib
import importlib
import importlib.util
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, NoReturn

HEADER = struct.Struct("!I")
TAIL = 4000  # bytes of output that are quoted
REAP_SECONDS = 0.25  # for killed workers to be gone, when the zygote ends
LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


# -- messages ---------------------------------------------------------------------------------------
def pack(message: dict) -> bytes:
    """A message as it goes over a socket. Raises TypeError or ValueError for what is not plain JSON."""
    text = json.dumps(message).encode()
    return HEADER.pack(len(text)) + text


def unpack(buffer: bytearray) -> Iterator[dict]:
    """The whole messages in ``buffer``, taken out of it one by one."""
    while len(buffer) >= HEADER.size:
        end = HEADER.size + HEADER.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        message = json.loads(bytes(buffer[HEADER.size : end]))
        del buffer[:end]
        yield message


def receive(sock: socket.socket) -> tuple[dict | None, list[int]]:
    """The next message and the descriptors that came with it; (None, []) at the end."""
    header, fds, _, _ = socket.recv_fds(sock, HEADER.size, 1)
    header += _exactly(sock, HEADER.size - len(header)) if header else b""
    if len(header) < HEADER.size:
        return None, fds
    size = HEADER.unpack(header)[0]
    text = _exactly(sock, size)
    return (json.loads(text) if len(text) == size else None), fds


def _exactly(sock: socket.socket, size: int) -> bytes:
    """``size`` bytes; fewer at the end."""
    parts = bytearray()
    while len(parts) < size and (part := sock.recv(min(size - len(parts), 1 << 20))):
        parts += part
    return bytes(parts)


# -- the zygote -------------------------------------------------------------------------------------
@dataclass
class _Child:
    id: int
    log: BinaryIO


class Zygote:
    """Starts workers as ``control`` asks, until it ends.

    ``settings``: "path" (folders of modules), "preload" (names of modules), "fork" (may workers be forked)."""

    def __init__(self, control: socket.socket, settings: dict):
        self.control = control
        self.settings = settings
        self.children: dict[int, _Child] = {}  # by process id
        self.ears, self.bell = socket.socketpair()  # signals arrive here

    def run(self) -> None:
        # the parent may ignore or block them
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD, signal.SIGINT})
        die_with_parent(signal.SIGTERM)
        set_name("reflib-zygote")
        start = time.perf_counter()
        preload(self.settings)
        threads = _threads_after_fork() if self.settings["fork"] else 0
        self.forks = threads == 1 and not _cuda_is_up()
        self.bell.setblocking(False)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)  # what counts is the byte that arrives at ``ears``
        signal.set_wakeup_fd(self.bell.fileno(), warn_on_full_buffer=False)
        try:
            self._tell({"ready": {"forks": self.forks, "threads": threads, "seconds": time.perf_counter() - start}})
            while self._turn():
                for pid in list(self.children):
                    self._reap(pid)
        except ConnectionError:
            pass  # the parent is gone
        finally:
            self._end_all()

    def _tell(self, message: dict) -> None:
        self.control.sendall(pack(message))

    def _turn(self) -> bool:
        """Wait for a signal or a request, and do as it says; False: end."""
        ready = select.select([self.control, self.ears], [], [])[0]
        if self.ears in ready and signal.SIGTERM in self.ears.recv(4096):
            return False
        if self.control in ready:
            message, fds = receive(self.control)
            if message is None:
                return False
            if "start" in message:
                self._start(message["start"], message["name"], fds[0])
            else:
                for pid in [p for p, c in self.children.items() if c.id == message["kill"]]:
                    _kill_group(pid)
        return True

    def _start(self, id: int, name: str, fd: int) -> None:
        """Start a worker that talks through ``fd``."""
        os.set_inheritable(fd, False)
        try:
            log = tempfile.TemporaryFile("a+b", buffering=0)  # noqa: SIM115 - "a": it may be emptied
            pid = self._fork(name, fd, log) if self.forks else self._spawn(name, fd, log)
        except OSError as e:  # too many processes, no room for files
            self._tell({"ended": id, "status": None, "output": f"{e}"})
            return
        finally:
            os.close(fd)
        self.children[pid] = _Child(id, log)
        self._tell({"started": id, "pid": pid})

    def _fork(self, name: str, fd: int, log: BinaryIO) -> int:
        parent = os.getpid()
        # a signal that came before the child's own settings would be handled as if it were the zygote's
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD, signal.SIGINT})
        try:
            pid = os.fork()
            if pid == 0:
                self._become_worker(name, fd, log, parent, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        with contextlib.suppress(OSError):  # the child does it too: whoever is first
            os.setpgid(pid, pid)
        return pid

    def _become_worker(self, name: str, fd: int, log: BinaryIO, parent: int, mask: set) -> NoReturn:
        """Drop what is the zygote's, in the forked child, which must not go on as its parent whatever happens."""
        try:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for s in (self.control, self.ears, self.bell):
                s.close()
            for child in self.children.values():
                child.log.close()
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            log.close()
            work(socket.socket(fileno=fd), name, parent)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(70)

    def _spawn(self, name: str, fd: int, log: BinaryIO) -> int:
        command = [sys.executable, "-P", __file__, json.dumps(self.settings | {"worker": name, "fd": fd})]
        p = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=(fd,), process_group=0)
        p.returncode = 0  # _reap waits for it, not Popen
        return p.pid

    def _reap(self, pid: int) -> None:
        """If ``pid`` has ended: kill what it has left behind, and say how it ended and what it said last."""
        if hasattr(os, "waitid"):  # seen but not reaped: nobody else can have its number when its group is killed
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return
            _kill_group(pid)
        found, status = os.waitpid(pid, os.WNOHANG)
        if not found:
            return
        if not hasattr(os, "waitid"):  # macOS, before Python 3.13
            _kill_group(pid)
        child = self.children.pop(pid)
        output = tail(child.log.fileno())
        child.log.close()
        self._tell({"ended": child.id, "status": os.waitstatus_to_exitcode(status), "output": output})

    def _end_all(self) -> None:
        """Kill every worker, and wait a little, so that nobody inherits zombies."""
        for pid in self.children:
            _kill_group(pid)
        last = time.monotonic() + REAP_SECONDS
        for pid in self.children:
            while not os.waitpid(pid, os.WNOHANG)[0] and time.monotonic() < last:
                time.sleep(0.002)


def preload(settings: dict) -> None:
    """Import what workers need, and call ``module:function``, while the rest is imported; what is not there, or fails,
    is left to the job that wants it."""
    sys.path[:] = settings["path"]
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


def _threads_after_fork() -> int:
    """The threads that are left once something was forked: OpenBLAS, which numpy starts threads of, stops them then."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    for _ in range(20):
        if threads() == 1:
            break
        time.sleep(0.005)  # a thread that was joined is listed for a moment
    return threads()


def threads() -> int:
    """The threads of this process, those of C libraries too (Linux)."""
    return len(os.listdir("/proc/self/task"))


def _cuda_is_up() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


# -- a worker ---------------------------------------------------------------------------------------
Say = Callable[[dict], None]


def work(sock: socket.socket, name: str, parent: int) -> NoReturn:
    """Do the jobs that arrive at ``sock``, one after another, until it ends. ``parent``: the zygote's process id."""
    if die_with_parent(signal.SIGKILL) and os.getppid() != parent:
        os._exit(0)
    set_name(f"reflib {name}")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()  # where in Python it was, when C crashes
    # no core dumps, which take seconds: 1 byte is too little for a file, and tells Linux not to pipe one either
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    worker = _Worker(sock)
    try:
        sock.sendall(pack({"hello": os.getpid()}))
        while (message := receive(sock)[0]) is not None and "leave" not in message:
            if "environ" in message:
                adopt(message)
            else:
                sock.sendall(worker.run(message))
    except ConnectionError:
        pass  # nobody is left to answer
    os._exit(0)  # no exit handlers: tearing CUDA down may hang


class _Worker:
    """``state`` is handed to every job's function, which may keep what it likes in it."""

    def __init__(self, sock: socket.socket):
        self.sock = sock
        self.state: dict = {}
        self.imported: set[str] = set()

    def run(self, job: dict) -> bytes:
        """Call the job's function; what it returned or raised, as a message."""
        with contextlib.suppress(OSError):
            os.ftruncate(1, 0)
        say, hush = self._speaker()
        try:
            for name in job["imports"]:
                self._import(name)
            module, _, function = job["what"].partition(":")
            result = getattr(importlib.import_module(module), function)(self.state, job["data"], say)
            answer = {"done": result if result is not None else {}}
            pack(answer)
        except BaseException as e:  # SystemExit too: a job's end is not its worker's
            answer = {"failed": {"why": reason(e), "trace": "".join(traceback.format_exception(e)[-20:])}}
            if isinstance(e, ImportFailed):
                answer["failed"]["why"] = str(e)
            elif why := broken():
                answer = {"broken": {"why": why, "trace": answer["failed"]["trace"]}}
        hush()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        return pack(answer | {"output": tail(1)})

    def _speaker(self) -> tuple[Say, Callable[[], None]]:
        """``say`` for one job, and what ends it: a thread that the job leaves running does not speak for the next."""
        lock = threading.Lock()
        silent = False

        def say(message: dict) -> None:
            data = pack({"say": message})
            with lock:
                if not silent:
                    self.sock.sendall(data)

        def hush() -> None:
            nonlocal silent
            with lock:
                silent = True

        return say, hush

    def _import(self, name: str) -> None:
        if name in self.imported:
            return
        try:
            if name.endswith(".py"):
                import_file(name)
            else:
                importlib.import_module(name)
        except BaseException as e:
            raise ImportFailed(f"a worker cannot import {name}: {reason(e)}") from e
        self.imported.add(name)


class ImportFailed(Exception):
    """What the user's ops are in cannot be imported."""


def adopt(surroundings: dict) -> None:
    """The parent's environment variables and folders of modules, as they are now."""
    for name in set(os.environ) - set(surroundings["environ"]):
        del os.environ[name]
    os.environ.update(surroundings["environ"])
    sys.path += [p for p in surroundings["path"] if p not in sys.path]


def import_file(path: str) -> None:
    """Import the file, unless it is already, under a name that is derived from its path."""
    real = os.path.realpath(path)
    for module in list(sys.modules.values()):
        known = getattr(module, "__file__", None)
        if isinstance(known, str) and os.path.realpath(known) == real:
            return
    stem = os.path.splitext(os.path.basename(real))[0]
    name = f"reflib_imported_{stem}_{hashlib.sha256(real.encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, real)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def reason(e: BaseException) -> str:
    """An exception in one line."""
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__


def broken() -> str:
    """Why this process cannot use its GPU any more; "" if it can. After an illegal memory access every later call
    fails: only a new process helps."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as e:
        return reason(e)
    return ""


def tail(fd: int) -> str:
    """The end of a log."""
    with contextlib.suppress(OSError):
        size = os.fstat(fd).st_size
        return os.pread(fd, TAIL, max(0, size - TAIL)).decode(errors="replace")
    return ""


# -- the kernel's help ------------------------------------------------------------------------------
def die_with_parent(number: int) -> bool:
    """Have the kernel send this process a signal when the thread that started it ends; False where it cannot."""
    return LINUX and ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0) == 0


def set_name(name: str) -> None:
    """What ``ps`` and ``top`` show (15 characters)."""
    if LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def main() -> None:
    settings = json.loads(sys.argv[1])
    sock = socket.socket(fileno=settings["fd"])
    os.set_inheritable(sock.fileno(), False)
    if "worker" in settings:
        parent = os.getppid()
        preload(settings)
        work(sock, settings["worker"], parent)
    Zygote(sock, settings).run()
    os._exit(0)  # taking torch down takes long


if __name__ == "__main__":
    main()
