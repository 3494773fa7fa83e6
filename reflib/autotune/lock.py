"""One measurement at a time on a device, whichever process makes it.

``device_lock`` holds a lock on ``<cache>/locks/<host>-<device>`` while something is timed. All reflib processes of a
user that share a cache share it. Programs that do not take it (other users', other caches') are not kept out.

**Who holds it** is a process (POSIX record locks): the kernel releases it when that dies, however it dies, and children
that it forked do not have it. Threads of one process take turns by a lock of Python's. The file has the holder's
process id and command, for those who wait.

**Waiting takes turns.** The file has two locks, of byte 0 and of byte 1. Who wants to measure takes the second (the
place at the head of the line), then the first, then gives up the second. So a job that measures candidate after
candidate lets another job measure in between, and nobody starves.

The name is that of the physical device, not its index: ``cuda:0`` is another GPU in a process with another
CUDA_VISIBLE_DEVICES. The lock is not reentrant.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import os
import platform
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .. import cache
from ..errors import CacheError
from ..logs import get as logger

POLL_SECONDS = 0.01
SAY_SECONDS = 10.0  # of waiting, before it is said for whom
TENURE_SECONDS = 600.0  # that one holder is waited for,
STOPPED_SECONDS = 5.0  # and one that is stopped (Ctrl-Z)
DEVICE, LINE = 0, 1  # the bytes of the file
_threads: dict[str, threading.Lock] = {}  # by file


@contextmanager
def device_lock(
    device: str, say: Callable[[dict], None] | None = None, timeout: float = TENURE_SECONDS
) -> Iterator[bool]:
    """Hold the lock of ``device`` ("cuda:1", "cpu"). Yields whether it is held.

    It is not held, and that is logged, when one holder does not release it for ``timeout`` seconds, and where files
    cannot be locked: a disturbed measurement is better than none. Raises nothing of its own.
    say: if it must wait, called with {"kind": "waiting"}, and then with {"kind": "locked", "seconds": waited}.
    """
    request: _Request | None = None
    try:
        folder = cache.root() / "locks"
        folder.mkdir(mode=0o700, exist_ok=True)
        request = _Request(str(folder / lock_name(device)))
        if why := request.take(device, say or (lambda message: None), timeout):
            _warn(device, why)
    except (OSError, CacheError) as e:  # no such folder, or a file system without locks
        _warn(device, str(e))
    try:
        yield request is not None and request.held
    finally:
        if request is not None:
            request.leave()


class _Request:
    """One request for the device: its file, and which of the locks it has."""

    def __init__(self, path: str):
        self.thread = _threads.setdefault(path, threading.Lock())  # (one step of Python's: no lock is needed)
        self.path, self.fd = path, -1
        self.alone = self.first = self.held = False  # in this process; in the line; on the device

    def take(self, device: str, say: Callable[[dict], None], timeout: float) -> str:
        """Wait for it; why it was not to be had, or ""."""
        start = since = time.monotonic()
        who, now = "", 0.0
        while not self._next():
            if not now:
                say({"kind": "waiting"})
            now = time.monotonic()
            if (holder := self._holder()) != who:  # another one's turn
                who, since = holder, now
            most = min(timeout, STOPPED_SECONDS) if _is_stopped(who) else timeout
            if now - since >= most:
                say({"kind": "locked", "seconds": now - start})
                return f"{_name(who)} has held it for {most:g} s"
            if now - start >= SAY_SECONDS and who:
                _say_who(device, _name(who))
            time.sleep(POLL_SECONDS)
        if now:
            say({"kind": "locked", "seconds": time.monotonic() - start})
        return ""

    def _next(self) -> bool:
        """Get as far as possible: this process's turn, the head of the line, the device."""
        if not self.alone:
            self.alone = self.thread.acquire(blocking=False)
            if not self.alone:
                return False
            # (opened by one thread at a time: to close a file gives up all locks of the process on it)
            self.fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self.first = self.first or _lock(self.fd, LINE)
        self.held = self.first and _lock(self.fd, DEVICE)
        if self.held:
            os.truncate(self.fd, 0)
            command = " ".join([*map(os.path.basename, sys.argv[:1]), *sys.argv[1:]])[:100]
            os.pwrite(self.fd, f"{os.getpid()} {time.monotonic_ns()} {command}".encode(errors="replace"), 0)
            fcntl.lockf(self.fd, fcntl.LOCK_UN, 1, LINE)
        return self.held

    def _holder(self) -> str:
        """What the file says of who has it."""
        if self.fd < 0:
            return ""
        text = os.pread(self.fd, 200, 0).decode(errors="replace")
        return "" if text.startswith(f"{os.getpid()} ") else text  # ours, of before: it is being written

    def leave(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        if self.alone:
            self.thread.release()


def _lock(fd: int, byte: int) -> bool:
    """Try to lock a byte of the file. (A wait for it could not be given up.)"""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError as e:
        if e.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def _name(who: str) -> str:
    """A holder, in words."""
    pid, _, command = (who.split(" ", 2) + ["", ""])[:3]
    said = "".join(c if c.isprintable() else "?" for c in command)
    return f"process {pid}{f' ({said})' if said else ''}" if pid.isdigit() else "somebody"


def _is_stopped(who: str) -> bool:
    """Is that process stopped? (Only Linux says so.)"""
    try:
        with open(f"/proc/{int(who.split()[0])}/stat") as f:
            return f.read().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, ValueError, IndexError):
        return False


@functools.cache
def _say_who(device: str, who: str) -> None:
    """Once per holder."""
    logger("autotune").warning("waiting for a turn to measure on %s, where %s measures", device, who)


if hasattr(os, "register_at_fork"):  # a child does not have the threads that hold them
    os.register_at_fork(after_in_child=_threads.clear)


@functools.cache
def _warn(device: str, why: str) -> None:
    """Once per reason."""
    logger("autotune").warning("measuring on %s without its lock (timings may be disturbed): %s", device, why)


def lock_name(device: str) -> str:
    """The file for a device of this host (a home folder may be shared by hosts): a GPU's has its UUID."""
    name, _, index = str(device).partition(":")
    if name == "cuda":
        import torch

        try:
            name += f"-{torch.cuda.get_device_properties(int(index or torch.cuda.current_device())).uuid}"
        except Exception:  # no driver, or a torch without UUIDs
            name += f"-{index or 0}"
    return re.sub(r"[^\w.-]", "_", f"{platform.node()}-{name}")
