"""A process's traces, while it runs: events go into files of a folder, a bounded number of them.

``Options(trace="folder")``, or ``REFLIB_TRACE=folder`` in the environment, turns it on; else nothing of this is called.
Each process writes ``trace_<pid>_<number>.json.gz``, each file when EVENTS more have been recorded, and at its end.
Times are of one clock in all files of a machine. What cannot be written is lost: one warning says so, and recording
ends; nothing is raised.
"""

import atexit
import gzip
import json
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

from . import atomic
from .logs import Event
from .logs import get as logger
from .options import Options
from .timeline import chrome_trace

EVENTS, FILES = 50_000, 16  # per file; files per process: the first, which has its compilations, and the last ones


def folder(options: Options) -> str | None:
    """Where traces go; None: nowhere."""
    return options.trace or os.environ.get("REFLIB_TRACE") or None


class Recorder:
    """Of one folder. ``watch``: a list of events that others fill, of which the new ones are written each time."""

    def __init__(self, folder: Path):
        self.folder, self.failed = folder, False
        self.graphs = 0  # recorded, for their names
        self._lock = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Forget what is not written."""
        self._events: list[Event] = []
        self._watched: list[tuple[Sequence[Event], list[int]]] = []
        self._files: list[Path] = []
        self._number = 0

    def add(self, *events: Event) -> None:
        if self.failed:
            return
        self._events += events
        if len(self._events) >= EVENTS:
            self.flush()

    def watch(self, timeline: Sequence[Event]) -> None:
        self._watched.append((timeline, [0]))

    def fail(self, why: object) -> None:
        """Record nothing from now on, and say so once."""
        with self._lock:
            if not self.failed:
                logger("trace").warning("no more traces are written into %s: %s", self.folder, why)
            self.failed = True
            self.clear()

    def flush(self) -> Path | None:
        """Write what was recorded since the last time; the file, or None where there was nothing or it failed."""
        with self._lock:
            events, self._events = self._events, []
            for timeline, seen in self._watched:
                new = list(timeline)[seen[0] :]
                seen[0] += len(new)
                events = events + new
            if not events or self.failed:
                return None
            path = self.folder / f"trace_{os.getpid()}_{self._number:04}.json.gz"
            try:
                self._write(events, path)
            except Exception as e:
                why = f"{type(e).__name__}: {e}"
            else:
                return path
        self.fail(why)
        return None

    def _write(self, events: Sequence[Event], path: Path) -> None:
        trace = chrome_trace(events, 0.0)
        shared = [e["args"] for e in trace["traceEvents"] if "args" in e]  # mostly the same few: printed once each
        texts = {id(args): json.dumps(args) for args in {id(a): a for a in shared}.values()}
        for e in trace["traceEvents"]:
            e["pid"] = os.getpid()
            if "args" in e:
                e["args"] = f"@{id(e['args'])}"
        text = re.sub(r'"@(\d+)"', lambda m: texts[int(m[1])], json.dumps(trace))
        self.folder.mkdir(parents=True, exist_ok=True)
        atomic.write(path, gzip.compress(text.encode(), 1))
        self._number += 1
        self._files.append(path)
        for old in self._files[1 : max(1, len(self._files) - FILES + 1)]:
            old.unlink(missing_ok=True)
            self._files.remove(old)


recorders: dict[str, Recorder] = {}


def recorder(folder: str) -> Recorder:
    """The process's recorder for this folder."""
    where = os.path.abspath(folder)
    return recorders.get(where) or recorders.setdefault(where, Recorder(Path(where)))  # (threads get the same one)


@atexit.register
def flush() -> list[Path]:
    """Write what was recorded so far, in all folders. (At the process's end this is done without being asked.)"""
    return [path for r in list(recorders.values()) if (path := r.flush()) is not None]


def _in_child() -> None:
    for r in recorders.values():
        r.__init__(r.folder)  # type: ignore[misc]


os.register_at_fork(after_in_child=_in_child)  # a child writes none of its parent's events
