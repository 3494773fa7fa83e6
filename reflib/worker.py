"""A worker of the tuner's pool: answers calls, one after another. ``zygote.py`` starts it.

    zygote -> worker    a pickled Task
    worker -> zygote    ("ready", b"") once; per call any number of ("said", message, seconds by which its silence may
                        exceed the job's limit) or ("waits", message, ...): its silence is no hang; then one of
                        ("done", what the function returned), ("failed", facts): it raised, ("crashed", facts): the
                        process cannot go on, and ends. Messages, results and facts are pickled.

It leads a process group, so that compilers it runs die with it. On Linux the kernel kills it with the zygote. Only the
standard library is imported here, so that a process starts fast.
"""

import contextlib
import ctypes
import faulthandler
import functools
import hashlib
import importlib
import importlib.util
import mmap
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any, NoReturn

FORKS = 64  # that one job may make
NICE = 5  # of those that compile: the one that times kernels, and the parent, come first
LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


@dataclass(frozen=True)
class Task:
    """Call ``what`` ("module:function") with (state, data, say), after importing ``imports``: modules, files, and
    pickled calls that register what exists in the parent alone."""

    what: str
    data: dict
    imports: tuple[str | bytes, ...] = ()
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    path: tuple[str, ...] = ()


# -- a worker ---------------------------------------------------------------------------------------
def work(parent: Connection, name: str, zygote: int) -> NoReturn:
    """Answer the calls that arrive from ``parent``, one after another, until it ends. ``zygote``: its process id."""
    die_with(zygote)
    set_name(f"reflib {name}")
    if name.startswith("compile"):
        os.nice(NICE)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable()  # where in Python it was, when C crashes
    # no core dumps, which take seconds: 1 byte is too little for a file, and tells Linux not to pipe one either
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (1, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    forks = contain(parent)
    state: dict = {}
    with contextlib.suppress(EOFError, OSError):  # the parent is gone; or this is a copy that a candidate forked
        parent.send(("ready", b""))
        while answer(parent, parent.recv_bytes(), state) != "crashed":
            forks[:8] = bytes(8)
    os._exit(0)  # no exit handlers: tearing CUDA down may hang


def contain(parent: Connection) -> mmap.mmap:
    """Processes that a candidate forks end with this one, cannot send its messages, and are limited: more than FORKS
    processes in one job end it and all of them. Returns their count, which they share (8 bytes)."""
    worker, count = os.getpid(), mmap.mmap(-1, 8)
    forking = worker  # the process that forks

    def counted() -> None:
        nonlocal forking
        forking = os.getpid()
        n = int.from_bytes(count[:8], "little") + 1
        count[:8] = n.to_bytes(8, "little")
        if n > FORKS:
            os.write(2, b"it forked too many processes\n")
            kill_group(worker)
            os.kill(os.getpid(), signal.SIGKILL)

    def in_child() -> None:
        parent.close()
        die_with(forking)  # which may have ended already

    os.register_at_fork(before=counted, after_in_child=in_child)
    return count


def answer(parent: Connection, packed: bytes, state: dict) -> str:
    """Make one call and send what it returned or raised; its ``how``. The function may keep what it likes in
    ``state``."""
    sending = threading.Lock()
    over, more = False, 0.0

    def say(message: dict) -> None:
        nonlocal more
        with sending:
            if not over:  # a thread that an earlier call left running is not heard
                more = message.get("more", more)
                parent.send(("waits" if message.get("kind") == "waiting" else "said", pickle.dumps(message), more))

    try:
        call: Task = pickle.loads(packed)
        adopt(call)
        for name in call.imports:
            if isinstance(name, bytes):
                pickle.loads(name)
            else:
                import_named(name)
        module, _, function = call.what.partition(":")
        found = getattr(importlib.import_module(module), function)(state, call.data, say)
        how, facts = "done", pickle.dumps(found or {})
    except BaseException as e:  # SystemExit too: the end of a job is not its worker's
        lost = "" if isinstance(e, ImportFailed) else broken()
        trace = "".join(traceback.format_exception(e)[-20:])
        how, facts = "crashed" if lost else "failed", pickle.dumps({"why": lost or first_line(e), "trace": trace})
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with sending:
        over = True
    parent.send((how, facts))
    return how


class ImportFailed(Exception):
    """A module or file that the user's ops are in cannot be imported."""


def adopt(call: Task) -> None:
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
            import_file(real)
    except BaseException as e:
        raise ImportFailed(f"a worker cannot import {name}: {first_line(e)}") from e


def import_file(path: str) -> ModuleType:
    """A file's module, which is executed now."""
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
    return module


def first_line(e: BaseException) -> str:
    """An exception in one line."""
    lines = str(e).strip().splitlines()
    if isinstance(e, ImportFailed):
        return lines[0]
    return f"{type(e).__name__}: {lines[0][:300]}" if lines else type(e).__name__


def broken() -> str:
    """Why this process cannot use its GPU any more; "" if it can. After an illegal memory access every later call
    fails, and only a new process helps."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return ""
    try:
        torch.cuda.synchronize()
    except Exception as e:
        return first_line(e)
    return ""


# -- processes --------------------------------------------------------------------------------------
def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


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
