"""Processes: whether those that are not our children still run; a Python of its own; a fork."""

import os
import subprocess
import sys
import threading
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


def soon(condition: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What ``condition`` says, once it is true or the time is over."""
    last = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < last:
        time.sleep(0.01)
    return found


def gone(pids: Iterable[int], seconds: float = 30.0) -> bool:
    """Whether all of them have ended within ``seconds``."""
    pids = list(pids)
    return soon(lambda: not any(map(running, pids)), seconds)


def python(program: str, *words: str | Path, seconds: float = 300, env: dict[str, str] | None = None) -> str:
    """What ``program`` prints in a Python of its own, which must end well. ``env``: what it has besides ours."""
    command = [sys.executable, "-c", program, *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env={**os.environ, **(env or {})})
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def true_in_a_fork(check: Callable[[], Any]) -> bool:
    """Whether ``check`` returns, and something true, in a fork of this process, within a minute."""
    pid = os.fork()
    if pid == 0:
        threading.Timer(60, lambda: os._exit(9)).start()
        try:
            os._exit(0 if check() else 1)
        except BaseException:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
