"""Children that may crash. Each is forked from a parent that has imported everything and started no thread (for CUDA,
which does not survive a fork, it is a Python of its own); it reports where it is before each risky step, so that a dead
child is one crashed sample and the rest goes on."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
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


@dataclass
class Child:
    """One forked process at work on a task: where it is, what is done, and how it said that it died."""

    task: Task
    process: Any
    heard: float
    at: str = ""
    phase: str = "start"
    done: set[str] = field(default_factory=set)
    died: str = ""

    def hear(self, message: dict[str, Any], tell: Callable[[Result], None]) -> None:
        self.heard = time.monotonic()
        if result := message.pop("result", None):
            self.done.add(result.key)
            tell(result)
        for name, value in message.items():
            setattr(self, name, value)


def _work(task: Task, pipe: Connection, entry: str, until: str) -> None:
    """In the child: judge the samples, saying where it is."""

    def say(**message: Any) -> None:
        pipe.send(message)

    null = os.open(os.devnull, os.O_RDWR)
    for n in (0, 1, 2):
        os.dup2(null, n)
    try:
        cases = []
        for group, numbers in task.parts:
            say(at=f"{group.name}|{numbers[0]}", phase="samples")
            all_samples = samples(group)
            cases += [case(group, n, all_samples[n]) for n in numbers]
        run_batch(cases, say, entry=entry, until=until)
    except BaseException as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        say(died=f"{type(e).__name__}: {_brief(e)} ({os.path.basename(where.filename)}:{where.lineno})")
    finally:
        os._exit(0)  # none of the parent's clean-up


def run_tasks(
    tasks: list[Task], jobs: int, tell: Callable[[Result], None], entry: str = "aot", until: str = "wrap"
) -> None:
    """Run all tasks, ``jobs`` at a time. ``tell`` gets one Result for every sample."""
    on_cpu = all(group.device == "cpu" for task in tasks for group, _ in task.parts)
    context = multiprocessing.get_context("fork" if on_cpu else "spawn")
    waiting = list(reversed(tasks))
    running: dict[Connection, Child] = {}
    while waiting or running:
        while waiting and len(running) < jobs:
            task = waiting.pop()
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(task, theirs, entry, until), daemon=True)
            process.start()
            theirs.close()
            running[ours] = Child(task, process, time.monotonic())
        for pipe in wait(list(running), timeout=5):
            child = running[pipe]
            try:
                child.hear(pipe.recv(), tell)
            except EOFError:
                del running[pipe]
                child.process.join()
                waiting += _aftermath(child, entry, tell)
        for child in running.values():
            if time.monotonic() - child.heard > PATIENCE:
                child.died, child.heard = "timeout", time.monotonic()
                child.process.kill()


def _aftermath(child: Child, entry: str, tell: Callable[[Result], None]) -> list[Task]:
    """What is left to do after a child ended, early or not. Names the culprit, or halves the task to find it."""
    rest, died = child.task.without(child.done), child.died
    keys = rest.keys()
    if not keys:
        return []
    at = child.at if child.at in keys else ""
    if len(keys) == 1:
        at = keys[0]
    if at and (child.phase in ("capture", "compile", "run", "aot_eager") or len(keys) == 1):
        status = "timeout" if died == "timeout" else "error" if died else "crash"
        tell(Result(at, status, f"{child.phase}: {died or f'signal {-child.process.exitcode}'}", entry=entry))
        rest = rest.without({at})
        return [rest] if rest.parts else []
    half = set(keys[len(keys) // 2 :])
    return [t for t in (rest.without(half), rest.without(set(keys) - half)) if t.parts]
