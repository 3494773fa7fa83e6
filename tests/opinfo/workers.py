"""Children that may crash. Each reports where it is before each risky step, so that a dead child is one crashed sample
and the rest goes on.

On the CPU a child is forked for each task, from a parent that has imported everything and started no thread. CUDA does
not survive a fork (nor do gradients on a CPU where PyTorch is built for CUDA: one child in three was aborted): there a
child is a Python of its own, which takes 10 s to start and so does one task after another. With several GPUs each child
sees one of them.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from .judging import Result, brief, run_case
from .samples import Group, case, samples

PATIENCE = 180  # seconds without a word


@dataclass(frozen=True)
class Task:
    """Samples ``numbers`` of each group, in one child."""

    parts: tuple[tuple[Group, tuple[int, ...]], ...]

    def keys(self) -> list[str]:
        return [f"{g.name}|{n}" for g, numbers in self.parts for n in numbers]

    def without(self, done: set[str]) -> Task:
        parts = [(g, tuple(n for n in numbers if f"{g.name}|{n}" not in done)) for g, numbers in self.parts]
        return Task(tuple((g, n) for g, n in parts if n))


@dataclass
class Child:
    """A process at work on a task: where it is, what is done, and how it said that it died."""

    process: Any
    pipe: Connection
    errors: Path
    task: Task = Task(())
    heard: float = 0.0
    at: str = ""
    phase: str = "start"
    done: set[str] = field(default_factory=set)
    died: str = ""
    idle: bool = False

    def begin(self, task: Task) -> None:
        self.task, self.done, self.at, self.phase, self.idle = task, set(), "", "start", False
        self.heard = time.monotonic()
        self.pipe.send(task)

    def hear(self, message: dict[str, Any], tell: Callable[[Result], None]) -> None:
        self.heard = time.monotonic()
        if result := message.pop("result", None):
            self.done.add(result.key)
            tell(result)
        for name, value in message.items():
            setattr(self, name, value)


def _work(pipe: Connection, errors: Path, until: str, stays: bool) -> None:
    """In the child: judge the samples of its task, saying where it is; and those of the tasks that come after, if it
    ``stays``. errors: what takes stderr."""

    def say(**message: Any) -> None:
        pipe.send(message)

    null = os.open(os.devnull, os.O_RDWR)
    for n in (0, 1):
        os.dup2(null, n)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    torch.set_num_threads(1)
    try:
        while True:
            for group, numbers in pipe.recv().parts:
                say(at=f"{group.name}|{numbers[0]}", phase="samples")
                all_samples = samples(group)
                for n in numbers:
                    say(result=run_case(case(group, n, all_samples[n]), say, until))
            say(idle=True)
            if not stays:
                break
    except BaseException as e:
        where = traceback.extract_tb(e.__traceback__)[-1]
        say(died=f"{type(e).__name__}: {brief(e)} ({os.path.basename(where.filename)}:{where.lineno})")
    finally:
        os._exit(0)  # none of the parent's clean-up


def _children(folder: str, device: str, until: str) -> Iterator[Child]:
    """New processes, on a GPU for the visible devices by turns."""
    context: Any = multiprocessing.get_context("spawn" if _stays(device) else "fork")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    for n, card in enumerate(itertools.cycle(_cards() if device == "cuda" else [visible])):
        ours, theirs = context.Pipe()
        errors = Path(folder, str(n))
        args = (theirs, errors, until, _stays(device))
        process = context.Process(target=_work, args=args, daemon=True)
        if device == "cuda":
            os.environ["CUDA_VISIBLE_DEVICES"] = str(card)
        process.start()
        if device == "cuda":
            os.environ.pop("CUDA_VISIBLE_DEVICES")
            os.environ.update({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
        theirs.close()
        yield Child(process, ours, errors)


def _stays(device: str) -> bool:
    """Does a child do more than one task?"""
    return device != "cpu" or torch.version.cuda is not None


def _cards() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(n) for n in range(torch.cuda.device_count())]


def run_tasks(
    tasks: Iterable[Task],
    jobs: int,
    tell: Callable[[Result], None],
    until: str = "wrap",
    device: str = "cpu",
    seconds: float = float("inf"),
) -> None:
    """Run all tasks, ``jobs`` at a time, or what can be had of them in ``seconds``. ``tell`` gets one Result for every
    sample."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        _run(iter(tasks), _children(folder, device, until), jobs, tell, _stays(device), seconds)


def _run(
    waiting: Iterator[Task], new: Iterator[Child], jobs: int, tell: Callable[[Result], None], stay: bool, seconds: float
) -> None:  # fmt: skip
    again = list[Task]()
    running, idle = dict[Connection, Child](), list[Child]()
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        while len(running) < jobs and (task := again.pop() if again else next(waiting, None)):
            child = idle.pop() if idle else next(new)
            child.begin(task)
            running[child.pipe] = child
        if not running:
            break
        for pipe in wait(list(running), timeout=min(5, max(0, stop - time.monotonic()))):
            child = running[pipe]  # type: ignore[index]
            try:
                child.hear(child.pipe.recv(), tell)
            except EOFError:
                del running[child.pipe]
                child.process.join()
                again += _aftermath(child, tell)
            if child.idle and stay:
                idle.append(running.pop(child.pipe))
        for child in running.values():
            if time.monotonic() - child.heard > PATIENCE:
                child.died, child.heard = "timeout", time.monotonic()
                child.process.kill()
    for child in (*running.values(), *idle):
        child.process.kill()


def _aftermath(child: Child, tell: Callable[[Result], None]) -> list[Task]:
    """What is left to do after a child ended, early or not: all but the sample that it was at."""
    rest, died = child.task.without(child.done), child.died
    if not (keys := rest.keys()):
        return []
    at = child.at if child.at in keys else keys[0]
    status = "timeout" if died == "timeout" else "error" if died else "crash"
    last = child.errors.read_text(errors="replace").strip().splitlines()[-1:] if status == "crash" else []
    why = " ".join([f"{child.phase}: {died or f'signal {-child.process.exitcode}'}", *last])
    tell(Result(at, status, why[:400]))
    rest = rest.without({at})
    return [rest] if rest.parts else []
