"""One measurement at a time on a device, whichever process makes it.

``device_lock`` holds an advisory lock (``flock``) on ``<cache>/locks/<host>-<device>`` while something is timed. All
reflib processes of a user that share a cache share it; the kernel releases it when its holder dies, however it dies.
Programs that do not take it (other users', other caches') are not kept out.

The name is that of the physical device, not its index: ``cuda:0`` is another GPU in a process with another
CUDA_VISIBLE_DEVICES. The lock is not reentrant.
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

    It is not held, and that is logged, when it is not released for ``timeout`` seconds (a stopped process holds it for
    ever), and where files cannot be locked: a disturbed measurement is better than none. Raises nothing of its own.
    say: if it must wait, called with {"kind": "waiting"}, and then with {"kind": "locked", "seconds": waited}.
    """
    fd = None
    held = False
    try:
        folder = cache.root() / "locks"
        folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder / lock_name(device), os.O_RDWR | os.O_CREAT, 0o600)
        held = _acquire(fd, say or (lambda message: None), timeout)
        if not held:
            _warn(device, f"another process has held it for {timeout:g} s")
    except (OSError, CacheError) as e:  # no such folder, or a file system without locks
        _warn(device, str(e))
    try:
        yield held
    finally:
        if held and fd is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)  # closing would not do: a forked child may have the file open too
        if fd is not None:
            os.close(fd)


def _acquire(fd: int, say: Callable[[dict], None], timeout: float) -> bool:
    """Poll: a waiting flock could not be given up."""
    start = time.monotonic()
    waited = 0.0
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if not waited:
                say({"kind": "waiting"})
            waited = time.monotonic() - start
            if waited >= timeout:
                say({"kind": "locked", "seconds": waited})
                return False
            time.sleep(POLL_SECONDS)
    if waited:
        say({"kind": "locked", "seconds": time.monotonic() - start})
    return True


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
