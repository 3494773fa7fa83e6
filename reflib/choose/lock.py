"""One measurement at a time on a device, whichever process makes it.

``device_lock`` holds an advisory lock (``flock``) on ``<cache>/locks/<host>-<device>`` while something is timed. All
reflib processes of a user that share a cache share it; the kernel releases it when its holder dies, however it dies.

The name is that of the physical device, not its index: ``cuda:0`` is another GPU in a process with another
CUDA_VISIBLE_DEVICES. Nobody who keeps to no lock is kept out: other programs, users, and containers with caches of
their own.

It is not reentrant: asking again inside waits for oneself, until ``timeout``.
"""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .. import cache
from ..errors import CacheError
from ..logs import get as logger

POLL_SECONDS = 0.01


@contextmanager
def device_lock(device: str, say: Callable[[dict], None] | None = None, timeout: float = 60.0) -> Iterator[bool]:
    """Hold the lock of ``device`` ("cuda:1", "cpu"). Yields whether it is held.

    It is not held, and that is logged, when nobody released it for ``timeout`` seconds (a stopped process holds it for
    ever), and where files cannot be locked: a disturbed measurement is better than none. Raises nothing of its own.
    say: if it must wait, called with {"kind": "waiting"}, and then with {"kind": "locked", "seconds": waited}.
    """
    fd = _open(device)
    if fd is None:
        yield False
        return
    try:
        held = _acquire(fd, device, say, timeout)
        try:
            yield held
        finally:
            if held:
                fcntl.flock(fd, fcntl.LOCK_UN)  # closing would not do: a forked child may have the file open too
    finally:
        os.close(fd)


def _open(device: str) -> int | None:
    try:
        folder = cache.root() / "locks"
        folder.mkdir(mode=0o700, exist_ok=True)
        return os.open(folder / lock_name(device), os.O_RDWR | os.O_CREAT, 0o600)
    except (OSError, CacheError) as e:
        _warn(device, str(e))
        return None


def _acquire(fd: int, device: str, say: Callable[[dict], None] | None, timeout: float) -> bool:
    """Polls: a waiting flock could not be given up."""
    start = time.monotonic()
    waiting = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
            break
        except BlockingIOError:
            held = False
        except OSError as e:  # a file system without locks
            _warn(device, str(e))
            return False
        if time.monotonic() - start >= timeout:
            _warn(device, f"another process has held it for {timeout:g} s")
            break
        if not waiting and say is not None:
            say({"kind": "waiting"})
        waiting = True
        time.sleep(POLL_SECONDS)
    if waiting and say is not None:
        say({"kind": "locked", "seconds": time.monotonic() - start})
    return held


@functools.cache
def _warn(device: str, why: str) -> None:
    """Once for each reason."""
    logger("choose").warning("measuring on %s without its lock (timings may be disturbed): %s", device, why)


def lock_name(device: str) -> str:
    """The file for a device of this host: a home folder may be shared by hosts."""
    return re.sub(r"[^\w.-]", "_", f"{platform.node()}-{physical(device)}")


def physical(device: str) -> str:
    """The name of a device that does not depend on the process: a GPU's UUID; for others what they are called."""
    kind, _, index = str(device).partition(":")
    if kind != "cuda":
        return kind
    import torch

    try:
        return f"{kind}-{torch.cuda.get_device_properties(int(index or torch.cuda.current_device())).uuid}"
    except Exception:  # no driver, or a torch that does not tell
        return f"{kind}-{index or 0}"
