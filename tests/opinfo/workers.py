"""Children that may crash. Each is forked from a parent that has imported everything and started no thread; it
reports where it is before each risky step, so that a dead child is one crashed sample and the rest goes on."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from .batch import Result, _brief, run_batch
from .samples import Group, case, samples

PATIENCE = 180  # seconds without a word


@dataclass(frozen=True)
class Task:
    """Samples ``numbers`` of each group, in one child and one library."""

    parts: tuple[tuple[Group, tuple[int, ...]], ...]

    def keys(self) -> list[str]:
        return [f"{g.name}|{n}" for g, numbers in self.parts for n in numbers]

    def without(self, done: set[str]) -> Task:
        parts = [(g, tuple(n for n in numbers if f"{g.name}|{n}" not in done)) for g, numbers in self.parts]
        return Task(tuple((g, n) for g, n in parts if n))


class Child:
    """One forked process at work on a task."""

    def __init__(self, task: Task, door: str, until: str):
        self.task, self.door = task, door
        read, write = os.pipe()
        sys.stdout.flush()
        self.pid = os.fork()
        if not self.pid:
            os.close(read)
            _child(task, write, door, until)
        os.close(write)
        self.fd, self.buffer, self.heard = read, b"", time.monotonic()
        self.at, self.phase = "", "start"

    def lines(self) -> Iterator[dict[str, Any]]:
        data = os.read(self.fd, 1 << 16)
        self.heard = time.monotonic()
        self.buffer += data
        *whole, self.buffer = self.buffer.split(b"\n")
        for line in whole:
            yield json.loads(line)
        if not data:
            raise EOFError

    def finish(self) -> int:
        os.close(self.fd)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)


def _child(task: Task, fd: int, door: str, until: str) -> None:
    code = 0
    try:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_RDWR)
        for n in (0, 1, 2):
            os.dup2(null, n)

        def say(result: Result | None = None, **where: Any) -> None:
            message = {"result": asdict(result)} if result is not None else where
            os.write(fd, json.dumps(message).encode() + b"\n")

        cases = []
        for group, numbers in task.parts:
            say(at=f"{group.name}|{numbers[0]}", phase="samples")
            all_samples = samples(group)
            cases += [case(group, n, all_samples[n]) for n in numbers]
        run_batch(cases, say, door=door, until=until)
    except BaseException as e:
        code = 1
        text = f"{type(e).__name__}: {_brief(e)}"
        where = traceback.extract_tb(e.__traceback__)[-1]
        os.write(
            fd, json.dumps({"died": f"{text} ({os.path.basename(where.filename)}:{where.lineno})"}).encode() + b"\n"
        )
    finally:
        os._exit(code)


def run_tasks(
    tasks: list[Task], jobs: int, tell: Callable[[Result], None], door: str = "aot", until: str = "wrap"
) -> None:
    """Run all tasks, ``jobs`` at a time. ``tell`` gets one Result for every sample."""
    waiting = list(reversed(tasks))
    running: dict[int, Child] = {}
    died: dict[int, str] = {}
    done: dict[int, set[str]] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            child = Child(waiting.pop(), door, until)
            running[child.fd], done[child.fd] = child, set()
        ready, _, _ = select.select(list(running), [], [], 5)
        for fd in ready:
            child = running[fd]
            try:
                for line in child.lines():
                    if "result" in line:
                        tell(Result(**line["result"]))
                        done[fd].add(line["result"]["key"])
                    elif "died" in line:
                        died[fd] = line["died"]
                    else:
                        child.at, child.phase = line["at"], line["phase"]
            except EOFError:
                del running[fd]
                code = child.finish()
                waiting += _aftermath(child, code, done.pop(fd), died.pop(fd, ""), tell)
        for child in running.values():
            if time.monotonic() - child.heard > PATIENCE:
                died[child.fd] = "timeout"
                child.heard = time.monotonic()
                os.kill(child.pid, signal.SIGKILL)


def _aftermath(child: Child, code: int, done: set[str], died: str, tell: Callable[[Result], None]) -> list[Task]:
    """What is left to do after a child ended, early or not. Names the culprit, or halves the task to find it."""
    rest = child.task.without(done)
    keys = rest.keys()
    if not keys:
        return []
    at = child.at if child.at in keys else ""
    if len(keys) == 1:
        at = keys[0]
    if at and (child.phase in ("capture", "compile", "run", "aot_eager") or len(keys) == 1):
        status = "timeout" if died == "timeout" else "error" if died else "crash"
        tell(Result(at, status, f"{child.phase}: {died or 'signal ' + str(-code)}", door=child.door))
        rest = rest.without({at})
        return [rest] if rest.parts else []
    half = set(keys[len(keys) // 2 :])
    return [t for t in (rest.without(half), rest.without(set(keys) - half)) if t.parts]
