"""Whether processes that are not our children still run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any


def stat(pid: int) -> list[str]:
    """State, parent, group, session, ... of a process. OSError if there is none."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def running(pid: int) -> bool:
    """A zombie has ended: all it waits for is its parent."""
    try:
        return stat(pid)[0] not in "ZX"
    except OSError:
        return False


def soon(condition: Callable[[], Any], seconds: float = 5.0) -> Any:
    """What ``condition`` says, once it is true or the time is over."""
    last = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < last:
        time.sleep(0.01)
    return found


def gone(pids: Iterable[int], seconds: float = 10.0) -> bool:
    """Whether all of them have ended within ``seconds``."""
    pids = list(pids)
    return soon(lambda: not any(map(running, pids)), seconds)
