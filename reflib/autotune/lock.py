"""One measurement at a time on a device, whichever process makes it.

``device_lock`` holds a lock on ``<cache>/locks/<host>-<device>`` while something is timed. All reflib processes of a
user that share a cache share it. Programs that do not take it (other users', other caches') are not kept out.

**The holder** is whatever opened the file (``flock``): a thread of this process, or another process, whose lock the
kernel releases when it dies. The file has the holder's process id and command, for messages of processes that wait.

**Waiting is first come, first served.** There are two files. To measure, lock the second (the head of the queue), then
the first, then release the second. So a job that measures many candidates lets another job measure in between,
and no process starves.

The name is that of the physical device, not its index: ``cuda:0`` is another GPU in a process with another
CUDA_VISIBLE_DEVICES. The lock is not reentrant.
"""

import fcntl
import functools
import os
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from .. import cache
from ..errors import CacheError
from ..logs import get as logger

POLL_SECONDS = 0.01
SAY_SECONDS = 10.0  # of waiting, before it is said for whom
TENURE_SECONDS = 600.0  # that one holder is waited for,
STOPPED_SECONDS = 5.0  # and one that is stopped (Ctrl-Z)


@contextmanager
def device_lock(
    device: str, say: Callable[[dict], None] | None = None, timeout: float = TENURE_SECONDS
) -> Iterator[bool]:
    """Hold the lock of ``device`` ("cuda:1", "cpu"). Yields whether it is held.

    It is not held, and that is logged, when one holder does not release it for ``timeout`` seconds, and where files
    cannot be locked: a disturbed measurement is better than none. Raises nothing of its own.
    say: if it must wait, called with {"kind": "waiting"}, and then with {"kind": "locked", "seconds": waited}.
    """
    with ExitStack() as opened:
        try:
            folder = cache.root() / "locks"
            folder.mkdir(mode=0o700, exist_ok=True)
            name = lock_name(device)
            own, line = (opened.enter_context(_file(str(folder / name) + end)) for end in ("", ".line"))
            why = _take(own, line, device, say or (lambda message: None), timeout)
        except (OSError, CacheError) as e:  # no such folder, or a file system without locks
            why = str(e)
        if why:
            _warn(device, why)
        yield not why


@contextmanager
def _file(path: str) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield fd
    finally:
        with suppress(OSError):  # (a forked child may have the file open for longer)
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _take(own: int, line: int, device: str, say: Callable[[dict], None], timeout: float) -> str:
    """Wait for it; why it was not to be had, or ""."""
    start = since = now = time.monotonic()
    first, who = False, ""
    while True:
        first = first or _lock(line)
        if first and _lock(own):
            os.truncate(own, 0)
            command = " ".join([*map(os.path.basename, sys.argv[:1]), *sys.argv[1:]])[:100]
            os.pwrite(own, f"{os.getpid()} {time.monotonic_ns()} {command}".encode(errors="replace"), 0)
            fcntl.flock(line, fcntl.LOCK_UN)
            why = ""
            break
        if now == start:
            say({"kind": "waiting"})
        now = time.monotonic()
        if (holder := os.pread(own, 200, 0).decode(errors="replace")) != who:  # another one's turn
            who, since = holder, now
        most = min(timeout, STOPPED_SECONDS) if _is_stopped(who) else timeout
        if now - since >= most:
            why = f"{_name(who)} has held it for {most:g} s"
            fcntl.flock(line, fcntl.LOCK_UN)  # (nothing, if it is another's)
            break
        if now - start >= SAY_SECONDS and who:
            _say_who(device, _name(who))
        time.sleep(POLL_SECONDS)
    if now != start:
        say({"kind": "locked", "seconds": time.monotonic() - start})
    return why


def _lock(fd: int) -> bool:
    """Try to lock a file. (A blocking call could not be interrupted.)"""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
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
